"""How time and memory grow with length, rows and layers: the dense cache against two budgets, as one figure.

    python benchmarks/scaling.py                                    # the bundled model
    python benchmarks/scaling.py --model FOLDER --lengths 256,512,1024,2048,4096 --layers 2,4,8,16,30 --length 512

A point is a rollout whose prompt ends just before its length: the seconds of a decode step, in the mean over --steps of
them, and the bytes of the cache. The buffer is as large, so that a compressed cache is cut once. The points of an axis
take turns; medians. Layers have random weights of the model's shape. At last one rollout from a short prompt to
the longest, and the seconds until each length. Results are lines of --out, those of other models stay; the figure of
all is beside it.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench

from experiments.commas import numbers
from experiments.plot import pyplot
from experiments.records import arguments, made_by, read_results
from model import Decoder, ModelConfig, load_model
from rollout import cache_for
from runs import append, check_options, one_sentence, option, parse_config, pick_device, table
from task import ASSETS

PROGRAM = "benchmarks/scaling.py"
PANELS = (("seconds", "ms a decode step", 1e3), ("bytes", "MiB of the cache", 2**-20))


@dataclass(frozen=True)
class Settings:
    """What grows, and where the others stand meanwhile."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    label: str = option("", "the model's name in the results; else its folder's")
    compressor: str = option("snapkv", "policy of the compressed caches")
    budgets: str = option("128,512", "their budgets, with commas between")
    steps: int = option(64, "decode steps of a point, and the buffer", at_least=2)
    lengths: str = option("256,512,1024,2048,4096,8192,16384", "tokens of a sequence, with commas between")
    rows: str = option("1,2,4,8,16,32,64,128", "rows sampled at a time, with commas between")
    layers: str = option("1,2,4,8,16", "layers, with commas between")
    length: int = option(1024, "tokens of a sequence where rows or layers grow")
    row: int = option(8, "rows where length or layers grow", at_least=1)
    repeats: int = option(3, "measurements of each point", at_least=1)
    out: str = option("runs/scaling.jsonl", "a line a point; the figure is NAME.png")
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option("float32", "of weights and cache", choices=("float32", "bfloat16"))

    def __post_init__(self):
        check_options(self)
        if min(*numbers(self, "lengths"), self.length) <= self.steps + 2:
            raise ValueError(f"--lengths and --length must be above the {self.steps} + 2 of --steps")
        for cache in self.caches.values():
            bench.Settings(**cache, rows=self.rows)
        if 0 in numbers(self, "layers"):
            raise ValueError(f"--layers {self.layers}: at least 1 each")
        if Path(self.out).suffix != ".jsonl":
            raise ValueError(f"--out must be a file NAME.jsonl, not {self.out!r}")

    @property
    def caches(self) -> dict[str, dict]:
        """{name: settings} of each curve."""
        some = {
            f"{self.compressor}-{b}": {"compressors": self.compressor, "budget": b} for b in numbers(self, "budgets")
        }
        return {name: how | {"buffer": self.steps} for name, how in {"full": {"compressors": "full"}, **some}.items()}


def shallow(model: Decoder, layers: int) -> Decoder:
    """Random weights of the same shape with so many layers."""
    weight = model.embed_tokens.weight
    config = ModelConfig.from_dict(model.config.raw | {"num_hidden_layers": layers, "layer_types": None})
    return Decoder(config).to(device=weight.device, dtype=weight.dtype)


def axes(config: Settings, model: Decoder) -> dict[str, dict[int, tuple[Decoder, int, int]]]:
    """{axis: {where on it: (model, rows, length)}}."""
    return {
        "length": {length: (model, config.row, length) for length in numbers(config, "lengths")},
        "rows": {rows: (model, rows, config.length) for rows in numbers(config, "rows")},
        "layers": {n: (shallow(model, n), config.row, config.length) for n in numbers(config, "layers")},
    }


def step_seconds(cache: dict, prompt: int, model: Decoder, rows: int, length: int) -> torch.Tensor:
    """The seconds of each decode step of a rollout from a prompt to this length, (steps,)."""
    return bench.steps(
        model, bench.Settings(**cache, prompt=prompt, lengths=str(length)), rows, length, cache["compressors"]
    )


