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
from collections.abc import Iterator
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
        """Final hidden states (B, T, hidden) of tokens (B, T).

        positions (B, T) are the tokens' places in their own sequence (0, 1, ... by default). With a cache, which takes
        no padding, the tokens continue what it holds.
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
        for key in ("model_type", *SIZES, "num_hidden_layers", "rms_norm_eps"):
            if raw.get(key) is None:
                raise ValueError(f"config.json has no {key!r}: is this a complete Hugging Face model folder?")
        check({"hidden_act": "silu"} | raw, SETTINGS)
        qwen2, bias, heads = raw["model_type"] == "qwen2", bool(raw.get("attention_bias")), raw["num_attention_heads"]
        config = cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            norm_eps=raw["rms_norm_eps"],
            rope=read_rope(raw),
            tied=bool(raw.get("tie_word_embeddings")),
            qkv_bias=bias or qwen2,
            output_bias=bias and not qwen2,
            mlp_bias=bool(raw.get("mlp_bias")),
            qk_norm=raw["model_type"] == "qwen3",
            raw=raw,
        )
        for allowed, sentence in TOGETHER:
            if not allowed(config):
                raise ValueError("config.json: " + sentence.format(c=config))
        return config


MODEL_TYPES = ("llama", "qwen2", "qwen3")
ROPE_NUMBERS = {  # what each rope_type needs
    "default": ["rope_theta"],
    "linear": ["rope_theta", "factor"],
    "llama3": ["rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}

SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
OPTIONAL = ["num_key_value_heads", "head_dim", "max_window_layers"]  # absent, null and 0 stand for "as usual"
SWITCHES = ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"]

OTHER = "is not implemented in model.py"
WHOLE = "must be a whole number from 1 to 1,000,000"
POSITIVE = (lambda v: type(v) in (int, float) and 0 < v < 1e38, "must be a positive number")  # one that fits fp32

SETTINGS = (  # keys of config.json, whether a value v may stand there (None: absent), and what is said of any other
    (["model_type"], lambda v: v in MODEL_TYPES, "is none that model.py has: " + ", ".join(MODEL_TYPES)),
    (["num_hidden_layers"], lambda v: type(v) is int and 1 <= v <= 1_000, "must be a whole number from 1 to 1,000"),
    (SIZES, lambda v: type(v) is int and 1 <= v <= 1_000_000, WHOLE),
    (OPTIONAL, lambda v: not v or (type(v) is int and 1 <= v <= 1_000_000), WHOLE),
    (SWITCHES, lambda v: v in (None, False, True), OTHER),  # the text "false" is true for Python
    (["rms_norm_eps"], *POSITIVE),
    (["hidden_act"], lambda v: v == "silu", OTHER),
    (["attention_dropout"], lambda v: not v, OTHER),
    (["quantization_config"], lambda v: v is None, OTHER),
    (["layer_types"], lambda v: not v or (isinstance(v, list) and all(t == "full_attention" for t in v)), OTHER),
)
TOGETHER = (  # what holds of every ModelConfig c, and what is said of any other
    (
        lambda c: c.head_dim > 0 and c.head_dim % 2 == 0,
        "head_dim = {c.head_dim} must be even and above 0: RoPE turns pairs of dimensions",
    ),
    (
        lambda c: c.heads % c.kv_heads == 0,
        "num_attention_heads = {c.heads} is not a multiple of num_key_value_heads = {c.kv_heads}",
    ),
    (lambda c: not slides(c.raw), "use_sliding_window or sliding_window is not implemented in model.py"),
)


def check(settings: dict, rules) -> None:
    """Raises ValueError naming the first setting that its rule, a row like those of SETTINGS, does not allow."""
    for keys, allowed, sentence in rules:
        for key in keys:
            if not allowed(settings.get(key)):
                raise ValueError(f"config.json: {key} = {settings.get(key)!r} {sentence}")


def slides(raw: dict) -> bool:
    """Whether some layer would see a window of the newest tokens only."""
    if raw.get("layer_types") or (raw.get("max_window_layers") or 0) >= raw["num_hidden_layers"]:
        return False  # every layer is named, or the window begins above the last one
    # Qwen names a window that `use_sliding_window` leaves off; without that switch the number alone is one.
    on = raw.get("use_sliding_window", raw["model_type"] == "llama" and "sliding_window" in raw)
    return bool(on) and raw.get("sliding_window", "absent") is not None


def read_rope(raw: dict) -> dict:
    """`ModelConfig.rope` from either dialect of config.json. Raises ValueError naming what is not implemented."""
    given = [raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)] or [{}]
    if not all(isinstance(rope, dict) and rope == given[0] for rope in given):
        raise ValueError("config.json: rope_parameters and rope_scaling must be objects, and equal if both are there")
    rope = {"rope_theta": raw.get("rope_theta") or 10000.0} | given[0]
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    numbers = ROPE_NUMBERS.get(str(rope["rope_type"]), [])  # str: what JSON holds need not be hashable
    check(rope, [(["rope_type"], lambda v: str(v) in ROPE_NUMBERS, OTHER), (numbers, *POSITIVE)])
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor other than 1 {OTHER}")
    parts = [key for key, value in rope.items() if isinstance(value, dict)]
    if parts:
        raise ValueError(f"config.json: rope_parameters of {parts[0]!r} alone are not implemented in model.py")
    if rope["rope_type"] == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError("config.json: low_freq_factor must be below high_freq_factor")
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


def stored_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Every (file, name, tensor) of a folder, one at a time, but for the `inv_freq` buffers of old files.

    Raises ValueError naming the file if it is broken or holds a name for the second time, with `model.` or without;
    OSError if reading it fails.
    """
    seen: set[str] = set()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith("rotary_emb.inv_freq"):
                        continue
                    short = name.removeprefix("model.")
                    if short in seen:
                        raise ValueError(f"{file}: second tensor {name!r}")
                    seen.add(short)
                    yield file, name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error})") from None
        except OSError as error:
            raise OSError(f"cannot read {file}: {error}") from None


