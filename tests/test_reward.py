"""A reward of one's own: a function (response, answer) -> float, in a file or passed to train.main."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
from runs_of_train import arguments, lines, run

import eval as evaluation
import train

REWARDS = """
def length(response, answer):
    return -0.5 * len(response)

def parity(response, answer):
    return float(len(response) % 2 == 0)

def text(response, answer):
    return "1"

def nothing(response, answer):
    return None

def infinite(response, answer):
    return float("inf")

def broken(response, answer):
    return 1 / 0
"""


@pytest.fixture
def rewards(tmp_path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


def test_a_reward_from_a_file_is_what_training_maximises(files, rewards, tmp_path):
    """Any finite number, -0.5 a character here: each record has it, and the advantages come from it."""
    out = run(files, tmp_path / "run", "--steps", "1", "--eval-data=", "--reward", f"{rewards}:length")
    records = lines(out / "samples.jsonl")
    assert len({record["reward"] for record in records}) > 2
    assert lines(out / "metrics.jsonl")[0]["reward_mean"] == pytest.approx(sum(r["reward"] for r in records) / 16)
    for group in (records[i : i + 4] for i in range(0, 16, 4)):
        mean = sum(record["reward"] for record in group) / 4
        assert all((record["advantage"] > 0) == (record["reward"] > mean) for record in group)


def test_a_function_that_is_passed_does_the_same_as_one_from_a_file(files, rewards, tmp_path):
    """`train.main(argv, reward=f)`."""
    one = run(files, tmp_path / "one", "--steps", "1", "--eval-data=", "--reward", f"{rewards}:parity")

    def parity(response, answer):
        return float(len(response) % 2 == 0)

    train.main(arguments(files, tmp_path / "two", "--steps", "1", "--eval-data="), reward=parity)
    assert lines(one / "samples.jsonl") == lines(tmp_path / "two" / "samples.jsonl")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("text", "gave '1', not a finite number"),
        ("nothing", "raised TypeError"),
        ("infinite", "gave inf, not a finite number"),
        ("broken", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_that_breaks_its_promise_is_named_and_the_response_saved(
    name, fault, files, rewards, tmp_path, capsys
):
    """One sentence, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        run(files, tmp_path / "run", "--steps", "1", "--eval-data=", "--reward", f"{rewards}:{name}")
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and f"the reward {rewards}:{name} {fault}" in last
    assert {"response", "answer", "fault"} == json.loads((tmp_path / "run" / "reward-failed.json").read_text()).keys()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("{file}:absent", "FILE.py:NAME (KeyError: 'absent')"),
        ("nowhere.py:f", "No such file or directory"),
        ("parity", "FILE.py:NAME"),
    ],
)
def test_a_reward_that_is_not_there_is_refused_and_nothing_written(name, sentence, files, rewards, tmp_path, capsys):
    """By the file or the name that is missing."""
    with pytest.raises(SystemExit) as stop:
        run(files, tmp_path / "run", "--reward", name.format(file=rewards))
    assert stop.value.code == 2 and sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_has_the_reward_it_began_with(files, rewards, tmp_path, capsys):
    """Known by the file's contents and the function's name: it may move, not change, and not be left out."""
    out = run(files, tmp_path / "run", "--steps", "1", "--eval-data=", "--reward", f"{rewards}:parity")
    moved = shutil.move(rewards, tmp_path / "moved.py")
    train.main(["--resume", str(out), "--steps", "2", "--reward", f"{moved}:parity"])
    assert len(lines(out / "metrics.jsonl")) == 2
    for reward in (f"{moved}:length", ""):
        with pytest.raises(SystemExit):
            train.main(["--resume", str(out), "--steps", "3", "--reward", reward])
        assert "--reward: not what" in capsys.readouterr().err
    moved.write_text(REWARDS + "# another\n")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(out), "--steps", "3", "--reward", f"{moved}:parity"])
    assert "--reward: not what" in capsys.readouterr().err
    passed = arguments(files, tmp_path / "passed", "--steps", "1", "--eval-data=")
    train.main(passed, reward=lambda response, answer: float(len(response) % 2))
    with pytest.raises(SystemExit):
        train.main(["--resume", str(tmp_path / "passed"), "--steps", "2"])
    assert "--reward: not what" in capsys.readouterr().err


def test_a_function_without_source_is_refused_and_nothing_written(files, tmp_path, capsys):
    """No resumed run could know it again."""
    with pytest.raises(SystemExit) as stop:
        train.main(arguments(files, tmp_path / "run"), reward=functools.partial(max, key=len))
    assert stop.value.code == 2 and "pass a function of a file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_evaluation_reports_a_reward_beside_accuracy(files, rewards, tmp_path, capsys):
    """A column of its own; accuracy stays what is_correct says."""
    paths = ["--model", str(files / "model"), "--data", str(files / "p-heldout.jsonl"), "--out", str(tmp_path / "out")]
    small = [
        "--budget",
        "8",
        "--buffer",
        "4",
        "--window",
        "2",
        "--max-new-tokens",
        "24",
        "--limit",
        "3",
        "--samples",
        "2",
        "--temperature",
        "1",
    ]
    evaluation.main([*paths, *small, "--reward", f"{rewards}:length"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["p-heldout"]
    records = lines(tmp_path / "out" / "responses-p-heldout-dense.jsonl")
    given = [-0.5 * len(r["response"]) for r in records]
    assert len(set(given)) > 1 and given == [r["reward"] for r in records]
    assert results["dense"]["reward"] == pytest.approx(sum(given) / 6)
    assert results["dense"]["accuracy"] == pytest.approx(sum(r["correct"] for r in records) / 6)
    assert "reward" in capsys.readouterr().out
