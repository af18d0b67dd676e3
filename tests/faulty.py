"""How wrong variants are kept: each stands in the place of a right function, and a test must see it.

To add one, write the function as it would go wrong, and above it what it stands for and which test fails then:

    @wrong("grpo.rejection_mask", facts.test_smallest_single_ratio_decides)
    def veto_by_mean(logp_old, logp_sparse, mask, epsilon=1e-4):

Tests and variants meet in the module: a test calls `grpo.rejection_mask`, a variant what it imported by name. A variant
that stands for a constant returns it. faulty_objective.py, faulty_cache.py and faulty_answers.py hold them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import pytest

from kvcache import COMPRESSORS


@dataclass(frozen=True)
class Wrong:
    """A variant, the "module.name" or "module.Class.name" it stands for, and the test that sees it, with arguments."""

    variant: Callable
    target: str
    fact: Callable
    arguments: tuple

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Until `patch` is undone; policies that are registered with the right function get the wrong one as well."""
        module, *path = self.target.split(".")
        right = import_module(module)
        for name in path:
            right = getattr(right, name)
        patch.setattr(self.target, self.variant if callable(right) else self.variant())
        for name, policy in COMPRESSORS.items():
            for field in ("score", "layer_budgets"):
                if getattr(policy, field) is right:
                    patch.setitem(COMPRESSORS, name, replace(policy, **{field: self.variant}))


VARIANTS: list[Wrong] = []


def wrong(target: str, fact: Callable, *arguments) -> Callable[[Callable], Callable]:
    """The function below stands for `target`, and `fact(*arguments)`, a test, must fail on it."""

    def note(variant: Callable) -> Callable:
        VARIANTS.append(Wrong(variant, target, fact, arguments))
        return variant

    return note
