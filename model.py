"""A decoder-only transformer of the Llama family, from scratch.

Covers Llama (1 to 3.2, SmolLM2), Qwen2 / Qwen2.5 and Qwen3: RMSNorm, rotary positions (RoPE), grouped-query
attention (GQA), SwiGLU. It reads and writes ordinary Hugging Face folders (config.json and safetensors).

Shapes, here and in every other file: B rows, T tokens, S cache slots, H query heads, K KV heads, D head
dimension, L layers, V vocabulary, G group size, R response tokens.

The model stores no cache. `hidden` and `forward` take one as an argument: any sequence of L objects with

    attend(queries (B, H, T, D), keys (B, K, T, D), values (B, K, T, D), positions (B, T)) -> (B, H, T, D)

that stores the new keys and values and says what the queries see. kvcache.py holds the real ones; a test can
pass one that applies any visibility mask it likes. Batches are padded on the right: under causal attention
padding there changes nothing on its left, so no mask is needed.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ------------------------------------------------------------------------------------------------------ the transformer


def wide(x: Tensor) -> Tensor:
    """x in at least fp32; float64 stays float64. Softmax, norms, ratios and scores are not left to half precision."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, the statistics in at least fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(wide(x), (x.shape[-1],), eps=self.eps).to(x.dtype)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair of dimensions, (D/2,), fp32 (RoFormer 2104.09864; Llama 3.1 for `llama3`)."""
    rope, even = config.rope, torch.arange(0, config.head_dim, 2, dtype=torch.float32)
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

    In a decode step, T = 1, the rows are multiplied as (W x^T)^T, which a CPU does faster for few rows (all products of
    SmolLM2-135M for 8 rows: 32 ms instead of 44, `benchmarks/bench.py`).
    """
    if x.shape[-2] > 1:
        return F.linear(x, weight, bias)
    y = (weight @ x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """nn.Linear with the product of `project`."""

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


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
        if cache is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = cache.attend(q, k, v, positions)
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

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Final hidden states (B, T, hidden) of tokens (B, T).

        positions (B, T) are the tokens' places in their own sequence (0, 1, ... by default). A cache takes a
        position below 0 as padding. With a cache, the tokens continue what it holds.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.embed_tokens(tokens)  # (B, T, hidden)
        frequencies = rope_frequencies(self.config).to(x.device)
        angles = positions[:, None, :, None] * frequencies  # (B, 1, T, D/2), fp32
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


MODEL_TYPES = ("llama", "qwen2", "qwen3")


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

        def need(key: str):
            if raw.get(key) is None:
                raise ValueError(f"config.json has no {key!r}: is this a complete Hugging Face model folder?")
            return raw[key]

        def refuse(condition: bool, key: str) -> None:
            if condition:
                raise ValueError(f"config.json: {key} = {raw.get(key)!r} is not implemented in model.py")

        kind = need("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"config.json: model_type = {kind!r} is none that model.py has: {', '.join(MODEL_TYPES)}")
        refuse(raw.get("hidden_act", "silu") != "silu", "hidden_act")
        refuse(bool(raw.get("attention_dropout")), "attention_dropout")
        refuse(raw.get("quantization_config") is not None, "quantization_config")
        heads = need("num_attention_heads")
        bias = bool(raw.get("attention_bias", False))
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            size(key, need(key), most=1_000 if key == "num_hidden_layers" else 1_000_000)
        for key in ("num_key_value_heads", "head_dim", "max_window_layers"):
            size(key, raw.get(key) or 1, most=1_000_000)  # absent, null and 0 stand for "as usual"
        positive("rms_norm_eps", need("rms_norm_eps"))
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
            refuse(raw.get(key) not in (None, False, True), key)  # the text "false" is true for Python
        types = raw.get("layer_types") or []
        refuse(not isinstance(types, list) or any(t != "full_attention" for t in types), "layer_types")
        if not raw.get("layer_types") and (raw.get("max_window_layers") or 0) < raw["num_hidden_layers"]:
            # Qwen names a window that `use_sliding_window` leaves off; without that switch the number alone is one.
            on = raw.get("use_sliding_window", kind == "llama" and "sliding_window" in raw)
            if on and raw.get("sliding_window", "absent") is not None:
                raise ValueError("config.json: use_sliding_window or sliding_window is not implemented in model.py")
        config = cls(
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            layers=need("num_hidden_layers"),
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or need("hidden_size") // heads,
            norm_eps=need("rms_norm_eps"),
            rope=read_rope(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            raw=raw,
        )
        if config.head_dim % 2 or not config.head_dim:
            raise ValueError(
                f"config.json: head_dim = {config.head_dim} must be even and above 0: RoPE turns pairs of dimensions"
            )
        if config.heads % config.kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads = {config.heads} is not a multiple of "
                f"num_key_value_heads = {config.kv_heads}"
            )
        return config


ROPE_NUMBERS = {  # what each rope_type needs beside rope_theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def positive(key: str, value) -> None:
    """Raises ValueError naming the key of config.json unless its value is a number above 0 that fits fp32."""
    if type(value) not in (int, float) or not 0 < value < 1e38:
        raise ValueError(f"config.json: {key} = {value!r} must be a positive number")


def size(key: str, value, most: int) -> None:
    """Raises ValueError naming the key of config.json unless its value is a whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"config.json: {key} = {value!r} must be a whole number from 1 to {most:,}")


