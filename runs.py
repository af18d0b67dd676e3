"""What a program needs around its method: command line, one-sentence errors, tables, JSONL, run folder, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import operator
import os
import re
import shlex
import shutil
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import ranks
from model import Decoder, read_json, save_model

# ---------------------------------------------------------------------------------- command lines from dataclasses

LONGEST = 1_000_000  # of a sequence, a cache, a batch: a larger number is a slip, unless an option allows it
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def option(default, text: str, kind: type | None = None, choices=None, **bounds):
    """A config field: its help text, its type if the default has another, the values it may take, its BOUNDS."""
    if type(default) is int and "below" not in bounds:
        bounds.setdefault("at_most", LONGEST)
    about = {"help": text, "kind": kind or type(default), "choices": choices, "bounds": bounds}
    return field(default=default, metadata=about)


def flag(name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + name.replace("_", "-")


def check_options(config) -> None:
    """ValueError, naming the flag, for a value of another type than its option's, unknown, or out of bounds."""
    for f in fields(config):
        value, about = getattr(config, f.name), f.metadata
        if value is None and f.default is None:
            continue
        if type(value) is not about["kind"] and (type(value), about["kind"]) != (int, float):  # a bool is no int here
            wanted = about["kind"].__name__
        elif about["choices"] and value not in about["choices"]:
            wanted = f"one of {', '.join(map(str, about['choices']))}"
        elif not all(BOUNDS[word](value, limit) for word, limit in about["bounds"].items()):
            words = (f"{word.replace('_', ' ')} {limit:,}" for word, limit in about["bounds"].items())
            wanted = " and ".join(words).replace("below inf", "finite")
        else:
            continue
        raise ValueError(f"{flag(f.name)} must be {wanted}, not {value!r}")


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, and reads `@file` as a shell would: quotes, and # for comments."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line.removeprefix("\ufeff"), comments=True)
        except ValueError as error:
            raise ValueError(f"{error} in the line {arg_line!r} of an @file") from None

    def error(self, message: str) -> typing.NoReturn:
        ranks.last_words(f"{self.prog}: error: {message}")
        self.exit(2)


def parse_config(config_class, argv: list[str] | None, prog: str, description: str):
    """Make a command line from a dataclass of `option`s and parse it: (config, options that were given, by name).

    Bad values end the program with exit code 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a run
    usage = f"python {prog} [--option value ...] [@file]   (--help explains every option)"
    how = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS, "fromfile_prefix_chars": "@"}
    parser = Parser(prog, usage, description, **how)
    for f in fields(config_class):
        how = {"type": f.metadata["kind"], "choices": f.metadata["choices"]}
        if f.metadata["kind"] is bool:
            how = {"action": argparse.BooleanOptionalAction}
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
        reason = re.split(r"\n|\. ", str(error))[0]
        raise ValueError(f"--device {name} is not usable here ({reason}): try --device cpu") from None
    return torch.device(name)


# ------------------------------------------------------------------------------------------ errors and signals


OUT_OF_MEMORY = (
    "out of memory. While sampling, fewer rows at a time help (train.py --rollout-rows, eval.py --rows), while "
    "learning --gradient-checkpointing or fewer --micro-tokens; in a new run a smaller --budget or --max-new-tokens "
    "(of all these a resumed run in bfloat16 may change --gradient-checkpointing alone)"
)


@contextlib.contextmanager
def one_sentence(prog: str, errors=(ValueError, OSError), advice: str = ""):
    """Turn these errors, and any lack of memory, into one line on stderr and exit code 2; Ctrl-C ends with 130."""
    try:
        yield
    except KeyboardInterrupt:
        ranks.last_words(f"\n{prog}: stopped")
        raise SystemExit(128 + signal.SIGINT) from None
    except (*errors, MemoryError, RuntimeError) as error:  # PyTorch has many words for a lack of memory
        full = re.search("out of memory|allocate memory|not enough memory", str(error)) or type(error) is MemoryError
        lost = "another rank has ended, or cannot be reached: " if ranks.lost(error) else ""
        if not full and not lost and not isinstance(error, errors):
            raise
        said = OUT_OF_MEMORY if full else lost + " ".join(str(error).split())
        ranks.last_words(f"{prog}: error: {said}{advice}")
        raise SystemExit(2) from None


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
    rows = [head, ["-" * width for width in widths], *texts]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def megabytes(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"


def write_whole(path: Path, content: str | dict[str, Tensor]) -> None:
    """Write text, or tensors as safetensors, whole or not at all. Of several ranks, as always, the first does."""
    if ranks.rank():
        return
    partial = path.with_name(path.name + ".partial")
    if isinstance(content, str):
        partial.write_text(content, encoding="utf-8")
    else:
        path.parent.mkdir(exist_ok=True)
        save_file(content, partial)
    partial.replace(path)


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def as_lines(records: list[dict]) -> str:
    """Records as JSONL."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append(path: Path, records: list[dict]) -> None:
    """Add records to a JSONL file."""
    if ranks.rank():
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(as_lines(records))


