"""What a program needs around its method: command line, one-sentence errors, tables, JSONL, run folder, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import operator
import re
import shlex
import signal
import sys
import typing
from dataclasses import field, fields
from pathlib import Path

import torch

# ---------------------------------------------------------------------------------- command lines from dataclasses


LONGEST = 1_000_000  # of a sequence, a cache, a batch: a larger number is a slip, unless an option allows it
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default, text: str, choices=None, numbers=False, **bounds):
    """A config field: its help text, the values it may take, whether it holds numbers, its bounds (see BOUNDS)."""
    return field(default=default, metadata={"help": text, "choices": choices, "numbers": numbers, "bounds": bounds})


def numbers(text: str) -> list[int]:
    """The whole numbers of an option that holds some, with commas between."""
    return [int(word) for word in text.split(",") if word]


def check_options(config) -> None:
    """ValueError, naming the flag, for a value of another type than its field's, unknown, or out of bounds."""
    types = typing.get_type_hints(type(config))
    for f in fields(config):
        value, bounds, choices = getattr(config, f.name), f.metadata["bounds"], f.metadata["choices"]
        if type(value) is int and "below" not in bounds:
            bounds = bounds | {"at_most": bounds.get("at_most", LONGEST)}
        allowed = typing.get_args(types[f.name]) or (types[f.name],)
        if type(value) not in allowed + ((int,) if float in allowed else ()):  # a bool is no int here
            raise ValueError(f"{flag(f.name)} must be {allowed[0].__name__}, not {value!r}")
        if isinstance(value, str) and ("\0" in value or (f.default and not value.strip())):
            raise ValueError(f"{flag(f.name)} must be text without NUL, and not empty, not {value!r}")
        if f.metadata["numbers"] and value != f.default and not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
            raise ValueError(f"{flag(f.name)} must be numbers with commas between, not {value!r}")
        if choices and value not in choices:
            raise ValueError(f"{flag(f.name)} must be one of {', '.join(choices)}, not {value!r}")
        if value is not None and not all(BOUNDS[word](value, limit) for word, limit in bounds.items()):
            words = " and ".join(
                "finite" if limit == math.inf else f"{word.replace('_', ' ')} {limit:,}"
                for word, limit in bounds.items()
            )
            raise ValueError(f"{flag(f.name)} must be {words}, not {value}")


def flag(name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_config(config_class, argv: list[str] | None, prog: str, description: str):
    """Make a command line from a dataclass of `option`s and parse it: (config, names that were given).

    Bad values end the program with exit code 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a run
    parser = Parser(
        prog=prog,
        usage=f"python {prog} [--option value ...] [@file]   (--help explains every option)",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    types = typing.get_type_hints(config_class)
    for f in fields(config_class):
        kind = next(t for t in (*typing.get_args(types[f.name]), types[f.name]) if t is not type(None))
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        text = f"{f.metadata['help']} (default: {'none' if f.default in ('', None) else f.default})"
        if f.metadata["choices"]:
            how["choices"] = f.metadata["choices"]
        parser.add_argument(flag(f.name), help=text.replace("%", "%%"), **how)
    try:
        given = vars(parser.parse_args(with_files(sys.argv[1:] if argv is None else argv)))
        return config_class(**given), given
    except (ValueError, OverflowError) as error:
        parser.error(str(error))


def with_files(arguments: list[str]) -> list[str]:
    """The arguments with each `@file` replaced by those in the file: quotes as in a shell, # starts a comment."""
    expanded = []
    for argument in arguments:
        if not argument.startswith("@"):
            expanded.append(argument)
            continue
        try:
            expanded += shlex.split(Path(argument[1:]).read_text(encoding="utf-8-sig"), comments=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the arguments in {argument[1:]!r} ({error})") from None
    return expanded


def pick_device(name: str, threads: int) -> torch.device:
    """The torch device ("auto": an accelerator if there is one), after setting the CPU threads (0: all)."""
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each backend fails in its own way
        reason = str(error).split(". ")[0].split("\n")[0]
        raise ValueError(f"--device {name} is not usable here ({reason}): try --device cpu") from None
    return torch.device(name)


@contextlib.contextmanager
def one_sentence(prog: str, errors=(ValueError, OSError, MemoryError), advice: str = ""):
    """Turn what a user can mend into one line on stderr and exit code 2; Ctrl-C ends with 130."""
    try:
        with enough_memory():
            yield
    except errors as error:
        print(f"{prog}: error: {' '.join(str(error).split())}{advice}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def enough_memory():
    """Give the many ways in which PyTorch runs out of memory one name, MemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            "out of memory|allocate memory|not enough memory", str(error)
        ):
            raise
        raise MemoryError(
            "out of memory. While sampling, fewer rows at a time help (train.py --rollout-rows, eval.py --rows) or "
            "a smaller --budget or --max-new-tokens; while learning, --gradient-checkpointing or fewer --micro-tokens"
        ) from None


def table(head: list[str], rows: list[list]) -> str:
    """Rows as aligned text; floats with three decimals, nothing for None."""
    cells = [
        head,
        *([f"{c:.3f}" if isinstance(c, float) else str("" if c is None else c) for c in row] for row in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def plus_minus(mean: float, stderr: float | None) -> str:
    """A mean and, if there is one, its standard error."""
    return f"{mean:.3f}" + ("" if stderr is None else f" +- {stderr:.3f}")


def megabytes(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"


def write_whole(path: Path, text: str) -> None:
    """Give a file this content, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def as_lines(records: list[dict]) -> str:
    """Records as JSONL."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append(path: Path, records: list[dict]) -> None:
    """Add records to a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(as_lines(records))


def new_folder(folder: Path) -> None:
    """Make a folder; ValueError if it holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: name another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder} ({error.strerror}): name another one with --out") from None
