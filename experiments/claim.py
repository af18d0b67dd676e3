"""The paper's claim at laptop size: sparse rollouts break GRPO, and Sparse-RL's corrections mend that.

    python experiments/claim.py            dense, naive and sparse-rl, one seed
    python experiments/claim.py --full     six arms, five seeds
    python experiments/claim.py --map      naive, sparse-rl and dense over budgets and learning rates, two seeds
    python experiments/claim.py --ideas    changes to sparse-rl, and a smaller learning rate for comparison, five seeds
    python experiments/claim.py --learners dense, naive, sparse-rl and the replay learner, two learning rates, ten seeds
    python experiments/claim.py --serve    the models of the others, decoded dense and with compressed caches

Every run is `python train.py ... --threads 1` (or eval.py) in a process of its own, --workers at a time. Started again,
it goes on where it stopped. In --out: NAME.json (settings, every metric, every evaluation of a run), runs/NAME (its
folder), summary-*.json and *.png. What is finished is summarised, and how much of the plan that is.

The constants below were fixed, and committed, before any run that is reported; they were chosen with seed 1001.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from plot import draw, pyplot, read_run, series

from experiments.commas import numbers
from runs import check_options, checkpoints, flag, one_sentence, option, parse_config, table, write_json
from task import ASSETS

ROOT = ASSETS.parent

# ------------------------------------------------------------------------------------- fixed before the runs

BASE = {  # of every run
    "model": str(ASSETS / "model"),
    "data": str(ASSETS / "short-train.jsonl"),
    "max_new_tokens": 260,
    "compressor": "snapkv",
    "buffer": 16,
    "window": 8,
    "prompts": 8,
    "group_size": 8,
    "steps": 12,
    "eval_every": 6,
    "eval_limit": 100,
    "save_every": 6,
    "keep": 1,
    "sample_every": 0,
    "threads": 1,
}
BUDGET, LR = 72, 5e-4  # the headline
CONTROL_LR = 1.7e-4  # fixed after step-by-survivors had four seeds: LR times the share that it accepted, one third
ARMS = {
    "dense": {"compressor": "full", "correction": "none"},
    "naive": {"correction": "none"},
    "sparse-rl": {"correction": "sparse-rl"},
    "reject": {"correction": "reject"},
    "reweight": {"correction": "reweight"},
    "released": {"correction": "released"},
}
IDEAS = {  # sparse-rl with one change each (a third, and its end: see the README)
    "step-by-survivors": {"correction": "sparse-rl", "scale_step": True},
    "xi-cap-1.5": {"correction": "sparse-rl", "xi_cap": 1.5},
}
REPLAY = {"replay": {"correction": "sparse-rl", "learner": "replay"}}  # rejects nothing while its xi is 1
THREE = ("dense", "naive", "sparse-rl")
SEEDS = (1, 2, 3, 4, 5)
LEARNERS = (*THREE, *REPLAY)
LEARNER_SEEDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)  # at LR and at CONTROL_LR
MAP_BUDGETS, MAP_LRS, MAP_SEEDS = (64, 72, 84), (5e-4, 1e-3, 2.5e-4), (1, 2)
SERVE_POLICIES, SERVE_BUDGETS, SERVE_LIMIT = "snapkv,rkv,streaming", (64, 72, 84), 100


def plus_minus(mean: float, stderr: float | None) -> str:
    """A mean and, if there is one, its standard error."""
    return f"{mean:.3f}" + ("" if stderr is None else f" +- {stderr:.3f}")


def collapsed(run: dict) -> bool:
    """A run collapsed if its final dense greedy accuracy is over two standard errors below the starting model's."""
    start, *_, final = (e for e in run["evaluations"] if e["decoding"] == "dense")
    return final["accuracy"] < start["accuracy"] - 2 * (start["stderr"] or 0)


# ------------------------------------------------------------------------------------------------- the plan


PARTS = ("full", "map", "ideas", "learners", "serve")


