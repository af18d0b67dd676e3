"""Nothing is lost, whatever happens: kills, signals, full disks, damaged checkpoints, memory, numbers, precision."""

from __future__ import annotations

import itertools
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from test_train import any_digit_is_half_right, assert_same_tensors, four_steps, lines, run, timeless  # noqa: F401

import train
from grpo import token_logprobs
from kvcache import COMPRESSORS
from model import load_model
from task import ASSETS

CHILD = """
import os, signal, sys
sys.path.insert(0, {root!r})
import rollout, torch, train

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def at_call(module, name, number, last_words):
    real, calls = getattr(module, name), [0]
    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number:
            last_words(real, *args, **kwargs)
            die()
        return real(*args, **kwargs)
    setattr(module, name, counted)

def half_a_file(real, tensors, path):
    real(tensors, path)
    os.truncate(path, os.path.getsize(path) // 2)

def half_a_line(real, path, records):
    path.open("a").write('{{"step": 2, "rew')

moments = {{
    "rollout": lambda: at_call(rollout, "sample", 60, lambda *_, **__: None),
    "update": lambda: at_call(torch.optim.AdamW, "step", 3, lambda real, *args, **kwargs: real(*args, **kwargs)),
    "checkpoint": lambda: at_call(train, "save_file", 2, half_a_file),
    "metrics": lambda: at_call(train, "append", 5, half_a_line),  # evaluation; samples and metrics of each step
    "any": lambda: None,
}}
train.is_correct = lambda response, answer: len(response) % 2 == 0
moments[sys.argv[1]]()
train.main(sys.argv[2:])
"""


def start(moment: str, files: Path, out: Path) -> subprocess.Popen:
    """Start train.py as a process that dies at a moment, on the settings of `four_steps`."""
    recorded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "main", recorded.extend)
        run(files, out)
    command = [sys.executable, "-c", CHILD.format(root=str(ASSETS.parent)), moment, *recorded]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


MOMENTS = ("rollout", "update", "checkpoint", "metrics")


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """{moment: (process, run folder)}: all started at once, because each spends its time on importing PyTorch."""
    folders = {moment: tmp_path_factory.mktemp("killed") / moment for moment in MOMENTS}
    return {moment: (start(moment, files, out), out) for moment, out in folders.items()}


def assert_same_run(one: Path, other: Path) -> None:
    """Every line but its times, every weight and every optimizer state, bit for bit."""
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl"):
        assert timeless(lines(one / name)) == timeless(lines(other / name)), name
    assert_same_tensors(one, other)


# ------------------------------------------------------------------------------------------------ killed and stopped


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_as_if_nothing_had_happened(moment, killed, four_steps):  # noqa: F811
    """kill -9 while it samples, after the weights moved, in half a checkpoint, in half a line of metrics."""
    process, out = killed[moment]
    assert process.wait() == -signal.SIGKILL
    train.main(["--resume", str(out)])
    assert_same_run(out, four_steps)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_as_if_nothing_had_happened(files, four_steps, tmp_path):  # noqa: F811
    """Thirty moments drawn from the whole life of the process, the import of PyTorch included."""
    began = time.perf_counter()
    start("any", files, tmp_path / "whole").wait()
    life = time.perf_counter() - began
    draw, resumed = random.Random(0), 0
    for trial in range(30):
        out = tmp_path / f"run{trial}"
        process = start("any", files, out)
        try:
            process.wait(draw.uniform(0, life))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if (out / "config.json").exists():  # else nothing had begun
            train.main(["--resume", str(out)])
            assert_same_run(out, four_steps)
            resumed += 1
    assert resumed > 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_checkpoint_of_the_last_finished_step(
    number, code, files, four_steps, tmp_path, capsys, monkeypatch  # noqa: F811
):  # fmt: skip
    """Stopped while it scores step 4, it saves the weights of step 3, and goes on from them."""
    real, calls = train.score, []

    def stopped(*args):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(number)
        return real(*args)

    monkeypatch.setattr(train, "score", stopped)
    with pytest.raises(SystemExit) as stop:
        run(files, tmp_path / "run", "--save-every", "9")
    assert stop.value.code == code
    assert f"after step 3; go on with: python train.py --resume {tmp_path / 'run'}" in capsys.readouterr().err
    assert [step for step, _ in train.checkpoints(tmp_path / "run")] == [3]
    train.main(["--resume", str(tmp_path / "run")])
    assert_same_run(tmp_path / "run", four_steps)


