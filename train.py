"""Sparse-RL training: `python train.py --budget 512 --compressor snapkv`.

One step: sample G responses to each of P prompts with the compressed cache (logp_sparse), grade them, score them
with the same weights and dense attention (logp_old), then update the weights, dense, with the corrected policy
gradient of grpo.py.

Everything random in step s is drawn from generators seeded by (seed, what for, s), so a run that is resumed from a
checkpoint continues as if it had never stopped.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import random
import signal
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

import grpo
import ranks
import runs
import task
from answers import is_correct
from eval import Inputs, Shared, dense_and_sparse, details, read_inputs
from kvcache import COMPRESSORS
from model import Decoder, ModelConfig, load_model, weight_files
from rollout import Rollout, cache_for, memory, micro_batches, rescore, response_logprobs, rollout_shared
from runs import megabytes, option
from task import ASSETS, Prompt, Reward

LEARNERS = ("dense", "replay")
DENSE_EVERY = 5  # steps: how often a replay run scores densely, to report how far its sampler is from the dense policy


def free(settings: dict) -> set[str]:
    """What a resumed run may change without being another: its length, reports, the places of its inputs, the machine.

    In bfloat16 neither the rows of a rollout, nor the learner's padding, nor the device: they round otherwise.
    """
    names = {"steps", "eval_every", "save_every", "keep", "sample_every", "record_samples", "dry_run", "resume"}
    exact = {"rollout_rows", "micro_tokens", "device"} if settings["dtype"] == "float32" else set()
    return names | exact | {"gradient_checkpointing", "threads", *runs.PATHS}


@dataclass(frozen=True)
class Config(Shared):
    """All settings of a run, with those of `Shared`. The defaults are those of the main job on the bundled model."""

    # What is trained on, and where it goes
    data: str = option(str(ASSETS / "long-train.jsonl"), "training problems, JSONL")
    reward: str = option("", "FILE.py:NAME, a function (response, answer) -> float; default 1 if right, else 0")
    eval_data: str | None = option(None, "held-out problems, '': none; default: -heldout beside a -train file", str)
    out: str = option("", "run folder; default runs/<time>")
    resume: str = option("", "continue the run in this folder from its newest checkpoint, with its settings")
    dry_run: bool = option(False, "print the plan (lengths, memory, whether anything is evicted) and stop")
    # Sampling with the compressed cache
    compressor: str = option("snapkv", "KV policy of the sampler; full is dense GRPO", choices=COMPRESSORS)
    prompts: int = option(8, "prompts a step", at_least=1)
    group_size: int = option(8, "G, responses to each prompt; a group of one would have no advantage", at_least=2)
    temperature: float = option(1.0, "of the sampler and of every log-prob", at_least=1e-3, below=math.inf)
    rollout_rows: int = option(256, "responses sampled at a time: memory against speed", at_least=1)
    # The objective
    learner: str = option("dense", "replay: the learner attends to what the sampler attended to", choices=LEARNERS)
    correction: str = option("sparse-rl", "which corrections apply (grpo.py)", choices=grpo.CORRECTIONS)
    epsilon: float = option(1e-4, "a response with some ratio xi below this is rejected", above=0, below=1)
    xi_cap: float | None = option(None, "truncate the weights xi at this value", float, above=0, at_most=1e30)
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
    micro_tokens: int = option(1024, "padded tokens in one forward and backward pass", at_least=1, at_most=2**31)
    dtype: str = option("float32", "bfloat16 computes in it, over float32 weights", choices=("float32", "bfloat16"))
    gradient_checkpointing: bool = option(False, "keep one activation a layer, compute the others again")
    # Reports
    eval_every: int = option(0, "evaluate after so many steps; 0: before the first and after the last", at_least=0)
    eval_limit: int = option(200, "held-out problems to evaluate on; 0 takes all", at_least=0)
    save_every: int = option(5, "write a checkpoint after every so many steps, and after the last", at_least=1)
    keep: int = option(0, "keep so many checkpoints, the newest; 0 keeps all", at_least=0)
    sample_every: int = option(5, "print one sampled response after every so many steps; 0 never", at_least=0)
    record_samples: int = option(0, "keep tokens and evictions of so many responses a step (smallest xi)", at_least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.prompts % self.updates:
            raise ValueError(f"--updates must divide the {self.prompts} prompts of a step, not {self.updates}")
        if self.learner == "replay" and self.kv_bits:
            raise ValueError("--learner replay sees keys and values as they come, the sampler did not: --kv-bits 0")

    @property
    def dense(self) -> str:
        """What a run is that evicts nothing."""
        return "dense GRPO" + (f", but for rounding to {self.kv_bits} bits" if self.kv_bits else "")

    @property
    def replay(self) -> bool:
        """Whether the learner attends to what the sampler attended to; without eviction that is everything."""
        return self.learner == "replay" and self.compressor != "full"

    @property
    def rows(self) -> int:
        """The responses that are sampled at a time, on each rank."""
        return min(-(-self.prompts // ranks.count()) * self.group_size, max(self.rollout_rows, self.group_size))


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
) -> tuple[dict, list[dict], dict[str, Tensor]]:
    """Sample, grade, score, update. Returns the step's metrics, one record a response, and its `recording`.

    The metrics: those of grpo.py, `Rollout.statistics`, entropy (nats a token, of the policy that gives logp_old),
    tokens (sampled), what `learn` returns, seconds of each part; for a replay run now and then dense_sampler_kl,
    dense_rejected and dense_xi_p01, against the dense policy.
    """
    problems, waited = inputs.prompts["data"], ranks.waited()
    asked = [problems[i] for i in pick_problems(len(problems), config.prompts, step, config.seed)]
    how = config.cache | config.some("group_size", "max_new_tokens", "temperature") | {"rows": config.rollout_rows}
    how |= {"eos_ids": inputs.eos_ids, "generator": generator(config.seed, "rollout", step), "progress": True}
    how |= {"record": config.replay or config.record_samples > 0}
    r = rollout_shared(weights.decoder, [prompt.ids for prompt in asked], **how)
    asked = [prompt for prompt in asked for _ in range(config.group_size)]  # N, the prompt of each response
    texts = [task.response_text(inputs.tokenizer, r.response(i), inputs.eos_ids) for i in range(len(asked))]
    graded = ranks.first(lambda: [reward(text, prompt.answer) for text, prompt in zip(texts, asked, strict=True)])
    rewards = torch.tensor(graded)  # (N,)
    advantages = grpo.group_advantages(rewards, config.group_size, normalize_std=config.normalize_std)  # (N,)

    scoring = time.perf_counter()
    scored, entropy, dense = score(config, weights, r, step)
    logp_old = scored["logp_old"]  # (N, R)

    updating = time.perf_counter()
    corrections, learned = learn(config, weights, r, scored | {"advantages": advantages})
    used = torch.cat([c.weights for c in corrections])  # (N, R)
    ended = time.perf_counter()

    metrics = {
        "step": step + 1,
        **grpo.reward_metrics(rewards, config.group_size),
        **grpo.mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon),
        **dense,
        "entropy": float(entropy[r.mask].nanmean().nan_to_num()),
        **learned,
        "tokens": int(r.response_lengths.sum()),
        **r.statistics,
        "rollout_seconds": r.seconds,
        "scoring_seconds": updating - scoring,
        "update_seconds": ended - updating,
        "waiting_seconds": ranks.mean(ranks.waited() - waited),
    }
    columns = {"reward": rewards, "advantage": advantages, "accepted": torch.cat([c.accepted for c in corrections])}
    records = response_records(asked, texts, r, logp_old, columns)
    recorded = recording(config.record_samples, r, logp_old, entropy, used) if config.record_samples else {}
    return metrics, [{"step": step + 1} | record for record in records], recorded


def response_records(
    asked: list[Prompt], texts: list[str], r: Rollout, logp_old: Tensor, columns: dict[str, Tensor]
) -> list[dict]:
    """A record of each response: prompt, text, answer, these columns (N,), and what r and logp_old (N, R) say of it."""
    known = {"tokens": r.response_lengths, "finished": r.finished, **grpo.extremes(logp_old, r.logp_sparse, r.mask)}
    return [  # with None for what is not finite: JSON has no word for it
        {"prompt": prompt.text, "response": text, "answer": prompt.answer}
        | {name: column[i].item() if column[i].isfinite() else None for name, column in (columns | known).items()}
        for i, (prompt, text) in enumerate(zip(asked, texts, strict=True))
    ]


def score(
    config: Config, weights: Weights, r: Rollout, step: int
) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
    """logp_old and, with a KL, logp_ref by name, and the entropies, (N, R) each, all under the learner's attention.

    And what is reported of the dense policy, now and then, in a replay run, where logp_old is the sampler's own.
    """
    logp_old, entropy = rescore(weights.decoder, r, config.micro_tokens, replay=config.replay)
    scored, dense = {"logp_old": logp_old}, {}
    if weights.reference:
        scored["logp_ref"], _ = rescore(weights.reference, r, config.micro_tokens, replay=config.replay)
    if config.replay and step % DENSE_EVERY == 0:
        logp_dense, _ = rescore(weights.decoder, r, config.micro_tokens, replay=False)
        found = grpo.mismatch_metrics(logp_dense, r.logp_sparse, r.mask, config.epsilon)
        dense = {f"dense_{name}": found[name] for name in ("sampler_kl", "rejected", "xi_p01")}
    return scored, entropy, dense


def correction(config: Config, r: Rollout, logp_old: Tensor, rows: Tensor) -> grpo.Correction:
    """The correction of an update on these rows (n,)."""
    how = config.some("correction", "epsilon", "xi_cap", "aggregation") | {"max_length": config.max_new_tokens}
    return grpo.correct(logp_old[rows], r.logp_sparse[rows], r.mask[rows], **how)


def recording(n: int, r: Rollout, logp_old: Tensor, entropy: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What --record-samples keeps of a step, for experiments/look.py: the n responses of smallest xi.

    rows (n,): which they are; tokens (n, T); prompt_lengths, response_lengths (n,); logp_sparse, logp_old, entropy and
    weights (xi as it was used) (n, R); evicted_at (n, L, K, T), see KVCache.record.
    """
    xi_min = grpo.extremes(logp_old, r.logp_sparse, r.mask)["xi_min"].nan_to_num(0)  # (N,)
    rows = xi_min.argsort(stable=True)[:n].sort().values  # (n,)
    T, R = int(r.lengths[rows].max()), int(r.response_lengths[rows].max())
    each = {"logp_sparse": r.logp_sparse, "logp_old": logp_old, "entropy": entropy, "weights": weights}
    kept = {name: values[rows, :R] for name, values in each.items()}
    kept |= {"prompt_lengths": r.prompt_lengths[rows], "response_lengths": r.response_lengths[rows]}
    evicted_at = torch.stack([layer[rows, :, :T] for layer in r.evicted_at], dim=1)  # (n, L, K, T)
    return {"rows": rows, "tokens": r.tokens[rows, :T].int(), "evicted_at": evicted_at, **kept}


