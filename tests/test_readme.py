"""The README says what is true."""

from __future__ import annotations

import re

import kvcache
from eval import ASSETS

ROOT = ASSETS.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_for_a_new_policy_runs(tmp_path, monkeypatch):
    """The block defines a scoring function, registers it and trains one step with it."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    try:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    finally:
        kvcache.COMPRESSORS.pop("keynorm", None)
    assert list(tmp_path.glob("runs/*/checkpoints/step-000001/model.safetensors"))


def test_every_test_that_the_readme_names_exists():
    """The table of decisions points at tests of this suite."""
    named = set(re.findall(r"`(test_\w+)`", README))
    defined = {
        name for file in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named and named <= defined


def test_nothing_is_left_to_fill_in():
    """No placeholder in the text, or in the script that the text names."""
    assert "@@" not in README + (ASSETS / "make_bundled.py").read_text(encoding="utf-8")


def test_every_policy_is_in_the_table():
    """A policy that is registered is explained."""
    assert all(f"| `{name}` |" in README for name in kvcache.COMPRESSORS)
