"""Sparse-RL training: `python train.py --budget 512 --compressor snapkv`.

One step: sample G responses to each of P prompts with the compressed cache (logp_sparse), grade them, score them
with the same weights and dense attention (logp_old), then update the weights, dense, with the corrected policy
gradient of grpo.py.

Everything random in step s is drawn from generators seeded by (seed, what for, s), so a run that is resumed from a
checkpoint continues as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from eval import MAX_PROMPT, TEMPLATE, beyond_context, check_template, dense_and_sparse, sample_responses
from grpo import (
    AGGREGATIONS,
    CORRECTIONS,
    correct,
    group_advantages,
    log_ratio,
    mismatch_metrics,
    policy_loss,
    response_logprobs,
    reward_metrics,
    teaches,
)
from kvcache import COMPRESSORS, check_settings
from model import Decoder, ModelConfig, load_config, load_model, read_json, save_model
from rollout import Rollout, cache_for
from runs import (
    LONGEST,
    append,
    as_lines,
    check_options,
    flag,
    megabytes,
    new_folder,
    one_sentence,
    option,
    parse_config,
    pick_device,
    plus_minus,
    table,
    write_json,
    write_whole,
)
from task import ASSETS, Problem, is_correct, load_problems, load_tokenizer, render, usable

# What a resumed run may change, because it does not change the experiment: its length, its reports, and how the
# machine is used.
FREE = (
    *("steps", "eval_every", "save_every", "keep", "sample_every", "dry_run", "resume"),
    *("rollout_rows", "micro_tokens", "gradient_checkpointing", "threads", "device"),
)


@dataclass(frozen=True)
class Config:
    """All settings of a run. The defaults are those of the main job on the bundled model."""

    # What is trained, on what, and where it goes
    model: str = option(str(ASSETS / "model"), "Hugging Face folder to start from")
    data: str = option(str(ASSETS / "long-train.jsonl"), "training problems, JSONL")
    template: str = option("auto", TEMPLATE)
    max_prompt_tokens: int = option(0, MAX_PROMPT, at_least=0)
    eval_data: str | None = option(
        None, "held-out problems, '' for none; by default the -heldout file beside a -train file, if there is one"
    )
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
    max_new_tokens: int = option(
        1000, "longest response; what is longer is graded as it stands and counted", at_least=1
    )
    temperature: float = option(
        1.0, "of the sampler and of every log-prob; training has no top-p or top-k", at_least=1e-3, below=math.inf
    )
    rollout_rows: int = option(
        256, "responses sampled at a time (at least a group); costs memory, changes no result", at_least=1
    )
    # The objective
    correction: str = option("sparse-rl", "which corrections apply (grpo.py)", choices=CORRECTIONS)
    epsilon: float = option(1e-4, "a response with some ratio xi below this is rejected", above=0, below=1)
    xi_cap: float | None = option(None, "truncate the weights xi at this value", above=0, at_most=1e30)
    clip_low: float = option(0.2, "the staleness ratio is clipped below at 1 - this", at_least=0, below=1)
    clip_high: float = option(0.2, "and above at 1 + this", at_least=0, at_most=1e30)
    kl_coef: float = option(
        0.0, "beta, weight of the KL to the starting weights; 0 loads no reference", at_least=0, below=math.inf
    )
    aggregation: str = option(
        "response", "mean per response (GRPO), token (DAPO), constant (Dr. GRPO)", choices=AGGREGATIONS
    )
    normalize_std: bool = option(True, "divide advantages by the group's std")
    scale_step: bool = option(
        False, "the learning rate times the share of accepted responses: AdamW's step does not shrink with its gradient"
    )
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
    eval_every: int = option(
        0, "evaluate after every so many steps; 0 only before the first and after the last", at_least=0
    )
    eval_limit: int = option(200, "held-out problems to evaluate on; 0 takes all", at_least=0)
    save_every: int = option(5, "write a checkpoint after every so many steps, and after the last", at_least=1)
    keep: int = option(0, "keep so many checkpoints, the newest; 0 keeps all", at_least=0)
    sample_every: int = option(5, "print one sampled response after every so many steps; 0 never", at_least=0)
    # The machine
    seed: int = option(0, "of everything random", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")
    dtype: str = option(
        "float32", "bfloat16 computes in it, over float32 weights and optimizer state", choices=("float32", "bfloat16")
    )
    gradient_checkpointing: bool = option(False, "keep one activation a layer, compute the others again: saves memory")

    def __post_init__(self):
        check_options(self)
        check_template(self.template)
        check_settings(self.compressor, self.budget, self.buffer, self.window)
        if self.prompts % self.updates:
            raise ValueError(f"--updates must divide the {self.prompts} prompts of a step, not {self.updates}")
        if self.prompts * self.group_size > LONGEST:
            raise ValueError(f"--prompts times --group-size must be at most {LONGEST:,} responses a step")

    @property
    def cache(self) -> dict:
        """The settings of the sampler's cache."""
        return {name: getattr(self, name) for name in ("compressor", "budget", "buffer", "window")}

    @property
    def rows_at_once(self) -> int:
        """The responses that are sampled at a time."""
        return min(self.prompts * self.group_size, max(self.rollout_rows, self.group_size))