def learn(
    config: Config, weights: Weights, r: Rollout, scored: dict[str, Tensor]
) -> tuple[list[grpo.Correction], dict[str, float]]:
    """The updates of a step: the correction of each, and means over those that were made (0 where none was)."""
    shares = torch.arange(len(r.tokens)).chunk(config.updates)
    corrections, reports = zip(*(update(config, weights, r, scored, rows) for rows in shares), strict=True)
    made = [report for report in reports if "grad_norm" in report]
    names = ("policy_loss", "kl_ref", "clip_low", "clip_high", "clamped", "grad_norm")
    means = {name: sum(report[name] for report in made) / max(1, len(made)) for name in names}
    counts = {name: sum(name in report for report in reports) for name in ("updates_skipped", "updates_not_finite")}
    return corrections, means | counts


def update(
    config: Config, weights: Weights, r: Rollout, scored: dict[str, Tensor], rows: Tensor
) -> tuple[grpo.Correction, dict[str, float]]:
    """One optimizer update on these rows (n,) of the rollout and of what was scored: their correction, and metrics.

    The metrics are "updates_skipped" where nothing would teach, "updates_not_finite" where loss or gradient are not.
    """
    device = weights.decoder.embed_tokens.weight.device
    c = correction(config, r, scored["logp_old"], rows)
    teaching = grpo.teaches(scored["advantages"][rows], c)  # (n,)
    if not teaching.any():
        return c, {"updates_skipped": 1}
    # the others count below the line, but nothing needs to be computed for them
    needed = (c.accepted if config.kl_coef else teaching).nonzero()[:, 0]
    weights.optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    shares = [list(micro_batches(s, r.lengths[rows], config.micro_tokens)) for s in ranks.deal(needed, r.lengths[rows])]
    for part, counts in tqdm(ranks.in_step(shares), desc="update", leave=False):
        (logp,) = response_logprobs(weights.decoder, r, rows[part], replay=config.replay)  # (b, R), with gradient
        given = {name: x[rows[part]].to(device) for name, x in scored.items()}
        how = {"clip": (config.clip_low, config.clip_high), "kl_coef": config.kl_coef}
        loss, metrics = grpo.surrogate_loss(logp, c[part].to(device), **given, **how)
        (counts * loss).backward()
        sums = {name: sums.get(name, 0) + counts * value for name, value in metrics.items()}
    sums = {name: ranks.total(value) for name, value in sums.items()}
    norm = ranks.full(torch.nn.utils.clip_grad_norm_(weights.master.parameters(), config.max_grad_norm))
    if not all(value.isfinite() for value in (norm, *sums.values())):
        return c, {"updates_not_finite": 1}
    for group in weights.optimizer.param_groups:
        # AdamW's step does not shrink with its gradient: a step with many rejections would be as long as any other
        group["lr"] = config.lr * (float(c.accepted.float().mean()) if config.scale_step else 1)
    weights.optimizer.step()
    if weights.decoder is not weights.master:
        weights.decoder.load_state_dict(weights.master.state_dict())  # rounded to the copy's dtype
    return c, {"grad_norm": float(norm)} | {name: float(sums[name]) for name in sums}


