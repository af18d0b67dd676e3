"""A resumed run reads what the run began with, wherever that lies now: it is known by its contents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs_of_train import assert_same_run, contents, lines, run
from safetensors.torch import load_file, save_file

import train

pytestmark = pytest.mark.usefixtures("any_digit_is_half_right")


@pytest.fixture
def place(files, tmp_path) -> Path:
    """A folder with a model, problems, and a run of two steps on them."""
    place = shutil.copytree(files, tmp_path / "place")
    run(place, place / "run", "--steps", "2")
    return place


def edit(name: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    """A change of the text of a file."""
    return lambda place: (place / name).write_text(change((place / name).read_text()))


def other_weights(place: Path) -> None:
    tensors = load_file(place / "model" / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-6
    save_file(tensors, place / "model" / "model.safetensors")


def other_eos(place: Path) -> None:
    (place / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


CHANGES = {
    "a row more in front": ("--data", edit("p-train.jsonl", lambda text: '{"prompt": "1=", "answer": "1"}\n' + text)),
    "rows in another order": ("--data", edit("p-train.jsonl", lambda text: "\n".join(text.splitlines()[::-1]))),
    "an answer": ("--data", edit("p-train.jsonl", lambda text: text.replace('"answer": "3"', '"answer": "4"'))),
    "a prompt": ("--data", edit("p-train.jsonl", lambda text: text.replace("0+0=", "0+9="))),
    "a held-out problem": ("--eval-data", edit("p-heldout.jsonl", lambda text: text.replace("0+0=", "0+9="))),
    "a held-out answer": ("--eval-data", edit("p-heldout.jsonl", lambda text: text.replace('"3"', '"4"'))),
    "a weight": ("--model", other_weights),
    "a setting of the model": ("--model", edit("model/config.json", lambda text: text.replace("1e-05", "1e-06"))),
    "the tokens that end a response": ("--model", other_eos),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_run_whose_inputs_changed_is_not_resumed(what, place, capsys):
    """It would be a run of neither: the flag is named, and the way out; nothing is written. Also before any save."""
    flag, change = CHANGES[what]
    change(place)
    for _ in range(2):
        before = contents(place)
        with pytest.raises(SystemExit) as stop:
            train.main(["--resume", str(place / "run"), "--steps", "4"])
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        remedy = f"error: {flag}: not what {place}/run began with. Name the old one, or start a new run"
        assert line.endswith(remedy) and contents(place) == before
        shutil.rmtree(
            place / "run" / "checkpoints", ignore_errors=True
        )  # as if it had been killed before its first one


def test_what_a_model_does_not_read_may_change(place):
    """A file beside the weights, blank lines and keys of a problem that nobody asks for are no other experiment."""
    (place / "model" / "README.md").write_text("about the model")
    edit("p-train.jsonl", lambda text: text.replace('"}\n', '", "source": "of mine"}\n\n'))(place)
    train.main(["--resume", str(place / "run"), "--steps", "3"])
    assert len(lines(place / "run" / "metrics.jsonl")) == 3


def test_a_run_is_resumed_with_what_it_reads_in_another_place(place, four_steps, tmp_path, capsys):
    """Moved as a whole, under other names: the flags name it anew, once, and every bit is as if it had stayed."""
    moved = place.rename(tmp_path / "moved")
    for old, new in (("model", "start"), ("p-train.jsonl", "a.jsonl"), ("p-heldout.jsonl", "b.jsonl")):
        (moved / old).rename(moved / new)
    with pytest.raises(SystemExit):
        train.main(["--resume", str(moved / "run")])
    assert f"{place}/model/config.json does not exist" in capsys.readouterr().err
    named = {"--model": "start", "--data": "a.jsonl", "--eval-data": "b.jsonl"}
    anew = [word for flag, name in named.items() for word in (flag, str(moved / name))]
    train.main(["--resume", str(moved / "run"), *anew, "--steps", "3"])
    config = json.loads((moved / "run" / "config.json").read_text())
    assert [config[name] for name in ("model", "data", "eval_data")] == anew[1::2]
    train.main(["--resume", str(moved / "run"), "--steps", "4"])
    # evaluations are due at the end of each of the three, so only the records of steps 0 and 4 are compared
    evaluations = [e for e in lines(moved / "run" / "evals.jsonl") if e["step"] in (0, 4)]
    (moved / "run" / "evals.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    assert_same_run(moved / "run", four_steps)


def test_a_run_without_hashes_of_its_inputs_is_refused(place, capsys):
    """Nobody could tell whether it reads the same: one sentence that names the file."""
    (place / "run" / "inputs.json").unlink()
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", str(place / "run")])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{place}/run/inputs.json does not exist" in line


@pytest.mark.parametrize("content", ["{}", '{"model": 1, "data": 2, "eval_data": 3, "more": 4}'])
def test_damaged_hashes_let_nothing_pass(content, place, capsys):
    """What is not there is no proof, and what should not be there no traceback."""
    shutil.rmtree(place / "run" / "checkpoints")
    (place / "run" / "inputs.json").write_text(content)
    with pytest.raises(SystemExit) as stop:
        train.main(["--resume", str(place / "run")])
    assert stop.value.code == 2 and "--model, --data, --eval-data, --reward: not what" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rollout-rows", "--micro-tokens"])
def test_in_bf16_a_resumed_run_may_not_change_what_rounds_otherwise(option, files, tmp_path, capsys):
    """The rows of a matrix product and the padding of the learner: in fp32 they move the last bits, here the tokens."""
    part = run(files, tmp_path / "part", "--dtype", "bfloat16", "--eval-data=", "--steps", "1")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(part), "--steps", "2", option, "50"])
    assert f"cannot change the experiment ({option}" in capsys.readouterr().err
    assert len(lines(part / "metrics.jsonl")) == 1
