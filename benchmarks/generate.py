"""Rollouts of rollout.py against transformers' generate, on one model folder: tokens a second, in turns, medians.

    pip install -r requirements-dev.txt      # transformers is a tool for development, nothing else imports it
    python benchmarks/generate.py --model FOLDER
    python benchmarks/generate.py --model FOLDER --kvpress     # pip install kvpress==0.5.5, an environment of its own

Both continue the same prompt to the same length, sampling at temperature 1 from the whole vocabulary, with no EOS.
Ours does more: it records the log-prob of each token, and its uniform numbers are per row. `dense` is the cache that
never evicts, the others are cut to --budget; with --kvpress generate's cache as well, by its DecodingPress of SnapKV,
every --buffer tokens. The ratios are to transformers in the same dtype.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench import seconds

from model import load_model
from rollout import rollout
from runs import pick_device, table


def pressed(model: torch.nn.Module, generate: Callable, args: argparse.Namespace) -> None:
    """generate with a cache that kvpress cuts."""
    from kvpress import DecodingPress, SnapKVPress

    with DecodingPress(SnapKVPress(window_size=8), compression_interval=args.buffer, target_size=args.budget)(model):
        generate()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--rows", default="8,32", help="rows sampled at a time, with commas between")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="with commas between")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens to sample")
    parser.add_argument("--budget", type=int, default=128, help="of snapkv")
    parser.add_argument("--buffer", type=int, default=32, help="of snapkv")
    parser.add_argument("--kvpress", action="store_true", help="also kvpress")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 takes all")
    args = parser.parse_args()
    device = pick_device("auto", args.threads)
    lines = []
    for dtype in args.dtypes.split(","):
        ours = load_model(args.model, getattr(torch, dtype), device)
        theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype)).to(device).eval()
        how = GenerationConfig(do_sample=True, top_k=0, min_new_tokens=args.new, max_new_tokens=args.new)
        how.eos_token_id = how.pad_token_id = 0  # one that generate asks for, and min_new_tokens keeps from ending it
        prompt = [1 + i % 1000 for i in range(args.prompt)]
        for rows in map(int, args.rows.split(",")):
            sample = partial(rollout, ours, [prompt], group_size=rows, max_new_tokens=args.new, eos_ids=[])
            inputs = torch.tensor([prompt] * rows, device=device)
            whole = torch.ones_like(inputs)
            generate = partial(theirs.generate, inputs, attention_mask=whole, generation_config=how)
            cut = {"compressor": "snapkv", "budget": args.budget, "buffer": args.buffer}
            cases = {
                "transformers": generate,
                "dense": partial(sample, compressor="full"),
                f"snapkv-{args.budget}": partial(sample, **cut),
            }
            if args.kvpress:
                cases[f"kvpress-{args.budget}"] = partial(pressed, theirs, generate, args)
            spent = defaultdict(list)
            for turn in range(args.repeats):
                for name, function in cases.items():
                    spent[name].append(seconds(function))
                    print(f"{dtype}, {rows} rows, turn {turn + 1}: {name} {spent[name][-1]:.2f} s", file=sys.stderr)
            middle = {name: statistics.median(values) for name, values in spent.items()}
            for name, value in middle.items():
                speed, ratio = rows * args.new / value, middle["transformers"] / value
                lines.append([dtype, str(rows), name, f"{speed:.0f}", f"{1e3 * value / args.new:.1f}", f"{ratio:.2f}"])
    print(table(["dtype", "rows", "sampler", "tokens/s", "ms a step", "ratio"], lines))


if __name__ == "__main__":
    main()