@dataclass(frozen=True)
class Settings:
    """Which part of the experiment runs, and where it goes."""

    full: bool = option(False, f"the headline: all of {', '.join(ARMS)}, five seeds")
    map: bool = option(False, "budgets x learning rates, two seeds")
    ideas: bool = option(False, f"sparse-rl with one change each ({', '.join(IDEAS)}) and smaller steps, five seeds")
    learners: bool = option(False, f"{', '.join(LEARNERS)} at two learning rates, ten seeds")
    serve: bool = option(False, "evaluate the final models of the others, dense and compressed")
    seeds: str = option("", "other seeds, with commas between")
    workers: int = option(0, "processes at a time, one thread each; 0 takes the number of cores", at_least=0)
    out: str = option("runs/claim", "folder of runs and results")

    def __post_init__(self):
        check_options(self)
        if sum(getattr(self, part) for part in PARTS) > 1:
            raise ValueError(f"{', '.join(map(flag, PARTS))} are separate parts: give one")
        self.seeds_or(())

    @property
    def part(self) -> str:
        """The name of the part, and of its results."""
        return next((name for name in PARTS if getattr(self, name)), "default")

    def seeds_or(self, fixed: tuple[int, ...]) -> list[int]:
        """The seeds given, else the fixed ones."""
        return numbers(self, "seeds") if self.seeds else list(fixed)


def run_settings(arm: str, seed: int, budget: int, lr: float) -> dict:
    """The train.py settings of a run; dense has no budget."""
    settings = BASE | (ARMS | IDEAS | REPLAY)[arm] | {"lr": lr, "seed": seed}
    return settings if settings["compressor"] == "full" else settings | {"budget": budget}


def run_name(arm: str, settings: dict) -> str:
    """One name for one experiment, so that the parts share runs."""
    cache = f"-{settings['compressor']}-{settings['budget']}" if "budget" in settings else ""
    return f"{arm}{cache}-lr{settings['lr']:g}-seed{settings['seed']}"


def labelled(arm: str, lr: float) -> str:
    """An arm as it is called beside others of its budget."""
    return arm if lr == LR else f"{arm}, lr {lr:g}"


def planned(config: Settings) -> dict[str, tuple[str, dict]]:
    """{name: (arm, settings)}, seed by seed, so that what is finished can be compared at any time."""
    three, headline = ([(arm, BUDGET, LR) for arm in arms] for arms in (THREE, ARMS))
    ideas = [(arm, BUDGET, LR) for arm in IDEAS]
    control = [(arm, BUDGET, CONTROL_LR) for arm in THREE]
    replay = [("replay", BUDGET, lr) for lr in (LR, CONTROL_LR)]
    cells, fixed = {
        "default": (three, SEEDS[:1]),
        "full": (headline, SEEDS),
        "map": ([(arm, budget, lr) for lr in MAP_LRS for budget in MAP_BUDGETS for arm in THREE], MAP_SEEDS),
        "ideas": (three + ideas + control, SEEDS),
        "learners": (three + control + replay, LEARNER_SEEDS),
        "serve": (headline + ideas + control + replay, SEEDS),
    }[config.part]
    seeds = config.seeds_or(fixed)
    runs = [(arm, run_settings(arm, seed, budget, lr)) for seed in seeds for arm, budget, lr in cells]
    return {run_name(arm, settings): (arm, settings) for arm, settings in runs}


# -------------------------------------------------------------------------------------------------- running


def commit() -> str:
    """The commit of this checkout, with a + if files were changed since; "unknown" without git."""
    try:
        ask = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ask[0] + ("+" if ask[1] else "")


def arguments(settings: dict) -> list[str]:
    """Settings as command-line arguments; folders of the repository as seen from its root."""
    words = {name: [] if value is True else [shown(value)] for name, value in settings.items()}
    return [word for name, value in words.items() for word in (flag(name), *value)]


def shown(value) -> str:
    """A value as an argument."""
    return str(value).removeprefix(f"{ROOT}{os.sep}")


CHILDREN: set[subprocess.Popen] = set()  # what runs now


def call(command: list[str], log: Path) -> None:
    """Run a script of this repository; RuntimeError that names the log if it fails."""
    how = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.STDOUT}
    how["start_new_session"] = True  # Ctrl-C in the terminal is for this process, which tells the others once to end
    with log.open("a", encoding="utf-8") as file, subprocess.Popen([sys.executable, *command], stdout=file, **how) as p:
        CHILDREN.add(p)
        code = p.wait()
        CHILDREN.discard(p)
    if code:
        raise RuntimeError(f"{command[0]} ended with code {code}, see {log}")


