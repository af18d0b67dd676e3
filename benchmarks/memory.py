"""Peak memory, measured, of the two things that this project bounds.

    python benchmarks/memory.py cache      # the process while it samples 4,096 tokens, dense against budget 512
    python benchmarks/memory.py scoring    # log-probs and entropy at V = 151,936, whole logits against chunks

Each measurement is a process of its own and reports its resident memory (the operating system's high-water mark) above
what it held before it began. On CUDA read torch.cuda.max_memory_allocated instead.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval import ASSETS, megabytes, table
from grpo import token_logprobs
from model import load_model
from rollout import rollout


def high_water() -> int:
    """The largest resident memory of this process so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def sample(compressor: str, rows: int, tokens: int) -> dict:
    """Sample `tokens` tokens in each of `rows` rows of the bundled model, which never end."""
    model = load_model(ASSETS / "model")
    rollout(model, [[5]], group_size=1, max_new_tokens=2, eos_ids=[])
    before = high_water()
    r = rollout(model, [[5]], group_size=rows, max_new_tokens=tokens - 1, eos_ids=[], compressor=compressor)
    return {"peak": high_water() - before, "keys and values": r.cache_bytes["keys"] + r.cache_bytes["values"]}


def log_probs(way: str, tokens: int, vocabulary: int, width: int = 896) -> dict:
    """Forward and backward of log-probs and entropy; the head has the width of Qwen2.5-0.5B."""
    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    hidden.grad, head.weight.grad = torch.zeros_like(hidden), torch.zeros_like(head.weight)
    before = high_water()
    if way == "whole":
        full = head(hidden).log_softmax(-1)
        logp, entropy = full.gather(-1, targets[:, None])[:, 0], -(full.detach().exp() * full.detach()).sum(-1)
        del full
    else:
        logp, entropy = token_logprobs(hidden, head, targets, chunk=128)
    logp.mean().backward()
    sums = {"logp": logp.sum(), "entropy": entropy.sum(), "gradient": hidden.grad.abs().sum()}
    return {"peak": high_water() - before, **{name: float(value.detach()) for name, value in sums.items()}}


def measured(*arguments: str) -> dict:
    """The report of one measurement in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cache", "scoring"])
    parser.add_argument("--rows", type=int, default=16, help="rows sampled (cache)")
    parser.add_argument("--tokens", type=int, help="tokens a row (cache, 4096), or in all (scoring, 2048)")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # which single measurement this process makes
    args = parser.parse_args()
    tokens = args.tokens or {"cache": 4096, "scoring": 2048}[args.what]
    if args.one:
        report = (
            sample(args.one, args.rows, tokens)
            if args.what == "cache"
            else log_probs(args.one, tokens, args.vocabulary)
        )
        print(json.dumps(report))
        return
    ways = ("full", "snapkv") if args.what == "cache" else ("whole", "chunks")
    passed = ["--rows", str(args.rows), "--tokens", str(tokens), "--vocabulary", str(args.vocabulary)]
    reports = {way: measured(args.what, "--one", way, *passed) for way in ways}
    names = list(reports[ways[0]])
    as_bytes = ("peak", "keys and values")
    rows = [[way, *(megabytes(r[n]) if n in as_bytes else f"{r[n]:.5f}" for n in names)] for way, r in reports.items()]
    print(table([args.what, *names], rows))
    print(f"peak ratio {reports[ways[0]]['peak'] / reports[ways[1]]['peak']:.1f}")


if __name__ == "__main__":
    main()
