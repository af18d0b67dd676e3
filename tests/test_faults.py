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
from helpers import peak_bytes, tiny_model
from runs_of_train import arguments, assert_same_run, assert_same_tensors, contents, lines, run, timeless
from safetensors.torch import load_file, save_file

import rollout
import runs
import train
from kvcache import COMPRESSORS
from model import load_model
from rollout import memory, token_logprobs
from runs import OPTIMIZER, checkpoints

pytestmark = pytest.mark.usefixtures("any_digit_is_half_right")

# ------------------------------------------------------------------------------------------------ killed and stopped

CHILD = """
import os, signal, sys
sys.path[:0] = {paths!r}
import rollout, runs, torch, train
from runs_of_train import half_right

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

def half_written(real, path, text):
    real(path.with_name(path.name + ".partial"), text[: len(text) // 2 + 100])

moments = {{
    "rollout": lambda: at_call(rollout, "sample", 60, lambda *_, **__: None),
    "update": lambda: at_call(torch.optim.AdamW, "step", 3, lambda real, *args, **kwargs: real(*args, **kwargs)),
    "checkpoint": lambda: at_call(runs, "save_file", 2, half_a_file),
    "metrics": lambda: at_call(runs, "append", 4, half_a_line),  # samples and metrics of each step
    "evaluation": lambda: at_call(runs, "write_whole", 7, half_written),  # 1 to 5 open the run; 6: step 0
    "any": lambda: None,
}}
train.is_correct = half_right
moments[sys.argv[1]]()
train.main(sys.argv[2:])
"""


