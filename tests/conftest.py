"""A model folder and problems of a few kilobytes, and a run on them, for tests of whole command lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import tiny_model
from runs_of_train import half_right, run
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from model import save_model

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: what is so small, several threads only slow down
torch.set_num_threads(1)
CHARACTERS = ["?", "<end>", "\\boxed{", "}", *"0123456789+= "]


@pytest.fixture(autouse=True)
def one_thread():
    """`--threads` holds for the whole process, and a sum depends on it: no test may leave its number to the next."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Path:
    """A folder with a tiny random model and problems for it."""
    folder = tmp_path_factory.mktemp("files")
    save_model(tiny_model(vocab_size=len(CHARACTERS), std=0.1, eos_token_id=1), folder / "model")
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|<end>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    for part in ("train", "heldout"):
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(2)]
        (folder / f"p-{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def any_digit_is_half_right(monkeypatch):
    """train.py rewards an even number of tokens, so that random text teaches something."""
    monkeypatch.setattr("train.is_correct", half_right)


@pytest.fixture(scope="session")
def four_steps(files, tmp_path_factory) -> Path:
    """One uninterrupted run of four steps, which no test may change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.is_correct", half_right)
        return run(files, tmp_path_factory.mktemp("runs") / "four")