@dataclass(frozen=True)
class Inputs:
    """What a run reads before it loads any weights."""

    model: ModelConfig
    tokenizer: Tokenizer
    eos_ids: list[int]
    problems: list[Problem]
    prompts: list[list[int]]  # token ids, one list a problem
    held_out: list[Problem]


@dataclass
class Job:
    """A run with everything it needs loaded."""

    config: Config
    inputs: Inputs
    folder: Path
    start: int  # steps done when it was loaded
    master: Decoder  # fp32; the optimizer moves it and checkpoints hold it
    decoder: Decoder  # samples, scores and learns, in --dtype; for float32 the master itself
    reference: Decoder | None  # the starting weights, if the KL is on
    optimizer: torch.optim.Optimizer
    whole: int | None  # finished steps that the master and the records hold; None from a step's first update to its end


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


def micro_batches(rows: Tensor, lengths: Tensor, micro_tokens: int) -> Iterator[Tensor]:
    """Split rows into batches of similar length with at most micro_tokens padded tokens (or a single row)."""
    batch: list[int] = []
    for row in rows[lengths[rows].argsort(descending=True, stable=True)].tolist():
        if batch and (len(batch) + 1) * int(lengths[batch[0]]) > micro_tokens:
            yield torch.tensor(batch)
            batch = []
        batch.append(row)
    yield torch.tensor(batch)


def dense_logprobs(decoder: Decoder, r: Rollout, rows: Tensor, **settings) -> tuple[Tensor, ...]:
    """`response_logprobs` (rows, R) of these responses, on the decoder's device."""
    device = decoder.embed_tokens.weight.device
    lengths = r.prompt_lengths + r.response_lengths
    tokens = r.tokens[rows, : int(lengths[rows].max())].to(device)
    return response_logprobs(decoder, tokens, r.prompt_lengths[rows].to(device), r.mask[rows].to(device), **settings)


@torch.no_grad()
def score(decoder: Decoder, r: Rollout, config: Config) -> tuple[Tensor, Tensor]:
    """logp_old (or logp_ref) and entropy (N, R) on the CPU, without gradient."""
    logp, entropy = torch.zeros_like(r.logp_sparse), torch.zeros_like(r.logp_sparse)
    lengths = r.prompt_lengths + r.response_lengths
    batches = list(micro_batches(torch.arange(len(r.tokens)), lengths, config.micro_tokens))
    for rows in tqdm(batches, desc="scoring", leave=False):
        both = dense_logprobs(decoder, r, rows, temperature=config.temperature, entropy=True)
        logp[rows], entropy[rows] = (x.cpu() for x in both)
    return logp, entropy


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


