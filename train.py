"""Sparse-RL training: `python train.py --budget 512 --compressor snapkv`.

One step: sample G responses to each of P prompts with the compressed cache (logp_sparse), grade them, score them
with the same weights and dense attention (logp_old), then update the weights, dense, with the corrected policy
gradient of grpo.py.

Everything random in step s is drawn from generators seeded by (seed, what for, s), so a run that is resumed from a
checkpoint continues as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from eval import (
    ASSETS,
    Problem,
    append,
    check_prompts,
    dense_and_sparse,
    encode,
    is_correct,
    load_problems,
    load_tokenizer,
    megabytes,
    new_folder,
    one_sentence,
    option,
    parse_config,
    pick_device,
    render,
    sample_responses,
    table,
)
from grpo import (
    AGGREGATIONS,
    CORRECTIONS,
    correct,
    group_advantages,
    has_signal,
    mismatch_metrics,
    policy_loss,
    response_logprobs,
    reward_metrics,
)
from kvcache import COMPRESSORS, check_settings
from model import Decoder, load_model, read_json, save_model
from rollout import Rollout, cache_for

# What a resumed run may change: more of the same, and how it is reported.
FREE = ("steps", "eval_every", "save_every", "sample_every", "rollout_rows", "dry_run", "resume")


@dataclass(frozen=True)
class Config:
    """All settings of a run. The defaults are those of the main job on the bundled model."""

    # What is trained, on what, and where it goes
    model: str = option(str(ASSETS / "model"), "Hugging Face folder to start from")
    data: str = option(str(ASSETS / "long-train.jsonl"), "training problems, JSONL")
    eval_data: str | None = option(
        None,
        "held-out problems, '' for no evaluation; by default the -heldout file beside a -train file, if there is one",
    )
    out: str = option("", "run folder; default runs/<time>")
    resume: str = option("", "continue the run in this folder from its newest checkpoint, with its settings")
    dry_run: bool = option(False, "print the plan (lengths, memory, whether anything is evicted) and stop")
    # Sampling with the compressed cache
    compressor: str = option("snapkv", "KV policy of the sampler; full is dense GRPO", choices=COMPRESSORS)
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive, and whose queries score the others")
    prompts: int = option(8, "prompts a step")
    group_size: int = option(8, "G, responses to each prompt")
    max_new_tokens: int = option(
        1000, "longest response; what is longer is graded as it stands and counts as truncated"
    )
    temperature: float = option(1.0, "of the sampler and of every log-prob; training has no top-p or top-k")
    rollout_rows: int = option(256, "responses sampled at a time; memory grows with it, results do not change")
    # The objective
    correction: str = option("sparse-rl", "which corrections apply (grpo.py)", choices=CORRECTIONS)
    epsilon: float = option(1e-4, "a response with some ratio xi below this is rejected")
    xi_cap: float | None = option(None, "truncate the weights xi at this value")
    clip_low: float = option(0.2, "the staleness ratio is clipped below at 1 - this")
    clip_high: float = option(0.2, "and above at 1 + this")
    kl_coef: float = option(0.0, "beta, weight of the KL to the starting weights; 0 keeps no reference model")
    aggregation: str = option(
        "response", "mean per response (GRPO), token (DAPO), constant (Dr. GRPO)", choices=AGGREGATIONS
    )
    normalize_std: bool = option(True, "divide advantages by the group's std")
    # The optimizer
    steps: int = option(15, "training steps, one rollout each")
    updates: int = option(1, "optimizer updates a step; the step's prompts are divided among them")
    lr: float = option(2e-4, "AdamW learning rate, constant")
    beta1: float = option(0.9, "AdamW beta1")
    beta2: float = option(0.98, "AdamW beta2")
    weight_decay: float = option(0.1, "AdamW weight decay")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    micro_tokens: int = option(8192, "tokens, padding included, in one forward and backward pass")
    # Reports
    eval_every: int = option(0, "evaluate after every so many steps; 0 only before the first and after the last")
    eval_limit: int = option(200, "held-out problems to evaluate on; 0 takes all")
    save_every: int = option(5, "write a checkpoint after every so many steps, and after the last")
    sample_every: int = option(5, "print one sampled response after every so many steps; 0 never")
    # The machine
    seed: int = option(0, "of everything random")
    threads: int = option(0, "CPU threads; 0 takes all")
    device: str = option("auto", "auto, cpu, cuda, mps")

    def __post_init__(self):
        check_settings(self.compressor, self.budget, self.buffer, self.window)

        def must(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise ValueError(f"--{name.replace('_', '-')} {what}, not {getattr(self, name)}")

        for name in ("prompts", "max_new_tokens", "rollout_rows", "steps", "updates", "micro_tokens", "save_every"):
            must(getattr(self, name) >= 1, name, "must be at least 1")
        for name in ("eval_every", "eval_limit", "sample_every", "threads", "seed"):
            must(getattr(self, name) >= 0, name, "must be 0 or more")
        must(self.group_size >= 2, "group_size", "must be at least 2 (a group of one has no advantage)")
        must(1e-3 <= self.temperature < math.inf, "temperature", "must be at least 0.001: training needs samples")
        must(0 < self.epsilon < 1, "epsilon", "must be above 0 and below 1")
        must(self.xi_cap is None or self.xi_cap > 0, "xi_cap", "must be above 0")
        must(0 <= self.clip_low < 1, "clip_low", "must be at least 0 and below 1")
        must(0 <= self.clip_high < math.inf, "clip_high", "must be at least 0")
        must(0 <= self.kl_coef < math.inf, "kl_coef", "must be at least 0")
        must(0 < self.lr < math.inf, "lr", "must be above 0")
        must(0 <= self.beta1 < 1, "beta1", "must be at least 0 and below 1")
        must(0 <= self.beta2 < 1, "beta2", "must be at least 0 and below 1")
        must(0 <= self.weight_decay < math.inf, "weight_decay", "must be at least 0")
        must(self.max_grad_norm > 0, "max_grad_norm", "must be above 0 (inf never clips)")
        must(self.prompts % self.updates == 0, "updates", f"must divide the {self.prompts} prompts of a step")

    @property
    def cache(self) -> dict:
        """The settings of the sampler's cache."""
        return {name: getattr(self, name) for name in ("compressor", "budget", "buffer", "window")}