def compute_copy(master: Decoder, dtype: torch.dtype) -> Decoder:
    """The decoder that computes in `dtype` for fp32 weights: the master itself, or a copy that hands over gradients.

    A bf16 weight of 0.02 does not feel a change of 1e-6: gradients are summed, and weights moved, in fp32.
    """
    if dtype == torch.float32 or ranks.count() > 1:  # of several, each puts the weights together in `dtype`
        return master
    decoder = copy.deepcopy(master).to(dtype)
    for parameter, original in zip(decoder.parameters(), master.parameters(), strict=True):

        def hand_over(p: Tensor, original: Tensor = original) -> None:
            original.grad = p.grad.float() if original.grad is None else original.grad.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(hand_over)
    return decoder


# ---------------------------------------------------------------------------------------------------- the loop


def train(
    config: Config, inputs: Inputs, weights: Weights, reward: Reward, folder: Path, done: int, stopping: list[int]
) -> None:
    """The loop, from step `done` on, until it ends or a signal has come (`stop_signals`)."""
    state = {"decoder": weights.master, "optimizer": weights.optimizer, "start": Path(config.model)}
    save = functools.partial(runs.save_checkpoint, folder, keep=config.keep, **state)
    evaluate_if_due(config, inputs, weights, folder, done)  # before the first step, or left out by a kill
    bar = tqdm(range(done, config.steps), desc="training", initial=done, total=config.steps, unit="step")
    for step in bar:
        if ranks.agree(stopping):
            break
        metrics, records, recorded = train_step(config, inputs, weights, reward, step)
        if recorded:
            runs.write_whole(folder / runs.RECORDED.format(step + 1), recorded)
        runs.append(folder / "samples.jsonl", records)
        runs.append(folder / "metrics.jsonl", [metrics])
        done, last = step + 1, step + 1 == config.steps
        bar.set_postfix({name: f"{metrics[name]:.3f}" for name in ("reward_mean", "rejected", "kv_saved")})
        if config.sample_every and (step % config.sample_every == 0 or last):
            shown = "\nstep {step}, reward {reward:g} (answer {answer}):\n{prompt}{response}\n"
            tqdm.write(shown.format(**records[0]))
        if metrics["updates_not_finite"]:
            ranks.first(functools.partial(complain, folder, done, records))
        if done % config.save_every == 0 or last:
            save(step=done)
        if not ranks.agree(stopping):
            evaluate_if_due(config, inputs, weights, folder, done)
    if ranks.first(lambda: done not in {0, *dict(runs.checkpoints(folder))}):  # stopped between two checkpoints
        save(step=done)
    if not stopping:
        ranks.first(lambda: print("\n" + summary(config, folder)))


