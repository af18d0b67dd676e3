"""The experiment on a pretrained model, the whole chain, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import real


@pytest.fixture
def toy(files, tmp_path, monkeypatch, any_digit_is_half_right) -> list[str]:
    """The command line of real.py on the tiny random model, with two steps a run."""
    small = {"prompts": 2, "group_size": 2, "max_new_tokens": 16, "steps": 2, "save_every": 1}
    small |= {"dtype": "float32", "lr": 0.05}
    monkeypatch.setattr(real, "WORDS", {"warm": 6, "train": 8, "heldout": 4, "least": 1, "most": 1})
    monkeypatch.setattr(real, "WARM", {"updates": 2, "batch": 2, "lr": 1e-3})
    monkeypatch.setattr(real, "TRAINING", real.TRAINING | small)
    monkeypatch.setattr(real, "CACHES", {"headline": {"compressor": "snapkv", "budget": 8, "buffer": 4, "window": 2}})
    paths = {"model": files / "model", "out": tmp_path / "out", "results": tmp_path / "real.jsonl"}
    return [word for name, path in paths.items() for word in (f"--{name}", str(path))]


def lines(tmp_path: Path) -> list[dict]:
    """The finished runs."""
    return [json.loads(line) for line in (tmp_path / "real.jsonl").read_text().splitlines()]


def timeless(x):
    """Metrics or summaries without how long things took."""
    timed = ("seconds", "tokens_per_second")
    return {k: timeless(v) for k, v in x.items() if not k.endswith(timed)} if isinstance(x, dict) else x


def test_one_command_goes_from_problems_to_compared_arms(toy, tmp_path, monkeypatch, capsys):
    """A line for each seed and arm, seed by seed, with every metric and evaluation; a second start trains nothing."""
    real.main([*toy, "--seeds", "1,2"])
    runs = lines(tmp_path)
    order = [(seed, arm) for seed in (1, 2) for arm in ("dense", "naive", "sparse-rl")]
    assert [(run["seed"], run["arm"]) for run in runs] == order
    for run in runs:
        assert [m["step"] for m in run["metrics"]] == [1, 2] and run["commit"] and run["setting"] == "headline"
        assert run["command"].startswith("python train.py") and f"--seed {run['seed']}" in run["command"]
        for when in ("before", "after"):
            modes = {kind: set(by_mode) for kind, by_mode in run[when].items()}
            assert modes == {kind: {"dense", "snapkv-8"} for kind in ("greedy", "sampled")}
            assert all(s["problems"] == 4 for by_mode in run[when].values() for s in by_mode.values())
        assert (run["metrics"][0]["kv_saved"] > 0) == (run["arm"] != "dense")
        assert run["settings"]["correction"] == ("sparse-rl" if run["arm"] == "sparse-rl" else "none")
    assert all(run["before"] == runs[0]["before"] for run in runs)  # measured once
    printed = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(real.train, "main", None)  # nothing may run
    monkeypatch.setattr(real.evaluation, "main", None)
    real.main([*toy, "--seeds", "1,2"])
    again = capsys.readouterr().out.splitlines()
    assert again == printed[-len(again) :] and sum("naive - dense" in line for line in again) == 1


def test_arms_are_compared_seed_by_seed():
    """Means +- standard error of each arm, and the difference over the seeds that both have, not that of the means."""

    def line(arm: str, seed: int, accuracy: float) -> dict:
        return {"arm": arm, "seed": seed, "after": {"greedy": {"dense": {"accuracy": accuracy}}}}

    found = [line("dense", 1, 0.9), line("naive", 1, 0.7), line("dense", 2, 0.5), line("naive", 2, 0.4)]
    rows = real.summary([*found, line("naive", 3, 0.1)]).splitlines()[2:]
    assert [row.split() for row in rows] == [
        ["dense", "2", "0.700", "+-", "0.200"],
        ["naive", "3", "0.400", "+-", "0.173"],
        ["naive", "-", "dense", "2", "-0.150", "+-", "0.050"],
    ]


def test_a_killed_run_is_resumed_and_ends_as_if_it_had_not_been(toy, tmp_path, monkeypatch, capsys):
    """Killed in the second step: the same command does the rest; metrics and evaluations are a whole run's."""
    whole = tmp_path / "whole"
    real.main(
        [*toy, "--arms", "naive", "--seeds", "3", "--out", str(whole), "--results", str(tmp_path / "whole.jsonl")]
    )
    train_step = real.train.train_step

    begun = []

    def killed(config, inputs, weights, reward, step):
        begun.append(step)
        if len(begun) == 2:
            raise RuntimeError("killed")
        return train_step(config, inputs, weights, reward, step)

    monkeypatch.setattr(real.train, "train_step", killed)
    with pytest.raises(RuntimeError, match="killed"):
        real.main([*toy, "--arms", "naive", "--seeds", "3"])
    assert not (tmp_path / "real.jsonl").exists()
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(real, "TRAINING", real.TRAINING | {"lr": 0.06})
        real.main([*toy, "--arms", "naive", "--seeds", "3"])
    assert "--lr 0.05 -> 0.06" in capsys.readouterr().err
    real.main([*toy, "--arms", "naive", "--seeds", "3"])
    assert begun == [0, 1, 1]
    (run,), (expected,) = lines(tmp_path), map(json.loads, (tmp_path / "whole.jsonl").read_text().splitlines())

    assert list(map(timeless, run["metrics"])) == list(map(timeless, expected["metrics"]))
    assert timeless(run["after"]) == timeless(expected["after"]) != timeless(run["before"])


def test_an_unknown_arm_is_refused_in_one_sentence(toy, capsys):
    """The arms that there are are named."""
    with pytest.raises(SystemExit):
        real.main([*toy, "--arms", "dense,other"])
    assert "--arms 'other' is none of dense, naive, sparse-rl, replay" in capsys.readouterr().err