@dataclass
class Job:
    """A run with everything it needs loaded."""

    config: Config
    folder: Path
    start: int  # steps done already
    decoder: Decoder
    reference: Decoder | None  # the starting weights, if the KL is on
    optimizer: torch.optim.Optimizer
    tokenizer: Tokenizer
    eos_ids: list[int]
    problems: list[Problem]
    held_out: list[Problem]


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


def dense_logprobs(decoder: Decoder, r: Rollout, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy (rows, R) of these responses under dense attention, on the decoder's device."""
    device = decoder.embed_tokens.weight.device
    lengths = r.prompt_lengths + r.response_lengths
    tokens = r.tokens[rows, : int(lengths[rows].max())].to(device)
    return response_logprobs(
        decoder, tokens, r.prompt_lengths[rows].to(device), r.mask[rows].to(device), temperature=temperature
    )


@torch.no_grad()
def score(decoder: Decoder, r: Rollout, config: Config) -> tuple[Tensor, Tensor]:
    """logp_old (or logp_ref) and entropy (N, R) on the CPU, without gradient."""
    logp, entropy = torch.zeros_like(r.logp_sparse), torch.zeros_like(r.logp_sparse)
    lengths = r.prompt_lengths + r.response_lengths
    batches = list(micro_batches(torch.arange(len(r.tokens)), lengths, config.micro_tokens))
    for rows in tqdm(batches, desc="scoring", leave=False):
        logp[rows], entropy[rows] = (x.cpu() for x in dense_logprobs(decoder, r, rows, config.temperature))
    return logp, entropy


def update(
    job: Job, r: Rollout, rows: Tensor, advantages: Tensor, logp_old: Tensor, logp_ref: Tensor | None
) -> dict[str, float]:
    """One optimizer update on these rows of the rollout; skipped whole where nothing would teach."""
    config, device = job.config, job.decoder.embed_tokens.weight.device
    how = {"correction": config.correction, "epsilon": config.epsilon, "xi_cap": config.xi_cap}
    c = correct(logp_old[rows], r.logp_sparse[rows], r.mask[rows], **how)
    if not has_signal(advantages[rows], c):
        return {"skipped": 1.0}
    job.optimizer.zero_grad()
    sums: dict[str, Tensor] = {}
    batches = list(micro_batches(rows, r.prompt_lengths + r.response_lengths, config.micro_tokens))
    for batch in tqdm(batches, desc="update", leave=False):
        logp, _ = dense_logprobs(job.decoder, r, batch, config.temperature)
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
    norm = torch.nn.utils.clip_grad_norm_(job.decoder.parameters(), config.max_grad_norm)
    if not norm.isfinite():
        raise FloatingPointError(f"the gradient's norm is {float(norm)}: the weights are left as they were; lower --lr")
    job.optimizer.step()
    return {"skipped": 0.0, "grad_norm": float(norm)} | {name: float(value) for name, value in sums.items()}


def train_step(job: Job, step: int) -> tuple[dict[str, float], list[dict]]:
    """Sample, grade, score, update. Returns the step's metrics and one record a response."""
    config = job.config
    chosen = [job.problems[i] for i in pick_problems(len(job.problems), config.prompts, step, config.seed)]
    r = sample_responses(
        job.decoder,
        encode(chosen, job.tokenizer),
        group_size=config.group_size,
        rows=config.rollout_rows,
        max_new_tokens=config.max_new_tokens,
        eos_ids=job.eos_ids,
        temperature=config.temperature,
        **config.cache,
        generator=generator(config.seed, "rollout", step),
        progress=True,
    )
    owners = [problem for problem in chosen for _ in range(config.group_size)]
    texts = [job.tokenizer.decode(r.response(i)) for i in range(len(owners))]
    rewards = torch.tensor([float(is_correct(text, p.answer)) for text, p in zip(texts, owners, strict=True)])
    advantages = group_advantages(rewards, config.group_size, normalize_std=config.normalize_std)

    scoring = time.perf_counter()
    logp_old, entropy = score(job.decoder, r, config)
    logp_ref = score(job.reference, r, config)[0] if job.reference else None
    updating = time.perf_counter()
    parts = torch.arange(len(owners)).chunk(config.updates)
    reports = [update(job, r, rows, advantages, logp_old, logp_ref) for rows in parts]
    ended = time.perf_counter()

    done = [report for report in reports if not report["skipped"]]
    names = ("policy_loss", "kl_ref", "clip_low", "clip_high", "clamped", "grad_norm")
    metrics = {
        "step": step + 1,
        **reward_metrics(rewards, config.group_size),
        **mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon),
        "entropy": float(entropy[r.mask].mean()),
        **{name: sum(report[name] for report in done) / max(1, len(done)) for name in names},
        "updates_skipped": len(reports) - len(done),
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
    records = [
        {
            "step": step + 1,
            "prompt": render(owners[i].prompt, job.tokenizer),
            "response": texts[i],
            "answer": owners[i].answer,
            "reward": float(rewards[i]),
            "advantage": float(advantages[i]),
            "accepted": bool(accepted[i]),
            "tokens": int(r.response_lengths[i]),
            "finished": bool(r.finished[i]),
        }
        for i in range(len(owners))
    ]
    return metrics, records


# ------------------------------------------------------------------------------------------------- checkpoints


TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "vocab*", "merges.txt", "*.jinja")