def measure(config: Settings, model: Decoder) -> list[dict]:
    """Every point: {"axis", "at", "cache", "seconds", "bytes"}; on the axis `whole` the seconds of a rollout."""
    found, lengths = [], numbers(config, "lengths")
    step_seconds(config.caches["full"], 1, model, config.row, min(lengths))  # the first of a process is slower
    for axis, places in axes(config, model).items():
        cases = [(at, name) for at in places for name in config.caches]
        spent = {case: [] for case in cases}
        for at, name in cases * config.repeats:
            prompt = places[at][2] - config.steps - 2  # the last tokens are sampled, not fed
            spent[at, name].append(float(step_seconds(config.caches[name], prompt, *places[at]).mean()))
        for at, name in cases:
            sized, rows, length = places[at]
            how = {key: config.caches[name].get(key, 128) for key in ("budget", "buffer")}
            how |= {"compressor": config.caches[name]["compressors"], "dtype": getattr(torch, config.dtype)}
            size = sum(cache_for(sized.config, rows, length, device="meta", **how).nbytes.values())
            found.append(
                {"axis": axis, "at": at, "cache": name, "seconds": statistics.median(spent[at, name]), "bytes": size}
            )
    for name, cache in config.caches.items():
        until = step_seconds(cache, config.steps, model, config.row, max(lengths)).cumsum(0)  # (steps,)
        at = {length: float(until[length - config.steps - 3]) for length in lengths}
        found += [{"axis": "whole", "at": n, "cache": name, "seconds": s, "bytes": None} for n, s in at.items()]
    return found


def draw(lines: list[dict], file: Path) -> None:
    """Both of PANELS over each axis, a color a cache, a line style a model."""
    figure, grid = pyplot().subplots(2, 3, figsize=(14, 7), layout="constrained")
    curves: dict[tuple, list[dict]] = {}
    for line in lines:
        curves.setdefault((line["model"], line["cache"]), []).append(line)
    styles = {model: ("-", "--", ":")[i % 3] for i, model in enumerate(dict.fromkeys(model for model, _ in curves))}
    colors = {cache: f"C{i}" for i, cache in enumerate(dict.fromkeys(cache for _, cache in curves))}
    for column, axis in zip(grid.T, ("length", "rows", "layers"), strict=True):
        for ax, (name, title, unit) in zip(column, PANELS, strict=True):
            for (model, cache), of in curves.items():
                points = [(line["at"], line[name] * unit) for line in of if line["axis"] == axis]
                how = {"color": colors[cache], "ls": styles[model], "marker": "o", "ms": 3}
                ax.plot(*zip(*points, strict=True), label=f"{model}, {cache}", **how)
            ax.set(xscale="log", yscale="log", xlabel=axis, title=title)
            at = sorted({line["at"] for line in lines if line["axis"] == axis})
            ax.set_xticks(at, [f"{n:,}" for n in at])
            ax.minorticks_off()
            ax.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(file, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(Settings, argv, PROGRAM, "Time and memory over length, rows and layers.")
    file, name = Path(config.out), config.label or Path(config.model).name
    with one_sentence(PROGRAM):
        pyplot()  # better missing now than after the measurements
        model = load_model(config.model, getattr(torch, config.dtype), pick_device(config.device, config.threads))
        if not any(line["model"] == name for line in read_results(file, "axis").values()):
            file.parent.mkdir(parents=True, exist_ok=True)
            how = {"model": name, "dtype": config.dtype, **made_by([PROGRAM, *arguments(given)])}
            points = measure(config, model)
            append(file, [{"name": f"{name} {p['axis']} {p['at']} {p['cache']}", **how, **p} for p in points])
        lines = list(read_results(file).values())
        rows = {}
        for line in lines:
            rows.setdefault((line["model"], line["axis"], line["at"]), {})[line["cache"]] = line["seconds"] * 1e3
        caches = list(config.caches)
        print(
            table(
                ["model", "axis", "at", *(f"{c}, ms" for c in caches)],
                [[*map(str, at), *(x.get(c) for c in caches)] for at, x in rows.items()],
            )
        )
        draw(lines, file.with_suffix(".png"))
        print(f"results are in {file}, the figure is {file.with_suffix('.png')}")


if __name__ == "__main__":
    main()
