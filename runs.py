"""What a program needs around its method: command line, one-sentence errors, tables, JSONL, run folder, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import math
import operator
import os
import re
import shlex
import shutil
import signal
import sys
import typing
from collections.abc import Iterator
from dataclasses import field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import Decoder, read_json, save_model

# ---------------------------------------------------------------------------------- command lines from dataclasses

LONGEST = 1_000_000  # of a sequence, a cache, a batch: a larger number is a slip, unless an option allows it
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default, text: str, choices=None, **bounds):
    """A config field: its help text, the values it may take, its bounds (see BOUNDS)."""
    return field(default=default, metadata={"help": text, "choices": choices, "bounds": bounds})


def flag(name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + name.replace("_", "-")


def check_options(config) -> None:
    """ValueError, naming the flag, for a value of another type than its field's, unknown, or out of bounds."""
    types = typing.get_type_hints(type(config))
    for f in fields(config):
        value, bounds, choices = getattr(config, f.name), f.metadata["bounds"], f.metadata["choices"]
        if type(value) is int and "below" not in bounds:
            bounds = bounds | {"at_most": bounds.get("at_most", LONGEST)}
        allowed = typing.get_args(types[f.name]) or (types[f.name],)
        wanted = None
        if type(value) not in allowed + ((int,) if float in allowed else ()):  # a bool is no int here
            wanted = allowed[0].__name__
        elif isinstance(value, str) and ("\0" in value or (f.default and not value.strip())):
            wanted = "text without NUL, and not empty"
        elif choices and value not in choices:
            wanted = f"one of {', '.join(choices)}"
        elif value is not None and not all(BOUNDS[word](value, limit) for word, limit in bounds.items()):
            words = [
                "finite" if limit == math.inf else f"{word.replace('_', ' ')} {limit:,}"
                for word, limit in bounds.items()
            ]
            wanted = " and ".join(words)
        if wanted:
            raise ValueError(f"{flag(f.name)} must be {wanted}, not {value!r}")


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, and reads `@file` as a shell would: quotes, and # for comments."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line.removeprefix("\ufeff"), comments=True)
        except ValueError as error:
            raise ValueError(f"{error} in the line {arg_line!r} of an @file") from None

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_config(config_class, argv: list[str] | None, prog: str, description: str):
    """Make a command line from a dataclass of `option`s and parse it: (config, options that were given, by name).

    Bad values end the program with exit code 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a run
    usage = f"python {prog} [--option value ...] [@file]   (--help explains every option)"
    how = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS, "fromfile_prefix_chars": "@"}
    parser = Parser(prog, usage, description, **how)
    types = typing.get_type_hints(config_class)
    for f in fields(config_class):
        kind = next(t for t in (*typing.get_args(types[f.name]), types[f.name]) if t is not type(None))
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        if f.metadata["choices"]:
            how["choices"] = f.metadata["choices"]
        text = f"{f.metadata['help']} (default: {'none' if f.default in ('', None) else f.default})"
        parser.add_argument(flag(f.name), help=text.replace("%", "%%"), **how)
    try:
        given = vars(parser.parse_args(argv))
        return config_class(**given), given
    except (ValueError, OverflowError, RecursionError) as error:  # an @file can name itself
        parser.error(str(error))


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


# ------------------------------------------------------------------------------------------ errors and signals


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
        words = "out of memory|allocate memory|not enough memory"
        if isinstance(error, RuntimeError) and not re.search(words, str(error)):
            raise
        raise MemoryError(
            "out of memory. While sampling, fewer rows at a time help (train.py --rollout-rows, eval.py --rows) or "
            "a smaller --budget or --max-new-tokens; while learning, --gradient-checkpointing or fewer --micro-tokens"
        ) from None


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The numbers of the signals that came (Ctrl-C, SIGTERM), to be read between steps. A second one stops at once."""
    came: list[int] = []

    def note(number: int, frame) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        print(f"\n{signal.Signals(number).name}: stopping after this step; once more stops at once", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    except KeyboardInterrupt:  # the second one: what was going on is given up, and the caller finds both in the list
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------ text and files


def table(head: list[str], lines: list[list]) -> str:
    """Lines of cells as aligned text; floats with three decimals, nothing for None."""
    texts = [[f"{c:.3f}" if isinstance(c, float) else str("" if c is None else c) for c in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    aligned = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in [head, *texts]
    ]
    return "\n".join([aligned[0], "  ".join("-" * w for w in widths), *aligned[1:]])


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


def read_records(path: Path, last_step: int) -> list[dict]:
    """The records of a JSONL file up to a step. Later ones are left out: a resumed run writes them anew.

    So is a last line that a killed run did not finish; ValueError names any other line that is damaged.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # what stands behind the last newline was never finished
    records = []
    for count, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["step"] <= last_step:
                records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path}, line {count} is damaged: the run cannot be resumed with it") from None
    return records


def new_folder(folder: Path) -> None:
    """Make a folder; ValueError if it holds something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: name another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder} ({error.strerror}): name another one with --out") from None


# --------------------------------------------------------------------------------------------------- checkpoints

PATHS = ("model", "data", "eval_data", "reward")  # options that name files: a run knows them by their contents
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("generation_config.json", "chat_template*", "*.jinja"),
)


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints of a run, the newest first."""
    steps = {path.name.removeprefix("step-"): path for path in run.glob("checkpoints/step-*")}
    return sorted(((int(step), path) for step, path in steps.items() if step.isdecimal()), reverse=True)


def save_checkpoint(
    run: Path, identity: dict, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer, tokenizer: Path, keep: int
) -> None:
    """Write checkpoints/step-NNNNNN of a run, complete or not at all; of it and older ones `keep` stay (0: all).

    The folder holds a Hugging Face model, with the tokenizer files of the folder `tokenizer`, and nothing else but the
    subfolder training/: the optimizer's state, the step, and the run's identity.
    """
    final = run / "checkpoints" / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_model(decoder, partial)
        for file in {file for pattern in TOKENIZER_FILES for file in tokenizer.glob(pattern) if file.is_file()}:
            shutil.copyfile(file, partial / file.name)
        (partial / "training").mkdir()
        names = [name for name, _ in decoder.named_parameters()]
        state = optimizer.state_dict()["state"]  # {index: {"step", "exp_avg", "exp_avg_sq"}}
        tensors = {f"{names[i]}.{key}": value for i, entry in state.items() for key, value in entry.items()}
        save_file(tensors, partial / "training" / "optimizer.safetensors")
        write_json(partial / "training" / "state.json", {"step": step} | identity)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    older = [folder for found, folder in checkpoints(run) if found <= step]
    for folder in older[keep:] if keep else []:
        shutil.rmtree(folder, ignore_errors=True)


def load_optimizer(optimizer: torch.optim.Optimizer, decoder: Decoder, folder: Path) -> None:
    """Put back the state that `save_checkpoint` wrote. ValueError if it is not that of this decoder, or not whole."""
    file = folder / "training" / "optimizer.safetensors"
    if not file.exists():
        raise ValueError(f"{file} does not exist")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error})") from None
    except OSError as error:
        raise OSError(f"cannot read {file}: {error}") from None
    shapes = {
        f"{name}.{key}": torch.Size(()) if key == "step" else parameter.shape
        for name, parameter in decoder.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    if tensors and {name: tensor.shape for name, tensor in tensors.items()} != shapes:  # empty: no update was made yet
        raise ValueError(f"{file} is not the state of this optimizer: other names or shapes")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError(f"{file} holds values that are not finite")
    state = {}
    for i, (name, _) in enumerate(decoder.named_parameters() if tensors else ()):
        state[i] = {key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def set_aside(run: Path, step: int) -> Path:
    """Move a damaged checkpoint where it no longer counts as one, and copy the records beside it: damaged-NNNNNN-1."""
    places = (run / f"damaged-{step:06d}-{count}" for count in itertools.count(1))
    place = next(place for place in places if not place.exists())
    place.mkdir()
    for records in run.glob("*.jsonl"):  # the run is about to cut these back
        shutil.copyfile(records, place / records.name)
    return (run / "checkpoints" / f"step-{step:06d}").rename(place / "checkpoint")


def fingerprint(*contents) -> str:
    """A hash of JSON values and of the files that are given as Path, by what they hold and not by their names."""
    whole = hashlib.sha256()
    for content in contents:
        if isinstance(content, Path):
            with content.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
        else:
            whole.update(hashlib.sha256(json.dumps(content).encode()).digest())
    return whole.hexdigest()


def check_inputs(run: Path, now: dict) -> None:
    """ValueError if what a resumed run reads is not what it read when it began."""
    file = run / "inputs.json"
    if not file.exists():
        raise ValueError(
            f"{run} holds no inputs.json, the hashes of what it read: an older version began it, start anew"
        )
    began = read_json(file)
    if changed := [flag(name) for name in PATHS if began.get(name) != now[name]]:
        raise ValueError(f"{', '.join(changed)}: not what {run} began with. give the old one again, or start a new run")


def absolute(settings: dict) -> dict:
    """Settings whose files are found from any working directory."""
    return {name: os.path.abspath(v) if name in PATHS and v else v for name, v in settings.items()}


def resumed(config_class, given: dict, free: tuple[str, ...]):
    """The stored settings of the run given["resume"], with those of `given` that are free; ValueError shows others."""
    file, given = Path(given["resume"]) / "config.json", absolute(given)
    settings = read_json(file)
    if odd := sorted(settings.keys() ^ {f.name for f in fields(config_class)}):
        what = "has no" if odd[0] not in settings else "has an unknown"
        raise ValueError(f"{file} {what} {odd[0]!r}: name a run folder of this version with --resume")
    changed = [name for name in given if name not in free and given[name] != settings[name]]
    if changed:
        shown = ", ".join(f"{flag(name)} {settings[name]} -> {given[name]}" for name in changed)
        raise ValueError(f"--resume cannot change the experiment ({shown}): start a new run for it")
    try:
        return config_class(**(settings | given))
    except ValueError as error:
        raise ValueError(f"{file} cannot be resumed: {error}") from None
