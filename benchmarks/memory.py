"""Peak memory: measured, of the two things that this project bounds; estimated, of real sizes at the paper's settings.

    python benchmarks/memory.py cache      # the process while it samples 4,096 tokens, dense against budget 512
    python benchmarks/memory.py scoring    # log-probs and entropy at V = 151,936, whole logits against chunks
    python benchmarks/memory.py learner    # a micro-batch of --model, against `rollout.memory`; and the time it takes
    python benchmarks/memory.py sizes      # Qwen2.5 by `rollout.memory`, nothing is allocated
    python benchmarks/memory.py ranks      # the 7B of these on 1, 4 and 8 devices

Each measurement is a process of its own and reports its resident memory (the operating system's high-water mark) above
what it held before it began. `scoring` measures two numbers of tokens, forward and backward, and extends the straight
line through them to a batch of 8 x 1,024.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kvcache import Replay, record_dtype
from model import ModelConfig, load_config, load_model
from rollout import memory, rollout, token_logprobs
from runs import megabytes, parse_config, table
from task import ASSETS
from train import Config


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


def log_probs(way: str, tokens: int, vocabulary: int, results: str, width: int = 896) -> dict:
    """Forward and backward of log-probs and entropy; the head has the width of Qwen2.5-0.5B. Values go to a file."""
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
        logp, entropy = token_logprobs(hidden, head, targets, chunk=128, entropy=True)
    logp.sum().backward()
    peak = high_water() - before
    values = {"log-probs": logp.detach(), "entropies": entropy, "gradients": hidden.grad, "head": head.weight.grad}
    save_file({name: value.contiguous() for name, value in values.items()}, results)
    return {"peak": peak}


def learn(way: str, folder: str, rows: int, tokens: int) -> dict:
    """Score rows of `tokens` tokens, or go forward and backward, keeping what `way` says; replay: 640 keys are seen."""
    model = load_model(folder)
    model.checkpointing = way == "checkpointing"
    goes = (torch.arange(tokens) + 640).to(record_dtype(tokens + 640)).expand(rows, model.config.kv_heads, tokens)
    record = [Replay(goes)] * model.config.layers if way == "replay" else None
    ids = (torch.arange(rows * tokens) % model.config.vocab_size).view(rows, tokens)

    def pass_over(ids: torch.Tensor) -> None:
        logp, *_ = token_logprobs(model.hidden(ids, cache=record), model.head, ids, entropy=way == "scoring")
        if way != "scoring":
            logp.mean().backward()

    with torch.set_grad_enabled(way != "scoring"):
        pass_over(ids[:, :2])  # from here on there are gradients
        before, began = high_water(), time.perf_counter()
        pass_over(ids)
    return {"peak": high_water() - before, "seconds": time.perf_counter() - began}


def measured(what: str, way: str, *arguments) -> dict:
    """The report of one measurement in a process of its own."""
    command = [sys.executable, __file__, what, "--one", way, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def cache(rows: int, tokens: int) -> None:
    """Print the peak of sampling with a dense and with a compressed cache."""
    reports = {way: measured("cache", way, "--rows", rows, "--tokens", tokens) for way in ("full", "snapkv")}
    print(f"{rows} rows of {tokens:,} tokens, bundled model")
    print(table(["cache", *reports["full"]], [[way, *map(megabytes, r.values())] for way, r in reports.items()]))
    print(f"peak ratio {reports['full']['peak'] / reports['snapkv']['peak']:.1f}")


def scoring(tokens: int, vocabulary: int) -> None:
    """Print the peak of scoring with whole and with chunked logits, and by how much their values differ."""
    counts, target, peaks = (tokens // 2, tokens), 8 * 1024, {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("whole", "chunks"):
            where = ("--vocabulary", vocabulary, "--results", f"{folder}/{way}")
            peaks[way] = [measured("scoring", way, "--tokens", count, *where)["peak"] for count in counts]
            slope = (peaks[way][1] - peaks[way][0]) / (counts[1] - counts[0])  # bytes a token
            peaks[way].append(peaks[way][1] + slope * (target - counts[1]))
        whole, chunks = (load_file(f"{folder}/{way}") for way in ("whole", "chunks"))
    heads = [*(f"{count:,} tokens" for count in counts), f"{target:,} (extended)"]
    ratios = ["ratio", *(a / b for a, b in zip(*peaks.values(), strict=True))]
    print(f"V = {vocabulary:,}")
    print(table(["logits", *heads], [*([way, *map(megabytes, found)] for way, found in peaks.items()), ratios]))
    differences = ((name, float((whole[name] - chunks[name]).abs().max())) for name in whole)
    print("largest differences: " + ", ".join(f"{name} {value:.1e}" for name, value in differences))


def estimate(config: Config, model: ModelConfig, longest: int, devices: int = 1) -> dict[str, int]:
    """`rollout.memory` of these settings, as train.py's plan has it, of each of so many devices."""
    how = config.some("micro_tokens", "gradient_checkpointing", "kl_coef") | {"dtype": getattr(torch, config.dtype)}
    rows = min(config.rows, config.prompts * config.group_size // devices)
    return memory(model, config.cache, rows, longest, devices=devices, **how)


def learner(folder: str, rows: int, tokens: int) -> None:
    """Print the peak and the time of a micro-batch of the learner, and what the formula makes of the peak."""
    lines = []
    for way in ("scoring", "update", "checkpointing", "replay"):
        found = measured("learner", way, "--model", folder, "--rows", rows, "--tokens", tokens)
        config = Config(micro_tokens=rows * tokens, gradient_checkpointing=way == "checkpointing")
        formula = estimate(config, load_config(folder), tokens)["activations"]
        lines.append([way, megabytes(found["peak"]), "" if way == "scoring" else megabytes(formula), found["seconds"]])
    print(f"{rows} rows of {tokens:,} tokens, {folder}")
    print(table(["pass", "peak", "formula", "seconds"], lines))


QWEN = {  # hidden_size, intermediate_size, layers, heads, KV heads, tied head; head_dim is hidden_size / heads
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False),
}