def read_rope(raw: dict) -> dict:
    """`ModelConfig.rope` from either dialect of config.json. Raises ValueError naming what is not implemented."""
    given = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)] or [{}]
    if not all(isinstance(rope, dict) and rope == given[0] for rope in given):
        raise ValueError("config.json: rope_parameters and rope_scaling must be objects, and equal if both are there")
    rope = {"rope_theta": raw.get("rope_theta") or 10000.0} | given[0]
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] not in list(ROPE_NUMBERS):  # a list: what JSON holds need not be hashable
        raise ValueError(f"config.json: rope_type = {rope['rope_type']!r} is not implemented in model.py")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: partial_rotary_factor other than 1 is not implemented in model.py")
    for key, value in rope.items():
        if isinstance(value, dict):
            raise ValueError(f"config.json: rope_parameters of {key!r} alone are not implemented in model.py")
    for key in ("rope_theta", *ROPE_NUMBERS[rope["rope_type"]]):
        positive(key, rope.get(key))
    if rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError("config.json: low_freq_factor must be below high_freq_factor")
    return rope


# --------------------------------------------------------------------------------------------------- loading and saving


INDEX = "model.safetensors.index.json"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_json(path: Path) -> dict:
    """The JSON object in `path`; ValueError names the file if it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: is its folder the right one?") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def load_config(folder) -> ModelConfig:
    """The settings in a Hugging Face folder's config.json. Raises ValueError as `read_json` and `from_dict` do."""
    raw = read_json(Path(folder) / "config.json")
    try:
        return ModelConfig.from_dict(raw)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single file, or else the shards that the index names."""
    index, names = folder / INDEX, {"model.safetensors"}
    if index.exists() and not (folder / "model.safetensors").exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{index} has no weight_map of tensors to files: download it again")
        for name in shards.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{index}: weight_map names {name!r}, which is not a file of this folder")
        names = set(shards.values())
    files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} does not exist: the weights of {folder} are incomplete, or not in safetensors")
    return files


def load_model(folder, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Load a Hugging Face folder, one tensor at a time, strictly: every tensor used once, none missing.

    Accepted beside the parameters: a stored `lm_head.weight` equal to a tied embedding, and the `inv_freq`
    buffers of old files. Raises ValueError naming the file and tensor for anything else.
    """
    folder = Path(folder)
    with torch.device("meta"):  # shapes without memory
        decoder = Decoder(load_config(folder))
    expected = decoder.state_dict()
    state: dict[str, Tensor] = {}
    seen: set[str] = set()
    stored_head = None
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    short = name.removeprefix("model.")
                    tensor = tensors.get_tensor(name)
                    if short.endswith("rotary_emb.inv_freq"):
                        continue
                    if short in seen:
                        raise ValueError(f"{file}: second tensor {name!r}")
                    seen.add(short)
                    if short == "lm_head.weight" and decoder.config.tied:
                        stored_head = tensor
                        continue
                    if short not in expected:
                        raise ValueError(f"{file}: unexpected tensor {name!r}")
                    if tensor.shape != expected[short].shape:
                        raise ValueError(
                            f"{file}: {name} has shape {tuple(tensor.shape)}, "
                            f"config.json asks for {tuple(expected[short].shape)}"
                        )
                    if tensor.dtype not in FLOATS:
                        raise ValueError(
                            f"{file}: {name} has dtype {tensor.dtype}; quantized weights are not implemented"
                        )
                    state[short] = tensor.to(device, dtype, copy=True)  # a copy: the file may change later
                    if not state[short].isfinite().all():
                        raise ValueError(f"{file}: {name} holds values that are not finite in {dtype}")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error})") from None
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    if stored_head is not None and not torch.equal(stored_head.to(device, dtype), state["embed_tokens.weight"]):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding, but config.json ties them")
    decoder.load_state_dict(state, assign=True)
    return decoder


def save_model(decoder: Decoder, folder) -> None:
    """Write config.json and model.safetensors, with the names other tools expect. Keys we do not use survive."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(decoder.parameters()).dtype
    raw = dict(decoder.config.raw)
    raw["dtype" if "dtype" in raw else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    state = decoder.state_dict()
    named = {name if name == "lm_head.weight" else f"model.{name}": t.contiguous() for name, t in state.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # the library's own is for the owner alone
    (folder / INDEX).unlink(missing_ok=True)  # that of shards which the new file replaces