def test_a_signal_amid_an_update_saves_nothing(files, four_steps, tmp_path, monkeypatch):  # noqa: F811
    """Half-moved weights belong to no step: the run goes on from the last checkpoint."""
    real = torch.optim.AdamW.step
    calls = []

    def stopped(self, *args):
        calls.append(1)
        real(self, *args)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(torch.optim.AdamW, "step", stopped)
        run(files, tmp_path / "run")
    assert [step for step, _ in train.checkpoints(tmp_path / "run")] == [2]
    train.main(["--resume", str(tmp_path / "run")])
    assert_same_run(tmp_path / "run", four_steps)


# ------------------------------------------------------------------------------------------------- disk and memory


@pytest.mark.parametrize("limited", ["checkpoint", "metrics"])
def test_a_full_disk_loses_nothing(limited, files, four_steps, tmp_path, capsys, monkeypatch):  # noqa: F811
    """One sentence with the way on; the last checkpoint whole, no half one left; with room again the run goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out, real = tmp_path / "run", train.train_step

    def full(job, step):
        found = real(job, step)
        if step == 2:  # a file-size limit stands for the full disk
            size = 50_000 if limited == "checkpoint" else (out / "metrics.jsonl").stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        return found

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train, "train_step", full)
        try:
            run(files, out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "File too large" in last and f"--resume {out}" in last
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    train.main(["--resume", str(out)])
    assert_same_run(out, four_steps)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_what_to_lower_and_the_run_goes_on_with_it(error, files, tmp_path, capsys, monkeypatch):
    """Rows at a time and micro-batches do not change the experiment, so that a resumed run may lower them."""

    def fails(*_, **__):
        raise error

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train, "sample_responses", fails)
        run(files, tmp_path / "run", "--eval-data=")
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(name in last for name in ("--rollout-rows", "--budget", "--micro-tokens", "--resume"))
    train.main(["--resume", str(tmp_path / "run"), "--rollout-rows", "4", "--micro-tokens", "50", "--steps", "1"])
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


# --------------------------------------------------------------------------------------------------- checkpoints


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(folder / "model.safetensors"),
        lambda folder: truncate(folder / "optimizer.safetensors"),
        lambda folder: truncate(folder / "training.json"),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_a_damaged_checkpoint_is_left_for_the_one_before(damage, files, four_steps, tmp_path, capsys):  # noqa: F811
    """It is said which and why; the run ends where the undamaged one does."""
    shutil.copytree(four_steps, tmp_path / "run")
    damage(tmp_path / "run" / "checkpoints" / "step-000004")
    train.main(["--resume", str(tmp_path / "run")])
    assert "step-000002" in next(line for line in capsys.readouterr().out.splitlines() if "going back" in line)
    assert_same_run(tmp_path / "run", four_steps)


def test_a_checkpoint_of_another_run_is_refused(four_steps, tmp_path, capsys):  # noqa: F811
    """Its settings are stored with it: a folder copied from a run with another seed is not taken for this one's."""
    shutil.copytree(four_steps, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-000004" / "training.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"settings": stored["settings"] | {"seed": 7}}))
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "step-000004 belongs to another run" in capsys.readouterr().err.splitlines()[-1]


def test_keep_leaves_the_newest_checkpoints(files, tmp_path):
    """--keep 2 of four."""
    out = run(files, tmp_path / "run", "--save-every", "1", "--keep", "2", "--eval-data=")
    assert [step for step, _ in train.checkpoints(out)] == [4, 3]
    assert len(list((out / "checkpoints").iterdir())) == 2


