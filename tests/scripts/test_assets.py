"""The bundled model and problems (assets/)."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch

from answers import extract_answer
from model import load_model
from task import ASSETS, load_problems, load_tokenizer, prepare

sys.path.insert(0, str(ASSETS))
import make_bundled

SETS = [f"{length}-{part}" for length in ("long", "short") for part in ("train", "heldout")]


def execute(prompt: str) -> int:
    """An interpreter of prompts, from their description alone: the last value after all rounds."""
    start, *lines, last = prompt.removesuffix("=").split(";")
    values = {start[i]: int(start[i + 1]) for i in range(0, len(start), 2)}
    for _ in range("ABCDEFGHIJKLMNOP".index(last) + 1):
        for target, _, left, sign, right in lines:
            values[target] = (values[left] + (1 if sign == "+" else -1) * values[right]) % 10
    return values[lines[-1][0]]


def test_training_and_held_out_problems_are_disjoint():
    """No prompt stands in two of the four files, or twice in one."""
    prompts = [problem.prompt for name in SETS for problem in load_problems(ASSETS / f"{name}.jsonl")]
    assert len(prompts) == len(set(prompts)) == 2 * (make_bundled.TRAINING + make_bundled.HELD_OUT)


@pytest.mark.parametrize("name", SETS)
def test_every_reference_answer_is_what_the_program_computes(name):
    """By an interpreter that knows the prompt's text only."""
    assert all(execute(p.prompt) == int(p.answer) for p in load_problems(ASSETS / f"{name}.jsonl"))


def test_the_script_makes_the_committed_problems(tmp_path):
    """make_bundled.py is seeded: the files are its output, byte for byte."""
    make_bundled.write_problems(tmp_path, seed=1)
    assert all((tmp_path / f"{name}.jsonl").read_bytes() == (ASSETS / f"{name}.jsonl").read_bytes() for name in SETS)


def test_the_teacher_traces_and_boxes_the_answer():
    """Without noise the response ends in the program's answer; long ones have 900 to 1,100 tokens, short ones 287."""
    tokenizer = make_bundled.make_tokenizer()
    for shape, least, most in ((make_bundled.LONG, 900, 1100), (make_bundled.SHORT, 250, 290)):
        program = make_bundled.make_program(random.Random(0), *shape)
        prompt, response = make_bundled.prompt_of(program), make_bundled.response_of(make_bundled.run(program))
        assert extract_answer(response) == str(execute(prompt))
        ids = tokenizer.encode(prompt + response + make_bundled.EOS).ids
        assert least <= len(ids) <= most and tokenizer.decode(ids) == prompt + response


def test_the_bundle_is_small_and_in_the_formats_of_real_models():
    """At most 8 MB; the model folder and the problems load like any other, and every prompt can be encoded."""
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if "__pycache__" not in file.parts) < 8_000_000
    tokenizer, eos_ids = load_tokenizer(ASSETS / "model")
    model = load_model(ASSETS / "model")
    assert eos_ids == [tokenizer.token_to_id(make_bundled.EOS)]
    assert model.config.vocab_size == tokenizer.get_vocab_size()
    unknown = tokenizer.token_to_id(make_bundled.UNKNOWN)
    problems = [problem for name in SETS for problem in load_problems(ASSETS / f"{name}.jsonl")]
    assert all(unknown not in prompt.ids for prompt in prepare(problems, tokenizer, model.config.vocab_size))
    assert json.loads((ASSETS / "model" / "config.json").read_text())["model_type"] == "llama"


@torch.no_grad()
def test_the_eviction_mask_hides_keys_by_age():
    """The warm start's stand-in for a cache: query i sees key j while i - j is below the key's age."""
    age = torch.tensor([[[1, 2, 9, 9]]])  # (B, K, T)
    mask = make_bundled.EvictionMask(age, heads=2)
    visible = (mask.bias[0, 1] == 0).int().tolist()
    assert visible == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
