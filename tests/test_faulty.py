"""A test counts when it has been seen to fail: each wrong variant breaks the fact that it concerns (see faulty.py)."""

from __future__ import annotations

import inspect

import faulty_answers
import faulty_cache
import faulty_objective
import pytest
from faulty import VARIANTS, Wrong


@pytest.mark.parametrize("case", VARIANTS, ids=[case.variant.__name__ for case in VARIANTS])
def test_a_wrong_variant_is_caught(case: Wrong, monkeypatch):
    """The fact holds for the right code, and fails by an assertion of its own with the wrong variant in its place."""
    case.fact(*case.arguments)
    case.put_in_place(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        case.fact(*case.arguments)


def test_no_variant_is_forgotten():
    """Every function of these files but the helper `of_run` says what it stands for."""
    found = {
        function
        for module in (faulty_objective, faulty_cache, faulty_answers)
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
    }
    assert found == {case.variant for case in VARIANTS} | {faulty_cache.of_run}