def evaluate_if_due(config: Config, inputs: Inputs, weights: Weights, folder: Path, done: int) -> None:
    """Add the greedy accuracy on the held-out problems, dense and with the run's compressor, to evals.jsonl."""
    due = done in (0, config.steps) or (config.eval_every > 0 and done % config.eval_every == 0)
    if not due or not (held_out := inputs.prompts["eval_data"]):
        return
    evaluations = ranks.first(lambda: runs.read_records(folder / "evals.jsonl"))
    if any(e["step"] == done for e in evaluations):
        return
    how = config.cache | {"rows": config.rollout_rows, "max_new_tokens": config.max_new_tokens, "temperature": 0.0}
    found = dense_and_sparse(weights.decoder, inputs.tokenizer, inputs.eos_ids, held_out, progress=True, **how)
    results = [{"step": done, "decoding": name, **result} for name, (result, _) in found.items()]
    runs.write_whole(folder / "evals.jsonl", runs.as_lines(evaluations + results))  # all lines of a step, or none
    tqdm.write(f"step {done}: greedy " + ", ".join(f"{e['decoding']} {e['accuracy']:.3f}" for e in results))


def complain(folder: Path, done: int, records: list[dict]) -> None:
    """Say what to look at after an update that was not applied; FloatingPointError after three such steps."""
    last = runs.read_records(folder / "metrics.jsonl")[-3:]
    worst = max(records, key=lambda r: math.inf if None in (r["xi_max"], r["logp_min"]) else r["xi_max"])
    shown = "largest xi {xi_max}, smallest log-prob {logp_min} (None: not finite)".format(**worst)
    said = f"step {done}: {last[-1]['updates_not_finite']} update(s) left out, loss or gradient not finite"
    tqdm.write(f"{said}. Look at its response {records.index(worst)}: {shown}")
    if len(last) == 3 and all(m["updates_not_finite"] for m in last):
        raise FloatingPointError(
            f"loss or gradient were not finite for three steps (see above and {folder}/samples.jsonl); the weights are "
            f"those before them. Start a new run from {folder}/checkpoints, with a smaller --lr or --xi-cap"
        )


