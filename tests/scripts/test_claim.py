"""The experiment on the paper's claim, whole, at toy size."""

from __future__ import annotations

import importlib.util
import json
import sys
from concurrent.futures import Executor, Future
from pathlib import Path
from types import ModuleType

import pytest

import train
from task import ASSETS

EXPERIMENTS = ASSETS.parent / "experiments"
TOY = {
    **{"max_new_tokens": 16, "buffer": 4, "window": 2, "prompts": 2, "group_size": 2},
    **{"steps": 2, "eval_every": 1, "eval_limit": 2, "save_every": 1},
}


def load(name: str) -> ModuleType:
    """A fresh copy of a script in experiments/."""
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def claim() -> ModuleType:
    """experiments/claim.py as it is, but without figures: matplotlib is not needed to test."""
    module = load("claim")
    module.pyplot, module.draw = lambda: None, lambda groups, file: file.write_text(str(groups))
    return module


class AtOnce(Executor):
    """Runs each job when it is submitted, in this thread: train.py listens to signals, which only this one may."""

    def __init__(self, workers: int):
        pass

    def submit(self, function, *given) -> Future:
        future = Future()
        future.set_result(function(*given))
        return future


@pytest.fixture
def toy(claim, files) -> ModuleType:
    """The same with two arms, two steps and a tiny model.

    train.py runs in this process, one run after the other: starting PyTorch takes longer than the toy.
    """

    def call(command: list[str], log: Path) -> None:
        assert command[0] == "train.py"
        train.main(command[1:])

    claim.call, claim.ThreadPoolExecutor = call, AtOnce
    claim.BASE |= TOY | {"model": str(files / "model"), "data": str(files / "p-train.jsonl")}
    claim.BUDGET, claim.THREE = 8, ("dense", "sparse-rl")
    return claim


def result(arm: str, seed: int, finals: list[float]) -> dict:
    """A finished run as claim.py writes it: dense accuracy 0.7 +- 0.05 at step 0, and these after each step."""
    evaluations = [
        {"step": step, "decoding": "dense", "accuracy": accuracy, "stderr": 0.05}
        for step, accuracy in enumerate([0.7, *finals])
    ]
    return {"arm": arm, "settings": {"seed": seed}, "evaluations": evaluations, "metrics": []}


def test_the_whole_experiment_leaves_every_file_and_goes_on_where_it_stopped(toy, tmp_path, capsys):
    """A line a run with every metric, a summary, a table; a second start trains nothing, and says the same.

    A third finds the second run's line cut short, as a killed process leaves it: that run ends anew from its folder.
    """
    start = ["--out", str(tmp_path), "--workers", "2"]
    toy.main(start)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    runs = {run["name"]: run for run in map(json.loads, lines)}
    assert len(lines) == 2 and runs.keys() == {"dense-lr0.0005-seed1", "sparse-rl-snapkv-8-lr0.0005-seed1"}
    for run in runs.values():
        assert [m["step"] for m in run["metrics"]] == [1, 2] and {e["step"] for e in run["evaluations"]} == {0, 1, 2}
        assert {column for column, _ in sys.modules["plot"].PANELS} - {"dense", "sparse"} <= run["metrics"][0].keys()
        assert run["command"].startswith("python train.py") and run["commit"] and run["settings"]["seed"] == 1
    summary = json.loads((tmp_path / "summary-default.json").read_text())
    assert summary["state"] == "2 of 2 runs are finished" and [arm["arm"] for arm in summary["arms"]] == [*toy.THREE]
    assert (tmp_path / "default.png").exists()
    printed = capsys.readouterr().out
    printed = printed[printed.index("2 of 2 runs are finished") :]
    call, toy.call = toy.call, None  # nothing may run
    toy.main(start)
    assert printed in capsys.readouterr().out
    toy.call = call
    (tmp_path / "runs.jsonl").write_text(lines[0] + "\n" + lines[1][:99])
    toy.main(start)
    again = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert again[0] == lines[0] and {run["name"]: run for run in map(json.loads, again)} == runs


def test_a_run_that_was_stopped_is_resumed_and_one_that_fails_is_named(claim, tmp_path, monkeypatch, capsys):
    """With a checkpoint: train.py --resume, without: from the start. The other runs go on; exit code 2."""
    (tmp_path / "runs" / "dense-lr0.0005-seed7" / "checkpoints" / "step-000001").mkdir(parents=True)
    called = []

    def fail(command, log):
        called.append(command)
        raise RuntimeError(f"no luck, see {log.name}")

    monkeypatch.setattr(claim, "call", fail)
    with pytest.raises(SystemExit) as stop:
        claim.main(["--out", str(tmp_path), "--workers", "1", "--seeds", "7"])
    assert stop.value.code == 2 and "dense-lr0.0005-seed7: no luck" in capsys.readouterr().err
    assert ["--resume" in command for command in called] == [True, False, False]


