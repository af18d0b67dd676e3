"""Sparse-RL training: `python train.py --budget 512 --compressor snapkv`.

One step: sample G responses to each of P prompts with the compressed cache (logp_sparse), grade them, score them
with the same weights and dense attention (logp_old), then update the weights, dense, with the corrected policy
gradient of grpo.py.

Everything random in step s is drawn from generators seeded by (seed, what for, s), so a run that is resumed from a
checkpoint continues as if it had never stopped.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

import grpo
import runs
import task
from eval import beyond_context, dense_and_sparse
from kvcache import COMPRESSORS, check_settings
from model import Decoder, ModelConfig, load_config, load_model, read_json, weight_files
from rollout import Rollout, cache_for, dense_logprobs, memory, micro_batches, rescore, rollout_batches
from runs import megabytes, option
from task import ASSETS, Prompt, Reward, is_correct

# What a resumed run may change, because it does not change the experiment: its length, its reports, where its inputs
# lie (they are known by their contents), and how the machine is used, which in fp32 moves results by rounding at most.
FREE = (
    *("steps", "eval_every", "save_every", "keep", "sample_every", "dry_run", "resume", *runs.PATHS),
    *("rollout_rows", "micro_tokens", "gradient_checkpointing", "threads", "device"),
)


def free(settings: dict) -> set[str]:
    """FREE, less what rounds otherwise in bfloat16: the rows of a rollout, the learner's padding, the device."""
    coarse = settings["dtype"] != "float32"
    return set(FREE) - ({"rollout_rows", "micro_tokens", "device"} if coarse else set())