def save_checkpoint(job: Job, step: int) -> None:
    """Write checkpoints/step-NNNNNN, a Hugging Face folder plus the optimizer's state; complete or not there."""
    final = job.folder / "checkpoints" / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(job.decoder, partial)
    for pattern in TOKENIZER_FILES:
        for file in Path(job.config.model).glob(pattern):
            if file.is_file():
                shutil.copy(file, partial)
    names = [name for name, _ in job.decoder.named_parameters()]
    state = job.optimizer.state_dict()["state"]  # {index: {"step", "exp_avg", "exp_avg_sq"}}
    save_file(
        {f"{names[i]}.{key}": value for i, entry in state.items() for key, value in entry.items()},
        partial / "optimizer.safetensors",
    )
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def load_optimizer(optimizer: torch.optim.Optimizer, decoder: Decoder, folder: Path) -> None:
    """Put back the state that `save_checkpoint` wrote."""
    indices = {name: i for i, (name, _) in enumerate(decoder.named_parameters())}
    state: dict[int, dict[str, Tensor]] = {i: {} for i in indices.values()}
    for name, value in load_file(folder / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition(".")
        state[indices[parameter]][key] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {i: entry for i, entry in state.items() if entry}})


def newest_checkpoint(run: Path) -> tuple[int, Path]:
    """(step, folder) of the newest complete checkpoint of a run; ValueError if there is none."""
    steps = {path.name.removeprefix("step-"): path for path in run.glob("checkpoints/step-*")}
    complete = {int(step): path for step, path in steps.items() if step.isdecimal()}
    if not complete:
        raise ValueError(f"--resume {run}: there is no checkpoint in {run}/checkpoints, so start a new run")
    return max(complete.items())