def as_parameter(stored: Tensor, shape: torch.Size, dtype: torch.dtype, device, where: str) -> Tensor:
    """A stored tensor as the decoder holds it. ValueError says `where` it lies if it does not fit or is not finite."""
    if stored.shape != shape:
        raise ValueError(f"{where} has shape {tuple(stored.shape)}, config.json asks for {tuple(shape)}")
    if stored.dtype not in FLOATS:
        raise ValueError(f"{where} has dtype {stored.dtype}; quantized weights are not implemented")
    tensor = stored.to(device, dtype, copy=True)  # a copy: the file may change later
    if not tensor.isfinite().all():
        raise ValueError(f"{where} holds values that are not finite in {dtype}")
    return tensor


def load_model(folder, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """Load a Hugging Face folder, one tensor at a time, strictly: every tensor used once, none missing.

    Accepted beside the parameters: a stored `lm_head.weight` equal to a tied embedding, and the `inv_freq`
    buffers of old files. Raises ValueError naming the file and tensor for anything else.
    """
    folder = Path(folder)
    with torch.device("meta"):  # shapes without memory
        decoder = Decoder(load_config(folder))
    expected, state, stored_head = decoder.state_dict(), {}, None
    for file, name, stored in stored_tensors(folder):
        short = name.removeprefix("model.")
        if short == "lm_head.weight" and decoder.config.tied:
            stored_head = stored
        elif short in expected:
            state[short] = as_parameter(stored, expected[short].shape, dtype, device, f"{file}: {name}")
        else:
            raise ValueError(f"{file}: unexpected tensor {name!r}")
    missing = sorted(expected.keys() - state.keys())
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    if stored_head is not None and not torch.equal(stored_head.to(device, dtype), state["embed_tokens.weight"]):
        raise ValueError(f"{folder}: lm_head.weight differs from the embedding, but config.json ties them")
    decoder.load_state_dict(state, assign=True)
    return decoder.to(device)  # what is not stored: the frequencies


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
