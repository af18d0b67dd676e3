"""The README says what is true."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import kvcache
from task import ASSETS

ROOT = ASSETS.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=["a policy", "a reward"])
def test_the_code_for_a_new_policy_or_reward_trains_with_it(block, tmp_path, monkeypatch):
    """It evicts, and moves the weights once; a reward of one's own is that of the records."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").symlink_to(ASSETS)
    names = {"__name__": "readme"}
    (tmp_path / "block.py").write_text(block)
    try:
        exec(compile(block, str(tmp_path / "block.py"), "exec"), names)
    finally:
        kvcache.COMPRESSORS.pop("valueaware", None)
    (run,) = tmp_path.glob("runs/*")
    (metrics,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert metrics["kv_saved"] > 0.3 and metrics["updates_skipped"] == 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (ASSETS / "model", run / "checkpoints/step-000001")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    if reward := names.get("short_and_right"):
        records = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
        assert all(abs(r["reward"] - reward(r["response"], r["answer"])) < 1e-6 for r in records)


def test_every_test_that_the_readme_names_exists():
    """The table of decisions points at tests of this suite."""
    named = set(re.findall(r"`(test_\w+)`", README))
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named and named <= defined


def test_nothing_is_left_to_fill_in():
    """No placeholder in the text, or in the script that the text names."""
    assert "@@" not in README + (ASSETS / "make_bundled.py").read_text(encoding="utf-8")


def test_every_policy_is_in_the_table():
    """A policy that is registered is explained."""
    assert all(f"| `{name}` |" in README for name in kvcache.COMPRESSORS)
