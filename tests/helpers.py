"""Small things that tests share: random models, generators, and a cache that applies any visibility mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from model import Decoder, ModelConfig
from rollout import Rollout


def tiny_model(
    *, layers=2, heads=4, kv_heads=2, head_dim=8, vocab_size=31, std=0.2, dtype=torch.float32, seed=0, **settings
) -> Decoder:
    """A Llama of random weights, large enough that the log-probs are far from uniform. settings: as in config.json."""
    raw = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
    }
    decoder = Decoder(ModelConfig.from_dict(raw | settings))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=std, generator=random)
    return decoder.to(dtype)


def constant_model(logits: list[float], **settings) -> Decoder:
    """A model whose logits are these after whatever context."""
    decoder = tiny_model(vocab_size=len(logits), **settings)
    with torch.no_grad():
        decoder.embed_tokens.weight.fill_(1.0)  # the same hidden state for every token
        for layer in decoder.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        state = decoder.norm(decoder.embed_tokens.weight[:1])  # (1, hidden), all entries equal
        decoder.lm_head.weight.copy_(torch.tensor(logits)[:, None] / state.sum())
    return decoder


def seeded(seed: int, skip: int = 0) -> torch.Generator:
    """A CPU generator that has already drawn `skip` numbers."""
    generator = torch.Generator().manual_seed(seed)
    torch.rand(skip, generator=generator)
    return generator


class VisibilityMask:
    """Stands in for a cache: in layer l, row b and KV head k the query at place p sees the keys of masks[l][b, k, p].

    masks: per layer (B, K, T, T) bool. One query head at a time, straight from the formula. `seen[l]` keeps the
    queries (B, H, T, D) and keys (B, K, T, D), after RoPE, that came by.
    """

    def __init__(self, masks: list[Tensor]):
        self.masks = masks
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, layer: int) -> VisibilityMask._Layer:
        return self._Layer(self, layer)

    class _Layer:
        def __init__(self, owner: VisibilityMask, layer: int):
            self.owner, self.layer = owner, layer

        def attend(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
            self.owner.seen[self.layer] = queries, keys
            H, K, D = queries.shape[1], keys.shape[1], keys.shape[3]
            out = []
            for h in range(H):
                k = h // (H // K)  # the KV head that serves query head h
                logits = queries[:, h] @ keys[:, k].mT / D**0.5  # (B, T, T)
                weights = logits.masked_fill(~self.owner.masks[self.layer][:, k], -torch.inf).softmax(-1)
                out.append(weights @ values[:, k])  # (B, T, D)
            return torch.stack(out, dim=1)


def visibility(evicted_at: list[Tensor], T: int) -> list[Tensor]:
    """Per layer (N, K, T, T): the query at p sees the key at j if j <= p < evicted_at[j] (N, K, at least T)."""
    query, key = torch.arange(T)[:, None], torch.arange(T)
    return [(key <= query) & (query < gone[:, :, None, :T]) for gone in evicted_at]


@torch.no_grad()
def replay(model: Decoder, r: Rollout, temperature: float = 1.0) -> tuple[Tensor, VisibilityMask]:
    """The log-probs (N, R) of a recorded rollout from one forward under the mask of its evictions, and that mask."""
    mask = VisibilityMask(visibility(r.evicted_at, r.tokens.shape[1]))
    logp = (model(r.tokens, cache=mask) / temperature).log_softmax(-1)  # (N, T, V)
    out = torch.zeros_like(r.logp_sparse)
    for i, (P, R) in enumerate(zip(r.prompt_lengths.tolist(), r.response_lengths.tolist(), strict=True)):
        for t in range(R):
            out[i, t] = logp[i, P + t - 1, r.tokens[i, P + t]]
    return out, mask


def held_after(evicted_at: list[int], seen: int) -> list[int]:
    """The positions that a row's KV head holds when it has seen `seen` tokens; evicted_at is its record."""
    return [j for j in range(seen) if evicted_at[j] > seen]


def cut_times(evicted_at: list[int]) -> list[int]:
    """How many tokens had been seen at each cut of a row's KV head; evicted_at is its record."""
    return sorted(time for time in set(evicted_at) if time < torch.iinfo(torch.int16).max)


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at any moment, by PyTorch's own allocation events on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def rounded(numbers: list[float], bits: int, group: int) -> list[float]:
    """Each `group` neighbours at the nearest of 2^bits levels above their smallest; this and the step in fp16."""

    def half(x: float) -> float:
        return float(torch.tensor(x).half())  # by way of fp32

    out: list[float] = []
    for first in range(0, len(numbers), group):
        some = numbers[first : first + group]
        low, step = half(min(some)), half((max(some) - min(some)) / (2**bits - 1))
        out += [low + step * min(max(round((x - low) / step), 0), 2**bits - 1) if step else low for x in some]
    return out


class Growing:
    """Stands in for a cache that takes a token at a time: each query head sees the keys that its record still holds.

    With bits, a query behind a prompt of P tokens sees all keys and values but the W newest as they are rounded.
    """

    def __init__(self, evicted_at: Tensor, bits: int = 0, P: int = 0, W: int = 0):
        self.evicted_at, self.bits, self.P, self.W = evicted_at.tolist(), bits, P, W
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []  # (K, D) each
        self.old: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of a token and a head: key and value, rounded

    def seen(self, p: int, j: int, k: int) -> tuple[Tensor, Tensor]:
        """The key and value (D,) of the token at j and head k, as the query at p meets them."""
        key, value = self.keys[j][k], self.values[j][k]
        if not self.bits or p < self.P or p - j < self.W:
            return key, value
        if (j, k) not in self.old:
            prompt = torch.stack(self.keys[: self.P])[:, k]  # (P, D)
            scale = prompt.abs().amax(0).sqrt() if self.P > 1 else torch.ones_like(key)
            pair = (torch.tensor(rounded(x.tolist(), self.bits, len(x)), dtype=x.dtype) for x in (key / scale, value))
            self.old[j, k] = next(pair) * scale, next(pair)
        return self.old[j, k]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        p, heads, (H, K, D) = int(positions), [], (queries.shape[1], keys.shape[1], keys.shape[3])
        self.keys.append(keys[0, :, 0])
        self.values.append(values[0, :, 0])
        for h in range(H):
            k = h * K // H
            held = [self.seen(p, j, k) for j in range(p + 1) if p < self.evicted_at[k][j]]
            weights = torch.stack([queries[0, h, 0] @ key / D**0.5 for key, _ in held]).softmax(0)
            heads.append(sum(w * value for w, (_, value) in zip(weights, held, strict=True)))
        return torch.stack(heads)[None, :, None]


def token_by_token(model: Decoder, r: Rollout, bits: int = 0, window: int = 0) -> Tensor:
    """The log-probs (N, R) of a recorded rollout, each step's attention taken over what was held then."""
    out = torch.zeros_like(r.logp_sparse)
    for i, (P, n) in enumerate(zip(r.prompt_lengths.tolist(), r.lengths.tolist(), strict=True)):
        cache = [Growing(layer[i], bits, P, window) for layer in r.evicted_at]
        for t in range(n - 1):
            logp = model(r.tokens[i : i + 1, t : t + 1], torch.tensor([[t]]), cache)[0, 0].log_softmax(-1)
            if t + 1 >= P:
                out[i, t + 1 - P] = logp[r.tokens[i, t + 1]]
    return out
