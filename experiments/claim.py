"""The paper's claim at laptop size: sparse rollouts break GRPO, and Sparse-RL's corrections mend that.

    python experiments/claim.py            dense, naive and sparse-rl, one seed
    python experiments/claim.py --full     six arms, five seeds
    python experiments/claim.py --map      naive, sparse-rl and dense over budgets and learning rates, two seeds
    python experiments/claim.py --ideas    changes to sparse-rl, and a smaller learning rate for comparison, five seeds
    python experiments/claim.py --learners dense, naive, sparse-rl and the replay learner, two learning rates, ten seeds
    python experiments/claim.py --serve    the models of the others, decoded dense and with compressed caches

Every run is `python train.py ... --threads 1` (or eval.py) in a process of its own, --workers at a time. Started again,
it goes on where it stopped. In --out: runs.jsonl (a line a finished run: command, commit, settings, every metric, every
evaluation), serve.jsonl (a line an evaluation of --serve), runs/NAME (a run's folder), summary-*.json and *.png. What
is finished is summarised, and how much of the plan that is.

The constants below were fixed, and committed, before any run that is reported; they were chosen with seed 1001.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from plot import draw, draw_map, pyplot, read_run, series

from experiments.commas import numbers
from experiments.records import ROOT, arguments, check_same, made_by, mean_stderr, read_results, shown, shown_mean
from runs import append, check_options, checkpoints, flag, one_sentence, option, parse_config, table, write_json
from task import ASSETS

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

    @property
    def part(self) -> str:
        """The name of the part, and of its results."""
        return next((name for name in PARTS if getattr(self, name)), "default")


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

    def cells(arms, lrs, budgets=(BUDGET,)) -> list[tuple[str, int, float]]:
        return [(arm, budget, lr) for lr, budget, arm in product(lrs, budgets, arms)]

    fixed, plan = {
        "default": (SEEDS[:1], cells(THREE, [LR])),
        "full": (SEEDS, cells(ARMS, [LR])),
        "map": (MAP_SEEDS, cells(THREE, MAP_LRS, MAP_BUDGETS)),
        "ideas": (SEEDS, cells([*THREE, *IDEAS], [LR]) + cells(THREE, [CONTROL_LR])),
        "learners": (LEARNER_SEEDS, cells(LEARNERS, [LR, CONTROL_LR])),
        "serve": (SEEDS, cells([*ARMS, *IDEAS, *REPLAY], [LR]) + cells(LEARNERS, [CONTROL_LR])),
    }[config.part]
    seeds = numbers(config, "seeds") if config.seeds else fixed
    runs = [(arm, run_settings(arm, seed, *cell)) for seed in seeds for arm, *cell in plan]
    return {run_name(arm, settings): (arm, settings) for arm, settings in runs}


# -------------------------------------------------------------------------------------------------- running


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


def train_run(name: str, arm: str, settings: dict, out: Path) -> dict:
    """Train, or go on with, one run; its result."""
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
    seconds += sum(e["seconds"] for e in run["evaluations"])
    return {"name": name, **made_by(command), "arm": arm, "seconds": seconds, **run}


def serve_run(name: str, model: Path, budget: int, out: Path) -> dict:
    """Decode the held-out problems greedily with one model: dense, and with each policy at this budget."""
    names = ("max_new_tokens", "buffer", "window", "threads")
    settings = {"model": model, "data": BASE["data"].replace("-train.", "-heldout."), "limit": SERVE_LIMIT}
    settings |= {"compressor": SERVE_POLICIES, "budget": budget} | {key: BASE[key] for key in names}
    command, folder = ["eval.py", *arguments(settings)], out / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    call([*command, "--out", str(folder)], out / "runs" / f"{name}.log")
    (results,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"].values()
    return {"name": name, **made_by(command), "budget": budget, "results": results}


def finish(jobs: dict[str, Callable[[], dict]], file: Path, workers: int) -> list[str]:
    """Do the jobs that have no line in the file, `workers` at a time, and add their lines. Returns what went wrong."""
    finished, wrong, one_at_a_time = read_results(file), [], Lock()

    def do(job: Callable[[], dict]) -> None:
        result = job()
        with one_at_a_time:
            append(file, [result])

    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(do, job): name for name, job in jobs.items() if name not in finished}
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


def final(run: dict, decoding: str = "dense") -> list[float]:
    """The last greedy accuracy of a run, dense or `sparse` (its own cache); empty if there is none."""
    return list(series(run, decoding).values())[-1:]


def collapsed(run: dict) -> bool:
    """A run collapsed if its final dense greedy accuracy is over two standard errors below the starting model's."""
    start = next(e for e in run["evaluations"] if e["decoding"] == "dense")
    return final(run)[0] < start["accuracy"] - 2 * (start["stderr"] or 0)