def update(
    job: Job, r: Rollout, rows: Tensor, advantages: Tensor, logp_old: Tensor, logp_ref: Tensor | None
) -> dict[str, float]:
    """One optimizer update on these rows of the rollout.

    Not made where nothing would teach ("skipped"), or where loss or gradient are not finite ("not_finite").
    """
    config, device = job.config, job.decoder.embed_tokens.weight.device
    how = {"correction": config.correction, "epsilon": config.epsilon, "xi_cap": config.xi_cap}
    c = correct(logp_old[rows], r.logp_sparse[rows], r.mask[rows], **how)
    teaching = teaches(advantages[rows], c)
    if not teaching.any():
        return {"skipped": 1, "not_finite": 0}
    # the others count below the line, but nothing needs to be computed for them
    needed = rows[c.accepted if config.kl_coef else teaching]
    job.optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    batches = list(micro_batches(needed, r.prompt_lengths + r.response_lengths, config.micro_tokens))
    for batch in tqdm(batches, desc="update", leave=False):
        (logp,) = dense_logprobs(job.decoder, r, batch, temperature=config.temperature)
        given = (logp_old, r.logp_sparse, advantages, r.mask)
        loss, metrics = policy_loss(
            logp,
            *(x[batch].to(device) for x in given),
            logp_ref=None if logp_ref is None else logp_ref[batch].to(device),
            **how,
            clip=(config.clip_low, config.clip_high),
            kl_coef=config.kl_coef,
            aggregation=config.aggregation,
            max_length=config.max_new_tokens,
            total=len(rows),
            total_tokens=int(r.mask[rows].sum()),
            weight_mean=float(c.weight_mean),
        )
        loss.backward()
        for name, value in metrics.items():  # each micro-batch has its share of the update's value
            sums[name] = sums.get(name, 0) + value
    norm = torch.nn.utils.clip_grad_norm_(job.master.parameters(), config.max_grad_norm)
    if not all(value.isfinite() for value in (norm, *sums.values())):
        return {"skipped": 0, "not_finite": 1}
    job.whole = None
    for group in job.optimizer.param_groups:
        group["lr"] = config.lr * (float(c.accepted.float().mean()) if config.scale_step else 1)
    job.optimizer.step()
    follow(job.decoder, job.master)
    report = {name: float(value) for name, value in sums.items()}
    return {"skipped": 0, "not_finite": 0, "grad_norm": float(norm)} | report


def train_step(job: Job, step: int) -> tuple[dict[str, float], list[dict]]:
    """Sample, grade, score, update. Returns the step's metrics and one record a response."""
    config, inputs = job.config, job.inputs
    chosen = pick_problems(len(inputs.problems), config.prompts, step, config.seed)
    r = sample_responses(
        job.decoder,
        [inputs.prompts[i] for i in chosen],
        group_size=config.group_size,
        rows=config.rollout_rows,
        max_new_tokens=config.max_new_tokens,
        eos_ids=inputs.eos_ids,
        temperature=config.temperature,
        **config.cache,
        generator=generator(config.seed, "rollout", step),
        progress=True,
    )
    owners = [inputs.problems[i] for i in chosen for _ in range(config.group_size)]
    texts = [inputs.tokenizer.decode(r.response(i)) for i in range(len(owners))]
    rewards = torch.tensor([float(is_correct(text, p.answer)) for text, p in zip(texts, owners, strict=True)])
    advantages = group_advantages(rewards, config.group_size, normalize_std=config.normalize_std)

    scoring = time.perf_counter()
    logp_old, entropy = score(job.decoder, r, config)
    logp_ref = score(job.reference, r, config)[0] if job.reference else None
    updating = time.perf_counter()
    parts = torch.arange(len(owners)).chunk(config.updates)
    reports = [update(job, r, rows, advantages, logp_old, logp_ref) for rows in parts]
    ended = time.perf_counter()

    done = [report for report in reports if not report["skipped"] and not report["not_finite"]]
    names = ("policy_loss", "kl_ref", "clip_low", "clip_high", "clamped", "grad_norm")
    metrics = {
        "step": step + 1,
        **reward_metrics(rewards, config.group_size),
        **mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon),
        "entropy": float(entropy[r.mask].nanmean().nan_to_num()),
        **{name: sum(report[name] for report in done) / max(1, len(done)) for name in names},
        "updates_skipped": sum(report["skipped"] for report in reports),
        "updates_not_finite": sum(report["not_finite"] for report in reports),
        "response_length": float(r.response_lengths.double().mean()),
        "truncated": 1 - float(r.finished.double().mean()),
        "tokens": int(r.response_lengths.sum()),
        "kv_saved": r.kv_saved,
        "cache_bytes": sum(r.cache_bytes.values()),
        "dense_bytes": r.dense_bytes,
        "rollout_seconds": r.seconds,
        "scoring_seconds": updating - scoring,
        "update_seconds": ended - updating,
        "tokens_per_second": r.tokens_per_second,
    }
    accepted = correct(logp_old, r.logp_sparse, r.mask, config.correction, epsilon=config.epsilon).accepted
    log_xi = log_ratio(logp_old, r.logp_sparse, r.mask)  # (N, R)
    low, high = (log_xi.masked_fill(~r.mask, beyond) for beyond in (math.inf, -math.inf))  # padding is no extreme
    extremes = {"xi_min": low.amin(1).exp(), "xi_max": high.amax(1).exp(), "logp_min": logp_old.amin(1)}  # (N,)
    records = [
        {
            "step": step + 1,
            "prompt": render(owners[i].prompt, inputs.tokenizer, config.template),
            "response": texts[i],
            "answer": owners[i].answer,
            "reward": float(rewards[i]),
            "advantage": float(advantages[i]),
            "accepted": bool(accepted[i]),
            "tokens": int(r.response_lengths[i]),
            "finished": bool(r.finished[i]),
            **{name: number_or_none(values[i]) for name, values in extremes.items()},
        }
        for i in range(len(owners))
    ]
    return metrics, records