@dataclass(frozen=True)
class Config:
    """All settings of a run. The defaults are those of the main job on the bundled model."""

    # What is trained, on what, and where it goes
    model: str = option(str(ASSETS / "model"), "Hugging Face folder to start from")
    data: str = option(str(ASSETS / "long-train.jsonl"), "training problems, JSONL")
    template: str = option("auto", task.TEMPLATE)
    max_prompt_tokens: int = option(0, task.MAX_PROMPT, at_least=0)
    reward: str = option("", "FILE.py:NAME, a function (response, answer) -> float; default 1 if right, else 0")
    eval_data: str | None = option(None, "held-out problems, '' for none; by default the -heldout beside a -train file")
    out: str = option("", "run folder; default runs/<time>")
    resume: str = option("", "continue the run in this folder from its newest checkpoint, with its settings")
    dry_run: bool = option(False, "print the plan (lengths, memory, whether anything is evicted) and stop")
    # Sampling with the compressed cache
    compressor: str = option("snapkv", "KV policy of the sampler; full is dense GRPO", choices=COMPRESSORS)
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive, and whose queries score the others")
    prompts: int = option(8, "prompts a step", at_least=1)
    group_size: int = option(8, "G, responses to each prompt; a group of one would have no advantage", at_least=2)
    max_new_tokens: int = option(1000, "longest response; a longer one is graded as it stands, and counted", at_least=1)
    temperature: float = option(1.0, "of the sampler and of every log-prob", at_least=1e-3, below=math.inf)
    rollout_rows: int = option(256, "responses sampled at a time: memory against speed", at_least=1)
    # The objective
    correction: str = option("sparse-rl", "which corrections apply (grpo.py)", choices=grpo.CORRECTIONS)
    epsilon: float = option(1e-4, "a response with some ratio xi below this is rejected", above=0, below=1)
    xi_cap: float | None = option(None, "truncate the weights xi at this value", above=0, at_most=1e30)
    clip_low: float = option(0.2, "the staleness ratio is clipped below at 1 - this", at_least=0, below=1)
    clip_high: float = option(0.2, "and above at 1 + this", at_least=0, at_most=1e30)
    kl_coef: float = option(0.0, "beta, weight of the KL to the starting weights; 0: none", at_least=0, below=math.inf)
    aggregation: str = option("response", "mean per response, token, or over a constant", choices=grpo.AGGREGATIONS)
    normalize_std: bool = option(True, "divide advantages by the group's std")
    scale_step: bool = option(False, "the learning rate times the share of accepted responses")
    # The optimizer
    steps: int = option(15, "training steps, one rollout each", at_least=1)
    updates: int = option(1, "optimizer updates a step; the step's prompts are divided among them", at_least=1)
    lr: float = option(2e-4, "AdamW learning rate, constant", above=0, at_most=10)
    beta1: float = option(0.9, "AdamW beta1", at_least=0, below=1)
    beta2: float = option(0.98, "AdamW beta2", at_least=0, below=1)
    weight_decay: float = option(0.1, "AdamW weight decay", at_least=0, at_most=1000)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; inf never clips", above=0)
    micro_tokens: int = option(8192, "padded tokens in one forward and backward pass", at_least=1, at_most=2**31)
    # Reports
    eval_every: int = option(0, "evaluate after so many steps; 0: before the first and after the last", at_least=0)
    eval_limit: int = option(200, "held-out problems to evaluate on; 0 takes all", at_least=0)
    save_every: int = option(5, "write a checkpoint after every so many steps, and after the last", at_least=1)
    keep: int = option(0, "keep so many checkpoints, the newest; 0 keeps all", at_least=0)
    sample_every: int = option(5, "print one sampled response after every so many steps; 0 never", at_least=0)
    # The machine
    seed: int = option(0, "of everything random", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option("float32", "bfloat16 computes in it, over float32 weights", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, "keep one activation a layer, compute the others again")

    def __post_init__(self):
        runs.check_options(self)
        check_settings(self.compressor, self.budget, self.buffer, self.window)
        if self.prompts % self.updates:
            raise ValueError(f"--updates must divide the {self.prompts} prompts of a step, not {self.updates}")
        if self.prompts * self.group_size > runs.LONGEST:
            raise ValueError(f"--prompts times --group-size must be at most {runs.LONGEST:,} responses a step")

    def some(self, *names: str) -> dict:
        """The settings of these names."""
        return {name: getattr(self, name) for name in names}

    @property
    def cache(self) -> dict:
        """The settings of the sampler's cache."""
        return self.some("compressor", "budget", "buffer", "window")

    @property
    def rows(self) -> int:
        """The responses that are sampled at a time."""
        return min(self.prompts * self.group_size, max(self.rollout_rows, self.group_size))


@dataclass(frozen=True)
class Inputs:
    """What a run reads before it loads any weights."""

    model: ModelConfig
    tokenizer: Tokenizer
    eos_ids: list[int]
    prompts: list[Prompt]  # to train on
    held_out: list[Prompt]


@dataclass(frozen=True)
class Weights:
    """The weights of the three policies, and the optimizer."""

    master: Decoder  # fp32; the optimizer moves it and checkpoints hold it
    decoder: Decoder  # samples, scores and learns, in --dtype; for float32 the master itself
    reference: Decoder | None  # the starting weights, if the KL is on
    optimizer: torch.optim.Optimizer


# ---------------------------------------------------------------------------------------------------- one step


def generator(seed: int, purpose: str, step: int) -> torch.Generator:
    """A CPU generator that depends on these three alone."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {purpose} {step}").getrandbits(63))


def pick_problems(count: int, prompts: int, step: int, seed: int) -> list[int]:
    """The problems of a step (0-based): the next `prompts` of an endless row of shuffled passes over all of them."""
    places = range(step * prompts, (step + 1) * prompts)
    passes = {place // count for place in places}
    order = {p: torch.randperm(count, generator=generator(seed, "problems", p)).tolist() for p in passes}
    return [order[place // count][place % count] for place in places]


def train_step(
    config: Config, inputs: Inputs, weights: Weights, reward: Reward, step: int
) -> tuple[dict[str, float], list[dict]]:
    """Sample, grade, score, update. Returns the step's metrics and one record a response."""
    asked = [inputs.prompts[i] for i in pick_problems(len(inputs.prompts), config.prompts, step, config.seed)]
    r = rollout_batches(
        weights.decoder,
        [prompt.ids for prompt in asked],
        rows=config.rollout_rows,
        eos_ids=inputs.eos_ids,
        generator=generator(config.seed, "rollout", step),
        progress=True,
        **config.some("group_size", "max_new_tokens", "temperature"),
        **config.cache,
    )
    asked = [prompt for prompt in asked for _ in range(config.group_size)]  # N, the prompt of each response
    texts = [task.response_text(inputs.tokenizer, r.response(i), inputs.eos_ids) for i in range(len(asked))]
    rewards = torch.tensor([reward(text, prompt.answer) for text, prompt in zip(texts, asked, strict=True)])  # (N,)
    advantages = grpo.group_advantages(rewards, config.group_size, normalize_std=config.normalize_std)  # (N,)

    scoring = time.perf_counter()
    logp_old, entropy = rescore(weights.decoder, r, config.micro_tokens)  # (N, R) each
    logp_ref = rescore(weights.reference, r, config.micro_tokens)[0] if weights.reference else None
    scored = {"logp_old": logp_old, "advantages": advantages} | ({} if logp_ref is None else {"logp_ref": logp_ref})

    updating = time.perf_counter()
    how = config.some("correction", "epsilon", "xi_cap", "aggregation") | {"max_length": config.max_new_tokens}
    accepted, reports = [], []
    for rows in torch.arange(len(asked)).chunk(config.updates):
        c = grpo.correct(logp_old[rows], r.logp_sparse[rows], r.mask[rows], **how)
        accepted.append(c.accepted)
        reports.append(update(config, weights, r, scored, rows, c))
    ended = time.perf_counter()

    metrics = {
        "step": step + 1,
        **grpo.reward_metrics(rewards, config.group_size),
        **grpo.mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon),
        "entropy": float(entropy[r.mask].nanmean().nan_to_num()),
        **update_metrics(reports),
        "tokens": int(r.response_lengths.sum()),
        **r.statistics,
        "rollout_seconds": r.seconds,
        "scoring_seconds": updating - scoring,
        "update_seconds": ended - updating,
    }
    columns = {
        "reward": rewards,
        "advantage": advantages,
        "accepted": torch.cat(accepted),
        "tokens": r.response_lengths,
        "finished": r.finished,
        **grpo.extremes(logp_old, r.logp_sparse, r.mask),
    }
    records = [
        {"step": step + 1, "prompt": prompt.text, "response": text, "answer": prompt.answer}
        | {name: number_or_none(column[i]) for name, column in columns.items()}
        for i, (prompt, text) in enumerate(zip(asked, texts, strict=True))
    ]
    return metrics, records