def summarize(runs: list[dict]) -> dict:
    """What the runs of one arm at one setting came to, every seed in the order of `seeds`."""
    metrics = ("sampler_kl", "rejected", "kv_saved", "reward_mean", "grad_norm", "entropy", "response_length")
    dense, sparse = ([value for run in runs for value in final(run, name)] for name in ("dense", "sparse"))
    return {
        "seeds": [run["settings"]["seed"] for run in runs],
        "start": series(runs[0], "dense")[0],
        "final_dense": mean_stderr(dense),
        "final_sparse": mean_stderr(sparse) if sparse else None,
        "collapsed": [collapsed(run) for run in runs],
        "means_over_steps": {
            name: mean_stderr([statistics.fmean(series(run, name).values()) for run in runs]) for name in metrics
        },
        "seconds": mean_stderr([run["seconds"] for run in runs]),
    }


def paired(runs: list[dict], others: list[dict]) -> dict | None:
    """The difference in final dense accuracy to another arm, seed by seed; None without a common seed."""
    ours, theirs = ({run["settings"]["seed"]: final(run)[0] for run in x} for x in (runs, others))
    seeds = [seed for seed in ours if seed in theirs]
    return {"seeds": seeds, **mean_stderr([ours[s] - theirs[s] for s in seeds])} if seeds else None


def grouped(results: list[dict]) -> dict[tuple[float, int, str], list[dict]]:
    """{(lr, budget or 0, arm): runs that differ in the seed alone}."""
    groups: dict[tuple, list[dict]] = {}
    for run in results:
        settings = run["settings"]
        budget = 0 if settings["compressor"] == "full" else settings["budget"]
        groups.setdefault((settings["lr"], budget, run["arm"]), []).append(run)
    return groups


def compared(groups: dict[tuple[float, int, str], list[dict]]) -> list[dict]:
    """Each group's summary, with the difference to each of THREE at the same setting."""
    lines = []
    for (lr, budget, arm), runs in groups.items():
        others = {x: groups.get((lr, 0 if x == "dense" else budget, x), []) for x in THREE}
        minus = {f"minus_{x}": None if x == arm else paired(runs, others[x]) for x in THREE}
        lines.append({"arm": arm, "budget": budget or None, "lr": lr, **summarize(runs), **minus})
    return lines


def cells_of(line: dict) -> dict:
    """A line of the summary as it is printed: {column: cell}."""
    means = line["means_over_steps"]
    return {
        **{"arm": line["arm"], "budget": line["budget"], "lr": f"{line['lr']:g}", "start": line["start"]},
        "final, each seed": " ".join(f"{value:.2f}" for value in line["final_dense"]["values"]),
        "final dense": shown_mean(line["final_dense"]),
        "final sparse": shown_mean(line["final_sparse"]),
        **{f"- {other}": shown_mean(line[f"minus_{other}"]) for other in THREE},
        "collapsed": f"{sum(line['collapsed'])} of {len(line['seeds'])}",
        **{"KL": means["sampler_kl"]["mean"], "rejected": means["rejected"]["mean"]},
        **{"kv saved": means["kv_saved"]["mean"], "s a run": round(line["seconds"]["mean"])},
    }


def write_summary(config: Settings, results: list[dict], total: int, noun: str, **content) -> None:
    """summary-PART.json, and on stdout how much of the plan is finished."""
    state = f"{len(results)} of {total} {noun} are finished"
    commits = sorted({result["commit"] for result in results})
    file = Path(config.out) / f"summary-{config.part}.json"
    write_json(file, {"part": config.part, "state": state, "commits": commits, **content})
    print(f"\n{state}")