def number_or_none(value: Tensor) -> float | None:
    """A float for JSON, which has no words for what is not finite."""
    return float(value) if value.isfinite() else None


# ------------------------------------------------------------------------------------------------- checkpoints


TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("generation_config.json", "chat_template*", "*.jinja"),
)


def absolute(settings: dict) -> dict:
    """Settings whose model and data are found from any working directory."""
    return {
        name: os.path.abspath(value) if name in ("model", "data", "eval_data") and value else value
        for name, value in settings.items()
    }


def experiment(config: Config) -> dict:
    """The settings that a resumed run may not change."""
    return absolute({name: value for name, value in asdict(config).items() if name not in FREE})


def save_checkpoint(job: Job, step: int) -> None:
    """Write checkpoints/step-NNNNNN, a Hugging Face folder plus the optimizer's state; complete or not there."""
    final = job.folder / "checkpoints" / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_model(job.master, partial)
        for pattern in TOKENIZER_FILES:
            for file in Path(job.config.model).glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
        names = [name for name, _ in job.master.named_parameters()]
        state = job.optimizer.state_dict()["state"]  # {index: {"step", "exp_avg", "exp_avg_sq"}}
        save_file(
            {f"{names[i]}.{key}": value for i, entry in state.items() for key, value in entry.items()},
            partial / "optimizer.safetensors",
        )
        write_json(partial / "training.json", {"step": step, "settings": experiment(job.config)})
    except (OSError, SafetensorError):
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its space back
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for _, old in checkpoints(job.folder)[job.config.keep :] if job.config.keep else []:
        shutil.rmtree(old, ignore_errors=True)


