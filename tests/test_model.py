"""model.py against a slow forward pass written from the papers' formulas, and its files against what they promise."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import Decoder, ModelConfig, load_model, save_model

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


@torch.no_grad()
def test_padding_on_the_right_changes_nothing_on_its_left():
    """Under causal attention a right-padded row has the logits it has alone."""
    decoder = tiny_model()
    tokens = torch.randint(31, (3, 12), generator=torch.Generator().manual_seed(3))
    together = decoder(tokens)
    for row, length in enumerate((5, 12, 1)):
        torch.testing.assert_close(together[row, :length], decoder(tokens[row : row + 1, :length])[0])


@torch.no_grad()
def test_positions_are_relative_under_rope():
    """Shifting all positions of a sequence leaves its logits as they are."""
    decoder = tiny_model(dtype=torch.float64)
    tokens = torch.arange(9)[None]
    shifted = decoder(tokens, positions=tokens + 40)
    torch.testing.assert_close(shifted, decoder(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "logits"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
@torch.no_grad()
def test_logits_are_at_least_fp32(dtype, logits):
    """Half-precision weights still give fp32 logits; float64 stays float64."""
    assert tiny_model(dtype=dtype)(torch.arange(4)[None]).dtype == logits


# ------------------------------------------------------------------------------------------------------- folders


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


@torch.no_grad()
def test_both_dialects_of_config_json_mean_the_same():
    """`rope_parameters` of newer files says what `rope_theta` and `rope_scaling` say in older ones."""
    old = tiny_model(rope_theta=500.0, rope_scaling=LLAMA3)
    new = tiny_model(rope_parameters=LLAMA3 | {"rope_theta": 500.0})
    assert torch.equal(old(torch.arange(9)[None]), new(torch.arange(9)[None]))


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


def edited_folder(tmp_path, edit, **settings):
    """A saved tiny model whose tensors went through `edit`."""
    save_model(tiny_model(layers=1, **settings), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), "1 tensors are missing, the first is 'norm.weight'"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected tensor 'extra'"),
        (lambda t: t.update({NORM: torch.ones(3)}), r"model.norm.weight has shape \(3,\)"),
        (lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)}), "model.norm.weight has dtype torch.int8"),
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


def test_redundant_tensors_of_older_files_are_accepted_by_name(tmp_path):
    """A stored head equal to the tied embedding, and `inv_freq` buffers, are no errors; a differing head is."""

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    load_model(edited_folder(tmp_path, add, tie_word_embeddings=True))
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
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
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
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(setting):
    """Never a silent approximation of another architecture."""
    name = next(iter(setting))
    with pytest.raises(ValueError, match="rope_type" if name == "rope_scaling" else name):
        ModelConfig.from_dict(tiny_model().config.raw | setting)
