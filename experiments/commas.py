"""Options of the scripts here and in benchmarks/ that hold several numbers."""

from __future__ import annotations

import re

from runs import flag


def numbers(config, name: str) -> list[int]:
    """The whole numbers, with commas between, of a config's option of this name; ValueError names the flag."""
    text = getattr(config, name)
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise ValueError(f"{flag(name)} must be numbers with commas between, not {text!r}")
    return [int(word) for word in text.split(",")]
