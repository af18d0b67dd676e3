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
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from eval import (
    ASSETS,
    Problem,
    evaluate,
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


@dataclass(frozen=True)
class Config:
    """All settings of a run. The defaults are those of the main job on the bundled model."""

    # What is trained, on what, and where it goes
    model: str = option(str(ASSETS / "model"), "Hugging Face folder to start from")
    data: str = option(str(ASSETS / "long-train.jsonl"), "training problems, JSONL")
    eval_data: str = option(str(ASSETS / "long-heldout.jsonl"), "held-out problems; '' evaluates nothing")
    out: str = option("", "run folder; default runs/<time>")
    resume: str = option("", "continue the run in this folder from its newest checkpoint, with its settings")
    dry_run: bool = option(False, "print the plan (lengths, memory, whether anything is evicted) and stop")
    # Sampling with the compressed cache
    compressor: str = option("snapkv", "KV policy of the sampler; full is dense GRPO", choices=list(COMPRESSORS))
    budget: int = option(512, "keys that survive a cut, per layer and KV head")
    buffer: int = option(128, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive, and whose queries score the others")
    prompts: int = option(8, "prompts a step")
    group_size: int = option(8, "G, responses to each prompt")
    max_new_tokens: int = option(1000, "longest response; what is longer is graded as it stands and counts as truncated")
    temperature: float = option(1.0, "of the sampler and of every log-prob; training has no top-p or top-k")
    rollout_rows: int = option(256, "responses sampled at a time; memory grows with it, results do not change")
    # The objective
    correction: str = option("sparse-rl", "which corrections apply (grpo.py)", choices=list(CORRECTIONS))
    epsilon: float = option(1e-4, "a response with some ratio xi below this is rejected")
    xi_cap: float | None = option(None, "truncate the weights xi at this value")
    clip_low: float = option(0.2, "the staleness ratio is clipped below at 1 - this")
    clip_high: float = option(0.2, "and above at 1 + this")
    kl_coef: float = option(0.0, "beta, weight of the KL to the starting weights; 0 keeps no reference model")
    aggregation: str = option("response", "mean per response (GRPO), token (DAPO), constant (Dr. GRPO)", choices=AGGREGATIONS)
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
        must(0 < self.temperature < math.inf, "temperature", "must be above 0: training needs samples")
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
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    r: Rollout,
    rows: Tensor,
    advantages: Tensor,
    logp_old: Tensor,
    logp_ref: Tensor | None,
    config: Config,
) -> dict[str, float]:
    """One optimizer update on these rows of the rollout; skipped whole where nothing would teach."""
    device = decoder.embed_tokens.weight.device
    c = correct(
        logp_old[rows], r.logp_sparse[rows], r.mask[rows], config.correction, epsilon=config.epsilon, xi_cap=config.xi_cap
    )
    if not has_signal(advantages[rows], c):
        return {"updates_skipped": 1.0}
    totals = {"total": len(rows), "total_tokens": int(r.mask[rows].sum()), "weight_mean": float(c.weight_mean)}
    sums: dict[str, Tensor] = {}
    optimizer.zero_grad(set_to_none=True)
    batches = list(micro_batches(rows, r.prompt_lengths + r.response_lengths, config.micro_tokens))
    for batch in tqdm(batches, desc="update", leave=False):
        logp, _ = dense_logprobs(decoder, r, batch, config.temperature)
        loss, metrics = policy_loss(
            logp,
            logp_old[batch].to(device),
            r.logp_sparse[batch].to(device),
            advantages[batch].to(device),
            r.mask[batch].to(device),
            logp_ref=None if logp_ref is None else logp_ref[batch].to(device),
            correction=config.correction,
            epsilon=config.epsilon,
            clip=(config.clip_low, config.clip_high),
            kl_coef=config.kl_coef,
            xi_cap=config.xi_cap,
            aggregation=config.aggregation,
            max_length=config.max_new_tokens,
            **totals,
        )
        loss.backward()
        for name, value in metrics.items():  # each is its share of the update's value
            sums[name] = sums.get(name, 0) + value
    norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), config.max_grad_norm)
    optimizer.step()
    return {"updates_skipped": 0.0, "grad_norm": float(norm), **{name: float(value) for name, value in sums.items()}}