def load_optimizer(optimizer: torch.optim.Optimizer, decoder: Decoder, folder: Path) -> None:
    """Put back the state that `save_checkpoint` wrote. ValueError if it is not that of this decoder."""
    file = folder / "optimizer.safetensors"
    parameters = dict(decoder.named_parameters())
    state: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    try:
        for name, value in load_file(file).items():
            parameter, _, key = name.rpartition(".")
            if value.shape != (() if key == "step" else parameters[parameter].shape):
                raise ValueError(f"{name} has shape {tuple(value.shape)}")
            if not value.is_floating_point() or not value.isfinite().all() or (key != "exp_avg" and value.min() < 0):
                raise ValueError(f"{name} holds values that AdamW never has")
            state[parameter][key] = value
        if any(entry and entry.keys() != {"step", "exp_avg", "exp_avg_sq"} for entry in state.values()):
            raise ValueError("a parameter has other entries than step, exp_avg and exp_avg_sq")
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        raise ValueError(f"{file} is not this run's optimizer state ({error})") from None
    entries = {i: entry for i, entry in enumerate(state.values()) if entry}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": entries})


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints of a run, the newest first."""
    steps = {path.name.removeprefix("step-"): path for path in run.glob("checkpoints/step-*")}
    return sorted(((int(step), path) for step, path in steps.items() if step.isdecimal()), reverse=True)


def resumed(config: Config, given: dict) -> Config:
    """The stored settings of the run to resume, with those of `given` that may change; ValueError shows the others."""
    file = Path(config.resume) / "config.json"
    settings = read_json(file)
    if odd := sorted(settings.keys() ^ {f.name for f in fields(Config)}):
        what = "has no" if odd[0] not in settings else "has an unknown"
        raise ValueError(f"{file} {what} {odd[0]!r}: name a run folder of train.py with --resume")
    try:
        stored = Config(**settings)
    except ValueError as error:
        raise ValueError(f"{file} cannot be resumed: {error}") from None
    changed = [
        f"{flag(name)} {getattr(stored, name)} -> {value}"
        for name, value in given.items()
        if name not in FREE and value != getattr(stored, name)
    ]
    if changed:
        raise ValueError(
            f"--resume {config.resume} cannot change the experiment ({', '.join(changed)}): start a new run for it"
        )
    return replace(stored, **{name: value for name, value in given.items() if name in FREE})


def read_lines(path: Path, last_step: int) -> list[dict]:
    """The records of a JSONL file up to a step. Later ones are left out: a resumed run writes them anew.

    So is a last line that a killed run did not finish; ValueError names any other line that is damaged.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")  # what stands behind the last newline was never finished
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["step"] <= last_step:
                records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path}, line {number} is damaged: the run cannot be resumed with it") from None
    return records


# ---------------------------------------------------------------------------------------------------- the job


def read(config: Config) -> Inputs:
    """Read and check all but the weights, write nothing. Raises ValueError or OSError in a sentence for the user."""
    model = load_config(config.model)
    tokenizer, eos_ids = load_tokenizer(config.model)
    limits = {"template": config.template, "max_prompt_tokens": config.max_prompt_tokens}
    problems, prompts = usable(load_problems(config.data), tokenizer, model.vocab_size, **limits)
    held_out = []
    if config.eval_data:
        held_out, _ = usable(load_problems(config.eval_data), tokenizer, model.vocab_size, **limits)
    return Inputs(model, tokenizer, eos_ids, problems, prompts, held_out[: config.eval_limit or None])


def settle(config: Config, given: dict) -> Config:
    """The settings with what they leave open filled in: those of the run to resume, the default held-out file."""
    if config.resume:
        return resumed(config, absolute(given))
    if config.eval_data is None:
        beside = config.data.replace("-train.", "-heldout.")
        return replace(config, eval_data=beside if beside != config.data and Path(beside).exists() else "")
    return config