def read_records(path: Path, last_step: int = sys.maxsize) -> list[dict]:
    """The records of a JSONL file up to a step. Later ones are left out: a resumed run writes them anew.

    So is a last line that a killed run did not finish; ValueError if any other line is damaged.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # behind the last newline: unfinished
    try:
        return [record for record in map(json.loads, lines) if record["step"] <= last_step]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged, some line is no record: the run cannot be resumed with it") from None


def new_folder(folder: Path) -> None:
    """Make a folder; ValueError if it holds something already."""
    if ranks.rank():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} exists already: name another folder with --out")


# --------------------------------------------------------------------------------------------------- checkpoints

PATHS = ("model", "data", "eval_data", "reward")  # options that name files: a run knows them by their contents
OPTIMIZER = "training/optimizer.safetensors"
RECORDED = "recorded/step-{:06d}.safetensors"  # of a step, in the run folder


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints of a run, the newest first."""
    complete = run.glob("checkpoints/step-*[0-9]")
    return sorted(((int(path.name.removeprefix("step-")), path) for path in complete), reverse=True)


def save_checkpoint(
    run: Path, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer, start: Path, keep: int
) -> None:
    """Write checkpoints/step-NNNNNN of a run, complete or not at all; the newest `keep` stay (0: all).

    The folder holds a Hugging Face model, with tokenizer and templates from the folder `start`, and nothing else but
    the optimizer's state in training/.
    """
    weights = {name: ranks.to_first(tensor) for name, tensor in decoder.state_dict().items()}
    entries = [(name, optimizer.state.get(parameter, {})) for name, parameter in decoder.named_parameters()]
    state = {f"{name}.{key}": ranks.to_first(value) for name, entry in entries for key, value in entry.items()}
    final = run / "checkpoints" / f"step-{step:06d}"
    if ranks.rank() == 0:
        write_checkpoint(final, decoder, weights, state, start)
        for _, folder in checkpoints(run)[keep:] if keep else []:
            shutil.rmtree(folder, ignore_errors=True)
    ranks.meet()


def write_checkpoint(final: Path, decoder: Decoder, weights: dict, state: dict, start: Path) -> None:
    """Write the folder `final`, complete or not at all: weights and the optimizer's state, tensors by name."""
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / OPTIMIZER).parent.mkdir(parents=True)
        for file in start.iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(file, partial / file.name)
        save_model(decoder, partial, weights)  # with a config.json of its own, and no index of shards
        save_file(state, partial / OPTIMIZER)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def load_optimizer(optimizer: torch.optim.Optimizer, decoder: Decoder, folder: Path) -> None:
    """Put back the state that `save_checkpoint` wrote; ValueError, naming the file, if it cannot be read."""
    try:
        tensors = load_file(folder / OPTIMIZER)
        named = decoder.named_parameters() if tensors else []  # none: no update was made yet
        state = [
            {"step": tensors[f"{name}.step"]}
            | {key: ranks.part_of(tensors[f"{name}.{key}"], parameter) for key in ("exp_avg", "exp_avg_sq")}
            for name, parameter in named
        ]
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"cannot read {folder / OPTIMIZER}: {error}") from None
    optimizer.load_state_dict(optimizer.state_dict() | {"state": dict(enumerate(state))})


def fingerprint(*contents) -> str:
    """A hash of JSON values and of the files that are given as Path, by what they hold and not by their names."""
    whole = hashlib.sha256()
    for content in contents:
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(json.dumps(content).encode()) as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def check_inputs(run: Path, now: dict) -> None:
    """ValueError if what a resumed run reads is not what it read when it began."""
    began = read_json(run / "inputs.json")
    if changed := [flag(name) for name in PATHS if began.get(name) != now[name]]:
        raise ValueError(f"{', '.join(changed)}: not what {run} began with. Name the old one, or start a new run")


def absolute(settings: dict) -> dict:
    """Settings whose files are found from any working directory."""
    return {name: os.path.abspath(v) if name in PATHS and v else v for name, v in settings.items()}


def resumed(config_class, given: dict, free: Callable[[dict], set[str]]):
    """The stored settings of the run given["resume"] with those of `given` that may change; ValueError shows others."""
    file, given = Path(given["resume"]) / "config.json", absolute(given)
    settings = read_json(file)
    if odd := sorted(settings.keys() ^ {f.name for f in fields(config_class)}):
        raise ValueError(f"{file} has other settings than this version ({odd[0]}): name another run with --resume")
    if changed := [name for name in given if name not in free(settings) and given[name] != settings[name]]:
        shown = ", ".join(f"{flag(name)} {settings[name]} -> {given[name]}" for name in changed)
        raise ValueError(f"--resume cannot change the experiment ({shown}): start a new run for it")
    return config_class(**(settings | given))