def train_step(
    decoder: Decoder,
    reference: Decoder | None,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    eos_ids: list[int],
    problems: list[Problem],
    config: Config,
    step: int,
) -> tuple[dict[str, float], list[dict]]:
    """Sample, grade, score, update. Returns the step's metrics and one record a response."""
    chosen = [problems[i] for i in pick_problems(len(problems), config.prompts, step, config.seed)]
    prompts = [tokenizer.encode(render(p.prompt, tokenizer), add_special_tokens=False).ids for p in chosen]
    r = sample_responses(
        decoder,
        prompts,
        group_size=config.group_size,
        rows=config.rollout_rows,
        max_new_tokens=config.max_new_tokens,
        eos_ids=eos_ids,
        temperature=config.temperature,
        compressor=config.compressor,
        budget=config.budget,
        buffer=config.buffer,
        window=config.window,
        generator=generator(config.seed, "rollout", step),
        progress=True,
    )
    texts = [tokenizer.decode(r.response(i)) for i in range(len(r.tokens))]
    answers = [p.answer for p in chosen for _ in range(config.group_size)]
    rewards = torch.tensor([float(is_correct(text, answer)) for text, answer in zip(texts, answers, strict=True)])
    advantages = group_advantages(rewards, config.group_size, normalize_std=config.normalize_std)

    began = time.perf_counter()
    logp_old, entropy = score(decoder, r, config)
    logp_ref = score(reference, r, config)[0] if reference is not None else None
    scoring_seconds = time.perf_counter() - began

    began = time.perf_counter()
    parts = torch.arange(len(r.tokens)).chunk(config.updates)
    reports = [update(decoder, optimizer, r, rows, advantages, logp_old, logp_ref, config) for rows in parts]
    update_seconds = time.perf_counter() - began

    done = [report for report in reports if "grad_norm" in report]
    names = ("policy_loss", "kl_ref", "clip_low", "clip_high", "clamped", "grad_norm")
    metrics = {
        "step": step + 1,
        **reward_metrics(rewards, config.group_size),
        **mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon),
        "entropy": float(entropy[r.mask].mean()),
        **{name: sum(report[name] for report in done) / len(done) if done else 0.0 for name in names},
        "updates_skipped": sum(report["updates_skipped"] for report in reports),
        "response_length": float(r.response_lengths.double().mean()),
        "truncated": 1 - float(r.finished.double().mean()),
        "tokens": int(r.response_lengths.sum()),
        "kv_saved": r.kv_saved,
        "cache_bytes": sum(r.cache_bytes.values()),
        "dense_bytes": r.dense_bytes,
        "rollout_seconds": r.seconds,
        "scoring_seconds": scoring_seconds,
        "update_seconds": update_seconds,
        "tokens_per_second": r.tokens_per_second,
    }
    accepted = correct(logp_old, r.logp_sparse, r.mask, config.correction, epsilon=config.epsilon).accepted
    records = [
        {
            "step": step + 1,
            "prompt": render(chosen[i // config.group_size].prompt, tokenizer),
            "response": texts[i],
            "answer": answers[i],
            "reward": float(rewards[i]),
            "advantage": float(advantages[i]),
            "accepted": bool(accepted[i]),
            "tokens": int(r.response_lengths[i]),
            "finished": bool(r.finished[i]),
        }
        for i in range(len(texts))
    ]
    return metrics, records


# ------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(run: Path, step: int, decoder: Decoder, optimizer: torch.optim.Optimizer, source: str) -> Path:
    """Write checkpoints/step-NNNNNN: a Hugging Face folder, and the optimizer's state. Complete or not there."""
    final = run / "checkpoints" / f"step-{step:06d}"
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(decoder, partial)
    for file in Path(source).iterdir():  # tokenizer, templates, generation settings
        if file.is_file() and file.name != "config.json" and file.suffix in (".json", ".txt", ".model", ".jinja"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, partial / file.name)
    names = [name for name, _ in decoder.named_parameters()]
    state = {
        f"{names[index]}.{key}": value.contiguous()
        for index, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }
    save_file(state, partial / "optimizer.safetensors")
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final


def load_optimizer(optimizer: torch.optim.Optimizer, decoder: Decoder, folder: Path) -> None:
    """Put back the state that `save_checkpoint` wrote."""
    stored, whole = load_file(folder / "optimizer.safetensors"), optimizer.state_dict()
    for index, (name, _) in enumerate(decoder.named_parameters()):
        keys = {key: value for key in ("step", "exp_avg", "exp_avg_sq") if (value := stored.get(f"{name}.{key}")) is not None}
        if keys:
            whole["state"][index] = keys
    optimizer.load_state_dict(whole)


def newest_checkpoint(run: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest complete checkpoint of a run."""
    found = sorted(p for p in run.glob("checkpoints/step-*") if not p.name.endswith(".partial"))
    return (int(found[-1].name.split("-")[1]), found[-1]) if found else None


def read_lines(path: Path, last_step: int) -> list[dict]:
    """The records of a JSONL file up to a step; later ones are cut from the file, for a resumed run writes them anew."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    records = [record for record in records if record["step"] <= last_step]
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return records


def append(path: Path, records: list[dict]) -> None:
    """Add records to a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


# --------------------------------------------------------------------------------------------------- the plan


def plan(config: Config, decoder: Decoder, tokenizer: Tokenizer, problems: list[Problem]) -> str:
    """What a step will hold and do, in words and numbers, before anything is sampled."""
    lengths = [len(tokenizer.encode(render(p.prompt, tokenizer), add_special_tokens=False).ids) for p in problems]
    longest, rows = max(lengths), min(config.rollout_rows, config.prompts * config.group_size)
    max_length = longest + config.max_new_tokens
    sizes = {"rows": rows, "max_length": max_length, "device": "meta"}  # shapes without memory
    dense = sum(cache_for(decoder.config, compressor="full", **sizes).nbytes.values())
    settings = {name: getattr(config, name) for name in ("compressor", "budget", "buffer", "window")}
    cache = cache_for(decoder.config, **settings, **sizes)
    weights = sum(p.numel() * p.element_size() for p in decoder.parameters())
    count = sum(p.numel() for p in decoder.parameters())
    lines = [
        f"model      {config.model}: {count:,} parameters, {megabytes(weights)}; gradients and AdamW {megabytes(3 * weights)}"
        + (f"; reference {megabytes(weights)}" if config.kl_coef else ""),
        f"problems   {len(problems)} in {config.data}, prompts of {min(lengths)} to {longest} tokens",
        f"step       {config.prompts} prompts x {config.group_size} responses of at most {config.max_new_tokens} tokens: "
        f"at most {config.prompts * config.group_size * config.max_new_tokens:,} sampled tokens; {config.updates} update(s)",
        f"KV cache   {config.compressor}: {megabytes(sum(cache.nbytes.values()))} for {rows} rows at a time, "
        f"dense {megabytes(dense)}",
    ]
    last_full = [layer.slots for layer in cache.layers]
    if config.compressor == "full":
        lines.append("eviction   none: compressor full is dense GRPO")
    elif max_length - 1 < min(last_full):
        lines.append(
            f"eviction   NEVER: a row holds at most {max_length - 1} keys and is cut at budget + buffer = {min(last_full)}; "
            f"this run is dense. Lower --budget or --buffer, or raise --max-new-tokens."
        )
    else:
        lines.append(f"eviction   a row is cut to {config.budget} keys whenever it holds {config.budget + config.buffer}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- the loop


def measure(decoder, tokenizer, eos_ids, problems: list[Problem], config: Config, step: int) -> list[dict]:
    """Greedy accuracy on held-out problems, dense and (unless the run is dense) with the run's compressor."""
    modes = ["full"] + [config.compressor] * (config.compressor != "full")
    results = []
    for mode in modes:
        summary, _ = evaluate(
            decoder,
            tokenizer,
            eos_ids,
            problems,
            rows=config.rollout_rows,
            max_new_tokens=config.max_new_tokens,
            temperature=0.0,
            compressor=mode,
            budget=config.budget,
            buffer=config.buffer,
            window=config.window,
            progress=True,
        )
        name = "dense" if mode == "full" else f"{mode}-{config.budget}"
        results.append({"step": step, "decoding": name, **summary})
    return results


def summary(config: Config, metrics: list[dict], evaluations: list[dict], run: Path, seconds: float) -> str:
    """The table at the end of a run."""
    lines = []
    if evaluations:
        first, last = min(e["step"] for e in evaluations), max(e["step"] for e in evaluations)
        rows = []
        for before in (e for e in evaluations if e["step"] == first):
            after = next(e for e in evaluations if e["step"] == last and e["decoding"] == before["decoding"])
            cells = [f"{e['accuracy']:.3f} +- {e['stderr']:.3f}" for e in (before, after)]
            rows.append([before["decoding"], *cells, after["kv_saved"], megabytes(after["cache_bytes"])])
        head = ["greedy accuracy", f"before (step {first})", f"after (step {last})", "kv saved", "cache"]
        lines += [f"{evaluations[0]['problems']} held-out problems of {config.eval_data}", table(head, rows), ""]

    def mean(name: str) -> float:
        return sum(m[name] for m in metrics) / len(metrics)

    parts = {name: sum(m[f"{name}_seconds"] for m in metrics) for name in ("rollout", "scoring", "update")}
    total = max(sum(parts.values()), 1e-9)
    lines += [
        f"{len(metrics)} steps, means: reward {mean('reward_mean'):.3f}, rejected {mean('rejected'):.1%}, "
        f"truncated {mean('truncated'):.1%}, kv saved {mean('kv_saved'):.1%}, sampler KL {mean('sampler_kl'):.4f}",
        f"rollout cache {megabytes(max(m['cache_bytes'] for m in metrics))}, "
        f"dense keys and values would take {megabytes(max(m['dense_bytes'] for m in metrics))}",
        "time in steps " + ", ".join(f"{name} {value:.0f} s ({value / total:.0%})" for name, value in parts.items())
        + f"; this session took {seconds:.0f} s in all",
        f"everything is in {run}/: metrics.jsonl, samples.jsonl, evals.jsonl, checkpoints/",
    ]
    return "\n".join(lines)


def train(config: Config) -> Path:
    """Run the whole job and return the run folder. Raises ValueError and OSError for what a user can mend."""
    began = time.perf_counter()
    device = pick_device(config.device, config.threads)
    run, start = Path(config.resume), 0
    if config.resume:
        newest = newest_checkpoint(run)
        if newest is None:
            raise ValueError(f"--resume {run}: no checkpoint in this folder")
        start, checkpoint = newest
    problems = load_problems(config.data)
    held_out = load_problems(config.eval_data)[: config.eval_limit or None] if config.eval_data else []
    tokenizer, eos_ids = load_tokenizer(config.model)
    decoder = load_model(checkpoint if config.resume else config.model, device=device)
    print(plan(config, decoder, tokenizer, problems))
    if config.dry_run:
        return run
    reference = load_model(config.model, device=device).requires_grad_(False) if config.kl_coef else None
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    if config.resume:
        load_optimizer(optimizer, decoder, checkpoint)
    else:
        run = new_folder(config.out, "")
        (run / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    print(f"run folder {run}/" + (f", resumed after step {start}" if start else ""), flush=True)

    history = read_lines(run / "metrics.jsonl", start)
    evaluations = read_lines(run / "evals.jsonl", start)
    read_lines(run / "samples.jsonl", start)

    def evaluate_now(step: int) -> None:
        if held_out and all(e["step"] != step for e in evaluations):
            results = measure(decoder, tokenizer, eos_ids, held_out, config, step)
            append(run / "evals.jsonl", results)
            evaluations.extend(results)
            tqdm.write(f"step {step}: " + ", ".join(f"{r['decoding']} greedy {r['accuracy']:.3f}" for r in results))

    if start == 0:
        evaluate_now(0)
    bar = tqdm(range(start, config.steps), desc="training", initial=start, total=config.steps, unit="step")
    for step in bar:
        metrics, records = train_step(decoder, reference, optimizer, tokenizer, eos_ids, problems, config, step)
        done = step + 1
        append(run / "samples.jsonl", records)
        append(run / "metrics.jsonl", [metrics])
        history.append(metrics)
        bar.set_postfix_str(
            f"reward {metrics['reward_mean']:.3f}, rejected {metrics['rejected']:.0%}, kv saved {metrics['kv_saved']:.0%}"
        )
        if config.sample_every and (step % config.sample_every == 0 or done == config.steps):
            shown = records[0]
            tqdm.write(f"\nstep {done}, reward {shown['reward']:.0f} (answer {shown['answer']}):\n{shown['prompt']}{shown['response']}\n")
        if done % config.save_every == 0 or done == config.steps:
            save_checkpoint(run, done, decoder, optimizer, config.model)
        if done == config.steps or (config.eval_every and done % config.eval_every == 0):
            evaluate_now(done)
    print("\n" + summary(config, history, evaluations, run, time.perf_counter() - began))
    return run


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config = parse_config(Config, argv, "train.py", "Reinforcement learning with rollouts from a compressed KV cache.")
    with one_sentence("train.py"):
        if config.resume:
            stored = read_json(Path(config.resume) / "config.json")
            config = replace(Config(**stored), resume=config.resume, steps=max(config.steps, stored["steps"]))
        train(config)


if __name__ == "__main__":
    main()