def load_result(file: Path, settings: dict) -> dict | None:
    """A finished run's result; None if there is none. ValueError if it was made with other settings."""
    if not file.exists():
        return None
    result = json.loads(file.read_text(encoding="utf-8"))
    other = [name for name, value in settings.items() if shown(result["settings"].get(name)) != shown(value)]
    if other:
        raise ValueError(f"{file} was made with another {flag(other[0])}: move it away, or name another --out")
    return result


def train_run(name: str, arm: str, settings: dict, out: Path) -> None:
    """Train, or go on with, one run and write its result."""
    folder, log = out / "runs" / name, out / "runs" / f"{name}.log"
    command = ["train.py", *arguments(settings)]
    if checkpoints(folder):
        call(["train.py", "--resume", str(folder)], log)
    else:  # nothing to go on from
        shutil.rmtree(folder, ignore_errors=True)
        call([*command, "--out", str(folder)], log)
    run = read_run(folder)
    seconds = sum(m[f"{part}_seconds"] for m in run["metrics"] for part in ("rollout", "scoring", "update"))
    run["settings"] |= {name: shown(run["settings"][name]) for name in ("model", "data", "eval_data")} | {"out": ""}
    write_json(
        out / f"{name}.json",
        {
            "name": name,
            "arm": arm,
            "command": shlex.join(["python", *command]),
            "commit": commit(),
            "seconds": seconds + sum(e["seconds"] for e in run["evaluations"]),
            **run,
        },
    )


def serve_run(name: str, model: Path, budget: int, out: Path) -> None:
    """Decode the held-out problems greedily with one model: dense, and with each policy at this budget."""
    names = ("max_new_tokens", "buffer", "window", "threads")
    settings = {"model": model, "data": BASE["data"].replace("-train.", "-heldout."), "limit": SERVE_LIMIT}
    settings |= {"compressor": SERVE_POLICIES, "budget": budget} | {key: BASE[key] for key in names}
    command, folder = ["eval.py", *arguments(settings)], out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    call([*command, "--out", str(folder)], out / "runs" / f"{name}.log")
    (results,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"].values()
    write_json(
        out / f"{name}.json",
        {
            "name": name,
            "command": shlex.join(["python", *command]),
            "commit": commit(),
            "budget": budget,
            "results": results,
        },
    )


def in_parallel(jobs: dict[str, Callable[[], None]], workers: int) -> list[str]:
    """Run the jobs, `workers` at a time, in their order; a line for each on stdout. Returns what went wrong."""
    wrong = []
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(job): name for name, job in jobs.items()}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                error = future.exception()
                if error and not isinstance(error, RuntimeError):
                    raise error
                wrong += [f"{futures[future]}: {error}"] if error else []
                print(f"{done} of {len(futures)}: {futures[future]}{f' FAILED: {error}' if error else ''}", flush=True)
        except BaseException:  # Ctrl-C among them: train.py saves what it has when it is told to end
            pool.shutdown(wait=False, cancel_futures=True)
            for child in tuple(CHILDREN):
                child.terminate()
            raise
    return wrong


# ------------------------------------------------------------------------------------------------ summaries


def mean_stderr(values: list[float]) -> dict:
    """Mean, and standard error over seeds (None for a single one)."""
    stderr = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "stderr": stderr, "values": values}


def summarize(runs: list[dict]) -> dict:
    """What the runs of one arm at one setting came to, every seed in the order of `seeds`."""
    last = [{name: list(series(run, name).values())[-1:] for name in ("dense", "sparse")} for run in runs]
    means = {
        name: mean_stderr([statistics.fmean(series(run, name).values()) for run in runs])
        for name in ("sampler_kl", "rejected", "kv_saved", "reward_mean", "grad_norm", "entropy", "response_length")
    }
    return {
        "seeds": [run["settings"]["seed"] for run in runs],
        "start": series(runs[0], "dense")[0],
        "final_dense": mean_stderr([values["dense"][0] for values in last]),
        "final_sparse": mean_stderr([v for values in last for v in values["sparse"]]) if last[0]["sparse"] else None,
        "collapsed": [collapsed(run) for run in runs],
        "means_over_steps": means,
        "seconds": mean_stderr([run["seconds"] for run in runs]),
    }