def resumed(config: Config, given: dict) -> Config:
    """The stored settings of the run to resume, with those of `given` that may change; ValueError shows the others."""
    file = Path(config.resume) / "config.json"
    try:
        stored = Config(**read_json(file))
    except TypeError as error:
        raise ValueError(f"{file} does not hold the settings of a run ({error})") from None
    changed = [
        f"--{name.replace('_', '-')} {getattr(stored, name)} -> {value}"
        for name, value in given.items()
        if name not in FREE and value != getattr(stored, name)
    ]
    if changed:
        raise ValueError(
            f"--resume {config.resume} cannot change the experiment ({', '.join(changed)}): start a new run"
        )
    return replace(stored, **{name: value for name, value in given.items() if name in FREE})


def read_lines(path: Path, last_step: int) -> list[dict]:
    """The records of a JSONL file up to a step. Later ones leave the file: a resumed run writes them anew.

    A last line that a killed run did not finish is dropped; ValueError names any other line that is damaged.
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
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number} is damaged: the run cannot be resumed with it") from None
    partial = path.with_name(path.name + ".partial")
    partial.write_text("")
    append(partial, records)
    partial.replace(path)
    return records


# ---------------------------------------------------------------------------------------------------- the job


def prepare(config: Config, given: dict) -> Job:
    """Read and check everything, write nothing. Raises ValueError or OSError in a sentence for the user."""
    start, source = 0, Path(config.model)
    if config.resume:
        config = resumed(config, given)
        start, source = newest_checkpoint(Path(config.resume))
    device = pick_device(config.device, config.threads)
    problems = load_problems(config.data)
    if config.eval_data is None:
        beside = Path(config.data.replace("-train.", "-heldout."))
        config = replace(config, eval_data=str(beside) if str(beside) != config.data and beside.exists() else "")
    held_out = load_problems(config.eval_data)[: config.eval_limit or None] if config.eval_data else []
    tokenizer, eos_ids = load_tokenizer(config.model)
    decoder = load_model(source, device=device)
    reference = load_model(config.model, device=device).requires_grad_(False) if config.kl_coef else None
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    if start:
        try:
            load_optimizer(optimizer, decoder, source)
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(f"{source}/optimizer.safetensors is not this run's optimizer state ({error})") from None
    folder = Path(config.resume or config.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    return Job(config, folder, start, decoder, reference, optimizer, tokenizer, eos_ids, problems, held_out)


def plan(job: Job) -> str:
    """What a step will hold and do, before anything is sampled."""
    config, c = job.config, job.decoder.config
    lengths = check_prompts(job.problems, job.tokenizer, c.vocab_size)
    rows, longest = config.prompts * config.group_size, max(lengths) + config.max_new_tokens
    at_once = min(rows, max(config.rollout_rows, config.group_size))
    sizes = {"rows": at_once, "max_length": longest, "device": "meta"}  # shapes without memory
    cache, dense = cache_for(c, **config.cache, **sizes), cache_for(c, compressor="full", **sizes)
    held, dense_held = (sum(x.nbytes.values()) for x in (cache, dense))
    count = sum(p.numel() for p in job.decoder.parameters())
    copies = 5 if job.reference else 4  # weights, gradients, two moments; the reference
    slots, budgets = (sorted({getattr(layer, name) for layer in cache.layers}) for name in ("slots", "budget"))
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
            f"model     {config.model}: {count:,} parameters; "
            f"weights, gradients and optimizer {megabytes(copies * 4 * count)}",
            f"problems  {len(job.problems)} in {config.data}, prompts of {min(lengths)} to {max(lengths)} tokens",
            f"step      {config.prompts} prompts x {config.group_size} responses of at most {config.max_new_tokens} "
            f"tokens ({rows * config.max_new_tokens:,} in all), {config.updates} update(s); {config.steps} steps",
            f"KV cache  {config.compressor} {megabytes(held)}, dense {megabytes(dense_held)} ({at_once} rows at once)",
            f"eviction  {eviction}",
        ]
    )


def measure(job: Job, step: int) -> list[dict]:
    """Greedy accuracy on the held-out problems, dense and with the run's compressor."""
    results = dense_and_sparse(
        job.decoder,
        job.tokenizer,
        job.eos_ids,
        job.held_out,
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
            cells = [f"{e['accuracy']:.3f} +- {e['stderr']:.3f}" for e in (before, after)]
            rows.append([before["decoding"], *cells, after["kv_saved"], megabytes(after["cache_bytes"])])
        lines.append(f"greedy accuracy on {before['problems']} held-out problems of {job.config.eval_data}")
        lines.append(table(["decoding", f"step {first}", f"step {last}", "kv saved", "cache"], rows) + "\n")
    means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
    parts = {name: len(metrics) * means[f"{name}_seconds"] for name in ("rollout", "scoring", "update")}
    shares = ", ".join(f"{name} {value:.0f} s ({value / sum(parts.values()):.0%})" for name, value in parts.items())
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
        (job.folder / "config.json").write_text(json.dumps(asdict(job.config), indent=2) + "\n")
    metrics, evaluations, _ = (read_lines(job.folder / name, job.start) for name in RECORDS)
    return metrics, evaluations


def train(job: Job, history: list[dict], evaluations: list[dict]) -> None:
    """The loop; history and evaluations are those of the steps done already."""
    config = job.config
    metrics_file, evals_file, samples_file = (job.folder / name for name in RECORDS)

    def evaluate_now(step: int) -> None:
        if job.held_out and all(e["step"] != step for e in evaluations):
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
        bar.set_postfix_str(
            "reward {reward_mean:.3f}, rejected {rejected:.0%}, kv saved {kv_saved:.0%}".format_map(metrics)
        )
        if config.sample_every and (step % config.sample_every == 0 or last):
            tqdm.write(
                "\nstep {step}, reward {reward:.0f} (answer {answer}):\n{prompt}{response}\n".format_map(records[0])
            )
        if done % config.save_every == 0 or last:
            save_checkpoint(job, done)
        if due(done):
            evaluate_now(done)
    print("\n" + summary(job, history, evaluations))


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(
        Config, argv, "train.py", "Train a language model on rollouts from a compressed KV cache."
    )
    with one_sentence("train.py"):
        job = prepare(config, given)
        print(plan(job))
        if config.dry_run:
            return
        records = open_run(job)
        print(f"run       {job.folder}/ from step {job.start}", flush=True)
    with one_sentence("train.py", FloatingPointError):
        train(job, *records)


if __name__ == "__main__":
    main()
