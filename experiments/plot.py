"""Curves of training runs: `python experiments/plot.py runs/a runs/b --out curves.png`.

Runs whose settings differ in nothing but the seed make one line, the mean at each step, with a band from the lowest to
the highest seed. A line is named after the settings in which the runs given differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runs import PATHS, one_sentence, read_records
from train import Config, free

PANELS = (  # column, title
    ("dense", "greedy accuracy, dense"),
    ("sparse", "greedy accuracy, sampler's cache"),
    ("reward_mean", "reward of the sampler"),
    ("sampler_kl", "k3 KL(sampler || dense), nats"),
    ("rejected", "share with some xi < epsilon"),
    ("grad_norm", "gradient norm"),
    ("entropy", "entropy, nats a token"),
    ("xi_p01", "xi, its first percentile over tokens"),
)
LOGARITHMIC = {"grad_norm": 0.01, "xi_p01": 1e-4}  # below this the axis is linear


def read_run(folder: Path) -> dict:
    """A run folder of train.py: {"settings", "metrics", "evaluations"}, none of the last without held-out problems.

    ValueError if it is no such folder, or one without a finished step.
    """
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        Config(**settings)
        metrics, evaluations = (read_records(folder / name) for name in ("metrics.jsonl", "evals.jsonl"))
        if not metrics:
            raise ValueError("no step is finished")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder} is not the folder of a train.py run ({error})") from None
    return {"settings": settings, "metrics": metrics, "evaluations": evaluations}


def series(run: dict, column: str) -> dict[int, float]:
    """{step: value} of a metric, or of greedy accuracy: `dense`, or `sparse` with the run's own cache."""
    if column in ("dense", "sparse"):
        return {
            e["step"]: e["accuracy"] for e in run["evaluations"] if (e["decoding"] == "dense") == (column == "dense")
        }
    return {m["step"]: m[column] for m in run["metrics"] if column in m}


def pyplot():
    """matplotlib's, drawing into files; ValueError if it is not installed (nothing but figures needs it)."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_if_possible(draw: Callable[[Path], None], file: Path) -> None:
    """draw(file), or a line that says what it takes: what was measured does not depend on matplotlib."""
    if find_spec("matplotlib"):
        draw(file)
        print(f"the figure is {file}")
    else:
        print("no figure: pip install -r requirements-dev.txt, and the same command draws it")


def draw(groups: dict[str, list[dict]], file: Path) -> None:
    """All panels into a PNG, a line for each group of runs. Steps that not all runs of a group have show the others."""
    figure, axes = pyplot().subplots(2, 4, figsize=(16, 7), layout="constrained")
    for ax, (column, title) in zip(axes.flat, PANELS, strict=True):
        for color, (label, runs) in enumerate(groups.items()):
            found = [series(run, column) for run in runs]
            steps = sorted(set().union(*found))
            if steps:
                values = [[s[step] for s in found if step in s] for step in steps]
                means = [sum(v) / len(v) for v in values]
                marker = "o" if column in ("dense", "sparse") else None
                ax.plot(steps, means, color=f"C{color}", label=f"{label} ({len(runs)})", marker=marker, markersize=3)
                ax.fill_between(
                    steps, [min(v) for v in values], [max(v) for v in values], color=f"C{color}", alpha=0.12, lw=0
                )
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("step", fontsize=8)
        ax.grid(alpha=0.3)
        if column in LOGARITHMIC:
            ax.set_yscale("symlog", linthresh=LOGARITHMIC[column])
    figure.legend(*axes.flat[2].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot().close(figure)


def draw_map(lines: list[dict], file: Path) -> None:
    """Final dense accuracy over budgets, a panel a learning rate, every seed a dot; then the gain over the KL.

    lines: those of claim.py's summary-map.json.
    """
    lrs = sorted({line["lr"] for line in lines})
    figure, axes = pyplot().subplots(1, len(lrs) + 1, figsize=(5 * len(lrs) + 5, 4), layout="constrained")
    for ax, lr in zip(axes, lrs, strict=False):
        draw_budgets(ax, [line for line in lines if line["lr"] == lr])
        ax.set(title=f"lr {lr:g}", xlabel="budget", ylabel="final greedy accuracy, dense", ylim=(-0.03, 1.03))
    draw_gains(axes[-1], lines)
    axes[-1].set(title="sparse-rl minus naive, same seed", xlabel="k3 KL of the naive arm, nats", ylabel="accuracy")
    for ax in axes:
        ax.legend()
        ax.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    pyplot().close(figure)


def draw_budgets(ax, lines: list[dict]) -> None:
    """Final accuracy over budgets, a curve an arm with a dot a seed; dense, which has no budget, is a level."""
    ax.set_xticks(sorted({line["budget"] for line in lines if line["budget"]}))
    for color, arm in enumerate(dict.fromkeys(line["arm"] for line in lines)):
        cells = [line for line in lines if line["arm"] == arm]
        means = [line["final_dense"]["mean"] for line in cells]
        if cells[0]["budget"] is None:
            ax.axhline(means[0], color=f"C{color}", label=arm)
        else:
            ax.plot([line["budget"] for line in cells], means, color=f"C{color}", label=arm)
            dots = [(line["budget"], value) for line in cells for value in line["final_dense"]["values"]]
            ax.scatter(*zip(*dots, strict=True), color=f"C{color}")


def draw_gains(ax, lines: list[dict]) -> None:
    """What sparse-rl gains on naive over the KL of naive, a dot a seed, a color a learning rate."""
    ax.axhline(0, color="gray", lw=0.8)
    kl = {
        (line["lr"], line["budget"]): line["means_over_steps"]["sampler_kl"]["mean"]
        for line in lines
        if line["arm"] == "naive"
    }
    for color, lr in enumerate(sorted({line["lr"] for line in lines})):
        both = [line for line in lines if line["lr"] == lr and line["arm"] == "sparse-rl" and line["minus_naive"]]
        dots = [(kl[lr, line["budget"]], gain) for line in both for gain in line["minus_naive"]["values"]]
        if dots:
            ax.scatter(*zip(*dots, strict=True), color=f"C{color}", label=f"lr {lr:g}")


def group(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs that differ in the seed alone, under the settings in which the groups differ."""
    settings = [run["settings"] for run in runs]
    hidden = {"seed", "out"}.union(*map(free, settings)) - {*PATHS}
    names = [n for n in settings[0] if n not in hidden and len({s[n] for s in settings}) > 1]
    groups: dict[str, list[dict]] = {}
    for run in runs:
        groups.setdefault(", ".join(f"{n} {run['settings'][n]}" for n in names) or "all", []).append(run)
    return groups


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="experiments/plot.py", description="Curves of training runs; seeds of the same settings make one line."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders of train.py")
    parser.add_argument("--out", type=Path, default=Path("plot.png"), help="the PNG (default: %(default)s)")
    given = parser.parse_args(argv)
    with one_sentence("experiments/plot.py"):
        if not given.out.parent.is_dir():
            raise ValueError(f"--out: the folder {given.out.parent} does not exist")
        draw(group([read_run(folder) for folder in given.runs]), given.out)
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
