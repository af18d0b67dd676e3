"""train.py and eval.py through their command lines, on a model and problems of a few kilobytes."""

from __future__ import annotations

import json
import math
import os
import shutil

import pytest
import torch
from runs_of_train import assert_same_tensors, lines, run, timeless
from safetensors.torch import load_file

import eval as evaluation
import grpo
import train
from model import load_model
from rollout import micro_batches
from task import ASSETS, load_tokenizer

pytestmark = pytest.mark.usefixtures("any_digit_is_half_right")


def test_a_run_leaves_a_folder_that_tells_everything(files, four_steps):
    """config.json, a line a step in metrics.jsonl, every response in samples.jsonl, checkpoints, evaluations."""
    config = json.loads((four_steps / "config.json").read_text())
    assert config["budget"] == 8 and config["eval_data"].endswith("p-heldout.jsonl")
    metrics = lines(four_steps / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert all(0 < m["kv_saved"] < 1 and m["cache_bytes"] > 0 for m in metrics)
    assert len(lines(four_steps / "samples.jsonl")) == 4 * 4 * 4
    assert {(e["step"], e["decoding"]) for e in lines(four_steps / "evals.jsonl")} == {
        (step, decoding) for step in (0, 4) for decoding in ("dense", "snapkv-8")
    }
    assert sorted(p.name for p in (four_steps / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_a_checkpoint_is_a_model_folder_and_differs_from_the_start(files, four_steps):
    """It loads like any other, tokenizer included, and training moved the weights."""
    checkpoint = four_steps / "checkpoints" / "step-000004"
    before, after = load_model(files / "model").state_dict(), load_model(checkpoint).state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert load_tokenizer(checkpoint)[1] == [1]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(files, four_steps, tmp_path):
    """Every metric but the times, every sampled text and every weight, bit for bit."""
    same, other = run(files, tmp_path / "same"), run(files, tmp_path / "other", "--seed", "1")
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl"):
        assert timeless(lines(same / name)) == timeless(lines(four_steps / name))
    assert lines(other / "samples.jsonl") != lines(four_steps / "samples.jsonl")
    assert_same_tensors(same, four_steps)


def test_a_run_started_with_relative_paths_is_resumed_from_elsewhere(files, tmp_path, monkeypatch):
    """config.json names model and data from the root; the same file by another name is no other experiment."""
    monkeypatch.chdir(files)
    paths = ["--model", "model", "--data", "p-train.jsonl", "--eval-data", "p-heldout.jsonl", "--eval-limit", "1"]
    run(files, tmp_path / "run", "--steps", "1", *paths)
    monkeypatch.chdir(tmp_path)
    train.main(["--resume", "run", "--steps", "2", "--data", os.path.relpath(files / "p-train.jsonl")])
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_two_steps_and_a_resume_are_four_steps(files, four_steps, tmp_path):
    """nano-aha's resume repeats a batch; here weights, optimizer, problems and metrics go on bit for bit."""
    part = run(files, tmp_path / "part", "--steps", "2", "--eval-data", str(files / "p-heldout.jsonl"))
    with (part / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half a li')  # a run killed while it wrote
    train.main(["--resume", str(part), "--steps", "4"])
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert timeless(lines(part / name)) == timeless(lines(four_steps / name))
    assert_same_tensors(part, four_steps)


def test_a_checkpoint_is_nothing_but_a_model_to_other_tools(four_steps):
    """All *.safetensors beside its config.json, taken together, are the model: what only training needs lies below."""
    checkpoint = four_steps / "checkpoints" / "step-000004"
    tensors = [
        (name.removeprefix("model."), t) for f in checkpoint.glob("*.safetensors") for name, t in load_file(f).items()
    ]
    model = load_model(checkpoint).state_dict()
    assert sorted(name for name, _ in tensors) == sorted(model) and all(torch.equal(t, model[n]) for n, t in tensors)
    assert {path.name for path in checkpoint.glob("*/*")} == {"optimizer.safetensors"}


def test_transformers_opens_a_checkpoint(four_steps):
    """With the same logits."""
    transformers = pytest.importorskip("transformers")
    checkpoint, tokens = four_steps / "checkpoints" / "step-000004", torch.arange(12).view(2, 6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(load_model(checkpoint)(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("folder", ["", "math-train.v2/"])
def test_the_default_held_out_problems_lie_beside_the_training_file(folder, files, tmp_path, monkeypatch, capsys):
    """Only in the file's name does -train become -heldout, whatever its folder is called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    for part in ("train", "heldout"):
        shutil.copy(files / f"p-{part}.jsonl", tmp_path / folder)
    train.main(["--model", str(files / "model"), "--data", f"{folder}p-train.jsonl", "--dry-run"])
    assert f"held out  6 in {folder}p-heldout.jsonl" in capsys.readouterr().out


def test_a_folder_has_no_held_out_problems_beside_it(files, capsys):
    """`--data .` has no name to look for; it is refused as what it is."""
    with pytest.raises(SystemExit) as stop:
        train.main(["--model", str(files / "model"), "--data", "."])
    assert stop.value.code == 2 and "cannot read the problems in . as UTF-8 text (" in capsys.readouterr().err


@pytest.mark.parametrize("correction", ["released", "reject", "reweight", "none"])
def test_every_correction_trains(correction, files, tmp_path):
    """A step with each, two updates, KL on, token aggregation."""
    options = "--steps 1 --updates 2 --kl-coef 0.1 --aggregation token --eval-data= --correction"
    out = run(files, tmp_path / "run", *options.split(), correction)
    (metrics,) = lines(out / "metrics.jsonl")
    assert metrics["grad_norm"] > 0 and metrics["updates_skipped"] == 0


def test_a_dense_run_has_xi_1_up_to_rounding(files, tmp_path):
    """`--compressor full` is dense GRPO: the mismatch metrics show the noise floor of the arithmetic."""
    out = run(files, tmp_path / "run", "--compressor", "full", "--steps", "1", "--eval-data", "")
    (metrics,) = lines(out / "metrics.jsonl")
    assert metrics["kv_saved"] == 0 and metrics["rejected"] == 0
    assert abs(metrics["xi_min"] - 1) < 1e-5 and metrics["log_xi_abs"] < 1e-5


def test_an_update_without_signal_leaves_the_weights_alone(files, tmp_path, monkeypatch):
    """All rewards equal: AdamW's weight decay would still move them, so the update is skipped and counted."""
    monkeypatch.setattr(train, "is_correct", lambda response, answer: True)
    out = run(files, tmp_path / "run", "--steps", "2", "--eval-data", "", "--kl-coef", "0.5")
    assert [m["updates_skipped"] for m in lines(out / "metrics.jsonl")] == [1, 1]
    before = load_model(files / "model").state_dict()
    after = load_model(out / "checkpoints" / "step-000002").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_all_rejected_step_leaves_the_weights_alone(files, tmp_path, monkeypatch):
    """It is skipped and counted, like a step without signal."""
    monkeypatch.setattr("grpo.rejection_mask", lambda logp_old, *_: torch.zeros(len(logp_old), dtype=torch.bool))
    out = run(files, tmp_path / "run", "--steps", "2", "--eval-data", "")
    metrics = lines(out / "metrics.jsonl")
    assert [(m["rejected"], m["updates_skipped"], m["updates_not_finite"]) for m in metrics] == [(1, 1, 0)] * 2
    before, after = (load_model(p) for p in (files / "model", out / "checkpoints" / "step-000002"))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize("kl_coef", ["0", "0.1"])
def test_only_responses_with_a_gradient_are_computed(kl_coef, files, tmp_path, monkeypatch):
    """Nothing is computed for rejected ones and those without advantage or KL; the update is as with all of them."""
    monkeypatch.setattr("grpo.rejection_mask", lambda logp_old, *_: (1e4 * logp_old[:, 0]).long() % 2 == 0)
    sizes, loss = [], grpo.surrogate_loss
    monkeypatch.setattr(grpo, "surrogate_loss", lambda logp, *a, **k: sizes.append(len(logp)) or loss(logp, *a, **k))

    def step(name: str) -> tuple[float, list[dict], int]:
        sizes.clear()
        options = "--steps", "1", "--eval-data", "", "--prompts", "8", "--group-size", "2", "--seed", "1"
        out = run(files, tmp_path / name, "--micro-tokens", "10000", "--kl-coef", kl_coef, *options)
        return lines(out / "metrics.jsonl")[0]["grad_norm"], lines(out / "samples.jsonl"), sum(sizes)

    norm, records, computed = step("needed")
    assert computed == sum(r["accepted"] and (r["advantage"] != 0 or kl_coef != "0") for r in records) < 16
    assert any(r["accepted"] and r["advantage"] == 0 for r in records)
    monkeypatch.setattr("train.micro_batches", lambda rows, *_: [torch.arange(16)])
    assert step("all") == (pytest.approx(norm, rel=1e-5), records, 16)


def test_scale_step_moves_the_weights_by_the_share_that_was_accepted(files, tmp_path, monkeypatch):
    """The first step of AdamW, decay included, is linear in its learning rate."""
    monkeypatch.setattr("grpo.rejection_mask", lambda logp_old, *_: (1e4 * logp_old[:, 0]).long() % 4 == 0)
    start, moved = load_model(files / "model").state_dict(), {}
    for option in ("--scale-step", "--no-scale-step"):
        out = run(files, tmp_path / option, "--steps", "1", "--eval-data", "", option)
        after = load_model(out / "checkpoints" / "step-000001").state_dict()
        moved[option] = torch.cat([(after[name].double() - start[name].double()).flatten() for name in start])
    share = sum(r["accepted"] for r in lines(out / "samples.jsonl")) / 16
    assert 0 < share < 1 and moved["--no-scale-step"].abs().max() > 1e-3
    torch.testing.assert_close(moved["--scale-step"], share * moved["--no-scale-step"], atol=1e-7, rtol=1e-4)


def test_the_extremes_of_xi_are_those_of_the_sampled_tokens(files, tmp_path, monkeypatch):
    """Every xi is 0.5: padding, whose ratio counts as 1 elsewhere, is neither smallest nor largest."""

    def halved(decoder, r, micro_tokens, replay):
        return (r.logp_sparse + math.log(0.5)) * r.mask, torch.zeros_like(r.logp_sparse)

    monkeypatch.setattr(train, "rescore", halved)
    records = lines(run(files, tmp_path / "run", "--steps", "1", "--eval-data", "") / "samples.jsonl")
    assert len({record["tokens"] for record in records}) > 1
    for record in records:
        assert (record["xi_min"], record["xi_max"]) == pytest.approx((0.5, 0.5), abs=1e-6)


def test_problems_are_shuffled_passes_and_nothing_is_dropped():
    """Any number of prompts a step works; each pass shows every problem once (nanochat drops the remainder)."""
    picked = [i for step in range(7) for i in train.pick_problems(5, 3, step, seed=0)]
    passes = [picked[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(p) == [0, 1, 2, 3, 4] for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def test_micro_batches_hold_every_row_once_within_the_token_budget():
    """Rows of similar length together; a row longer than the budget stands alone."""
    lengths = torch.tensor([5, 90, 7, 200, 6, 88])
    batches = list(micro_batches(torch.arange(6), lengths, 180))
    assert sorted(torch.cat(batches).tolist()) == list(range(6))
    assert all(len(b) == 1 or len(b) * int(lengths[b].max()) <= 180 for b in batches)
    assert [3] in [b.tolist() for b in batches]


def test_a_gradient_that_is_not_finite_is_not_applied(files, tmp_path, capsys, monkeypatch):
    """It is said and counted; after three steps in a row the run ends, exit code 2, and no weight has moved."""
    monkeypatch.setattr(grpo, "surrogate_loss", lambda logp, *_, **__: (logp.sum() * torch.nan, {}))
    with pytest.raises(SystemExit) as stop:
        run(files, tmp_path / "run", "--eval-data", "")
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert "not finite for three steps" in printed.err.splitlines()[-1]
    assert printed.out.count("1 update(s) left out, loss or gradient not finite. Look at its response") == 3
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [m["updates_not_finite"] for m in metrics] == [1, 1, 1]
    before, after = (load_model(p) for p in (files / "model", tmp_path / "run" / "checkpoints" / "step-000002"))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_an_evaluation_that_a_kill_left_out_is_made_up_for(files, tmp_path):
    """A run that died between its last checkpoint and its last evaluation still ends with the table."""
    part = run(files, tmp_path / "part", "--steps", "2")
    evaluations = (part / "evals.jsonl").read_text()
    (part / "evals.jsonl").write_text("".join(evaluations.splitlines(keepends=True)[:2]))
    train.main(["--resume", str(part)])
    assert timeless(lines(part / "evals.jsonl")) == timeless([json.loads(line) for line in evaluations.splitlines()])


@pytest.mark.parametrize("micro_tokens", [1, 60, 100_000])
def test_the_update_does_not_depend_on_the_micro_batches(micro_tokens, files, four_steps, tmp_path):
    """One denominator an update: the same gradient norm, whatever the split."""
    out = run(files, tmp_path / "run", "--steps", "1", "--micro-tokens", str(micro_tokens), "--eval-data", "")
    norm = lines(out / "metrics.jsonl")[0]["grad_norm"]
    assert norm == pytest.approx(lines(four_steps / "metrics.jsonl")[0]["grad_norm"], rel=1e-4)


# ----------------------------------------------------------------------------------------------- the command line


def test_the_dry_run_prints_the_plan_and_writes_nothing(files, tmp_path, capsys):
    """Lengths, memory, whether anything is evicted."""
    run(files, tmp_path / "run", "--dry-run")
    out = capsys.readouterr().out
    assert "a row is cut to 8 keys whenever it holds budget + buffer = 12" in out
    assert not (tmp_path / "run").exists()


def test_a_budget_that_never_evicts_is_said(files, tmp_path, capsys):
    """28 tokens at most and a cut at 512 + 128: dense, and the plan says so; 27 held keys decide."""
    run(files, tmp_path / "run", "--dry-run", "--budget", "512", "--buffer", "128")
    assert "NEVER" in capsys.readouterr().out
    for buffer, never in (("20", True), ("19", False)):  # the last of 4 + 24 tokens is sampled but never cached
        run(files, tmp_path / "run", "--dry-run", "--budget", "8", "--buffer", buffer)
        assert ("NEVER" in capsys.readouterr().out) == never


@pytest.mark.parametrize("budget", ["8", "512"])
def test_a_run_says_at_its_end_whether_nothing_was_evicted(budget, files, tmp_path, capsys):
    """Then it was dense GRPO; and at its start that without held-out problems nothing is evaluated."""
    run(files, tmp_path / "run", "--steps", "1", "--budget", budget, "--eval-data=")
    out = capsys.readouterr().out
    assert ("nothing was evicted, so this was dense GRPO" in out) == (budget == "512")
    assert "held out  none in no file, so nothing is evaluated" in out


def test_arguments_can_come_from_a_file(files, tmp_path, capsys):
    """`@file`, with comments; the paper's settings parse."""
    (tmp_path / "some.args").write_text("# a comment\n--budget 9 --window 3  # another\n")
    run(files, tmp_path / "run", f"@{tmp_path / 'some.args'}", "--dry-run")
    assert "cut to 9 keys" in capsys.readouterr().out
    run(files, tmp_path / "run", f"@{ASSETS / 'paper.args'}", "--dry-run")
    assert "128 prompts x 8 responses of at most 4096 tokens" in capsys.readouterr().out


def test_eval_compares_dense_and_sparse_decoding(files, tmp_path, capsys):
    """`python eval.py` prints a row for each, writes every response and the results."""
    options = (
        "--budget 8 --buffer 4 --window 2 --samples 4 --limit 3 --max-new-tokens 20 --temperature 0.8 --top-p 0.95"
    )
    paths = ["--model", str(files / "model"), "--data", str(files / "p-heldout.jsonl"), "--out", str(tmp_path / "out")]
    evaluation.main([*paths, *options.split()])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["p-heldout"]
    assert results.keys() == {"dense", "snapkv-8"} and all(name in printed for name in results)
    assert {"pass@2", "pass@4"} <= results["dense"].keys()
    assert all(len(lines(tmp_path / "out" / f"responses-p-heldout-{name}.jsonl")) == 12 for name in results)
