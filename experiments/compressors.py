"""Every cache policy at several budgets on one model: what it saves, and how far it moves the sampler.

    python experiments/compressors.py

Samples one response to each held-out problem at temperature 1 with the compressed cache, scores it with dense
attention, and prints a line for each policy and budget: KV tokens saved, the ratio xi = pi_old / pi_sparse over tokens
(mean, 1st and 5th percentile), the k3 estimate of KL(pi_sparse || pi_old), the share of responses that Sparse-RL would
reject, and the accuracy of the sampler. `full` is the noise floor. The same uniform numbers are used for all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from claim import shown

from experiments.commas import numbers
from grpo import mismatch_metrics
from kvcache import COMPRESSORS, check_settings
from model import load_model
from rollout import rescore, rollout_batches
from runs import check_options, one_sentence, option, parse_config, pick_device, table
from task import ASSETS, is_correct, load_problems, load_tokenizer, prepare


@dataclass(frozen=True)
class Settings:
    """What is compared, on what."""

    model: str = option(str(ASSETS / "model"), "Hugging Face folder")
    data: str = option(str(ASSETS / "long-heldout.jsonl"), "problems, JSONL")
    limit: int = option(64, "the first so many problems", at_least=1)
    budgets: str = option("128,256,512", "budgets, with commas between")
    buffer: int = option(32, "keys a row gathers beyond the budget before it is cut")
    window: int = option(8, "newest tokens that always survive")
    max_new_tokens: int = option(1000, "longest response", at_least=1)
    epsilon: float = option(1e-4, "a response with some xi below this counts as rejected", above=0, below=1)
    out: str = option("", "JSON file for the results")
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


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    config, _ = parse_config(Settings, argv, "experiments/compressors.py", "Every cache policy at several budgets.")
    with one_sentence("experiments/compressors.py"):
        budgets = numbers(config, "budgets")
        runs = [("full", 0)] + [(name, budget) for name in COMPRESSORS if name != "full" for budget in budgets]
        for name, budget in runs:
            check_settings(name, budget, config.buffer, config.window)
        device = pick_device(config.device, config.threads)
        tokenizer, eos_ids = load_tokenizer(config.model)
        model = load_model(config.model, device=device)
        prompts = prepare(load_problems(config.data)[: config.limit], tokenizer, model.config.vocab_size)
        if config.out:
            new_file(Path(config.out))
    results = []
    with one_sentence("experiments/compressors.py", (OSError, MemoryError, FloatingPointError)):
        for name, budget in runs:
            r = rollout_batches(
                model,
                [prompt.ids for prompt in prompts],
                group_size=1,
                rows=len(prompts),
                max_new_tokens=config.max_new_tokens,
                eos_ids=eos_ids,
                compressor=name,
                budget=budget,
                buffer=config.buffer,
                window=config.window,
                generator=torch.Generator().manual_seed(config.seed),
                progress=True,
            )
            logp_old, _ = rescore(model, r, micro_tokens=8192)
            right = [is_correct(tokenizer.decode(r.response(i)), p.answer) for i, p in enumerate(prompts)]
            measured = mismatch_metrics(logp_old, r.logp_sparse, r.mask, config.epsilon)
            results.append({"compressor": name, "budget": budget, "kv_saved": r.kv_saved, **measured})
            results[-1]["accuracy"] = sum(right) / len(right)
    columns = ["kv_saved", "xi_mean", "xi_p01", "xi_p05", "sampler_kl", "rejected", "accuracy"]
    rows = [[r["compressor"], r["budget"] or "", *(f"{r[c]:.4f}" for c in columns)] for r in results]
    print(table(["policy", "budget", *columns], rows))
    if config.out:
        settings = asdict(config) | {name: shown(getattr(config, name)) for name in ("model", "data")} | {"out": ""}
        Path(config.out).write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
