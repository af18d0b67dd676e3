"""Every cache policy at several budgets on one model: what it saves, and how far it moves the sampler.

    python experiments/compressors.py            # each policy samples for itself
    python experiments/compressors.py --forced   # all along the same dense responses

Samples one response to each held-out problem at temperature 1 with the compressed cache, scores it with dense
attention, and prints a line for each policy and budget: KV tokens saved, the ratio xi = pi_old / pi_sparse over tokens
(mean, 1st and 5th percentile), the k3 estimate of KL(pi_sparse || pi_old), the share of responses that Sparse-RL would
reject, and the accuracy of the sampler. `full` is the noise floor. The same uniform numbers are used for all.

With --forced the responses are sampled densely once, and each policy's cache is led along them: KL(pi_old || pi_sparse)
is then exact at each token (over the whole vocabulary), its standard error is over responses, and policies are compared
without their own drift.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from answers import is_correct
from eval import names as policies
from experiments.commas import numbers
from experiments.records import arguments, made_by, shown
from grpo import mismatch_metrics
from kvcache import COMPRESSORS, check_settings
from model import Decoder, load_model
from rollout import Rollout, cache_for, prefill, rescore, rollout_batches
from runs import append, check_options, one_sentence, option, parse_config, pick_device, table
from task import (
    ASSETS,
    TEMPLATE,
    all_ends,
    load_problems,
    load_template,
    load_tokenizer,
    prepare,
    response_text,
)


@dataclass(frozen=True)
class Settings:
    """What is compared, on what."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    data: str = option(str(ASSETS / "long-heldout.jsonl"), "problems, JSONL")
    limit: int = option(64, "the first so many problems", at_least=1)
    budgets: str = option("128,256,512", "budgets, with commas between")
    buffer: int = option(32, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive")
    forced: bool = option(
        False, "lead each policy along the same dense responses, and report the exact KL at each token"
    )
    compressors: str = option("", "policies, with commas between; all if empty")
    template: str = option("auto", TEMPLATE)
    max_new_tokens: int = option(1000, "longest response", at_least=1)
    epsilon: float = option(1e-4, "a response with some xi below this counts as rejected", above=0, below=1)
    out: str = option("", "new JSONL file for the results, a line in all")
    seed: int = option(0, "of the uniform numbers", at_least=0, below=2**63)
    threads: int = option(0, "CPU threads; 0 takes all", at_least=0, at_most=1024)
    device: str = option("auto", "auto, cpu, cuda, mps")

    def __post_init__(self):
        check_options(self)


def new_file(path: Path) -> None:
    """Make an empty file, before the long part; ValueError if there is one already, or none can be made."""
    try:
        path.touch(exist_ok=False)
    except OSError as error:
        raise ValueError(f"cannot make the file {path} ({error.strerror}): name another one with --out") from None


@torch.no_grad()
def forced(model: Decoder, r: Rollout, **cache) -> tuple[Tensor, Tensor, float]:
    """A compressed cache led along the responses of r: KL(pi_old || pi_sparse) and log xi (N, R), and kv_saved."""
    N, R = r.mask.shape
    prompts = [r.tokens[i, :n].tolist() for i, n in enumerate(r.prompt_lengths)]
    held = cache_for(model.config, N, r.tokens.shape[1], seeds=torch.arange(N), **cache)
    dense, row = model.hidden(r.tokens), torch.arange(N)  # (N, T, hidden)
    logits, kl, log_xi, cached, full = prefill(model, prompts, held), torch.zeros(N, R), torch.zeros(N, R), 0.0, 0.0
    for t in tqdm(range(R), desc=cache["compressor"], leave=False):
        alive, at = r.mask[:, t], (r.prompt_lengths + t).clamp(max=r.tokens.shape[1] - 1)  # (N,) each
        cached += sum(float((layer.length * alive).sum()) for layer in held.layers) / len(held.layers)
        full += float((at * alive).sum())
        old, sparse = model.head(dense[row, at - 1]).log_softmax(-1), logits.log_softmax(-1)  # (N, V) each
        kl[:, t] = (old.exp() * (old - sparse)).sum(-1)
        log_xi[:, t] = (old - sparse)[row, r.tokens[row, at]]
        logits = model.head(model.hidden(r.tokens[row, at][:, None], at[:, None], held))[:, 0]  # (N, V)
    return kl * r.mask, log_xi * r.mask, 1 - cached / full


def lead(model: Decoder, r: Rollout, runs: list[tuple[str, int]], config: Settings) -> list[dict]:
    """What `forced` measures of each policy and budget."""
    results = []
    for name, budget in runs:
        how = {"compressor": name, "budget": budget, "buffer": config.buffer, "window": config.window}
        kl, log_xi, saved = forced(model, r, **how)
        each = kl.sum(1) / r.response_lengths  # (N,)
        measured = {"kl": float(kl.sum() / r.mask.sum()), "stderr": float(each.std() / len(each) ** 0.5)}
        low = log_xi.masked_fill(~r.mask, 0).amin(1)
        rejected = float((low < math.log(config.epsilon)).float().mean())
        xi = log_xi[r.mask].exp().sort().values
        measured |= {"xi_p01": float(xi[round(0.01 * (len(xi) - 1))]), "rejected": rejected, "kv_saved": saved}
        results.append({"compressor": name, "budget": budget, **measured})
    return results


def how_made(config: Settings, given: dict) -> dict:
    """The command, the commit and the settings, without the place of the file that they are written to."""
    settings = asdict(config) | {name: shown(getattr(config, name)) for name in ("model", "data")} | {"out": ""}
    command = arguments({name: value for name, value in given.items() if name != "out"})
    return {**made_by(["experiments/compressors.py", *command]), "settings": settings}


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, given = parse_config(Settings, argv, "experiments/compressors.py", "Every cache policy at several budgets.")
    with one_sentence("experiments/compressors.py"):
        budgets = numbers(config, "budgets")
        names = policies(config.compressors) if config.compressors else [n for n in COMPRESSORS if n != "full"]
        runs = [("full", 0)] + [(name, budget) for name in names for budget in budgets]
        for name, budget in runs:
            check_settings(name, budget, config.buffer, config.window)
        device = pick_device(config.device, config.threads)
        tokenizer, eos_ids = load_tokenizer(config.model)
        model = load_model(config.model, device=device)
        template = load_template(config.model, config.template)
        problems = load_problems(config.data)[: config.limit]
        prompts = prepare(problems, tokenizer, model.config.vocab_size, template=template)
        eos_ids = all_ends(eos_ids, prompts)
        if config.out:
            new_file(Path(config.out))
    with one_sentence("experiments/compressors.py", (OSError, MemoryError, FloatingPointError)):
        how = {
            "group_size": 1,
            "rows": len(prompts),
            "max_new_tokens": config.max_new_tokens,
            "eos_ids": eos_ids,
            "progress": True,
        }
        ids, results = [prompt.ids for prompt in prompts], []
        if config.forced:
            generator = torch.Generator().manual_seed(config.seed)
            r = rollout_batches(model, ids, compressor="full", generator=generator, **how)
            results = lead(model, r, runs, config)
        for name, budget in [] if config.forced else runs:
            generator = torch.Generator().manual_seed(config.seed)
            cache = {"compressor": name, "budget": budget, "buffer": config.buffer, "window": config.window}
            r = rollout_batches(model, ids, generator=generator, **how, **cache)
            logp_old, _ = rescore(model, r, micro_tokens=8192)
            right = [
                is_correct(response_text(tokenizer, r.response(i), eos_ids), p.answer) for i, p in enumerate(prompts)
            ]
            measured = mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon)
            measured |= {"kv_saved": r.statistics["kv_saved"], "accuracy": sum(right) / len(right)}
            results.append({"compressor": name, "budget": budget, **measured})
    columns = ["kv_saved", "xi_mean", "xi_p01", "xi_p05", "sampler_kl", "rejected", "accuracy"]
    if config.forced:
        columns = ["kv_saved", "kl", "stderr", "xi_p01", "rejected"]
    lines = [[r["compressor"], r["budget"] or "", *(f"{r[c]:.4f}" for c in columns)] for r in results]
    print(table(["policy", "budget", *columns], lines))
    if config.out:
        append(Path(config.out), [{**how_made(config, given), "results": results}])


if __name__ == "__main__":
    main()