def summary(config: Config, folder: Path) -> str:
    """The tables at the end of a run."""
    metrics, evaluations = (runs.read_records(folder / f"{name}.jsonl") for name in ("metrics", "evals"))
    lines = []
    for step in (0, config.steps):
        if found := {e["decoding"]: e for e in evaluations if e["step"] == step}:
            problems = f"{found['dense']['problems']} held-out problems of {config.eval_data}"
            lines += [f"step {step}, greedy decoding of {problems}", details(found), ""]
    mean = {name: statistics.fmean(m[name] for m in metrics if name in m) for name in metrics[0]}
    if config.compressor != "full" and mean["kv_saved"] == 0:
        lines.append(f"nothing was evicted, so this was {config.dense}: lower --budget or --buffer")
    seconds = {name: len(metrics) * mean[f"{name}_seconds"] for name in ("rollout", "scoring", "update")}
    cache, dense = (megabytes(max(m[name] for m in metrics)) for name in ("cache_bytes", "dense_bytes"))
    against_dense = "against the dense policy: sampler KL {dense_sampler_kl:.4f}, rejected {dense_rejected:.1%}"
    lines += [
        f"means of {len(metrics)} steps: "
        "reward {reward_mean:.3f}, groups without signal {groups_without_signal:.1%}, rejected {rejected:.1%}, "
        "truncated {truncated:.1%}, kv saved {kv_saved:.1%}, sampler KL {sampler_kl:.4f}".format(**mean),
        *([against_dense.format(**mean)] if "dense_sampler_kl" in mean else []),
        f"rollout cache {cache}, dense keys and values would take {dense}",
        "time " + ", ".join(f"{name} {s:.0f} s ({s / sum(seconds.values()):.0%})" for name, s in seconds.items()),
        f"in {folder}/: {', '.join(sorted(path.name for path in folder.iterdir()))}",
        f"to look at it: python experiments/look.py {folder}",
    ]
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------- before the loop