def number_or_none(value: Tensor) -> float | int | bool | None:
    """A number for JSON, which has no words for what is not finite."""
    return value.item() if value.isfinite() else None


def update(
    config: Config, weights: Weights, r: Rollout, scored: dict[str, Tensor], rows: Tensor, c: grpo.Correction
) -> dict[str, float]:
    """One optimizer update on these rows (n,) of the rollout and of what was scored; c is their correction.

    Not made where nothing would teach ("skipped"), or where loss or gradient are not finite ("not_finite").
    """
    device = weights.decoder.embed_tokens.weight.device
    teaching = grpo.teaches(scored["advantages"][rows], c)  # (n,)
    if not teaching.any():
        return {"skipped": 1, "not_finite": 0}
    # the others count below the line, but nothing needs to be computed for them
    needed = (c.accepted if config.kl_coef else teaching).nonzero()[:, 0]
    weights.optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    for part in tqdm(list(micro_batches(needed, r.lengths[rows], config.micro_tokens)), desc="update", leave=False):
        (logp,) = dense_logprobs(weights.decoder, r, rows[part])  # (b, R), with gradient
        given = {name: x[rows[part]].to(device) for name, x in scored.items()}
        how = {"clip": (config.clip_low, config.clip_high), "kl_coef": config.kl_coef}
        loss, metrics = grpo.surrogate_loss(logp, c[part].to(device), **given, **how)
        loss.backward()
        sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
    norm = torch.nn.utils.clip_grad_norm_(weights.master.parameters(), config.max_grad_norm)
    if not all(value.isfinite() for value in (norm, *sums.values())):
        return {"skipped": 0, "not_finite": 1}
    for group in weights.optimizer.param_groups:
        # AdamW's step does not shrink with its gradient: a step with many rejections would be as long as any other
        group["lr"] = config.lr * (float(c.accepted.float().mean()) if config.scale_step else 1)
    weights.optimizer.step()
    follow(weights.decoder, weights.master)
    return {"skipped": 0, "not_finite": 0, "grad_norm": float(norm)} | {name: float(sums[name]) for name in sums}


