"""A decoder-only transformer of the Llama family, from scratch.

Covers Llama (1 to 3.2, SmolLM2), Qwen2 / Qwen2.5 and Qwen3: RMSNorm, rotary positions (RoPE), grouped-query
attention (GQA), SwiGLU, in ordinary Hugging Face folders (config.json and safetensors).

Shapes, here and in every other file: B rows, T tokens, S cache slots, H query heads, K KV heads, D head
dimension, L layers, V vocabulary, G group size, R response tokens.

The model stores no cache. `hidden` and `forward` take one as an argument: any sequence of L objects with

    attend(queries (B, H, T, D), keys (B, K, T, D), values (B, K, T, D), positions (B, T)) -> (B, H, T, D)

that stores the new keys and values and says what the queries see (kvcache.py). Batches are padded on the right:
under causal attention padding there changes nothing on its left, so no mask is needed.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def wide(x: Tensor) -> Tensor:
    """x in at least fp32; float64 stays float64. Softmax, norms, ratios and scores are not left to half precision."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the statistics in at least fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(wide(x), self.normalized_shape, eps=self.eps).to(x.dtype)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions, (D/2,), fp32 (RoFormer 2104.09864; Llama 3.1 for `llama3`)."""
    rope = config.rope
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")  # numbers in a model on "meta" too
    # The reciprocal, as other tools round it: with a negative power the angles at position 8,192 differ by 5e-4.
    frequencies = 1.0 / rope["rope_theta"] ** (even / config.head_dim)  # (D/2,)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        # Slow pairs are stretched by `factor`, fast ones left alone, with a linear blend between the two.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (share + (1 - share) / rope["factor"])
    return frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of x (B, heads, T, D) by the angles in cos, sin (B, 1, T, D/2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, (..., T, out), of x (..., T, in).

    In a decode step, T = 1, as (W x^T)^T: faster on a CPU (SmolLM2-135M, 8 rows: 32 ms, not 44, benchmarks/bench.py).
    """
    if x.shape[-2] > 1:
        return F.linear(x, weight, bias)
    y = (weight @ x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """nn.Linear with the product of `project`."""

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of queries q (B, H, T, D) to the keys and values k, v (B, K, T, D) up to their own: (B, H, T, D)."""
    grouped = q.is_cpu or q.dtype != torch.float32  # a GPU has no fused fp32 kernel for it: T x T weights would be kept
    if not grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention: each of the K KV heads serves H/K neighbouring query heads."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden_size, bias=c.output_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache) -> Tensor:
        def split(y: Tensor) -> Tensor:  # (B, T, heads * D) -> (B, heads, T, D)
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q = rotate(self.q_norm(split(self.q_proj(x))), cos, sin)  # (B, H, T, D)
        k = rotate(self.k_norm(split(self.k_proj(x))), cos, sin)  # (B, K, T, D)
        v = split(self.v_proj(x))  # (B, K, T, D)
        out = causal_attention(q, k, v) if cache is None else cache.attend(q, k, v, positions)  # (B, H, T, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, positions, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model. Parameter names are those of a Hugging Face file less the leading `model.`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False  # True: keep only each layer's input for the backward pass, compute the rest again
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)  # (D/2,), not in state_dict

    def _apply(self, fn, recurse=True):
        """`to` and its like move the frequencies, but leave them fp32: bf16 would round far positions to others."""
        super()._apply(fn, recurse)
        self.frequencies = rope_frequencies(self.config).to(self.frequencies.device)
        return self

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Final hidden states (B, T, hidden) of tokens (B, T) at positions (B, T) of a sequence, by default 0, 1, ...

        With a cache, which takes no padding, the tokens continue what it holds.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.embed_tokens(tokens)  # (B, T, hidden)
        angles = positions[:, None, :, None] * self.frequencies  # (B, 1, T, D/2), fp32
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for index, layer in enumerate(self.layers):
            inputs = (x, cos, sin, positions, None if cache is None else cache[index])
            again = self.checkpointing and torch.is_grad_enabled()
            x = checkpoint(layer, *inputs, use_reentrant=False) if again else layer(*inputs)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., hidden), in at least fp32."""
        return wide(project(hidden, self.embed_tokens.weight if self.config.tied else self.lm_head.weight))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Logits (B, T, V) of tokens (B, T): `head(hidden(...))`."""
        return self.head(self.hidden(tokens, positions, cache))


# ---------------------------------------------------------------------------------------------------- the configuration