def plan(config: Config, inputs: Inputs) -> str:
    """What a step will hold and do, before any weights are loaded."""
    lengths, held_out = [len(prompt.ids) for prompt in inputs.prompts["data"]], len(inputs.prompts["eval_data"])
    longest, most = max(lengths) + config.max_new_tokens, config.prompts * config.group_size * config.max_new_tokens
    how = config.some("micro_tokens", "gradient_checkpointing", "kl_coef", "replay")
    how |= {"dtype": getattr(torch, config.dtype), "devices": ranks.count()}
    need = memory(inputs.model, config.cache, config.rows, longest, **how)
    parameters, cache, dense = (need.pop(name) for name in ("parameters", "cache", "dense cache"))
    learner = f"{config.learner} is dense here: nothing is evicted" if config.compressor == "full" else config.learner
    lines = [
        f"model     {config.model}: {parameters:,} parameters, {config.dtype}",
        "memory    " + ", ".join(f"{name} {megabytes(size)}" for name, size in need.items() if size) + " (estimates)",
        *[f"ranks     {n}; memory, and below the KV cache, are those of each" for n in [ranks.count()] if n > 1],
        f"problems  {len(lengths)} in {config.data}, prompts of {min(lengths)} to {max(lengths)} tokens",
        f"held out  {held_out or 'none'} in {config.eval_data or 'no file, so nothing is evaluated (see --eval-data)'}",
        f"step      {config.prompts} prompts x {config.group_size} responses of at most {config.max_new_tokens} tokens "
        f"({most:,} in all), {config.updates} update(s); {config.steps} steps",
        f"KV cache  {config.compressor} {megabytes(cache)}, dense {megabytes(dense)} ({config.rows} rows at once)",
        f"eviction  {eviction(config, inputs.model, longest)}",
        f"learner   {learner}",
    ]
    return "\n".join(lines)


def eviction(config: Config, model: ModelConfig, longest: int) -> str:
    """When rows of at most `longest` tokens are cut, and to what."""
    if config.compressor == "full":
        return f"none: compressor full is {config.dense}"
    layers = cache_for(model, 1, longest, **config.cache, device="meta").layers
    budgets, slots = ([getattr(layer, name) for layer in layers] for name in ("budget", "slots"))
    if longest <= min(slots):  # the last token sampled is never cached
        return (
            f"NEVER: a row holds at most {longest - 1} keys and is cut at budget + buffer = {min(slots)}, so this run "
            f"is {config.dense}. Lower --budget or --buffer, or raise --max-new-tokens"
        )
    keys, full = (" to ".join(map(str, sorted({min(x), max(x)}))) for x in (budgets, slots))
    return f"a row is cut to {keys} keys whenever it holds budget + buffer = {full}"


def fingerprints(config: Config, inputs: Inputs, reward: Reward | None) -> dict[str, str]:
    """Hashes of what a run reads, by option. A reward that was passed is known by its source, not by its file."""
    folder, (file, _, function) = Path(config.model), config.reward.rpartition(":")
    try:
        source = [inspect.getsource(reward)] if reward else [Path(file), function] if function else []
    except (OSError, TypeError):
        raise ValueError(f"no source is to be had of the reward {reward!r}: pass a function of a file") from None
    return {
        "model": runs.fingerprint(folder / "config.json", *weight_files(folder), inputs.eos_ids),
        **{name: runs.fingerprint([[p.ids, p.answer] for p in asked]) for name, asked in inputs.prompts.items()},
        "reward": runs.fingerprint(*source),
    }