def report(results: list[dict], total: int, config: Settings) -> None:
    """Summary, table and figure of the training runs that are finished."""
    groups = grouped(results)
    lines = compared(dict(sorted(groups.items())) if config.map else groups)
    write_summary(config, results, total, "runs", arms=lines)
    rows = [cells_of(line) for line in lines]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if config.map:
        draw_map(lines, Path(config.out) / "map.png")
    else:
        labels = {labelled(arm, lr): runs for (lr, _, arm), runs in groups.items()}
        draw(labels, Path(config.out) / f"{config.part}.png")


def report_serving(done: dict[str, list[dict]], total: int, config: Settings) -> None:
    """Summary and table of the models under each decoding: the mean over seeds +- standard error."""
    modes = ["dense", *(f"{policy}-{b}" for b in SERVE_BUDGETS for policy in SERVE_POLICIES.split(","))]
    lines = []
    for arm, runs in done.items():
        found = {mode: [run["results"][mode]["accuracy"] for run in runs if mode in run["results"]] for mode in modes}
        # a model is decoded dense once with each budget, to the same end: once is enough
        found["dense"] = [run["results"]["dense"]["accuracy"] for run in runs if run["budget"] == SERVE_BUDGETS[0]]
        lines.append({"arm": arm, "accuracy": {mode: mean_stderr(values) for mode, values in found.items() if values}})
    results = [run for runs in done.values() for run in runs]
    write_summary(config, results, total, "evaluations", problems=SERVE_LIMIT, arms=lines)
    rows = [[line["arm"], *(shown_mean(line["accuracy"].get(mode)) for mode in modes)] for line in lines]
    print(table(["accuracy", *modes], rows))


# ------------------------------------------------------------------------------------------------- the parts


def training(config: Settings, plan: dict[str, tuple[str, dict]], out: Path, workers: int) -> list[str]:
    """The missing runs of a part, then its summary. Returns what went wrong."""
    file = out / "runs.jsonl"
    made = read_results(file)
    for name in plan.keys() & made.keys():
        check_same(name, made[name]["settings"], plan[name][1], file)
    try:
        return finish({name: partial(train_run, name, *run, out) for name, run in plan.items()}, file, workers)
    finally:  # also when it is stopped
        finished = read_results(file)
        if results := [finished[name] for name in plan if name in finished]:
            report(results, len(plan), config)


def serving(config: Settings, plan: dict[str, tuple[str, dict]], out: Path, workers: int) -> list[str]:
    """The final models that exist of the other parts, and the start, under every decoding. Returns what went wrong."""
    trained, file = read_results(out / "runs.jsonl"), out / "serve.jsonl"
    models = {"start": ("start", Path(BASE["model"]))}
    for name, (arm, settings) in plan.items():
        for _, folder in checkpoints(out / "runs" / name)[:1] if name in trained else []:
            models[name] = (labelled(arm, settings["lr"]), folder)
    asked = {f"serve-{name}-{b}": (arm, folder, b) for name, (arm, folder) in models.items() for b in SERVE_BUDGETS}
    try:
        return finish({name: partial(serve_run, name, *how, out) for name, (_, *how) in asked.items()}, file, workers)
    finally:
        finished, done = read_results(file), {}
        for name, (arm, _, _) in asked.items():
            if name in finished:
                done.setdefault(arm, []).append(finished[name])
        report_serving(done, (len(plan) + 1) * len(SERVE_BUDGETS), config)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "experiments/claim.py", "The paper's claim at laptop size.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with one_sentence("experiments/claim.py"):
        plan = planned(config)
        pyplot()  # better missing now than after the runs
        out = Path(config.out).resolve()
        (out / "runs").mkdir(parents=True, exist_ok=True)
        workers = config.workers or os.cpu_count() or 1
        wrong = (serving if config.serve else training)(config, plan, out, workers)
        print(f"results are in {config.out}/")
        if wrong:
            raise ValueError(f"{len(wrong)} did not finish; {wrong[0]}. Start it again to go on")


if __name__ == "__main__":
    main()
