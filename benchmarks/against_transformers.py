"""model.py against transformers: logits, greedy continuations, and the way back. A development script.

    pip install -r requirements-dev.txt      # transformers is a tool for development, nothing else imports it
    python benchmarks/against_transformers.py                  # a small random model of every kind
    python benchmarks/against_transformers.py --write          # ... and its folder into tests/fixtures
    python benchmarks/against_transformers.py --model FOLDER   # a real model

It prints the largest absolute differences of logits, all in fp32, and exits with 1 if one is above 1e-4:

  saved       the folder that transformers wrote, against what transformers computes
  old         the same folder with config.json in the older dialect (`rope_theta`, `rope_scaling`, `torch_dtype`)
  far         a token every 211 positions, up to 8,229
  inv_freq    RoPE's frequencies (radians per position)
  back        our saved folder, opened by transformers; tensors and config.json are compared as well

A fixture is the saved folder and reference.safetensors: tokens (T,) and the logits (T, V) that transformers gives.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import Decoder, load_model, rope_frequencies, save_model
from rollout import rollout
from runs import table

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
TOLERANCE = 1e-4
LENGTH = 40  # tokens, beyond the 32 of LLAMA3's original context
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-3,  # large, so that leaving it out shows
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
# What config.json says beyond SMALL, in the older dialect. Weights are stored in `torch_dtype`; logits are fp32.
KINDS = {
    "llama": {"torch_dtype": "float32"},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-rope-llama3": {"head_dim": 8, "rope_scaling": LLAMA3},
    "llama-rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-sharded": {},
    "llama-bfloat16": {"torch_dtype": "bfloat16"},
    "qwen2": {"sliding_window": 4, "use_sliding_window": False},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "qwen3-attention-bias": {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
}
PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
)


def save_random_model(raw: dict, folder: Path, seed: int) -> None:
    """Let transformers write a model whose every parameter is random: biases far from 0, norm weights far from 1."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.4, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    model = model.to(getattr(torch, raw["torch_dtype"]))
    model.save_pretrained(folder, max_shard_size="4KB" if folder.name.endswith("sharded") else "1GB")
    (folder / "generation_config.json").unlink()


def reference_model(folder: Path) -> transformers.PreTrainedModel:
    """The folder as transformers opens it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference."""
    return float((ours - theirs).abs().max())


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in fp32."""
    return {name: t.float() for file in folder.glob("model*.safetensors") for name, t in load_file(file).items()}


def way_back(decoder: Decoder, folder: Path, tokens: Tensor, theirs: Tensor) -> dict:
    """What is left of `folder` after load_model and save_model, as transformers sees it."""
    with tempfile.TemporaryDirectory() as again:
        save_model(decoder, again)
        before, after = stored(folder), stored(Path(again))
        if decoder.config.tied:
            before.pop("lm_head.weight", None)
        configs = [json.loads((Path(place) / "config.json").read_text()) for place in (folder, again)]
        changed = {key for key in configs[0].keys() | configs[1].keys() if configs[0].get(key) != configs[1].get(key)}
        return {
            "back": difference(reference_model(again)(tokens).logits, theirs),
            "same tensors": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
            "config keys changed": ", ".join(sorted(changed)) or "none",
        }


@torch.no_grad()
def compare_kind(kind: str, folder: Path, seed: int) -> dict:
    """Write a small random model of this kind into `folder`, and compare it in every way."""
    raw = SMALL | {"model_type": kind.split("-")[0]} | KINDS[kind]
    save_random_model(raw, folder, seed)
    model, decoder = reference_model(folder), load_model(folder)
    tokens = torch.randint(raw["vocab_size"], (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    theirs = model(tokens).logits  # (1, T, V)
    save_file({"tokens": tokens[0], "logits": theirs[0].contiguous()}, folder / "reference.safetensors")
    row = {"kind": kind, "largest": float(theirs.abs().max()), "saved": difference(decoder(tokens), theirs)}

    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(raw))
    row["old"] = difference(load_model(folder)(tokens), reference_model(folder)(tokens).logits)
    (folder / "config.json").write_text(written)

    far = torch.arange(LENGTH)[None] * 211  # (1, T); the mask says that the gaps do not begin new sequences
    spread = model(tokens, position_ids=far, attention_mask=torch.ones_like(tokens)).logits
    row["far"] = difference(decoder(tokens, far), spread)
    row["inv_freq"] = difference(rope_frequencies(decoder.config), model.model.rotary_emb.inv_freq)
    return row | way_back(decoder, folder, tokens, theirs)


@torch.no_grad()
def compare_real(folder: Path, new_tokens: int) -> list[dict]:
    """Logits and greedy continuations of a real model, prompt by prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, decoder = reference_model(folder), load_model(folder)
    eos = model.generation_config.eos_token_id
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        tokens = torch.tensor([ids])  # (1, T)
        sampled = rollout(
            decoder,
            [ids],
            group_size=1,
            max_new_tokens=new_tokens,
            eos_ids=eos if isinstance(eos, list) else [eos],
            temperature=0,
            compressor="full",
        )
        ours = sampled.response(0)
        whole = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new_tokens
        )
        theirs = whole[0, len(ids) :].tolist()
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) > 1), len(ours))
        logits = model(whole).logits
        rows.append(
            {
                "prompt": prompt[:32],
                "prompt tokens": len(ids),
                "largest": float(logits.abs().max()),
                "saved": difference(decoder(whole), logits),
                "new tokens": len(theirs),
                "equal up to": same if (same, len(ours)) != (len(theirs),) * 2 else "the end",
            }
        )
    return [row | (way_back(decoder, folder, whole, logits) if row is rows[-1] else {}) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write tests/fixtures")
    parser.add_argument("--model", type=Path, help="compare this Hugging Face folder instead")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of a greedy continuation")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    if args.model:
        rows = compare_real(args.model, args.new_tokens)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = [compare_kind(kind, Path(folder) / kind, seed) for seed, kind in enumerate(KINDS)]
            if args.write:
                shutil.rmtree(FIXTURES, ignore_errors=True)
                shutil.copytree(folder, FIXTURES)
                size = sum(file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file())
                print(f"wrote {FIXTURES}, {size / 1000:.0f} kB")
    head = list(rows[-1])
    print(
        table(head, [[f"{v:.1e}" if type(v) is float else v for v in (r.get(key, "") for key in head)] for r in rows])
    )
    worst = max(row.get(key, 0) for row in rows for key in ("saved", "old", "far", "back"))
    sys.exit(int(worst > TOLERANCE or any(row.get("same tensors") is False for row in rows)))


if __name__ == "__main__":
    main()