def qwen(name: str) -> ModelConfig:
    """The config.json of one of QWEN, as far as it counts here."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    *numbers, tied = QWEN[name]
    raw = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "tie_word_embeddings": tied}
    raw |= {"vocab_size": 152_064 if name.endswith("7B") else 151_936, **dict(zip(keys, numbers, strict=True))}
    return ModelConfig.from_dict(raw)


def sizes(longest: int, cases: list[tuple[str, int]]) -> None:
    """Print what assets/paper.args needs in bf16 with gradient checkpointing, for sequences of `longest` tokens.

    cases: models, and the devices that share one's run.
    """
    options = [f"@{ASSETS / 'paper.args'}", "--dtype", "bfloat16", "--gradient-checkpointing"]
    config, _ = parse_config(Config, options, "train.py", "")
    parts = ("weights", "gradients", "optimizer", "reference", "activations", "cache")
    rows = []
    for name, devices in cases:
        need = estimate(config, qwen(name), longest, devices)
        gib = [need[part] / 2**30 for part in (*parts, "dense cache")]
        cells = [f"{x:.1f}" for x in (*gib[:-1], sum(gib[:-1]), gib[-1])]
        rows.append([name, f"{need['parameters'] / 1e9:.2f}", devices, *cells])
    print(f"GiB; {config.rollout_rows} rows at a time of {longest:,} tokens, micro-batches of {config.micro_tokens:,}")
    print(table(["model", "10^9", "devices", *parts, "sum", "dense cache"], rows))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cache", "scoring", "learner", "sizes", "ranks"])
    parser.add_argument("--model", default=str(ASSETS / "model"), help="Hugging Face folder (learner)")
    parser.add_argument("--rows", type=int, default=16, help="rows (cache, learner)")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens a row (cache, 4096; learner, 512; sizes and ranks, 5120), or in all (scoring, 2048)",
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the single measurement that this process makes
    parser.add_argument("--results", help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokens = args.tokens or {"cache": 4096, "scoring": 2048, "learner": 512}.get(args.what, 1024 + 4096)
    if args.rows < 1 or min(tokens, args.vocabulary) < 2:
        parser.error("--rows must be at least 1, --tokens and --vocabulary at least 2")
    if args.one and args.what == "cache":
        print(json.dumps(sample(args.one, args.rows, tokens)))
    elif args.one and args.what == "learner":
        print(json.dumps(learn(args.one, args.model, args.rows, tokens)))
    elif args.one:
        print(json.dumps(log_probs(args.one, tokens, args.vocabulary, args.results)))
    elif args.what == "cache":
        cache(args.rows, tokens)
    elif args.what == "learner":
        learner(args.model, args.rows, tokens)
    elif args.what == "sizes":
        sizes(tokens, [(name, 1) for name in QWEN])
    elif args.what == "ranks":
        sizes(tokens, [("Qwen2.5-7B", devices) for devices in (1, 2, 4, 8)])
    else:
        scoring(tokens, args.vocabulary)


if __name__ == "__main__":
    main()