def load_weights(config: Config, folder: Path, device: torch.device) -> tuple[Weights, int]:
    """The weights and the steps done: of a resumed run's newest checkpoint, else of the start.

    ValueError for a checkpoint that cannot be read: whoever moves it away goes on from the one before it.
    """
    (step, source), *before = [*(runs.checkpoints(folder) if config.resume else []), (0, Path(config.model))]
    dtype = getattr(torch, config.dtype)
    try:
        master = ranks.place(load_model(source), dtype, device)
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        optimizer = torch.optim.AdamW(master.parameters(), config.lr, betas, weight_decay=decay)
        if step:
            runs.load_optimizer(optimizer, master, source)
    except (ValueError, OSError) as error:
        remedy = f"; if {source} is damaged, move it away, and the run goes on from step {before[0][0]}" if step else ""
        raise ValueError(f"{error}{remedy}") from None
    master.checkpointing = config.gradient_checkpointing
    reference = ranks.place(load_model(config.model, dtype), dtype, device) if config.kl_coef else None
    return Weights(master, compute_copy(master, dtype), reference, optimizer), step


def open_run(config: Config, folder: Path, hashes: dict[str, str], done: int) -> None:
    """Make the run folder, or cut a resumed one's records back. config.json comes last: who has it can be resumed."""
    if not config.resume:
        runs.new_folder(folder)
    records = {
        file: runs.read_records(folder / file, done) for file in ("metrics.jsonl", "evals.jsonl", "samples.jsonl")
    }
    for file, kept in records.items():
        runs.write_whole(folder / file, runs.as_lines(kept))
    for file in folder.glob("recorded/*"):
        if file > folder / runs.RECORDED.format(done):
            file.unlink(missing_ok=True)  # another rank may have been faster
    runs.write_json(folder / "inputs.json", hashes)
    runs.write_json(folder / "config.json", runs.absolute(asdict(replace(config, resume="", dry_run=False))))


@ranks.joined()
def main(argv: list[str] | None = None, reward: Reward | None = None) -> None:
    """The command line. reward: a function (response, answer) -> float in place of the check of the answer."""
    config, given = runs.parse_config(Config, argv, "train.py", "Train on rollouts from a compressed KV cache.")
    with runs.one_sentence("train.py"):
        if config.resume:
            config = runs.resumed(Config, given, free)
        elif config.eval_data is None:
            data = Path(config.data)
            beside = data.parent / data.name.replace("-train", "-heldout")
            config = replace(config, eval_data=str(beside) if beside != data and beside.exists() else "")
        device = runs.pick_device(config.device, config.threads)
        inputs = read_inputs(config, {"data": (config.data, 0), "eval_data": (config.eval_data, config.eval_limit)})
        function = reward or (task.load_reward(config.reward) if config.reward else is_correct)
        print(plan(config, inputs))
        if config.dry_run:
            return
        folder = ranks.first(lambda: Path(config.resume or config.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}"))
        hashes = fingerprints(config, inputs, reward)
        if config.resume:
            runs.check_inputs(folder, hashes)
        weights, done = load_weights(config, folder, device)
        open_run(config, folder, hashes, done)
        print(f"run       {folder}/ from step {done}", flush=True)
    advice = f"go on with: python train.py --resume {folder}"
    graded = task.held_to_its_promise(function, config.reward or function.__name__, folder)
    with (
        runs.one_sentence("train.py", (FloatingPointError, task.RewardError)),
        runs.one_sentence("train.py", (OSError, SafetensorError), f". What is saved is whole; {advice}"),
        runs.stop_signals() as stopping,
    ):
        train(config, inputs, weights, graded, folder, done, stopping)
    if stopping:
        steps, name = next((step for step, _ in runs.checkpoints(folder)), 0), signal.Signals(stopping[0]).name
        ranks.last_words(f"\ntrain.py: stopped by {name} after step {steps}; {advice}")
        raise SystemExit(128 + stopping[0])


if __name__ == "__main__":
    main()
