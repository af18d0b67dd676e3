"""model.py against a slow forward pass written from the papers' formulas, and against logits of transformers.

fixtures/ holds folders that benchmarks/against_transformers.py wrote: small random models as transformers saves them,
with tokens (T,) and logits (T, V) in reference.safetensors. Every parameter is random, biases and norms included.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import model
from model import Decoder, ModelConfig, load_model, project, rope_frequencies, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "llama, GQA, untied": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, one KV head per head": {"kv_heads": 4},
    "llama, llama3 RoPE": {"rope_scaling": LLAMA3, "rope_theta": 100.0},
    "llama, linear RoPE": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3, free head_dim": {"model_type": "qwen3", "head_dim": 12},
}


def fill_vectors(decoder: Decoder, seed: int = 1) -> Decoder:
    """Random biases and norm weights, so that leaving one out shows."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=random, dtype=torch.float64), alpha=0.2)
    return decoder


def slow_frequency(raw: dict, pair: int, dimension: int) -> float:
    """Radians per position of one pair of dimensions (RoFormer; Llama 3.1's three-piece rule)."""
    frequency = raw.get("rope_theta", 10000.0) ** (-2 * pair / dimension)
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind == "llama3":
        context, wavelength = scaling["original_max_position_embeddings"], 2 * math.pi / frequency
        if wavelength < context / scaling["high_freq_factor"]:
            return frequency
        if wavelength > context / scaling["low_freq_factor"]:
            return frequency / scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
    return frequency


def slow_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits (T, V) of one sequence, a token, a head and a pair of dimensions at a time."""
    c, raw, p = decoder.config, decoder.config.raw, dict(decoder.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + c.norm_eps).sqrt() * p[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0)

    def turn(x: Tensor, position: int) -> Tensor:
        out, half = x.clone(), c.head_dim // 2
        for i in range(half):
            z = complex(float(x[i]), float(x[i + half]))
            angle = position * slow_frequency(raw, i, c.head_dim)
            z *= complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = z.real, z.imag
        return out

    stream = [p["embed_tokens.weight"][token] for token in tokens]
    for index in range(c.layers):
        at = f"layers.{index}.self_attn"
        keys, values, mixed = [], [], []
        for position, x in enumerate(stream):
            y = norm(x, f"layers.{index}.input_layernorm")
            q, k, v = (linear(y, f"{at}.{name}_proj").split(c.head_dim) for name in "qkv")
            if c.qk_norm:
                q, k = [norm(h, f"{at}.q_norm") for h in q], [norm(h, f"{at}.k_norm") for h in k]
            keys.append([turn(h, position) for h in k])
            values.append(v)
            heads = []
            for h, query in enumerate(q):
                served = h * c.kv_heads // c.heads  # neighbouring query heads share a KV head
                query = turn(query, position)
                logits = torch.stack([query @ key[served] / c.head_dim**0.5 for key in keys])
                weights = logits.exp() / logits.exp().sum()
                heads.append(sum(w * value[served] for w, value in zip(weights, values, strict=True)))
            mixed.append(linear(torch.cat(heads), f"{at}.o_proj"))
        stream = [x + y for x, y in zip(stream, mixed, strict=True)]
        for position, x in enumerate(stream):
            y = norm(x, f"layers.{index}.post_attention_layernorm")
            gate, up = (linear(y, f"layers.{index}.mlp.{name}_proj") for name in ("gate", "up"))
            stream[position] = x + linear(gate / (1 + (-gate).exp()) * up, f"layers.{index}.mlp.down_proj")
    head = p["embed_tokens.weight" if c.tied else "lm_head.weight"]
    return torch.stack([head @ norm(x, "norm") for x in stream])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_formulas(kind):
    """RMSNorm, RoPE, GQA and SwiGLU give what their papers' formulas give, for every supported variant."""
    decoder = fill_vectors(tiny_model(dtype=torch.float64, **KINDS[kind]))
    tokens = torch.randint(31, (11,), generator=torch.Generator().manual_seed(2))
    # The angles are fp32 in the model, as in every release of these weights.
    torch.testing.assert_close(decoder(tokens[None])[0], slow_logits(decoder, tokens.tolist()), atol=2e-5, rtol=0)


FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_KINDS = (
    "llama",
    "llama-tied",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-attention-bias",
    "llama-mlp-bias",
    "llama-sharded",
    "llama-bfloat16",
    "qwen2",
    "qwen2-tied",
    "qwen3",
    "qwen3-attention-bias",
)


def reference(kind: str) -> tuple[Tensor, Tensor]:
    """Tokens (T,) and what transformers computes for them, (T, V)."""
    tensors = load_file(FIXTURES / kind / "reference.safetensors")
    return tensors["tokens"], tensors["logits"]


@pytest.mark.parametrize("kind", FIXTURE_KINDS)
@torch.no_grad()
def test_logits_are_those_of_transformers(kind):
    """A folder that transformers wrote gives its logits, to 1e-4 in fp32, whatever dtype the weights are stored in."""
    tokens, logits = reference(kind)
    torch.testing.assert_close(load_model(FIXTURES / kind)(tokens[None])[0], logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", FIXTURE_KINDS)
@torch.no_grad()
def test_padding_on_the_right_changes_nothing_on_its_left(kind):
    """Under causal attention each row of a right-padded batch has the logits it has alone, whatever the padding."""
    tokens, logits = reference(kind)
    decoder, lengths = load_model(FIXTURES / kind), (7, len(tokens), 1)
    batch = torch.randint(16, (3, len(tokens)), generator=torch.Generator().manual_seed(3))
    for row, length in enumerate(lengths):
        batch[row, :length] = tokens[:length]
    together = decoder(batch)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(together[row, :length], decoder(tokens[None, :length])[0])
        torch.testing.assert_close(together[row, :length], logits[:length], atol=1e-4, rtol=0)


class Attend:
    """Stands in for a cache: dense causal attention with one thing wrong."""

    def __init__(self, before=lambda q, k: (q, k), scale=None, served=Tensor.repeat_interleave):
        self.before, self.scale, self.served = before, scale, served

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        q, k = self.before(q, k)
        k, v = (self.served(x, q.shape[1] // x.shape[1], 1) for x in (k, v))  # (B, H, T, D)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)


def rope_of(**changes):
    """A fault: frequencies computed from another `rope`."""

    def fault(decoder, patch):
        decoder.frequencies = rope_frequencies(dataclasses.replace(decoder.config, rope=decoder.config.rope | changes))

    return fault


def no_blend(decoder, patch):
    """Llama 3.1's rule as a hard switch."""
    rope = decoder.config.rope
    plain = rope_frequencies(dataclasses.replace(decoder.config, rope=rope | {"rope_type": "default"}))
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    decoder.frequencies = torch.where(turns < 1, plain / rope["factor"], plain)


def pairs_of_neighbours(decoder, patch):
    """RoPE turns (x[2i], x[2i + 1]), as in the paper, while the weights are laid out for halves."""

    def rotate(x, cos, sin):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    patch.setattr(model, "rotate", rotate)


def without(name: str, value: float = 0.0):
    """A fault: every parameter whose name ends so has the value it would have if it were left out."""

    def fault(decoder, patch):
        for full_name, parameter in decoder.named_parameters():
            if full_name.endswith(name):
                parameter.fill_(value)

    return fault


def norm_after_rope(decoder, patch):
    """Qwen3's q/k norm applied to rotated queries and keys."""
    layers = [layer.self_attn for layer in decoder.layers]
    norms = [(a.q_norm, a.k_norm) for a in layers]
    for a in layers:
        a.q_norm = a.k_norm = torch.nn.Identity()
    return [Attend(before=lambda q, k, n=n: (n[0](q), n[1](k))) for n in norms]


def tied_head(decoder, patch):
    """The embedding serves as head though config.json says otherwise."""
    decoder.lm_head.weight.copy_(decoder.embed_tokens.weight)


def no_epsilon(decoder, patch):
    """RMSNorm without its epsilon."""
    for module in decoder.modules():
        if isinstance(module, model.RMSNorm):
            module.eps = 0.0


FAULTS = [
    ("llama", tied_head),
    ("llama", no_epsilon),
    ("llama", pairs_of_neighbours),
    ("llama", without("norm.weight", 1.0)),
    ("llama", lambda *_: [Attend(served=lambda x, n, dim: x.repeat(1, n, 1, 1))] * 2),  # head h by KV head h % K
    ("llama-rope-llama3", no_blend),
    ("llama-rope-llama3", rope_of(rope_type="default")),
    ("llama-rope-llama3", rope_of(rope_type="linear")),
    ("llama-rope-llama3", rope_of(original_max_position_embeddings=16384)),
    ("llama-rope-linear", rope_of(rope_type="default")),
    ("llama-attention-bias", without("v_proj.bias")),
    ("llama-attention-bias", without("o_proj.bias")),
    ("llama-mlp-bias", without("gate_proj.bias")),
    ("llama-mlp-bias", without("down_proj.bias")),
    ("qwen2", without("q_proj.bias")),
    ("qwen2-tied", without("k_proj.bias")),
    ("qwen2", rope_of(rope_theta=10000.0)),
    ("qwen3", norm_after_rope),
    ("qwen3", without("q_norm.weight", 1.0)),
    ("qwen3", lambda *_: [Attend(scale=(16 / 4) ** -0.5)] * 2),  # hidden / heads in place of D = 6
    ("qwen3-attention-bias", without("o_proj.bias")),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
@torch.no_grad()
def test_the_references_tell_a_wrong_model_apart(kind, fault, monkeypatch):
    """Each usual mistake moves the logits by far more than the tolerance of 1e-4."""
    tokens, logits = reference(kind)
    decoder = load_model(FIXTURES / kind)
    cache = fault(decoder, monkeypatch)
    assert (decoder(tokens[None], cache=cache)[0] - logits).abs().max() > 0.01


@torch.no_grad()
def test_the_stand_in_without_a_fault_is_right():
    """The faults above that go through `Attend` fail for what they change, not for the stand-in."""
    tokens, logits = reference("qwen3")
    torch.testing.assert_close(
        load_model(FIXTURES / "qwen3")(tokens[None], cache=[Attend()] * 2)[0], logits, atol=1e-4, rtol=0
    )


@torch.no_grad()
def test_positions_are_relative_under_rope():
    """Shifting all positions of a sequence leaves its logits as they are."""
    decoder = tiny_model(dtype=torch.float64)
    tokens = torch.arange(9)[None]
    shifted = decoder(tokens, positions=tokens + 40)
    torch.testing.assert_close(shifted, decoder(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("on_cpu", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.float64)])
def test_causal_attention_is_that_of_the_formula(on_cpu, dtype, monkeypatch):
    """softmax(q k^T / sqrt(D)) v over the tokens so far, H/K neighbouring query heads to a KV head, gradients too."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 7, 4, dtype=dtype, generator=random).requires_grad_() for heads in (6, 2, 2))
    future = ~torch.ones(7, 7).bool().tril()
    scores = (q.unflatten(1, (2, 3)) @ k[:, :, None].mT / 4**0.5).masked_fill(future, -torch.inf)  # (B, K, H/K, T, T)
    slow = (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)  # (B, H, T, D)
    monkeypatch.setattr(Tensor, "is_cpu", on_cpu, raising=False)  # False: as on an accelerator
    out = model.causal_attention(q, k, v)
    torch.testing.assert_close(out, slow)
    gradients = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, slow)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("on_cpu", "dtype", "heads"),
    [(True, torch.float32, 2), (True, torch.bfloat16, 2), (False, torch.bfloat16, 2), (False, torch.float32, 6)],
)
def test_keys_are_repeated_only_where_no_kernel_shares_them(on_cpu, dtype, heads, monkeypatch):
    """fp32 on an accelerator has no fused kernel for K < H: there, and only there, it is asked for H KV heads."""
    q, k, v = (torch.ones(1, heads, 3, 4, dtype=dtype) for heads in (6, 2, 2))
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *inputs, **how: calls.append((inputs, how)))
    monkeypatch.setattr(Tensor, "is_cpu", on_cpu, raising=False)
    model.causal_attention(q, k, v)
    ((inputs, how),) = calls
    assert [x.shape[1] for x in inputs] == [6, heads, heads]
    assert how["enable_gqa"] == (heads == 2)


def through_meta(decoder: Decoder) -> Decoder:
    """The model again, from shapes without memory and then the stored tensors."""
    with torch.device("meta"):
        empty = Decoder(decoder.config)
    empty.load_state_dict(decoder.state_dict(), assign=True)
    return empty


def saved_and_loaded(decoder: Decoder) -> Decoder:
    """The model again, from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(decoder, folder)
        return load_model(folder)


WAYS = {
    "new": lambda decoder: decoder,
    "bfloat16": lambda decoder: decoder.to(torch.bfloat16),
    "half and back": lambda decoder: decoder.half().float(),
    "float64": lambda decoder: decoder.double(),
    "deepcopy": copy.deepcopy,
    "deepcopy in bfloat16": lambda decoder: copy.deepcopy(decoder).to(torch.bfloat16),
    "meta": through_meta,
    "meta, then memory": lambda decoder: decoder.to("meta").to_empty(device="cpu"),
    "folder": saved_and_loaded,
}


@pytest.mark.parametrize("way", WAYS)
def test_rope_frequencies_are_never_rounded(way):
    """However a model came about, its frequencies are the fp32 ones: at position 8,192 bf16 would be off by radians."""
    decoder = WAYS[way](tiny_model(rope_scaling=LLAMA3, rope_theta=100.0))
    assert torch.equal(decoder.frequencies, rope_frequencies(decoder.config))
    assert decoder.frequencies.dtype == torch.float32 and decoder.frequencies.device == decoder.norm.weight.device


def test_rope_frequencies_move_but_are_not_stored():
    """They follow the model to another device, and neither a file nor the optimizer knows of them."""
    decoder = tiny_model()
    assert not any("frequencies" in name for name in [*decoder.state_dict(), *dict(decoder.named_parameters())])
    assert decoder.to("meta").frequencies.device.type == "meta"


@torch.no_grad()
def test_rope_frequencies_are_computed_once(monkeypatch):
    """A step of a model computes none, and so copies none to its device."""
    decoder = tiny_model()
    monkeypatch.setattr(model, "rope_frequencies", None)
    decoder(torch.arange(9)[None])


@pytest.mark.parametrize("shape", [(1, 5), (3, 1, 5), (2, 3, 5)])
def test_the_product_of_a_decode_step_is_the_usual_one(shape):
    """(W x^T)^T + b is x W^T + b, for any leading dimensions, gradients included."""
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (7, 5), (7,)))
    outputs = [product(x, weight, bias) for product in (project, F.linear)]
    gradients = [torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in outputs]
    for ours, usual in zip(*([y, *g] for y, g in zip(outputs, gradients, strict=True)), strict=True):
        torch.testing.assert_close(ours, usual)


@pytest.mark.parametrize(
    ("dtype", "logits"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
@torch.no_grad()
def test_logits_are_at_least_fp32(dtype, logits):
    """Half-precision weights still give fp32 logits; float64 stays float64."""
    assert tiny_model(dtype=dtype)(torch.arange(4)[None]).dtype == logits


# ------------------------------------------------------------------------------------------------------- folders

NORM = "model.norm.weight"


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_loads_to_the_same_model_and_config(kind, tmp_path):
    """Load, save, load: the same tensors, and every key of config.json, those we do not use included."""
    decoder = fill_vectors(tiny_model(**KINDS[kind], some_key="kept"))
    save_model(decoder, tmp_path / "a")
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0] == configs[1] == decoder.config.raw | {"torch_dtype": "float32"}


def test_names_in_the_file_are_those_of_hugging_face(tmp_path):
    """Other tools find `model.layers.0...`, `model.embed_tokens.weight` and `lm_head.weight`."""
    save_model(tiny_model(layers=1), tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= names
    assert all(name.startswith(("model.", "lm_head.")) for name in names)


@pytest.mark.parametrize("kind", FIXTURE_KINDS)
def test_a_folder_of_transformers_comes_back_whole(kind, tmp_path):
    """Load and save: every tensor and every key of config.json; only the dtype is now that of the file."""
    save_model(load_model(FIXTURES / kind), tmp_path)
    stored = {}
    for file in (FIXTURES / kind).glob("model*.safetensors"):
        stored |= load_file(file)
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor.float()) for name, tensor in stored.items())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (FIXTURES / kind, tmp_path))
    assert after == before | {"dtype": "float32"}


@pytest.mark.parametrize("kind", FIXTURE_KINDS)
def test_both_dialects_of_config_json_mean_the_same(kind):
    """`rope_parameters` of newer files says what `rope_theta` and `rope_scaling` say in older ones."""
    new = json.loads((FIXTURES / kind / "config.json").read_text())
    old = dict(new)
    old["torch_dtype"] = old.pop("dtype")
    scaling = dict(old.pop("rope_parameters"))
    old["rope_theta"], kind_of_rope = scaling.pop("rope_theta"), scaling.pop("rope_type")
    for name in ("type", "rope_type"):  # the oldest files say `type`
        old["rope_scaling"] = scaling | {name: kind_of_rope} if scaling else None
        configs = [dataclasses.replace(ModelConfig.from_dict(raw), raw={}) for raw in (old, new)]
        assert configs[0] == configs[1]


# config.json of published models, as far as it says something about the architecture.
LLAMA_32_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_25_05B = {
    "model_type": "qwen2",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,  # below the number of layers: only use_sliding_window keeps the window off
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_25_15B = QWEN_25_05B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
}
QWEN_25_7B = QWEN_25_05B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN_3_06B = QWEN_25_05B | {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    ("raw", "head_dim", "tied", "qkv_bias", "qk_norm", "rope_type", "parameters"),
    [
        (LLAMA_32_1B, 64, True, False, False, "llama3", 1_235_814_400),
        (QWEN_25_05B, 64, True, True, False, "default", 494_032_768),
        (QWEN_25_15B, 128, True, True, False, "default", 1_543_714_304),
        (QWEN_25_7B, 128, False, True, False, "default", 7_615_616_512),
        (QWEN_3_06B, 128, True, False, True, "default", 596_049_920),
    ],
    ids=("Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen3-0.6B"),
)
def test_published_models_have_their_published_size(raw, head_dim, tied, qkv_bias, qk_norm, rope_type, parameters):
    """Their config.json is accepted, read rightly, and gives exactly the published number of parameters."""
    config = ModelConfig.from_dict(raw)
    assert (config.head_dim, config.tied, config.qk_norm) == (head_dim, tied, qk_norm)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (qkv_bias, False, False)
    assert (config.rope["rope_type"], config.rope["rope_theta"]) == (rope_type, raw["rope_theta"])
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameters


def test_a_sharded_model_loads_like_a_single_file(tmp_path):
    """With an index, each shard is read and every tensor found."""
    save_model(tiny_model(), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards = {"one.safetensors": sorted(whole)[::2], "two.safetensors": sorted(whole)[1::2]}
    for file, names in shards.items():
        save_file({name: whole[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = load_model(tmp_path).state_dict()
    assert all(torch.equal(tensor, state[name.removeprefix("model.")]) for name, tensor in whole.items())
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"two\.safetensors does not exist"):
        load_model(tmp_path)


def test_an_index_without_files_gives_no_model(tmp_path):
    """A folder whose index names no shard lacks every tensor, and says so."""
    save_model(tiny_model(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ValueError, match=r"21 tensors are missing, the first is 'embed_tokens\.weight'"):
        load_model(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}], ids=("untied", "tied"))
def test_a_tensor_in_two_shards_is_named(settings, tmp_path):
    """Which of the two would count is nobody's guess; a tied head stored twice is refused as well."""
    name = "lm_head.weight"
    save_model(tiny_model(**settings), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    tensors = load_file(tmp_path / "one.safetensors")
    tensors.setdefault(name, tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({name: tensors[name]}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"two\.safetensors: unexpected or second tensor 'lm_head\.weight'"):
        load_model(tmp_path)


def test_saving_over_a_sharded_folder_leaves_no_stale_index(tmp_path):
    """The new file counts, for us and for tools that look for an index first."""
    shutil.copytree(FIXTURES / "llama-sharded", tmp_path, dirs_exist_ok=True)
    decoder = load_model(tmp_path)
    with torch.no_grad():
        decoder.norm.weight.fill_(2.0)
    save_model(decoder, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    shutil.copy(FIXTURES / "llama-sharded" / "model.safetensors.index.json", tmp_path)
    assert torch.equal(load_model(tmp_path).norm.weight, decoder.norm.weight)


def edited_folder(tmp_path, edit, **settings):
    """A saved tiny model whose tensors went through `edit`."""
    save_model(tiny_model(layers=1, **settings), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), "1 tensors are missing, the first is 'norm.weight'"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected or second tensor 'extra'"),
        (lambda t: t.update({NORM: torch.ones(3)}), r"model.norm.weight has shape \(3,\)"),
        (
            lambda t: t.update({NORM: torch.tensor(1.0)}),
            r"model.norm.weight has shape \(\) and torch.float32, config.json asks for \(32,\)",
        ),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)}), r"has shape \(32,\) and torch.int8, .* floats"),
        (
            lambda t: t.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)}),
            r"has shape \(32,\) and torch.float8_e4m3fn, config.json asks for \(32,\) and floats",
        ),
        (
            lambda t: t.update({NORM: torch.full((32,), torch.nan)}),
            "model.norm.weight holds values that are not",
        ),
    ],
)
def test_weights_are_loaded_strictly(edit, message, tmp_path):
    """Every tensor is used once and none is missing; anything else is an error that names the tensor."""
    with pytest.raises(ValueError, match=message):
        load_model(edited_folder(tmp_path, edit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_redundant_tensors_of_older_files_are_accepted_by_name(dtype, tmp_path):
    """A stored head equal to the tied embedding, and `inv_freq` buffers, are no errors; a differing head is."""

    def add(tensors):
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    folder = edited_folder(tmp_path, add, tie_word_embeddings=True)
    for loaded in (torch.float32, torch.bfloat16):
        assert load_model(folder, loaded).norm.weight.dtype == loaded
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_model(
            edited_folder(
                tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(31, 32)}), tie_word_embeddings=True
            )
        )


