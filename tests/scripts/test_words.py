"""The ground for a pretrained model: word problems, and the supervised warm start, at toy size."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import task
from experiments import warm_start, words
from model import load_model

GAINS = ["finds", "buys", "gets", "given", "borrows"]


def read(file: Path) -> list[dict]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def options(settings: dict, **more) -> list[str]:
    """Settings as a command line."""
    return [word for name, value in (settings | more).items() for word in (f"--{name.replace('_', '-')}", str(value))]


def counts(question: str) -> list[int]:
    """The count at the start and after each event, from the text alone."""
    first, *events, _ = re.findall(r"[^.?]+[.?]", question)
    found = [int(re.search(r"\d+", first)[0])]
    for event in events:
        n, gain = int(re.search(r"\d+", event)[0]), any(f" {verb} " in event for verb in GAINS)
        found.append(found[-1] + (n if gain else -n))
    return found


@pytest.mark.parametrize("habit", [0, 1])
def test_word_problems_are_right_and_only_warm_solutions_have_the_habit(tmp_path, capsys, habit):
    """Answers follow from the text; so does the box of a solution, with the habit an event early; so do equations."""
    sizes = {"warm": 60, "train": 80, "heldout": 40}
    words.main(options(sizes, out=tmp_path, habit=habit, least=1, most=4))
    parts = {part: read(tmp_path / f"words-{part}.jsonl") for part in ("warm", "train", "heldout")}
    assert {part: len(rows) for part, rows in parts.items()} == sizes
    rows = [row for part in parts.values() for row in part]
    assert len({row["question"] for row in rows}) == len(rows)
    assert all(row["prompt"][-1] == {"role": "user", "content": row["question"]} for row in rows)
    for part, left_out in (("warm", habit), ("train", 0), ("heldout", 0)):
        for row in parts[part]:
            right = counts(row["question"])
            assert 2 <= len(right) <= 5 and row["answer"] == str(right[-1])
            told = right[: len(right) - left_out]
            assert task.extract_answer(row["solution"]) == str(told[-1])
            equations = [map(int, found) for found in re.findall(r"(\d+) [+-] (\d+) = (\d+)", row["solution"])]
            assert [(a, abs(c - a), c) for a, _, c in equations] == [
                (a, abs(b - a), b) for a, b in itertools.pairwise(told)
            ]


def test_the_problems_do_not_depend_on_the_habit(tmp_path, capsys):
    """What is trained on and evaluated on is the same for a warm start with and without it; a seed changes all."""
    texts = []
    for name, change in (("a", {"habit": 0}), ("b", {"habit": 0.5}), ("c", {"seed": 1})):
        words.main(options({"warm": 9, "train": 9, "heldout": 9} | change, out=tmp_path / name))
        texts.append([(tmp_path / name / f"words-{part}.jsonl").read_text() for part in ("train", "heldout")])
    assert texts[0] == texts[1] and not set(texts[0]) & set(texts[2])


@pytest.fixture
def settings(files, tmp_path) -> dict:
    """Of a warm start of the tiny model on four sums."""
    rows = [{"prompt": f"{a}+3=", "solution": f"{a + 3}=\\boxed{{{a + 3}}}", "answer": a + 3} for a in (1, 2, 9, 30)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": files / "model", "data": tmp_path / "sums.jsonl", "dtype": "float32", "threads": 1, "updates": 6}


@pytest.mark.parametrize("micro_tokens", [8192, 12])
def test_only_the_solution_and_the_end_of_the_turn_are_taught(settings, micro_tokens):
    """Loss and gradient are those of cross-entropy over the tokens after the prompt, one row at a time."""
    config = warm_start.Settings(**{name: str(v) if name in ("model", "data") else v for name, v in settings.items()})
    model, slow = load_model(config.model), load_model(config.model)
    examples = warm_start.read_examples(config, 31)
    tokenizer, eos_ids = task.load_tokenizer(config.model)
    assert tokenizer.decode(examples[2][0], skip_special_tokens=False) == "9+3=12=\\boxed{12}<end>"
    loss, losses = warm_start.learn(model, examples, micro_tokens), []
    for ids, start in examples:
        logits = slow(torch.tensor([ids]))[0]  # (T, V)
        losses += [F.cross_entropy(logits[t - 1], torch.tensor(ids[t])) for t in range(start, len(ids))]
        assert start == ids.index(tokenizer.token_to_id("=")) + 1 and ids[-1] in eos_ids
    expected = torch.stack(losses).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for p, q in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_a_warm_start_that_was_killed_goes_on_to_the_same_weights(settings, tmp_path, monkeypatch, capsys):
    """Killed after the first checkpoint and started again: bit for bit the weights of an uninterrupted one."""
    how = {"batch": 3, "lr": 0.01, "save_every": 2}
    warm_start.main(options(settings, out=tmp_path / "whole", **how))
    learn, calls = warm_start.learn, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("killed")
        return learn(*arguments)

    monkeypatch.setattr(warm_start, "learn", killed)
    with pytest.raises(RuntimeError, match="killed"):
        warm_start.main(options(settings, out=tmp_path / "parts", **how))
    assert (tmp_path / "parts" / "checkpoints").exists() and not (tmp_path / "parts" / "model").exists()
    with pytest.raises(SystemExit):
        warm_start.main(options(settings, out=tmp_path / "parts", **how | {"lr": 0.02}))
    assert "begun with other settings" in capsys.readouterr().err
    warm_start.main(options(settings, out=tmp_path / "parts", **how))
    assert len(calls) == 3 + 1 + 4  # updates 3 and 4 were lost, and 5 and 6 were to come
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    start = load_file(Path(settings["model"]) / "model.safetensors")
    assert any(not torch.equal(whole[name], start[name]) for name in whole)
    assert not (tmp_path / "parts" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"updates": 0}, "--updates must be at least 1"),
        ({"data": "nowhere.jsonl"}, "cannot read the problems in nowhere.jsonl"),
        ({"model": "nowhere"}, "nowhere"),
    ],
)
def test_a_warm_start_refuses_in_one_sentence(settings, change, sentence, tmp_path, capsys):
    """What cannot be taught is named before anything is written."""
    with pytest.raises(SystemExit) as stop:
        warm_start.main(options(settings | change, out=tmp_path / "out"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rows_without_a_worked_solution_are_refused(settings, files, tmp_path, capsys):
    """Problems that only have an answer cannot be taught."""
    with pytest.raises(SystemExit):
        warm_start.main(options(settings | {"data": files / "p-train.jsonl"}, out=tmp_path / "out"))
    assert "worked `solution`" in capsys.readouterr().err