@dataclass(frozen=True)
class ModelConfig:
    """The settings of config.json that this file implements; `raw` keeps the whole file for saving."""

    vocab_size: int  # V
    hidden_size: int
    intermediate_size: int  # width of the SwiGLU
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D, free in Qwen3, elsewhere hidden_size / heads
    norm_eps: float
    rope: dict  # {"rope_type": "default" | "linear" | "llama3", "rope_theta": ..., and the type's own numbers}
    tied: bool  # the head is the embedding matrix
    qkv_bias: bool  # Qwen2
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool  # Qwen3: RMSNorm on each head's queries and keys
    raw: dict = field(repr=False, default_factory=dict)

    @classmethod
    def from_dict(cls, raw: dict) -> ModelConfig:
        """Read config.json in either dialect (`rope_theta`/`rope_scaling` or `rope_parameters`).

        Raises ValueError naming the setting if it is missing or not implemented: never an approximation.
        """
        rope = read_rope(raw)
        settings = raw | rope | {"layer_types": set(raw.get("layer_types") or ())}
        for key, known in IMPLEMENTED.items():
            if (value := settings.get(key)) not in known:
                only = " or ".join(map(repr, known))
                raise ValueError(f"config.json: {key} = {value!r} is not implemented in model.py, only {only}")
        hidden, heads = number(raw, "hidden_size"), number(raw, "num_attention_heads")
        kv_heads = number(raw, "num_key_value_heads", heads)
        head_dim = number(raw, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            wanted = f"num_key_value_heads {kv_heads} must divide {heads} heads, and 2 head_dim {head_dim}"
            raise ValueError(f"config.json: {wanted}")
        qwen2, bias = raw["model_type"] == "qwen2", bool(raw.get("attention_bias"))
        return cls(
            vocab_size=number(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=number(raw, "intermediate_size"),
            layers=number(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=number(raw, "rms_norm_eps", kind=float),
            rope=rope,
            tied=bool(raw.get("tie_word_embeddings")),
            qkv_bias=bias or qwen2,
            output_bias=bias and not qwen2,
            mlp_bias=bool(raw.get("mlp_bias")),
            qk_norm=raw["model_type"] == "qwen3",
            raw=raw,
        )


ROPE_NUMBERS = {  # what each rope_type needs
    "default": ["rope_theta"],
    "linear": ["rope_theta", "factor"],
    "llama3": ["rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}
IMPLEMENTED = {  # settings that change what a model computes, and the values that they may have here (None: absent)
    "model_type": ("llama", "qwen2", "qwen3"),
    "rope_type": tuple(ROPE_NUMBERS),
    "full_attention": (None,),  # a RoPE for these layers alone
    "partial_rotary_factor": (None, 1),
    "layer_types": (set(), {"full_attention"}),
    "use_sliding_window": (None, False),  # `sliding_window` alone is no window: Qwen names one that is off
    "hidden_act": (None, "silu"),
    "attention_dropout": (None, 0),
    "quantization_config": (None,),
}


def number(settings: dict, key: str, default: int | None = None, kind: type = int) -> float:
    """A positive number, whole if the kind is int; the default where it is absent, null or 0. ValueError names it."""
    value = settings.get(key) or default
    if type(value) not in (int, kind) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} = {value!r} must be a positive {'whole ' * (kind is int)}number")
    return value


def read_rope(raw: dict) -> dict:
    """`ModelConfig.rope` from either dialect of config.json. Raises ValueError for a number that is missing."""
    rope = {"rope_theta": raw.get("rope_theta") or 10000.0}
    rope |= (raw.get("rope_parameters") or {}) | (raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    for key in ROPE_NUMBERS.get(rope["rope_type"], []):
        number(rope, key, kind=float)
    return rope


# --------------------------------------------------------------------------------------------------- loading and saving


INDEX = "model.safetensors.index.json"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_json(path: Path) -> dict:
    """The JSON object in `path`; ValueError names the file if it is missing or broken, OSError if reading it fails."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: is its folder the right one?") from None
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def load_config(folder) -> ModelConfig:
    """The settings in a Hugging Face folder's config.json. Raises ValueError as `read_json` and `from_dict` do."""
    return ModelConfig.from_dict(read_json(Path(folder) / "config.json"))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single file, or else the shards that the index names."""
    files = [folder / "model.safetensors"]
    if (folder / INDEX).exists() and not files[0].exists():
        files = sorted({folder / name for name in read_json(folder / INDEX).get("weight_map", {}).values()})
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} does not exist: the weights of {folder} are incomplete, or not in safetensors")
    return files


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, mapped into memory. ValueError if it is broken, else OSError."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file ({error})") from None
    except OSError as error:
        raise OSError(f"cannot read {file}: {error}") from None


def load_model(folder, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Load a Hugging Face folder, one tensor at a time, strictly: every tensor used once, none missing.

    Of older files, a stored `lm_head.weight` equal to a tied embedding is accepted, and `inv_freq` buffers. Raises
    ValueError naming the file and tensor for anything else.
    """
    with torch.device("meta"):  # shapes without memory
        decoder = Decoder(load_config(folder))
    expected, state = decoder.state_dict(), {}
    shapes = {"lm_head.weight": expected["embed_tokens.weight"].shape} | {name: t.shape for name, t in expected.items()}
    for file in weight_files(Path(folder)):
        for name, stored in read_tensors(file).items():
            short = name.removeprefix("model.")
            if short.endswith("rotary_emb.inv_freq"):
                continue
            if short not in shapes or short in state:
                raise ValueError(f"{file}: unexpected or second tensor {name!r}")
            if stored.shape != shapes[short] or stored.dtype not in FLOATS:
                found, wanted = f"shape {(*stored.shape,)} and {stored.dtype}", f"{(*shapes[short],)} and floats"
                raise ValueError(f"{file}: {name} has {found}, config.json asks for {wanted}")
            state[short] = stored.to(device, dtype, copy=True)  # a copy: the file may change later
            if not state[short].isfinite().all():
                raise ValueError(f"{file}: {name} holds values that are not finite in {dtype}")
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    embedding = state["embed_tokens.weight"]
    if decoder.config.tied and not torch.equal(state.pop("lm_head.weight", embedding), embedding):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding, but config.json ties them")
    decoder.load_state_dict(state, assign=True)
    return decoder.to(device)  # what is not stored: the frequencies


def save_model(decoder: Decoder, folder, state: dict[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors, with the names other tools expect. Keys we do not use survive.

    state: its tensors by name, where the decoder itself holds only a part of each.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw, dtype = decoder.config.raw, str(decoder.norm.weight.dtype).removeprefix("torch.")
    raw = raw | {"dtype" if "dtype" in raw else "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    state = decoder.state_dict() if state is None else state
    state = {n if n == "lm_head.weight" else f"model.{n}": t.contiguous() for n, t in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # the library's own is for the owner alone
    (folder / INDEX).unlink(missing_ok=True)  # that of shards which the new file replaces