def test_a_truncated_file_is_named(tmp_path):
    """Half a safetensors file is an error in one sentence, not a traceback of the library."""
    save_model(tiny_model(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "setting",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_dropout": 0.1},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"bits": 4}},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"hidden_size": "32"},
        {"rms_norm_eps": -1},
        {"rope_theta": "10000"},
        {"head_dim": 7},
        {"head_dim": "8"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(setting):
    """Never a silent approximation of another architecture."""
    with pytest.raises(ValueError, match=next(iter(setting))):
        ModelConfig.from_dict(tiny_model().config.raw | setting)


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn' is not implemented"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic' is not implemented"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope' is not implemented"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": LINEAR}, "rope_type = 'yarn' is not implemented"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None must be a positive number"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention = .* is not implemented"),
    ],
)
def test_another_rope_is_refused_by_name(setting, message):
    """Only the plain, the linear and Llama 3.1's rule are implemented, the same for all layers and dimensions."""
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(tiny_model().config.raw | setting)


@pytest.mark.parametrize(
    ("setting", "in_use"),
    [
        ({"use_sliding_window": False, "sliding_window": 4096}, False),
        ({"use_sliding_window": False, "sliding_window": 4096, "layer_types": ["full_attention"] * 2}, False),
        ({"sliding_window": 4096}, False),  # Qwen's default is off
        ({"use_sliding_window": True, "sliding_window": 4096}, True),
    ],
)
def test_a_sliding_window_is_refused_when_it_is_in_use(setting, in_use):
    """Qwen's files name a window even where none is used: the switch alone counts."""
    raw = tiny_model().config.raw | {"model_type": "qwen2"} | setting  # 2 layers
    if in_use:
        with pytest.raises(ValueError, match="sliding_window"):
            ModelConfig.from_dict(raw)
    else:
        ModelConfig.from_dict(raw)


def test_a_wrong_head_dim_does_not_load(tmp_path):
    """A Qwen3 folder whose config.json lost its head_dim is refused by shape, never read as hidden / heads."""
    shutil.copytree(FIXTURES / "qwen3", tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("head_dim")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"self_attn\.\w+\.weight has shape"):
        load_model(tmp_path)
