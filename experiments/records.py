"""Results as JSONL, a line a run: how each was made, reading them, and their means."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
from pathlib import Path

from runs import flag
from task import ASSETS

ROOT = ASSETS.parent


def shown(value) -> str:
    """A value as an argument; folders of the repository as seen from its root."""
    return str(value).removeprefix(f"{ROOT}{os.sep}")


def arguments(settings: dict) -> list[str]:
    """Settings as command-line arguments, without what is off."""
    words = {name: [] if value is True else [shown(value)] for name, value in settings.items() if value is not False}
    return [word for name, value in words.items() for word in (flag(name), *value)]


def made_by(command: list[str]) -> dict:
    """What makes a result again: the command, and the commit of this checkout.

    The commit ends in + if files were changed since; it is "unknown" without git.
    """
    ask = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        commit = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {"command": shlex.join(["python", *command]), "commit": commit}


def read_results(file: Path, holds: str = "name") -> dict[str, dict]:
    """{name: result} of a JSONL file, none without one. A last line that a killed process did not finish is cut off.

    ValueError if any other line is damaged, or of another kind: without what each result `holds`.
    """
    *lines, unfinished = file.read_bytes().split(b"\n") if file.exists() else [b""]
    if unfinished:  # or the next result would be written behind it
        os.truncate(file, file.stat().st_size - len(unfinished))
    results = {}
    for number, line in enumerate(lines, 1):
        try:
            result = json.loads(line)
            results[result["name"]] = result
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}, line {number} is no result: delete it, and its run is made again") from None
        if holds not in result:
            raise ValueError(
                f"{file}, line {number} is a result of another kind (without {holds!r}): name another file"
            )
    return results


def check_same(name: str, made: dict, asked: dict, file: Path) -> None:
    """ValueError if a finished result was made with other settings than those asked for."""
    if other := [key for key, value in asked.items() if shown(made.get(key)) != shown(value)]:
        raise ValueError(f"{name} in {file} was made with another {flag(other[0])}: name another --out")


def mean_stderr(values: list[float]) -> dict:
    """Mean, and standard error of a mean over seeds or responses (None for a single one)."""
    stderr = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "stderr": stderr, "values": values}


def shown_mean(value: dict | None) -> str:
    """Mean +- standard error, if there is one, as text."""
    if value is None:
        return ""
    return f"{value['mean']:.3f}" + ("" if value["stderr"] is None else f" +- {value['stderr']:.3f}")