def paired(runs: list[dict], others: list[dict]) -> dict | None:
    """The difference in final dense accuracy to another arm, seed by seed; None without a common seed."""
    final = [{run["settings"]["seed"]: list(series(run, "dense").values())[-1] for run in x} for x in (runs, others)]
    seeds = [seed for seed in final[0] if seed in final[1]]
    return {"seeds": seeds, **mean_stderr([final[0][s] - final[1][s] for s in seeds])} if seeds else None


def shown_mean(value: dict | None) -> str:
    """Mean +- standard error as text."""
    return "" if value is None else plus_minus(value["mean"], value["stderr"])


def report(results: list[dict], total: int, config: Settings) -> None:
    """Summary, table and figure of the training runs that are finished."""
    groups: dict[tuple, list[dict]] = {}  # (lr, budget, arm): the runs
    for run in results:
        dense = run["settings"]["compressor"] == "full"
        groups.setdefault((run["settings"]["lr"], 0 if dense else run["settings"]["budget"], run["arm"]), []).append(
            run
        )
    lines, rows = [], []
    for (lr, budget, arm), runs in sorted(groups.items()) if config.map else groups.items():
        s = summarize(runs)
        for other in THREE:
            others = groups.get((lr, 0 if other == "dense" else budget, other))
            s[f"minus_{other}"] = paired(runs, others) if others and arm != other else None
        lines.append({"arm": arm, "budget": budget or None, "lr": lr, **s})
        rows.append(
            [
                *(arm, budget or "", f"{lr:g}", f"{s['start']:.2f}"),
                " ".join(f"{v:.2f}" for v in s["final_dense"]["values"]),
                *(shown_mean(s[name]) for name in ("final_dense", "final_sparse", *(f"minus_{x}" for x in THREE))),
                f"{sum(s['collapsed'])} of {len(runs)}",
                *(f"{s['means_over_steps'][n]['mean']:.3f}" for n in ("sampler_kl", "rejected", "kv_saved")),
                f"{s['seconds']['mean']:.0f}",
            ]
        )
    state = f"{len(results)} of {total} runs are finished"
    commits = sorted({run["commit"] for run in results})
    write_json(
        Path(config.out) / f"summary-{config.part}.json",
        {"part": config.part, "state": state, "commits": commits, "arms": lines},
    )
    head = [
        "arm",
        "budget",
        "lr",
        "start",
        "final, each seed",
        "final dense",
        "final sparse",
        *(f"- {x}" for x in THREE),
    ]
    print(f"\n{state}\n" + table([*head, "collapsed", "KL", "rejected", "kv saved", "s a run"], rows))
    if config.map:
        draw_map(lines, Path(config.out) / "map.png")
    else:
        labels = {labelled(arm, lr): runs for (lr, _, arm), runs in groups.items()}
        draw(labels, Path(config.out) / f"{config.part}.png")


def draw_map(lines: list[dict], file: Path) -> None:
    """Final dense accuracy over budgets, a panel a learning rate, every seed a dot; then the gain over the KL."""
    lrs = sorted({line["lr"] for line in lines})
    figure, axes = pyplot().subplots(1, len(lrs) + 1, figsize=(5 * len(lrs) + 5, 4), layout="constrained")
    for ax, lr in zip(axes, lrs, strict=False):
        for color, arm in enumerate(THREE):
            cells = [line for line in lines if (line["arm"], line["lr"]) == (arm, lr)]
            for line in cells if arm == "dense" else []:
                ax.axhline(line["final_dense"]["mean"], color=f"C{color}", label=arm)
            if arm != "dense" and cells:
                budgets, means = zip(*((line["budget"], line["final_dense"]["mean"]) for line in cells), strict=True)
                ax.plot(budgets, means, color=f"C{color}", label=arm)
                dots = [(line["budget"], v) for line in cells for v in line["final_dense"]["values"]]
                ax.scatter(*zip(*dots, strict=True), color=f"C{color}")
        ax.set(
            title=f"lr {lr:g}",
            xlabel="budget",
            xticks=MAP_BUDGETS,
            ylabel="final greedy accuracy, dense",
            ylim=(-0.03, 1.03),
        )
        ax.legend()
        ax.grid(alpha=0.3)
    kl = {(line["lr"], line["budget"]): line["means_over_steps"] for line in lines if line["arm"] == "naive"}
    for color, lr in enumerate(lrs):
        dots = [
            (kl[lr, line["budget"]]["sampler_kl"]["mean"], gain)
            for line in lines
            if line["arm"] == "sparse-rl" and line["lr"] == lr and line["minus_naive"]
            for gain in line["minus_naive"]["values"]
        ]
        if dots:
            axes[-1].scatter(*zip(*dots, strict=True), color=f"C{color}", label=f"lr {lr:g}")
    axes[-1].axhline(0, color="gray", lw=0.8)
    axes[-1].set(title="sparse-rl minus naive, same seed", xlabel="k3 KL of the naive arm, nats", ylabel="accuracy")
    axes[-1].legend()
    axes[-1].grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    pyplot().close(figure)


