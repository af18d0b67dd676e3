"""A real pretrained model under a compressed cache: dense GRPO, sparse rollouts taken as they are, and Sparse-RL.

    python experiments/real.py --model FOLDER                   every arm, seed by seed
    python experiments/real.py --model FOLDER --arms dense --seeds 7

FOLDER is an instruct model of a size that the machine bears (SmolLM2-135M-Instruct here). One command does the chain:
word problems (words.py), a warm start of the model on worked solutions of them (warm_start.py), the evaluation of that
start, and then for each seed and arm a run of train.py and the evaluation of its end. Every part that lies finished in
--out is taken as it is, a run that was stopped or killed goes on from its newest checkpoint, and a finished run is one
line of --results: arm, command, seed, commit, all metrics, and the evaluations before and after.

Evaluated is on the held-out problems: greedily and at temperature 1, dense and under the setting's cache, whatever the
arm, so that what is compared is the model.

The constants below were fixed, and committed, before any run that is reported; they were chosen with seed 1001
(experiments/results/real-pilots.jsonl).
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import warm_start
import words
from plot import draw, draw_if_possible, read_run

import eval as evaluation
import train
from experiments.commas import numbers
from experiments.records import arguments, made_by, mean_stderr, read_results, shown_mean
from runs import append, check_options, checkpoints, one_sentence, option, parse_config, table
from task import ASSETS

# ------------------------------------------------------------------------------------- fixed before the runs

WORDS = {"least": 2, "most": 3, "largest": 5, "habit": 0.5, "warm": 800, "train": 2000, "heldout": 200, "seed": 0}
WARM = {"updates": 100, "batch": 8, "lr": 2e-4, "seed": 0}  # one pass, so that nothing is learnt by heart
TRAINING = {  # of every run
    **{"prompts": 8, "group_size": 6, "max_new_tokens": 80, "steps": 20, "lr": 2e-5, "micro_tokens": 4096},
    **{"dtype": "bfloat16", "save_every": 5, "keep": 1, "sample_every": 0, "eval_data": ""},
}
CACHES = {  # setting: its cache
    "headline": {"compressor": "snapkv", "budget": 56, "buffer": 16, "window": 8},
    "harsher": {"compressor": "snapkv", "budget": 48, "buffer": 16, "window": 8},
}
ARMS = {  # what an arm changes
    "dense": {"compressor": "full", "correction": "none"},
    "naive": {"correction": "none"},
    "sparse-rl": {"correction": "sparse-rl"},
    "replay": {"correction": "none", "learner": "replay"},
}
SEEDS = "1,2,3"
WHEN, MEANS = ("before", "after"), ("rejected", "kv_saved", "sampler_kl")
EVALUATIONS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 1}}


def collapsed(line: dict) -> bool:
    """A run collapsed if its greedy dense accuracy ends over two standard errors below that of the start."""
    before, after = (line[when]["greedy"]["dense"] for when in ("before", "after"))
    return after["accuracy"] < before["accuracy"] - 2 * (before["stderr"] or 0)


@dataclass(frozen=True)
class Settings:
    """Which runs, of which model, and where they go."""

    model: str = option("", "Hugging Face folder of a pretrained instruct model")
    arms: str = option("dense,naive,sparse-rl", f"with commas between: {', '.join(ARMS)}")
    setting: str = option("headline", "the cache of the sparse arms and of the evaluations", choices=CACHES)
    seeds: str = option(SEEDS, "with commas between")
    threads: int = option(1, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    out: str = option("runs/real", "folder of problems, models and run folders")
    results: str = option(str(ASSETS.parent / "experiments" / "results" / "real.jsonl"), "a line for each finished run")

    def __post_init__(self):
        check_options(self)
        if unknown := sorted(set(self.arms.split(",")) - set(ARMS)):
            raise ValueError(f"--arms {unknown[0]!r} is none of {', '.join(ARMS)}")
        numbers(self, "seeds")

    @property
    def machine(self) -> dict:
        """How the machine is used."""
        return {"threads": self.threads, "device": self.device}


def warm_model(config: Settings) -> Path:
    """The folder of the warm-started model, made if it is not there."""
    out = Path(config.out)
    if not (out / "warm" / "model").exists() and not (Path(config.model) / "config.json").exists():
        raise ValueError(f"--model {config.model!r} is no Hugging Face folder: it has no config.json")
    if not (out / "words" / "words-warm.jsonl").exists():
        words.main(arguments(WORDS | {"out": out / "words"}))
    if not (out / "warm" / "model").exists():
        files = {"model": config.model, "data": out / "words" / "words-warm.jsonl", "out": out / "warm"}
        warm_start.main(arguments(WARM | files | {"dtype": TRAINING["dtype"]} | config.machine))
    return out / "warm" / "model"


def evaluated(config: Settings, model: Path, name: str) -> dict[str, dict]:
    """{how: {decoding: its summary}} on the held-out problems, measured if it does not lie in --out already."""
    how = CACHES[config.setting] | {"max_new_tokens": TRAINING["max_new_tokens"], "dtype": TRAINING["dtype"]}
    found = {}
    for kind, settings in EVALUATIONS.items():
        folder = Path(config.out) / "evaluations" / f"{name}-{how['compressor']}-{how['budget']}-{kind}"
        if not (folder / "results.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            files = {"model": model, "data": Path(config.out) / "words" / "words-heldout.jsonl", "out": folder}
            evaluation.main(arguments(how | settings | files | config.machine))
        (found[kind],) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"].values()
    return found


def trained(config: Settings, model: Path, arm: str, seed: int) -> tuple[Path, list[str]]:
    """Train, or go on with, one run: its folder, and the command."""
    folder = Path(config.out) / "runs" / f"{config.setting}-{arm}-seed{seed}"
    files = {"model": model, "data": Path(config.out) / "words" / "words-train.jsonl"}
    command = arguments(TRAINING | CACHES[config.setting] | ARMS[arm] | files | {"seed": seed} | config.machine)
    if checkpoints(folder):
        train.main([*command, "--resume", str(folder)])  # refuses other settings than those that it began with
    else:  # nothing to go on from
        shutil.rmtree(folder, ignore_errors=True)
        train.main([*command, "--out", str(folder)])
    return folder, command


def finish(config: Settings, model: Path, arm: str, seed: int) -> dict:
    """One run from where it stands to its line in --results."""
    folder, command = trained(config, model, arm, seed)
    run = read_run(folder)
    seconds = sum(m[f"{part}_seconds"] for m in run["metrics"] for part in ("rollout", "scoring", "update"))
    line = {
        "name": folder.name,
        "arm": arm,
        "setting": config.setting,
        "seed": seed,
        **made_by(["train.py", *command]),
        "minutes": seconds / 60,
        "before": evaluated(config, model, "start"),
        "after": evaluated(config, checkpoints(folder)[0][1], folder.name),
        "settings": run["settings"],
        "metrics": run["metrics"],
    }
    append(Path(config.results), [line])
    return line


def finished(config: Settings) -> dict[tuple[str, int], dict]:
    """{(arm, seed): line} of this setting in --results, arm by arm."""
    lines = [line for line in read_results(Path(config.results)).values() if line["setting"] == config.setting]
    lines.sort(key=lambda line: (list(ARMS).index(line["arm"]), line["seed"]))
    return {(line["arm"], line["seed"]): line for line in lines}


def report(lines: list[dict]) -> str:
    """A table of runs: accuracy before and after under each decoding, and means over the steps."""
    kinds = [(kind, mode, when) for kind, modes in lines[0]["before"].items() for mode in modes for when in WHEN]
    rows = []
    for line in lines:
        cells = [line[when][kind][mode] for kind, mode, when in kinds]
        means = [statistics.fmean(m[name] for m in line["metrics"]) for name in MEANS]
        accuracies = [shown_mean({"mean": cell["accuracy"], "stderr": cell["stderr"]}) for cell in cells]
        ends = ["yes" if collapsed(line) else "no", round(line["minutes"])]
        rows.append([line["arm"], line["seed"], *accuracies, *means, *ends])
    return table(["arm", "seed", *map(" ".join, kinds), *MEANS, "collapsed", "minutes"], rows)


def summary(lines: list[dict]) -> str:
    """A table of the arms after training: means over seeds, +- standard error, and their differences seed by seed."""
    after: dict[str, dict[int, dict]] = {}  # {arm: {seed: {(kind, mode): accuracy}}}
    for line in lines:
        cells = {
            (kind, mode): cell["accuracy"] for kind, found in line["after"].items() for mode, cell in found.items()
        }
        after.setdefault(line["arm"], {})[line["seed"]] = cells
    columns, rows = list(cells), []

    def add(name: str, found: list[dict]) -> None:
        rows.append([name, len(found), *(shown_mean(mean_stderr([x[column] for x in found])) for column in columns)])

    for arm, seeds in after.items():
        add(arm, list(seeds.values()))
    for other, one in combinations(after, 2):
        pairs = [(after[one][seed], after[other][seed]) for seed in after[one] if seed in after[other]]
        if pairs:
            add(f"{one} - {other}", [{column: a[column] - b[column] for column in columns} for a, b in pairs])
    return table(["after training", "seeds", *map(" ".join, columns)], rows)


def curves(line: dict) -> dict:
    """A finished run as plot.py takes it: greedy accuracy before the first step and after the last."""
    at = {"before": 0, "after": line["metrics"][-1]["step"]}
    cells = [(when, *cell) for when in WHEN for cell in line[when]["greedy"].items()]
    found = [{"step": at[when], "decoding": mode, **cell} for when, mode, cell in cells]
    return {"settings": line["settings"], "metrics": line["metrics"], "evaluations": found}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "experiments/real.py", "A pretrained model under a compressed cache.")
    with one_sentence("experiments/real.py"):
        model = warm_model(config)
        for seed in numbers(config, "seeds"):
            for arm in config.arms.split(","):
                if (arm, seed) not in finished(config):
                    finish(config, model, arm, seed)
                    print(report(list(finished(config).values())), flush=True)
        lines = list(finished(config).values())
        print(report(lines), summary(lines), sep="\n\n")
        arms = {arm: [curves(line) for line in lines if line["arm"] == arm] for arm in ARMS}
        groups = {arm: runs for arm, runs in arms.items() if runs}
        draw_if_possible(partial(draw, groups), Path(config.out) / f"{config.setting}.png")


if __name__ == "__main__":
    main()