def test_stopping_it_summarises_what_is_finished(claim, tmp_path, monkeypatch, capsys):
    """Ctrl-C in the third run: exit code 130, and the summary tells of two runs of three."""
    columns = (*(column for column, _ in sys.modules["plot"].PANELS), "kv_saved", "response_length", "step")
    finished = result("dense", 1, [0.9]) | {"commit": "", "seconds": 1, "metrics": [dict.fromkeys(columns, 1)]}

    def train_run(name, arm, given, out):
        if arm == "sparse-rl":
            raise KeyboardInterrupt
        return finished | {"name": name, "settings": given}

    monkeypatch.setattr(claim, "train_run", train_run)
    with pytest.raises(SystemExit) as stop:
        claim.main(["--out", str(tmp_path), "--workers", "1"])
    assert stop.value.code == 130 and "2 of 3 runs are finished" in capsys.readouterr().out


def test_results_that_are_not_of_this_plan_are_refused_in_one_sentence(claim, tmp_path, capsys):
    """A line that is no result, by its number; a run of other settings, by its name: nothing runs, nothing is lost."""
    claim.call, file = None, tmp_path / "runs.jsonl"
    name, (_, settings) = next(iter(claim.planned(claim.Settings()).items()))
    good, other = ({"name": name, "settings": settings | {"steps": steps}} for steps in (settings["steps"], 1))
    for text, word in (
        (json.dumps(good) + "\n{}\n", "line 2 is no result: delete it"),
        (json.dumps(other) + "\n", f"{name} in {file} was made with another --steps: name another --out"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit) as stop:
            claim.main(["--out", str(tmp_path)])
        assert stop.value.code == 2 and word in capsys.readouterr().err and file.read_text() == text


def test_our_results_give_our_summary(claim, tmp_path):
    """claim.jsonl as runs.jsonl: nothing is left to run, and every number of the headline's summary comes out again."""
    claim.call, results = None, EXPERIMENTS / "results"
    (tmp_path / "runs.jsonl").write_bytes((results / "claim.jsonl").read_bytes())
    claim.main(["--full", "--seeds", "1,2,3,4,5,6,7,8,9,10", "--out", str(tmp_path)])
    ours, again = (json.loads((folder / "summary-full.json").read_text()) for folder in (results, tmp_path))
    assert ours == again


def test_a_script_runs_in_a_process_of_its_own_and_its_log_is_named_if_it_fails(claim, tmp_path):
    """What it prints is in the log, one thread a process; any exit code but 0 is an error.

    The terminal's Ctrl-C does not reach it: claim.py tells it to end, and a second signal would cut its step short.
    """
    log = tmp_path / "log"
    claim.call(["-c", "import os; print(os.environ['OMP_NUM_THREADS'], os.getsid(0) == os.getpid())"], log)
    assert log.read_text() == "1 True\n"
    with pytest.raises(RuntimeError, match=str(log)):
        claim.call(["-c", "raise SystemExit(3)"], log)


def test_a_run_collapsed_if_it_ended_two_standard_errors_below_the_start(claim):
    """0.7 +- 0.05: 0.59 is a collapse, 0.61 is none, and what lies between start and end does not count."""
    assert claim.collapsed(result("naive", 1, [0.9, 0.59]))
    assert not claim.collapsed(result("naive", 1, [0.1, 0.61]))


def test_arms_are_compared_seed_by_seed(claim):
    """Only the seeds that both have: differences 0.2 and 0.4, mean 0.3, standard error 0.1."""
    ours = [result("sparse-rl", seed, [final]) for seed, final in ((1, 0.5), (2, 0.9), (3, 0.1))]
    others = [result("naive", seed, [final]) for seed, final in ((2, 0.5), (1, 0.3))]
    difference = claim.paired(ours, others)
    assert difference["seeds"] == [1, 2]
    assert difference["mean"] == pytest.approx(0.3) and difference["stderr"] == pytest.approx(0.1)


def test_the_parts_share_the_runs_that_they_have_in_common(claim):
    """The default's three are runs of --full; the map has the headline's cell; a budget does not change dense."""
    default, full, cells = (set(claim.planned(claim.Settings(**part))) for part in ({}, {"full": True}, {"map": True}))
    assert default < full and default < cells and len(full) == 30
    assert sum(name.startswith("dense") for name in cells) == len(claim.MAP_LRS) * len(claim.MAP_SEEDS)


def test_a_run_without_evaluations_is_drawn(tmp_path):
    """Its metrics are read, and a line that a live run has not finished is left out; without a step it is refused."""
    plot = load("plot")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no step is finished"):
        plot.read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "rew')
    run = plot.read_run(tmp_path)
    assert plot.series(run, "reward_mean") == {1: 0.5} and plot.series(run, "dense") == {}


def test_a_bad_argument_gets_one_sentence(claim, tmp_path, capsys):
    """Exit code 2, and the flag's name."""
    plot = load("plot")
    for main, options, word in (
        (claim.main, ["--seeds", "1;2"], "--seeds"),
        (claim.main, ["--full", "--map"], "give one"),
        (plot.main, [str(tmp_path)], "is not the folder of a train.py run"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(options)
        assert stop.value.code == 2 and word in capsys.readouterr().err