def update_metrics(reports: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates that were made (0 where none was), and how many were skipped or not finite."""
    made = [report for report in reports if "grad_norm" in report]
    names = ("policy_loss", "kl_ref", "clip_low", "clip_high", "clamped", "grad_norm")
    return {name: sum(report[name] for report in made) / max(1, len(made)) for name in names} | {
        f"updates_{name}": sum(report[name] for report in reports) for name in ("skipped", "not_finite")
    }


def compute_copy(master: Decoder, dtype: torch.dtype) -> Decoder:
    """The decoder that computes in `dtype` for fp32 weights: the master itself, or a copy that hands over gradients.

    A bf16 weight of 0.02 does not feel a change of 1e-6. So gradients are summed, and weights moved, in fp32; a
    gradient of the copy lasts until it is handed over.
    """
    if dtype == torch.float32:
        return master
    decoder = copy.deepcopy(master).to(dtype)
    for parameter, original in zip(decoder.parameters(), master.parameters(), strict=True):

        def hand_over(p: Tensor, original: Tensor = original) -> None:
            original.grad = p.grad.float() if original.grad is None else original.grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(hand_over)
    return decoder


@torch.no_grad()
def follow(decoder: Decoder, master: Decoder) -> None:
    """Give the computing copy, if it is one, the master's weights."""
    if decoder is not master:
        for parameter, original in zip(decoder.parameters(), master.parameters(), strict=True):
            parameter.copy_(original)


# ---------------------------------------------------------------------------------------------------- the loop


@dataclass
class Run:
    """A run folder and how far it has come."""

    folder: Path
    done: int  # steps
    metrics: list[dict]  # a line a step
    evaluations: list[dict]


def train(
    config: Config, inputs: Inputs, weights: Weights, reward: Reward, run: Run, save: Callable, stopping: list[int]
) -> None:
    """The loop. A step adds lines to metrics.jsonl and samples.jsonl and, when due, a checkpoint and an evaluation.

    save(): writes a checkpoint. stopping: the signals that came (`stop_signals`), read between steps.
    """
    saved = run.done
    evaluate_if_due(config, inputs, weights, run)  # before the first step, or left out when the run was killed
    bar = tqdm(range(run.done, config.steps), desc="training", initial=run.done, total=config.steps, unit="step")
    for step in bar:
        if stopping:
            break
        metrics, records = train_step(config, inputs, weights, reward, step)
        runs.append(run.folder / "samples.jsonl", records)
        runs.append(run.folder / "metrics.jsonl", [metrics])
        run.metrics.append(metrics)
        run.done = step + 1
        last = run.done == config.steps
        shown = "reward {reward_mean:.3f}, rejected {rejected:.0%}, kv saved {kv_saved:.0%}"
        bar.set_postfix_str(shown.format_map(metrics))
        if config.sample_every and (step % config.sample_every == 0 or last):
            shown = "\nstep {step}, reward {reward:.0f} (answer {answer}):\n{prompt}{response}\n"
            tqdm.write(shown.format_map(records[0]))
        complain(run, records)
        if run.done % config.save_every == 0 or last:
            save()
            saved = run.done
        if not stopping:
            evaluate_if_due(config, inputs, weights, run)
    if saved < run.done:  # stopped between two checkpoints
        save()
    if not stopping:
        print("\n" + summary(config, run))


def evaluate_if_due(config: Config, inputs: Inputs, weights: Weights, run: Run) -> None:
    """Add the greedy accuracy on the held-out problems, dense and with the run's compressor, to evals.jsonl."""
    due = run.done in (0, config.steps) or (config.eval_every > 0 and run.done % config.eval_every == 0)
    if not due or not inputs.held_out or any(e["step"] == run.done for e in run.evaluations):
        return
    how = config.cache | {"rows": config.rollout_rows, "max_new_tokens": config.max_new_tokens, "temperature": 0.0}
    found = dense_and_sparse(weights.decoder, inputs.tokenizer, inputs.eos_ids, inputs.held_out, progress=True, **how)
    results = [{"step": run.done, "decoding": name, **result} for name, (result, _) in found.items()]
    runs.append(run.folder / "evals.jsonl", results)
    run.evaluations.extend(results)
    tqdm.write(f"step {run.done}: greedy " + ", ".join(f"{e['decoding']} {e['accuracy']:.3f}" for e in results))


def complain(run: Run, records: list[dict]) -> None:
    """Say what to look at after an update that was not applied; FloatingPointError after three such steps."""
    if not (count := run.metrics[-1]["updates_not_finite"]):
        return
    bad = [i for i, record in enumerate(records) if None in (record["xi_max"], record["logp_min"])]
    worst = bad[0] if bad else max(range(len(records)), key=lambda i: records[i]["xi_max"])
    tqdm.write(
        f"step {run.done}: {count} update(s) left out, loss or gradient not finite. "
        "Largest xi {xi_max}, smallest log-prob {logp_min} (None: not finite) in ".format_map(records[worst])
        + f"response {worst} of this step in samples.jsonl"
    )
    if len(run.metrics) >= 3 and all(m["updates_not_finite"] for m in run.metrics[-3:]):
        raise FloatingPointError(
            f"loss or gradient were not finite for three steps (see above and {run.folder}/samples.jsonl); the weights "
            f"are those before them. Start a new run from {run.folder}/checkpoints, with a smaller --lr or --xi-cap"
        )


def summary(config: Config, run: Run) -> str:
    """The tables at the end of a run."""
    steps = sorted({e["step"] for e in run.evaluations})
    lines = []
    for first in (e for e in run.evaluations if len(steps) > 1 and e["step"] == steps[0]):
        last = next(e for e in run.evaluations if (e["step"], e["decoding"]) == (steps[-1], first["decoding"]))
        cells = [runs.plus_minus(e["accuracy"], e["stderr"]) for e in (first, last)]
        lines.append([first["decoding"], *cells, last["kv_saved"], megabytes(last["cache_bytes"])])
    text = ""
    if lines:
        text = f"greedy accuracy on {first['problems']} held-out problems of {config.eval_data}\n"
        text += runs.table(["decoding", f"step {steps[0]}", f"step {steps[-1]}", "kv saved", "cache"], lines) + "\n\n"
    means = {name: sum(m[name] for m in run.metrics) / len(run.metrics) for name in run.metrics[0]}
    if config.compressor != "full" and means["kv_saved"] == 0:
        text += "nothing was evicted, so this was dense GRPO: lower --budget or --buffer\n"
    seconds = {name: len(run.metrics) * means[f"{name}_seconds"] for name in ("rollout", "scoring", "update")}
    shares = ", ".join(f"{name} {s:.0f} s ({s / sum(seconds.values()):.0%})" for name, s in seconds.items())
    cache, dense = (megabytes(max(m[name] for m in run.metrics)) for name in ("cache_bytes", "dense_bytes"))
    return text + (
        f"means of {len(run.metrics)} steps: reward {means['reward_mean']:.3f}, "
        f"groups without signal {means['groups_without_signal']:.1%}, rejected {means['rejected']:.1%}, "
        f"truncated {means['truncated']:.1%}, kv saved {means['kv_saved']:.1%}, sampler KL {means['sampler_kl']:.4f}\n"
        f"rollout cache {cache}, dense keys and values would take {dense}\n"
        f"time {shares}\n"
        f"in {run.folder}/: {', '.join(sorted(path.name for path in run.folder.iterdir()))}"
    )


# ----------------------------------------------------------------------------------------------- before the loop


def read_inputs(config: Config) -> Inputs:
    """Read and check all but the weights, write nothing. Raises ValueError or OSError in a sentence for the user."""
    model = load_config(config.model)
    tokenizer, eos_ids = task.load_tokenizer(config.model)
    how = {"template": task.load_template(config.model, config.template), "longest": config.max_prompt_tokens}

    def prepared(file: str) -> list[Prompt]:
        return task.prepare(task.load_problems(file), tokenizer, model.vocab_size, **how)

    held_out = prepared(config.eval_data)[: config.eval_limit or None] if config.eval_data else []
    prompts = prepared(config.data)
    return Inputs(model, tokenizer, task.all_ends(eos_ids, [*prompts, *held_out]), prompts, held_out)


def plan(config: Config, inputs: Inputs) -> str:
    """What a step will hold and do, before any weights are loaded."""
    lengths = [len(prompt.ids) for prompt in inputs.prompts]
    responses, longest = config.prompts * config.group_size, max(lengths) + config.max_new_tokens
    how = config.some("micro_tokens", "gradient_checkpointing", "kl_coef") | {"dtype": getattr(torch, config.dtype)}
    need = memory(inputs.model, config.cache, config.rows, longest, **how)
    cache, dense = need.pop("cache"), need.pop("dense cache")
    layers = cache_for(inputs.model, 1, longest, **config.cache, device="meta").layers
    slots, budgets = (sorted({getattr(layer, name) for layer in layers}) for name in ("slots", "budget"))
    if config.compressor == "full":
        eviction = "none: compressor full is dense GRPO"
    elif longest <= slots[0]:  # the last token sampled is never cached
        eviction = (
            f"NEVER: a row holds at most {longest - 1} keys and is cut at budget + buffer = {slots[0]}, so this run is "
            "dense. Lower --budget or --buffer, or raise --max-new-tokens"
        )
    else:
        keys, full = (" to ".join(map(str, sorted({x[0], x[-1]}))) for x in (budgets, slots))
        eviction = f"a row is cut to {keys} keys whenever it holds budget + buffer = {full}"
    lines = {
        "model": f"{config.model}: {need.pop('parameters'):,} parameters, {config.dtype}",
        "memory": ", ".join(f"{name} {megabytes(size)}" for name, size in need.items() if size) + " (estimates)",
        "problems": f"{len(lengths)} in {config.data}, prompts of {min(lengths)} to {max(lengths)} tokens",
        "held out": f"{len(inputs.held_out)} in {config.eval_data}"
        if inputs.held_out
        else "none, so nothing is evaluated: --eval-data names a file",
        "step": f"{config.prompts} prompts x {config.group_size} responses of at most {config.max_new_tokens} tokens "
        f"({responses * config.max_new_tokens:,} in all), {config.updates} update(s); {config.steps} steps",
        "KV cache": f"{config.compressor} {megabytes(cache)}, dense {megabytes(dense)} ({config.rows} rows at once)",
        "eviction": eviction,
        "context": beyond_context(inputs.model, longest),
    }
    return "\n".join(f"{name:<10}{text}" for name, text in lines.items() if text)


def identity(config: Config, inputs: Inputs, reward: Reward | None) -> dict:
    """What makes a run this run: the settings that a resumed run may not change, and hashes of what it reads."""
    asked = {name: [[p.ids, p.answer] for p in getattr(inputs, name)] for name in ("prompts", "held_out")}
    files = [Path(config.model) / "config.json", *weight_files(Path(config.model))]
    return {
        "settings": {name: value for name, value in asdict(config).items() if name not in FREE},
        "model": runs.fingerprint(*files, inputs.eos_ids),
        "data": runs.fingerprint(asked["prompts"]),
        "eval_data": runs.fingerprint(asked["held_out"]),
        "reward": reward_source(config.reward, reward),
    }


def reward_source(name: str, passed: Reward | None) -> str:
    """What a reward is known by: its file's contents and its name there, or its own source; "" for the default."""
    if passed:
        try:
            return runs.fingerprint(inspect.getsource(passed))
        except (OSError, TypeError):
            raise ValueError(f"no source is to be had of the reward {passed!r}: pass a function of a file") from None
    file, _, function = name.rpartition(":")
    return runs.fingerprint(Path(file), function) if name else ""


def load_weights(config: Config, folder: Path, own: dict, device: torch.device) -> tuple[Weights, int]:
    """The weights and the steps done: the newest checkpoint of the run that can be read, or the start.

    Damaged checkpoints are set aside; ValueError for one that is not of this identity (`own`).
    """
    for step, source in [*(runs.checkpoints(folder) if config.resume else []), (0, Path(config.model))]:
        try:
            stored = read_json(source / "training" / "state.json") if step else None
            master = load_model(source, device=device)
            betas = config.beta1, config.beta2
            how = {"lr": config.lr, "betas": betas, "weight_decay": config.weight_decay}
            optimizer = torch.optim.AdamW(master.parameters(), **how)
            if step:
                runs.load_optimizer(optimizer, master, source)
            break
        except ValueError as error:
            if not step:
                raise
            print(f"{error}: moved to {runs.set_aside(folder, step)}")
    if step and stored != {"step": step} | own:
        raise ValueError(f"{source} belongs to another run than {folder}/config.json: move it away")
    master.checkpointing = config.gradient_checkpointing
    dtype = getattr(torch, config.dtype)
    reference = load_model(config.model, dtype, device).requires_grad_(False) if config.kl_coef else None
    return Weights(master, compute_copy(master, dtype), reference, optimizer), step


def open_run(config: Config, folder: Path, own: dict, done: int) -> Run:
    """Make the run folder, or cut a resumed one's records back to its checkpoint."""
    if not config.resume:
        runs.new_folder(folder)
    (folder / "checkpoints").mkdir(exist_ok=True)  # better refused now than after some steps
    files = {name: folder / f"{name}.jsonl" for name in ("metrics", "evals", "samples")}
    records = {name: runs.read_records(file, done) for name, file in files.items()}
    metrics, evaluations = records["metrics"], records["evals"]
    if any(m.keys() != metrics[0].keys() or "updates_not_finite" not in m for m in metrics):
        raise ValueError(f"{files['metrics']} is damaged: its lines have not the same entries")
    if sum(e["step"] == done for e in evaluations) == 1 and config.compressor != "full":
        evaluations[:] = [e for e in evaluations if e["step"] < done]  # of the two lines one was never written
    for name in (name for name, file in files.items() if file.exists()):
        runs.write_whole(files[name], runs.as_lines(records[name]))
    runs.write_json(folder / "inputs.json", {name: own[name] for name in runs.PATHS})
    # the last to be written: a run that has it can be resumed
    runs.write_json(folder / "config.json", runs.absolute(asdict(replace(config, resume="", dry_run=False))))
    return Run(folder, done, metrics, evaluations)


def main(argv: list[str] | None = None, reward: Reward | None = None) -> None:
    """The command line. reward: a function (response, answer) -> float in place of the check of the answer."""
    about = "Train a language model on rollouts from a compressed KV cache."
    config, given = runs.parse_config(Config, argv, "train.py", about)
    with runs.one_sentence("train.py"):
        if config.resume:
            config = runs.resumed(Config, given, free)
        elif config.eval_data is None:
            data = Path(config.data)
            beside = data.parent / data.name.replace("-train", "-heldout")
            config = replace(config, eval_data=str(beside) if beside != data and beside.exists() else "")
        device = runs.pick_device(config.device, config.threads)
        inputs = read_inputs(config)
        function = reward or (task.load_reward(config.reward) if config.reward else is_correct)
        print(plan(config, inputs))
        if config.dry_run:
            return
        folder = Path(config.resume or config.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
        own = identity(config, inputs, reward)
        if config.resume:
            runs.check_inputs(folder, own)
        weights, done = load_weights(config, folder, own, device)
        run = open_run(config, folder, own, done)
        print(f"run       {folder}/ from step {done}", flush=True)

    def save() -> None:
        model = {"decoder": weights.master, "optimizer": weights.optimizer, "tokenizer": Path(config.model)}
        runs.save_checkpoint(folder, own, run.done, keep=config.keep, **model)

    advice = f"go on with: python train.py --resume {folder}"
    graded = task.held_to_its_promise(function, config.reward or function.__name__, folder)
    with (
        runs.one_sentence("train.py", (FloatingPointError, task.RewardError)),
        runs.one_sentence("train.py", (OSError, SafetensorError, MemoryError), f". What is saved is whole; {advice}"),
        runs.stop_signals() as stopping,
    ):
        train(config, inputs, weights, graded, run, save, stopping)
    if stopping:
        steps, name = next((step for step, _ in runs.checkpoints(folder)), 0), signal.Signals(stopping[0]).name
        print(f"\ntrain.py: stopped by {name} after step {steps}; {advice}", file=sys.stderr)
        raise SystemExit(128 + stopping[0])


if __name__ == "__main__":
    main()
