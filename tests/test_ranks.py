"""The same run on two ranks (torchrun, gloo, CPU) as in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import as_ranks
import pytest
import torch
from runs_of_train import arguments, half_right, lines, timeless
from safetensors.torch import load_file

import ranks
import train

ONE_STEP = ["--steps", "1", "--eval-data=", "--threads", "1"]
LEARNER = [*ONE_STEP, "--updates", "2", "--kl-coef", "0.1", "--correction", "released", "--lr", "1e-4"]
UNEQUAL = [*ONE_STEP, "--prompts", "5", "--group-size", "3", "--micro-tokens", "60", "--gradient-checkpointing"]


def on_two_ranks(*runs: list[str]) -> subprocess.CompletedProcess:
    """Do these runs on two ranks, one after the other; in the last of them rank 1 is killed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(str(folder) for folder in (Path(train.__file__).parent, Path(__file__).parent))
    how = {"capture_output": True, "text": True, "timeout": 100, "env": os.environ | {"PYTHONPATH": path}}
    return subprocess.run([*torchrun, as_ranks.__file__, json.dumps(runs)], **how)


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory) -> Path:
    """Runs in one process, and the same on two ranks.

    `moved` goes 2 steps in one process and a third on two ranks, `killed` 3 steps in one and less than one on two.
    """
    folder = tmp_path_factory.mktemp("ranks")
    how = ["--lr", "1e-4", "--threads", "1", "--save-every", "1", "--eval-data="]
    train.main(arguments(files, folder / "moved", "--steps", "2", *how), reward=half_right)
    train.main(arguments(files, folder / "stayed", *how), reward=half_right)
    shutil.copytree(folder / "stayed", folder / "killed")
    shutil.rmtree(folder / "killed" / "checkpoints" / "step-000004")
    for name, options in {"learner": LEARNER, "unequal": UNEQUAL}.items():
        found = as_ranks.gradients_of(arguments(files, folder / f"{name}-1", *options))
        torch.save(found, folder / f"{name}-1" / "gradients.pt")
    done = on_two_ranks(
        arguments(files, folder / "learner-2", *LEARNER),
        arguments(files, folder / "unequal-2", *UNEQUAL),
        ["--resume", str(folder / "moved"), "--steps", "3"],
        ["--resume", str(folder / "killed")],
    )
    (folder / "stderr").write_text(done.stderr)
    assert done.returncode != 0
    return folder


@pytest.mark.parametrize("name", ["learner", "unequal"])
def test_two_ranks_sample_the_same_responses_and_report_the_same_step(name, folder):
    """Token for token, in the same order, also where the prompts do not divide; metrics but for rounding."""
    one, two = (lines(folder / f"{name}-{n}" / "samples.jsonl") for n in (1, 2))
    assert [r["response"] for r in one] == [r["response"] for r in two]
    assert [r["accepted"] for r in one] == [r["accepted"] for r in two]
    assert [r["advantage"] for r in one] == [r["advantage"] for r in two]
    (one,), (two,) = (timeless(lines(folder / f"{name}-{n}" / "metrics.jsonl")) for n in (1, 2))
    assert one.keys() == two.keys() and one["kv_saved"] > 0
    for metric in one.keys() - {"policy_loss", "kl_ref"}:
        assert two[metric] == pytest.approx(one[metric], rel=1e-5, abs=1e-7), metric
    for metric in ("policy_loss", "kl_ref"):  # about 0: sums of numbers that cancel
        assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", ["learner", "unequal"])
def test_the_gradient_of_an_update_is_that_of_one_process(name, folder):
    """To 1e-5 of its norm: with KL, correction `released` and two updates, and with shares of unequal size."""
    one, two = (torch.load(folder / f"{name}-{n}" / "gradients.pt") for n in (1, 2))
    assert len(one) == len(two) == (2 if name == "learner" else 1)
    for a, b in zip(one, two, strict=True):
        assert (a - b).norm() < 1e-5 * a.norm() and a.norm() > 1e-3


def test_a_run_is_resumed_with_another_number_of_ranks(folder):
    """Steps 1 and 2 in one process, 3 on two ranks, 4 in one: weights and moments as if it had never moved."""
    train.main(["--resume", str(folder / "moved"), "--steps", "4"], reward=half_right)
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        moved, stayed = (load_file(folder / run / "checkpoints/step-000004" / name) for run in ("moved", "stayed"))
        assert moved.keys() == stayed.keys()
        for key, a in stayed.items():
            assert moved[key].shape == a.shape and (moved[key] - a).norm() <= 1e-3 * a.norm(), key
    written = [path.name for path in sorted((folder / "moved").iterdir())]
    assert written == [path.name for path in sorted((folder / "stayed").iterdir())]
    assert [m["step"] for m in lines(folder / "moved" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_killed_rank_ends_the_run_in_one_sentence_and_loses_nothing(folder):
    """The other does not wait for it; the checkpoint before is whole, and the run goes on from it, in one process."""
    run, said = folder / "killed", (folder / "stderr").read_text().splitlines()
    waited = (folder / "stderr").stat().st_mtime - (run / "died").stat().st_mtime
    assert waited < 20  # seconds, on a machine that does other things, too
    (line,) = [line for line in said if "train.py: error" in line]
    assert "another rank has ended" in line and f"--resume {run}" in line
    train.main(["--resume", str(run)], reward=half_right)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert timeless(lines(run / name)) == timeless(lines(folder / "stayed" / name))


def test_rows_are_dealt_out_by_length_and_every_rank_makes_as_many_passes(monkeypatch):
    """Each row once; sums of tokens differ by less than the longest row; what is repeated counts nothing."""
    monkeypatch.setattr(ranks, "count", lambda: 3)
    lengths = torch.tensor([5, 90, 7, 200, 6, 88, 9, 80])
    shares = ranks.deal(torch.arange(8), lengths)
    assert sorted(torch.cat(shares).tolist()) == list(range(8))
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) < 200
    passes = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        passes.append(ranks.in_step([["a", "b"], ["c"], []]))
    assert passes == [[("a", 1), ("b", 1)], [("c", 1), ("b", 0)], [("b", 0), ("b", 0)]]


def test_every_prompt_belongs_to_one_rank(monkeypatch):
    """Whole groups, in order, also where there are fewer than ranks."""
    monkeypatch.setattr(ranks, "count", lambda: 4)
    for length in (0, 1, 3, 4, 10):
        parts = []
        for rank in range(4):
            monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
            parts += range(*ranks.share(length))
        assert parts == list(range(length))