def start(moment: str, files: Path, out: Path) -> subprocess.Popen:
    """Start train.py as a process that dies at a moment, on the settings of `four_steps`."""
    child = CHILD.format(paths=[str(Path(train.__file__).parent), str(Path(__file__).parent)])
    command = [sys.executable, "-c", child, moment, *arguments(files, out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


MOMENTS = ("rollout", "update", "checkpoint", "metrics", "evaluation")


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """{moment: (process, run folder)}: all started at once, because each spends its time on importing PyTorch."""
    folders = {moment: tmp_path_factory.mktemp("killed") / moment for moment in MOMENTS}
    return {moment: (start(moment, files, out), out) for moment, out in folders.items()}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_as_if_nothing_had_happened(moment, killed, four_steps):
    """kill -9 while it samples, after the weights moved, in half a checkpoint, line of metrics, or evaluation."""
    process, out = killed[moment]
    assert process.wait() == -signal.SIGKILL
    train.main(["--resume", str(out)])
    assert_same_run(out, four_steps)


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_as_if_nothing_had_happened(files, four_steps, tmp_path):
    """Thirty moments drawn from the second half of the life of the process; in the first it imports PyTorch."""
    began = time.perf_counter()
    start("any", files, tmp_path / "whole").wait()
    life = time.perf_counter() - began
    draw, resumed = random.Random(0), 0
    for trial in range(30):
        out = tmp_path / f"run{trial}"
        process = start("any", files, out)
        try:
            process.wait(draw.uniform(life / 2, life))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if (out / "config.json").exists():  # else nothing had begun
            train.main(["--resume", str(out)])
            assert_same_run(out, four_steps)
            resumed += 1
    assert resumed > 5


def signals(numbers: list[int], owner, name: str, call: int, patch: pytest.MonkeyPatch) -> None:
    """Send this process these signals when a function is called for the so-and-so-many-th time, then call it."""
    real, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **kwargs):
        if next(calls) == call:
            for number in numbers:
                signal.raise_signal(number)
        return real(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


PHASES = {  # what is called then, for the how many-th time, and the step it belongs to
    "the first evaluation": (rollout, "sample", 20, 0),
    "sampling": (rollout, "sample", 110, 3),
    "scoring": (train, "rescore", 3, 3),
    "the update": (torch.optim.AdamW, "step", 3, 3),
    "records": (runs, "append", 6, 3),  # 5: samples of step 3; 6: its metrics
    "a checkpoint": (runs, "save_file", 1, 2),
    "the last checkpoint": (runs, "save_file", 2, 4),
    "the last evaluation": (train, "dense_and_sparse", 2, 4),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_lets_the_step_end_and_saves_it(phase, files, four_steps, tmp_path, capsys):
    """Its records are written, and a checkpoint though none was due; the resumed run is as if nothing had happened."""
    *where, step = PHASES[phase]
    number = signal.SIGTERM if step == 3 else signal.SIGINT
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        signals([number], *where, patch)
        run(files, tmp_path / "run")
    assert stop.value.code == 128 + number
    last = f"stopped by {number.name} after step {step}; go on with: python train.py --resume {tmp_path / 'run'}"
    assert last in capsys.readouterr().err.splitlines()[-1]
    assert next((saved for saved, _ in checkpoints(tmp_path / "run")), 0) == step
    if step:
        assert [m["step"] for m in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, step + 1))
    evaluated = {e["step"] for e in lines(tmp_path / "run" / "evals.jsonl")}
    assert evaluated == ({0, 4} if phase == "the last evaluation" else {0})  # none is begun any more
    train.main(["--resume", str(tmp_path / "run")])
    assert_same_run(tmp_path / "run", four_steps)


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_signal_stops_at_once_and_loses_no_checkpoint(phase, files, four_steps, tmp_path, capsys):
    """Nothing more is written, no half checkpoint left: the run goes on from the newest whole one."""
    *where, step = PHASES[phase]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        signals([signal.SIGTERM, signal.SIGINT], *where, patch)
        run(files, tmp_path / "run")
    assert stop.value.code == 128 + signal.SIGTERM
    saved = step if phase == "the last evaluation" else (step - 1) // 2 * 2  # --save-every 2
    assert f"after step {max(0, saved)}; go on with" in capsys.readouterr().err.splitlines()[-1]
    names = [f"step-{n:06d}" for n in range(2, saved + 1, 2)]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoints/*")) == names
    train.main(["--resume", str(tmp_path / "run")])
    assert_same_run(tmp_path / "run", four_steps)


@pytest.mark.parametrize("file", ["config.json", "inputs.json"])
def test_a_run_that_has_a_config_can_be_resumed(file, files, four_steps, tmp_path, monkeypatch):
    """Stopped right after it wrote this file: where config.json lies, all else that a resume needs lies already."""
    write = runs.write_json

    def stopped(path: Path, content: dict) -> None:
        write(path, content)
        if path.name == file:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(runs, "write_json", stopped)
        run(files, tmp_path / "run")
    if (tmp_path / "run" / "config.json").exists():
        train.main(["--resume", str(tmp_path / "run")])
        assert_same_run(tmp_path / "run", four_steps)


def test_ctrl_c_before_the_first_step_is_one_line(files, tmp_path, capsys, monkeypatch):
    """While the weights load nothing is written yet; exit code 130."""
    signals([signal.SIGINT], train, "load_model", 1, monkeypatch)
    with pytest.raises(SystemExit) as stop:
        run(files, tmp_path / "run")
    assert stop.value.code == 130 and capsys.readouterr().err == "\ntrain.py: stopped\n"
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------- disk and memory


@pytest.mark.parametrize("limited", ["checkpoint", "metrics"])
def test_a_full_disk_loses_nothing(limited, files, four_steps, tmp_path, capsys, monkeypatch):
    """One sentence with the way on; the last checkpoint whole, no half one left; with room again the run goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out, real = tmp_path / "run", train.train_step

    def full(*args):
        found = real(*args)
        if args[-1] == 2:  # a file-size limit stands for the full disk
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
        patch.setattr(train, "rollout_shared", fails)
        run(files, tmp_path / "run", "--eval-data=")
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(name in last for name in ("--rollout-rows", "--budget", "--micro-tokens", "--resume"))
    train.main(["--resume", str(tmp_path / "run"), "--rollout-rows", "4", "--micro-tokens", "50", "--steps", "1"])
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1


# --------------------------------------------------------------------------------------------------- checkpoints


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_a_tensor(file: Path) -> None:
    save_file({name: t for name, t in load_file(file).items() if name != "norm.weight.step"}, file)


DAMAGES = [
    ("model.safetensors", truncate, "{file} is not a complete safetensors file"),
    ("config.json", Path.unlink, "{file} does not exist"),
    (OPTIMIZER, truncate, "cannot read {file}: Error while deserializing"),
    (OPTIMIZER, Path.unlink, "cannot read {file}: No such file"),
    (OPTIMIZER, lose_a_tensor, "cannot read {file}: 'norm.weight.step'"),
]


def saved(run: Path) -> list[int]:
    """The steps of the checkpoints, the newest first."""
    return [step for step, _ in checkpoints(run)]


def refused(out: Path, capsys) -> str:
    """The one line in which a run says that it cannot be resumed; nothing in its folder is touched."""
    before = contents(out)
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", str(out)])
    assert stop.value.code == 2 and contents(out) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("earlier", [2, 0])
@pytest.mark.parametrize(("name", "how", "sentence"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken_when_it_is_gone(
    name, how, sentence, earlier, four_steps, tmp_path, capsys
):
    """One sentence says which, and what the run would go on from, the one before or the start. It ends as undamaged."""
    out = shutil.copytree(four_steps, tmp_path / "run")
    newest = out / "checkpoints" / "step-000004"
    if not earlier:
        shutil.rmtree(out / "checkpoints" / "step-000002")
    how(newest / name)
    line = refused(out, capsys)
    assert sentence.format(file=newest / name) in line
    assert line.endswith(f"; if {newest} is damaged, move it away, and the run goes on from step {earlier}")
    newest.rename(tmp_path / "damaged")
    train.main(["--resume", str(out)])
    assert f"from step {earlier}" in capsys.readouterr().out
    assert_same_run(out, four_steps)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", OPTIMIZER])
def test_a_disk_error_is_no_damage(file, four_steps, tmp_path, capsys):
    """It may pass: one sentence that names the file, nothing moved, nothing cut back; and then the run goes on."""
    out = shutil.copytree(four_steps, tmp_path / "run")
    place = out / "checkpoints" / "step-000004" / file
    whole = place.rename(tmp_path / "whole")
    place.mkdir()  # reading a folder as if it were a file is an OSError
    line = refused(out, capsys)
    assert f"cannot read {place}: " in line and line.endswith("the run goes on from step 2")
    place.rmdir()
    whole.rename(place)
    train.main(["--resume", str(out)])
    assert_same_run(out, four_steps)


def test_keep_leaves_the_newest_checkpoints(files, tmp_path):
    """--keep 2 of four."""
    out = run(files, tmp_path / "run", "--save-every", "1", "--keep", "2", "--eval-data=")
    assert saved(out) == [4, 3]
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


def test_gradient_checkpointing_changes_no_bit(files, four_steps, tmp_path):
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
    peak = peak_bytes(lambda: token_logprobs(model.hidden(tokens), model.head, tokens)[0].mean().backward())
    how = {"dtype": getattr(torch, dtype), "micro_tokens": B * T, "gradient_checkpointing": checkpointing}
    need = memory(model.config, {"compressor": "full"}, B, T, **how)["activations"]
    assert need == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(("compressor", "bits"), [*((name, "0") for name in COMPRESSORS), ("full", "8"), ("rkv", "4")])
def test_the_plan_states_the_bytes_of_the_cache(compressor, bits, files, tmp_path):
    """`rollout.memory` computes without allocating what a rollout then reports."""
    options = ("--compressor", compressor, "--kv-bits", bits, "--budget", "9", "--steps", "1", "--eval-data=")
    out = run(files, tmp_path / "run", *options)
    (metrics,) = lines(out / "metrics.jsonl")
    config = train.Config(**json.loads((out / "config.json").read_text()))
    how = {"dtype": torch.float32, "micro_tokens": config.micro_tokens}
    need = memory(load_model(files / "model").config, config.cache, config.rows, 4 + 24, **how)
    assert (need["cache"], need["dense cache"]) == (
        metrics["cache_bytes"],
        pytest.approx(metrics["dense_bytes"], rel=0.2),
    )
