"""Small runs of train.py, and when two of them count as the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

import train

SMALL = (
    "--budget 8 --buffer 4 --window 2 --prompts 4 --group-size 4 --max-new-tokens 24 --steps 4 --micro-tokens 100 "
    "--lr 1e-2 --save-every 2"
)


def arguments(files: Path, out: Path, *options: str) -> list[str]:
    """The command line of a few small steps that do evict, on the fixture `files`."""
    paths = ["--model", str(files / "model"), "--data", str(files / "p-train.jsonl"), "--out", str(out)]
    return [*paths, *SMALL.split(), *options]


def run(files: Path, out: Path, *options: str) -> Path:
    """Train so, in this process; the run folder."""
    train.main(arguments(files, out, *options))
    return out


def half_right(response: str, answer: str) -> bool:
    """A reward that random text can earn: an even number of tokens."""
    return len(response) % 2 == 0


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(folder: Path) -> dict[Path, bytes | None]:
    """All that lies in a folder, to see that nothing was touched."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def timeless(records: list[dict]) -> list[dict]:
    """Metrics without those that measure time."""
    return [{k: v for k, v in r.items() if "second" not in k} for r in records]


def assert_same_tensors(one: Path, other: Path) -> None:
    """Weights and optimizer state after step 4, bit for bit."""
    for name in ("model.safetensors", "training/optimizer.safetensors"):
        a, b = (load_file(run / "checkpoints" / "step-000004" / name) for run in (one, other))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_same_run(one: Path, other: Path) -> None:
    """Every line but its times, every weight and every optimizer state, bit for bit."""
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl"):
        assert timeless(lines(one / name)) == timeless(lines(other / name)), name
    assert_same_tensors(one, other)