def test_a_resumed_run_remembers_the_steps_it_was_given(files, tmp_path):
    """--steps of a resumed run is stored, so that resuming it once more needs no option."""
    out = run(files, tmp_path / "run", "--steps", "1", "--eval-data=")
    train.main(["--resume", str(out), "--steps", "2"])
    assert json.loads((out / "config.json").read_text())["steps"] == 2


# ----------------------------------------------------------------------------------------------------- precision


def test_a_bf16_copy_hands_its_gradients_to_the_fp32_master():
    """The master's gradient is that of fp32 up to bf16's digits, sums in fp32; the copy keeps none."""
    master = tiny_model(std=0.1)
    copy = train.compute_copy(master, torch.bfloat16)
    tokens = torch.arange(12).view(2, 6)
    for _ in range(2):
        copy(tokens).logsumexp(-1).sum().backward()
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in copy.parameters())
    found = [p.grad.clone() for p in master.parameters()]
    master.zero_grad()
    (2 * master(tokens).logsumexp(-1).sum()).backward()
    for got, p in zip(found, master.parameters(), strict=True):
        assert got.dtype == torch.float32 and (got - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-6


def test_small_steps_are_not_lost_in_bf16(files, tmp_path):
    """A bf16 weight of 0.02 does not feel 1e-6: the fp32 master does, and checkpoints hold the master."""
    out = run(files, tmp_path / "run", "--dtype", "bfloat16", "--lr", "1e-6", "--steps", "2", "--eval-data=")
    before, after = load_model(files / "model"), load_model(out / "checkpoints" / "step-000002")
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-5


def test_two_steps_and_a_resume_are_four_steps_in_bf16(files, tmp_path):
    """The copy is made from the master again: nothing of it needs to be stored."""
    whole = run(files, tmp_path / "whole", "--dtype", "bfloat16", "--eval-data=")
    part = run(files, tmp_path / "part", "--dtype", "bfloat16", "--eval-data=", "--steps", "2")
    train.main(["--resume", str(part), "--steps", "4"])
    assert timeless(lines(part / "metrics.jsonl")) == timeless(lines(whole / "metrics.jsonl"))
    assert_same_tensors(part, whole)


def test_gradient_checkpointing_changes_no_bit(files, four_steps, tmp_path):  # noqa: F811
    """The layers are computed again with the same inputs."""
    assert_same_run(run(files, tmp_path / "run", "--gradient-checkpointing"), four_steps)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocabulary", "layers"), [(4, 12), (8000, 2)])
def test_the_plan_estimates_the_peak_of_forward_and_backward(vocabulary, layers, dtype, checkpointing):
    """The formula for activations is within a tenth of what the allocator counts, many layers or a large vocabulary."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": layers, "vocab_size": vocabulary}
    model = tiny_model(**sizes).to(getattr(torch, dtype))
    model.checkpointing = checkpointing
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    B, T = 4, 512
    tokens = torch.zeros(B, T, dtype=torch.long)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        token_logprobs(model.hidden(tokens), model.head, tokens)[0].mean().backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    config = train.Config(micro_tokens=B * T, dtype=dtype, gradient_checkpointing=checkpointing)
    need = train.memory(config, model.config, T)["activations"]
    assert need == pytest.approx(max(itertools.accumulate(changes)), rel=0.1)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_plan_states_the_bytes_of_the_cache(compressor, files, tmp_path):
    """`train.memory` computes without allocating what a rollout then reports."""
    out = run(files, tmp_path / "run", "--compressor", compressor, "--budget", "9", "--steps", "1", "--eval-data=")
    (metrics,) = lines(out / "metrics.jsonl")
    config = train.Config(**json.loads((out / "config.json").read_text()))
    need = train.memory(config, load_model(files / "model").config, 4 + 24)
    assert (need["cache"], need["dense cache"]) == (
        metrics["cache_bytes"],
        pytest.approx(metrics["dense_bytes"], rel=0.2),
    )