def load(config: Config, inputs: Inputs, device: torch.device) -> Job:
    """Load the weights: the newest checkpoint that can be read of the run to resume, or the starting weights."""
    folder = Path(config.resume or config.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    starts = [*(checkpoints(folder) if config.resume else []), (0, Path(config.model))]
    for (step, source), older in zip(starts, [*starts[1:], None], strict=True):
        try:
            return load_from(config, inputs, device, folder, step, source)
        except ValueError as error:
            if older is None or isinstance(error, OtherRun):
                raise
            print(f"{error}: going back to {older[1]}")


class OtherRun(ValueError):
    """A checkpoint of other settings than its run's."""


def load_from(config: Config, inputs: Inputs, device: torch.device, folder: Path, step: int, source: Path) -> Job:
    """The job at this step, from this folder; ValueError if it is damaged or belongs to another run."""
    if step:
        stored = read_json(source / "training.json")
        if stored != {"step": step, "settings": experiment(config)}:
            raise OtherRun(f"{source} belongs to another run than {folder}/config.json: move it away")
    dtype = getattr(torch, config.dtype)
    master = load_model(source, device=device)
    optimizer = torch.optim.AdamW(
        master.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    if step:
        load_optimizer(optimizer, master, source)
    master.checkpointing = config.gradient_checkpointing
    return Job(
        config=config,
        inputs=inputs,
        folder=folder,
        start=step,
        master=master,
        decoder=compute_copy(master, dtype),
        reference=load_model(config.model, dtype, device).requires_grad_(False) if config.kl_coef else None,
        optimizer=optimizer,
        whole=step,
    )


def memory(config: Config, model: ModelConfig, longest: int) -> dict[str, int]:
    """Bytes that a run of sequences of at most `longest` tokens needs at its peaks, by part. Nothing is allocated.

    weights + gradients + optimizer = 16 bytes a parameter in fp32 (4, 4 and 8), 2 more for the copy in bf16.
    KV cache  = `cache.nbytes` for the rows sampled at a time (2 L B K (budget + buffer) D itemsize and a little).
    activations of a micro-batch of M tokens, e bytes an item: each layer keeps
        M (8 hidden + e (4 hidden + 3 H D + 2 K D + 4 intermediate)), with checkpointing M e hidden;
    to that comes the larger of two backward passes: the head's, 3 copies of 1,024 tokens' fp32 logits and a gradient of
    e V hidden, and a layer's, 3 M e intermediate and, with checkpointing, what the layer keeps otherwise.
    """
    c, item = model, getattr(torch, config.dtype).itemsize
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(c).parameters())
    rows = config.rows_at_once
    sizes = {"rows": rows, "max_length": longest, "device": "meta", "dtype": getattr(torch, config.dtype)}
    cache, dense = (cache_for(c, **settings, **sizes) for settings in (config.cache, {"compressor": "full"}))
    tokens = min(max(config.micro_tokens, longest), rows * longest)
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer = 8 * c.hidden_size + item * (4 * c.hidden_size + 3 * queries + 2 * keys + 4 * c.intermediate_size)
    kept, again = (item * c.hidden_size, layer) if config.gradient_checkpointing else (layer, 0)
    head = 3 * 4 * min(1024, tokens) * c.vocab_size + item * c.vocab_size * c.hidden_size
    return {
        "parameters": parameters,
        "weights": (4 + (item if item < 4 else 0)) * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "reference": item * parameters if config.kl_coef else 0,
        "cache": sum(cache.nbytes.values()),
        "dense cache": sum(dense.nbytes.values()),
        "activations": tokens * c.layers * kept + max(head, tokens * (3 * item * c.intermediate_size + again)),
    }


def plan(config: Config, inputs: Inputs) -> str:
    """What a step will hold and do, before any weights are loaded."""
    lengths = [len(ids) for ids in inputs.prompts]
    rows, longest = config.prompts * config.group_size, max(lengths) + config.max_new_tokens
    need = memory(config, inputs.model, longest)
    parts = ("weights", "gradients", "optimizer", "reference", "activations")
    held = cache_for(inputs.model, 1, longest, **config.cache, device="meta").layers
    slots, budgets = (sorted({getattr(layer, name) for layer in held}) for name in ("slots", "budget"))
    if config.compressor == "full":
        eviction = "none: compressor full is dense GRPO"
    elif longest <= slots[0]:  # the last token sampled is never cached
        eviction = (
            f"NEVER: a row holds at most {longest - 1} keys and is cut at budget + buffer = {slots[0]}, so this run is "
            "dense. Lower --budget or --buffer, or raise --max-new-tokens"
        )
    else:
        keys, full = (" to ".join(map(str, (x[0], x[-1])[: len(x)])) for x in (budgets, slots))
        eviction = f"a row is cut to {keys} keys whenever it holds budget + buffer = {full}"
    return "\n".join(
        [
            f"model     {config.model}: {need['parameters']:,} parameters, {config.dtype}",
            f"memory    {', '.join(f'{name} {megabytes(need[name])}' for name in parts if need[name])} (estimates)",
            f"problems  {len(lengths)} in {config.data}, prompts of {min(lengths)} to {max(lengths)} tokens",
            f"held out  {len(inputs.held_out)} in {config.eval_data}"
            if inputs.held_out
            else "held out  none, so nothing is evaluated: --eval-data names a file",
            f"step      {config.prompts} prompts x {config.group_size} responses of at most {config.max_new_tokens} "
            f"tokens ({rows * config.max_new_tokens:,} in all), {config.updates} update(s); {config.steps} steps",
            f"KV cache  {config.compressor} {megabytes(need['cache'])}, dense {megabytes(need['dense cache'])} "
            f"({config.rows_at_once} rows at once)",
            f"eviction  {eviction}",
            *beyond_context(inputs.model, longest).splitlines(),
        ]
    )


def measure(job: Job, step: int) -> list[dict]:
    """Greedy accuracy on the held-out problems, dense and with the run's compressor."""
    results = dense_and_sparse(
        job.decoder,
        job.inputs.tokenizer,
        job.inputs.eos_ids,
        job.inputs.held_out,
        template=job.config.template,
        **job.config.cache,
        rows=job.config.rollout_rows,
        max_new_tokens=job.config.max_new_tokens,
        temperature=0.0,
        progress=True,
    )
    return [{"step": step, "decoding": name, **summary} for name, (summary, _) in results.items()]


def summary(job: Job, metrics: list[dict], evaluations: list[dict]) -> str:
    """The tables at the end of a run."""
    lines = []
    first, last = (f(e["step"] for e in evaluations) if evaluations else 0 for f in (min, max))
    if first < last:
        rows = []
        for before in (e for e in evaluations if e["step"] == first):
            after = next(e for e in evaluations if (e["step"], e["decoding"]) == (last, before["decoding"]))
            cells = [plus_minus(e["accuracy"], e["stderr"]) for e in (before, after)]
            rows.append([before["decoding"], *cells, after["kv_saved"], megabytes(after["cache_bytes"])])
        lines.append(f"greedy accuracy on {before['problems']} held-out problems of {job.config.eval_data}")
        lines.append(table(["decoding", f"step {first}", f"step {last}", "kv saved", "cache"], rows) + "\n")
    means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
    parts = {name: len(metrics) * means[f"{name}_seconds"] for name in ("rollout", "scoring", "update")}
    shares = ", ".join(f"{name} {value:.0f} s ({value / sum(parts.values()):.0%})" for name, value in parts.items())
    if job.config.compressor != "full" and means["kv_saved"] == 0:
        lines.append("nothing was evicted, so this was dense GRPO: lower --budget or --buffer")
    lines += [
        f"means of {len(metrics)} steps: reward {means['reward_mean']:.3f}, "
        f"groups without signal {means['groups_without_signal']:.1%}, rejected {means['rejected']:.1%}, "
        f"truncated {means['truncated']:.1%}, kv saved {means['kv_saved']:.1%}, sampler KL {means['sampler_kl']:.4f}",
        f"rollout cache {megabytes(max(m['cache_bytes'] for m in metrics))}, "
        f"dense keys and values would take {megabytes(max(m['dense_bytes'] for m in metrics))}",
        f"time {shares}",
        f"in {job.folder}/: {', '.join(sorted(path.name for path in job.folder.iterdir()))}",
    ]
    return "\n".join(lines)


RECORDS = ("metrics.jsonl", "evals.jsonl", "samples.jsonl")


def open_run(job: Job) -> tuple[list[dict], list[dict]]:
    """Make the run folder, or cut a resumed one's records back to its checkpoint: (metrics, evaluations) so far."""
    if not job.config.resume:
        new_folder(job.folder)
    (job.folder / "checkpoints").mkdir(exist_ok=True)  # better refused now than after some steps
    metrics, evaluations, samples = (read_lines(job.folder / name, job.start) for name in RECORDS)
    if any(m.keys() != metrics[0].keys() or "updates_not_finite" not in m for m in metrics):
        raise ValueError(f"{job.folder}/metrics.jsonl is damaged: its lines have not the same entries")
    if sum(e["step"] == job.start for e in evaluations) == 1 and job.config.compressor != "full":
        evaluations = [e for e in evaluations if e["step"] < job.start]  # of the two lines one was never written
    for name, records in zip(RECORDS, (metrics, evaluations, samples), strict=True):
        if (job.folder / name).exists():
            write_whole(job.folder / name, as_lines(records))
    write_json(job.folder / "config.json", absolute(asdict(replace(job.config, resume="", dry_run=False))))
    return metrics, evaluations


def train(job: Job, history: list[dict], evaluations: list[dict]) -> None:
    """The loop; history and evaluations are those of the steps done already."""
    config = job.config
    metrics_file, evals_file, samples_file = (job.folder / name for name in RECORDS)

    def evaluate_now(step: int) -> None:
        if job.inputs.held_out and all(e["step"] != step for e in evaluations):
            results = measure(job, step)
            append(evals_file, results)
            evaluations.extend(results)
            tqdm.write(f"step {step}: greedy " + ", ".join(f"{r['decoding']} {r['accuracy']:.3f}" for r in results))

    def due(step: int) -> bool:
        return step in (0, config.steps) or (config.eval_every > 0 and step % config.eval_every == 0)

    if due(job.start):  # before the first step, or left out when the run was killed
        evaluate_now(job.start)
    bar = tqdm(range(job.start, config.steps), desc="training", initial=job.start, total=config.steps, unit="step")
    for step in bar:
        metrics, records = train_step(job, step)
        done, last = step + 1, step + 1 == config.steps
        append(samples_file, records)
        append(metrics_file, [metrics])
        history.append(metrics)
        job.whole = done
        bar.set_postfix_str(
            "reward {reward_mean:.3f}, rejected {rejected:.0%}, kv saved {kv_saved:.0%}".format_map(metrics)
        )
        if config.sample_every and (step % config.sample_every == 0 or last):
            tqdm.write(
                "\nstep {step}, reward {reward:.0f} (answer {answer}):\n{prompt}{response}\n".format_map(records[0])
            )
        if metrics["updates_not_finite"]:
            tqdm.write(not_finite(metrics, records))
        if all(m["updates_not_finite"] for m in history[-3:]) and len(history) >= 3:
            raise FloatingPointError(
                f"loss or gradient were not finite for three steps (see above and {samples_file}); the weights "
                f"are those before them. Start a new run from {job.folder}/checkpoints, with a smaller --lr or --xi-cap"
            )
        if done % config.save_every == 0 or last:
            save_checkpoint(job, done)
        if due(done):
            evaluate_now(done)
    print("\n" + summary(job, history, evaluations))


def not_finite(metrics: dict, records: list[dict]) -> str:
    """What to look at after an update that was not applied: the response whose numbers are not finite, or extreme."""
    bad = [i for i, record in enumerate(records) if None in (record["xi_max"], record["logp_min"])]
    worst = bad[0] if bad else max(range(len(records)), key=lambda i: records[i]["xi_max"])
    return (
        f"step {metrics['step']}: {metrics['updates_not_finite']} update(s) left out, loss or gradient not finite. "
        "Largest xi {xi_max}, smallest log-prob {logp_min} (None: not finite) in ".format_map(records[worst])
        + f"response {worst} of this step in samples.jsonl"
    )


@contextlib.contextmanager
def stoppable(job: Job):
    """Ctrl-C and SIGTERM end a run at once, with a checkpoint if the weights are those of a finished step."""

    def interrupt(number: int, frame) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        if job.whole and all(step != job.whole for step, _ in checkpoints(job.folder)):
            save_checkpoint(job, job.whole)
        steps = next((step for step, _ in checkpoints(job.folder)), 0)
        print(
            f"\ntrain.py: stopped by {signal.Signals(number).name} after step {steps}; "
            f"go on with: python train.py --resume {job.folder}",
            file=sys.stderr,
        )
        raise SystemExit(128 + number) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(
        Config, argv, "train.py", "Train a language model on rollouts from a compressed KV cache."
    )
    with one_sentence("train.py"):
        config = settle(config, given)
        device = pick_device(config.device, config.threads)
        inputs = read(config)
        print(plan(config, inputs))
        if config.dry_run:
            return
        job = load(config, inputs, device)
        records = open_run(job)
        print(f"run       {job.folder}/ from step {job.start}", flush=True)
    advice = f". What is saved is whole; go on with: python train.py --resume {job.folder}"
    with (
        one_sentence("train.py", FloatingPointError),
        one_sentence("train.py", (OSError, SafetensorError, MemoryError), advice),
        stoppable(job),
    ):
        train(job, *records)


if __name__ == "__main__":
    main()