def report_serving(done: dict[str, list[dict]], total: int, config: Settings) -> None:
    """Summary and table of the models under each decoding: the mean over seeds +- standard error."""
    modes = ["dense", *(f"{policy}-{b}" for b in SERVE_BUDGETS for policy in SERVE_POLICIES.split(","))]
    lines, rows = [], []
    for arm, runs in done.items():
        found = {mode: [run["results"][mode]["accuracy"] for run in runs if mode in run["results"]] for mode in modes}
        # a model is decoded dense once with each budget, to the same end: once is enough
        found["dense"] = [run["results"]["dense"]["accuracy"] for run in runs if run["budget"] == SERVE_BUDGETS[0]]
        accuracies = {mode: mean_stderr(values) for mode, values in found.items() if values}
        lines.append({"arm": arm, "accuracy": accuracies})
        rows.append([arm, *(shown_mean(accuracies.get(mode)) for mode in modes)])
    state = f"{sum(map(len, done.values()))} of {total} evaluations are finished"
    commits = sorted({run["commit"] for runs in done.values() for run in runs})
    write_json(
        Path(config.out) / "summary-serve.json",
        {"part": "serve", "state": state, "commits": commits, "problems": SERVE_LIMIT, "arms": lines},
    )
    print(f"\n{state}\n" + table(["accuracy", *modes], rows))


# ------------------------------------------------------------------------------------------------- the parts


def training(config: Settings, out: Path, workers: int) -> list[str]:
    """The missing runs of a part, then its summary."""
    plan = planned(config)
    found = {name: load_result(out / f"{name}.json", settings) for name, (_, settings) in plan.items()}

    def job(name: str) -> Callable[[], None]:
        return lambda: train_run(name, *plan[name], out)

    try:
        return in_parallel({name: job(name) for name, result in found.items() if result is None}, workers)
    finally:  # also when it is stopped
        results = [load_result(out / f"{name}.json", settings) for name, (_, settings) in plan.items()]
        if any(results):
            report([result for result in results if result], len(plan), config)


def serving(config: Settings, out: Path, workers: int) -> list[str]:
    """The final models that exist of the other parts, and the start, under every decoding."""
    plan = planned(config)
    models = {"start": ("start", Path(BASE["model"]))}
    models |= {
        name: (labelled(arm, settings["lr"]), folder)
        for name, (arm, settings) in plan.items()
        for _, folder in checkpoints(out / "runs" / name)[:1]
        if (out / f"{name}.json").exists()
    }
    files = {f"serve-{name}-{b}": (arm, folder, b) for name, (arm, folder) in models.items() for b in SERVE_BUDGETS}

    def job(name: str) -> Callable[[], None]:
        return lambda: serve_run(name, *files[name][1:], out)

    try:
        return in_parallel({name: job(name) for name in files if not (out / f"{name}.json").exists()}, workers)
    finally:
        done: dict[str, list[dict]] = {}
        for name, (arm, _, _) in files.items():
            if (out / f"{name}.json").exists():
                done.setdefault(arm, []).append(json.loads((out / f"{name}.json").read_text(encoding="utf-8")))
        report_serving(done, (len(plan) + 1) * len(SERVE_BUDGETS), config)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "experiments/claim.py", "The paper's claim at laptop size.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with one_sentence("experiments/claim.py"):
        pyplot()  # better missing now than after the runs
        out = Path(config.out).resolve()
        (out / "runs").mkdir(parents=True, exist_ok=True)
        workers = config.workers or os.cpu_count() or 1
        wrong = (serving if config.serve else training)(config, out, workers)
        print(f"results are in {config.out}/")
        if wrong:
            raise ValueError(f"{len(wrong)} did not finish; {wrong[0]}. Start it again to go on")


if __name__ == "__main__":
    main()
