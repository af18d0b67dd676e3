"""The KV cache, and the policies that compress it.

Sampling writes a key and a value per token, layer and KV head. Here each layer holds them in S = budget + buffer
slots, allocated once. A new token takes the next free slot and attends to everything that is still held. Then each row
that holds S keys is cut to `budget`: its newest tokens survive, W at the least, and of the others those with the
highest score, in each layer and KV head by itself, in order of position. Keys are stored after RoPE and keep their
original positions, so a compressed cache differs from a dense one by eviction alone.

With kv_bits, keys and values lie packed in 2, 4 or 8 bits, the W newest also as they come. A token is rounded when it
arrives, each 32 neighbouring numbers of a key or value by their own range, and never again: a cut moves bytes. A prompt
attends to itself exactly; later queries, and policies that score them, meet the newest W exact and the others rounded.

A policy is a function that scores keys, and a few declarations (see `COMPRESSORS`). Choosing, ties, gathering and
memory exist once, in `choose` and `LayerCache`. Shapes: as in model.py, and W queries in the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model import causal_attention, wide

EMPTY = torch.iinfo(torch.int32).max  # the position of an unused slot: later than any query, so never visible
PER_SLOT = {"keys", "values", "key_ranges", "value_ranges", "positions", "attention"}  # what moves when a row is cut
BITS = (0, 2, 4, 8)  # that a cached key or value may have; 0: as it comes


@dataclass(frozen=True)
class Held:
    """What some rows hold when they are cut. A policy reads it and returns a score per slot, (B, K, S).

    The parts: keys and values (B, K, S, D), after RoPE; positions (B, K, S) int32, increasing, EMPTY in unused slots.
    For a policy that declares it also queries (B, H, W, D), the newest, that of position p at p mod W; attention
    (B, K, S) fp32, received by each key so far; seeds (B,) int64, to draw from. Nothing here may be written to.
    """

    parts: dict[str, Tensor]  # of the whole layer
    rows: Tensor | slice  # those that are cut
    seen: Tensor  # (B,) tokens so far of each of these rows
    recent: int  # this many of the newest tokens survive whatever their score: W, or more if the policy says so
    layer: int = 0

    def __getattr__(self, name: str) -> Tensor:
        """A part of these rows, taken only when it is read. Raises ValueError if the policy did not declare it."""
        if name not in self.parts:
            raise ValueError(f"nothing is kept as {name} for this policy: say {name}=True in its Compressor")
        return self.parts[name][self.rows]

    @property
    def older(self) -> Tensor:
        """(B, K, S) bool: the keys a policy decides about, those that are not recent."""
        return self.positions < (self.seen - self.recent)[:, None, None]


def choose(scores: Tensor, held: Held, budget: int) -> Tensor:
    """The slots that survive, (B, K, budget), in increasing order.

    Recent keys do, unused slots never, and a score that is not a number is the lowest. Of equal scores, which
    max-pooling makes common, the newer key survives. Raises ValueError unless there is a score for each slot.
    """
    shape, scores = held.positions.shape, wide(scores)
    if scores.shape != shape:
        raise ValueError(f"a policy scores each slot: shape (B, K, S) = {(*shape,)}, not {(*scores.shape,)}")
    finite = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)  # infinities too: between recent and unused
    ranked = finite.masked_fill(~held.older, math.inf).masked_fill(held.positions == EMPTY, -math.inf)
    newest_first = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices  # stable: a tie goes to the newer
    return (shape[2] - 1 - newest_first[..., :budget]).sort(-1).values


def streaming(held: Held, sinks: int = 4) -> Tensor:
    """StreamingLLM (2309.17453): the first `sinks` positions and the newest. (The paper re-numbers what it holds.)"""
    return held.positions.float().masked_fill(held.positions < sinks, math.inf)


def random(held: Held) -> Tensor:
    """The baseline every policy must beat: a uniform draw in [0, 1) per key. A fresh one per cut would favour new keys.

    A hash (SplitMix64) of seed, layer, KV head and position: the same in any batch, on any device, for a whole group.
    """

    def mix(x: Tensor) -> Tensor:  # int64 wraps around; masks make the shifts logical
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
        return x ^ (x >> 31 & (1 << 33) - 1)

    K = held.positions.shape[1]
    head = torch.arange(K, device=held.seeds.device)[:, None] + K * held.layer  # (K, 1)
    key = (head << 32) + held.positions.long()  # (B, K, S)
    return (mix(mix(held.seeds)[:, None, None] + key) >> 40 & (1 << 24) - 1).float() / (1 << 24)


def h2o(held: Held) -> Tensor:
    """H2O (2306.14048): attention received so far, summed over queries, averaged over the query heads of a KV head."""
    return held.attention


def attention_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """q k / sqrt(D) of queries (B, H, T, D) and keys (B, K, S, D), cast to fp32 before they meet: (B, K, H/K, T, S)."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # (B, K, H/K, T, D): the heads of a KV head side by side
    logits = wide(grouped.flatten(2, 3)) @ wide(keys).mT / math.sqrt(keys.shape[-1])  # (B, K, H/K * T, S)
    return logits.unflatten(2, grouped.shape[2:4])


def window_logits(held: Held) -> Tensor:
    """`attention_logits` of the W newest queries over all held keys, (B, K, H/K, W, S), -inf for a later key."""
    last, W = held.seen[:, None] - 1, held.queries.shape[2]
    places = last - (last - torch.arange(W, device=last.device)) % W  # (B, W): the query at position p lies at p mod W
    later = held.positions[:, :, None] > places[:, None, :, None]  # (B, K, W, S)
    return attention_logits(held.queries, held.keys).masked_fill(later[:, :, None], -math.inf)


def pool_older(scores: Tensor, held: Held, kernel: int) -> Tensor:
    """Each older slot takes the largest score within kernel // 2 slots of it; recent ones take no part."""
    return F.max_pool1d(scores.masked_fill(~held.older, -math.inf), kernel, stride=1, padding=kernel // 2)


def snapkv(held: Held, kernel: int = 7) -> Tensor:
    """SnapKV (2404.14469): attention that the W newest queries pay to older keys, max-pooled over `kernel` older slots.

    Softmax of the largest logit of a KV head's query heads, mean over the W queries: as in the code released with
    Sparse-RL and in R-KV. The paper has a key per query head, W = 32 or 64 (here 8), and compresses the prompt alone.
    """
    logits = window_logits(held).amax(dim=2)  # (B, K, W, S)
    attention = logits.masked_fill(~held.older[:, :, None], -math.inf).softmax(-1)
    return pool_older(attention.mean(dim=2), held, kernel)


def snapkv_mean(held: Held, kernel: int = 7) -> Tensor:
    """As `snapkv`, but softmax per query head over all held keys, then the mean over the query heads of a KV head."""
    attention = window_logits(held).softmax(-1)  # (B, K, H/K, W, S)
    return pool_older(attention.mean(dim=(2, 3)), held, kernel)


def rkv(held: Held, weight: float = 0.1, threshold: float = 0.5, kernel: int = 7, chunk: int = 16) -> Tensor:
    """R-KV (2505.24133): `weight` * importance - (1 - `weight`) * redundancy.

    Importance is `snapkv`'s. Redundancy is the mean cosine between a key and every held key, after the newest similar
    key of each (cosine > `threshold`) was let off, as a softmax over held keys. (The public code lets off slot 0 where
    no key is similar: a slip.) `chunk` keys at a time, so that S x S cosines never exist.
    """
    importance = snapkv(held, kernel)
    used, keys = held.positions != EMPTY, wide(held.keys)  # (B, K, S), (B, K, S, D)
    inverse = 1 / keys.norm(dim=-1).clamp(min=1e-12)  # (B, K, S)
    slot = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device)
    total = torch.zeros_like(inverse)
    for some in slot.split(chunk):  # how similar every key is to key i, for some i
        cosine = keys[:, :, some] @ keys.mT * inverse[:, :, some, None] * inverse[:, :, None]  # (B, K, chunk, S)
        cosine = cosine.masked_fill(some[:, None] == slot, 0)  # 0 for unused slots too: they hold zeros
        newest_similar = torch.where(cosine > threshold, slot, -1).amax(-1, keepdim=True)  # -1 if there is none
        total += cosine.masked_fill(slot == newest_similar, 0).sum(dim=2)
    mean = total / used.sum(-1, keepdim=True)
    redundancy = mean.masked_fill(~used, -math.inf).softmax(-1)
    return weight * importance - (1 - weight) * redundancy


def tova(held: Held) -> Tensor:
    """TOVA (2401.06104): attention that the newest query pays, in the mean over all heads of the layer.

    As in the paper, so all KV heads of a layer keep the same tokens. (There no window is safe, but for the last token.)
    """
    attention = window_logits(held).softmax(-1)  # (B, K, H/K, W, S)
    newest = (held.seen - 1) % attention.shape[3]
    mean = attention[torch.arange(len(newest), device=newest.device), :, :, newest].mean(dim=(1, 2))  # (B, S)
    return mean[:, None].expand(held.positions.shape)


def scissorhands(held: Held) -> Tensor:
    """Scissorhands (2305.17118): how often a key was pivotal, attended no less than the average of what a query sees.

    Counted anew at each cut, over the W newest queries and the query heads of a KV head. (The paper counts with a state
    per key, over a longer history, while it decodes.) Equal counts are common: there the newer key survives.
    """
    logits = window_logits(held)  # (B, K, H/K, W, S)
    average = 1 / (logits > -math.inf).sum(-1, keepdim=True)
    return (logits.softmax(-1) >= average).sum(dim=(2, 3)).float()


def keynorm(held: Held) -> Tensor:
    """Key norm (2406.11430): keys of small L2 norm survive. (There in all but the first layers.)

    RoPE leaves norms alone: equal tokens have equal norms in the first layer. So 14 bits decide, not their rounding.
    """
    return -(wide(held.keys).norm(dim=-1).log() * 2**14).round()


def pyramid_budgets(budget: int, layers: int, window: int, beta: int = 20) -> list[int]:
    """PyramidKV (2406.02069): budgets fall linearly from layer to layer, with the sum layers * budget.

    The last layer has (budget - window) // `beta` keys beyond the window, as in the public code, but at least 1; the
    first is as far above the budget as the last is below. What rounding leaves over goes to the first layers.
    """
    beyond = budget - window
    spread = beyond - max(1, beyond // beta)  # of the first and the last layer around the mean
    shares = [beyond + spread * (layers - 1 - 2 * layer) // max(1, layers - 1) for layer in range(layers)]
    missing = layers * beyond - sum(shares)
    return [window + share + (layer < missing) for layer, share in enumerate(shares)]


@dataclass(frozen=True)
class Compressor:
    """A policy: how older keys are scored, and what it needs beside keys, values and positions."""

    score: Callable[[Held], Tensor] | None  # (B, K, S), higher survives; None: nothing is ever evicted
    queries: bool = False  # needs the W newest queries
    attention: bool = False  # needs the attention that each key has received so far
    seeds: bool = False  # needs a number per row to draw from
    recent_share: float = 0.0  # of the budget, for the newest tokens; W of them survive at the least
    sinks: int = 0  # slots it promises to the first positions, beyond the window
    layer_budgets: Callable[..., list[int]] = lambda budget, layers, window: [budget] * layers  # the sum must stay


COMPRESSORS: dict[str, Compressor] = {
    "full": Compressor(None),
    "streaming": Compressor(streaming, sinks=4),
    "random": Compressor(random, seeds=True),
    "h2o": Compressor(h2o, attention=True, recent_share=0.5),  # as in the paper's code, which cuts at each step
    "snapkv": Compressor(snapkv, queries=True),
    "snapkv-mean": Compressor(snapkv_mean, queries=True),
    "rkv": Compressor(rkv, queries=True),
    "tova": Compressor(tova, queries=True),
    "scissorhands": Compressor(scissorhands, queries=True),
    "keynorm": Compressor(keynorm),
    "pyramidkv": Compressor(snapkv, queries=True, layer_budgets=pyramid_budgets),
}


def check_settings(compressor: str, budget: int, buffer: int, window: int, kv_bits: int = 0) -> Compressor:
    """The policy by name; ValueError in one sentence if these settings cannot work together."""
    if compressor not in COMPRESSORS:
        raise ValueError(f"unknown compressor {compressor!r}: choose from {', '.join(COMPRESSORS)}")
    policy = COMPRESSORS[compressor]
    if kv_bits not in BITS:
        raise ValueError(f"kv_bits {kv_bits} must be 2, 4 or 8, or 0 for keys and values as they come")
    if (policy.score or kv_bits) and min(buffer, window) < 1:
        raise ValueError(f"buffer {buffer} and window {window} must be at least 1")
    if policy.score and budget <= window + policy.sinks:
        sinks = f" + {policy.sinks} sinks" if policy.sinks else ""
        raise ValueError(f"budget {budget} must exceed the window of {window}{sinks}: raise the budget")
    return policy


# ------------------------------------------------------------------------------------------------------ fewer bits
#
# Values per token, with smallest number, step and a window in full precision, are KIVI's (2402.02750). Its keys are
# rounded per channel, over groups of tokens, because some channels of a key are large in every token. A cut breaks such
# groups, and rounding the survivors anew adds up; so keys are rounded per token as well, each channel divided by the
# square root of its largest number in the prompt (SmoothAttention of QServe, 2405.04532, has one for all prompts).
# KL(dense || sampler) after ten cuts or more, snapkv at 72 + 16, SmolLM2-135M along its own answers to GSM8K: 0.20
# without rounding, at 4 bits 0.22 per channel, 0.20 per token, 0.19 so; at 2 bits 0.89, 1.06 and 0.59. Where nothing is
# evicted KIVI's way is the better one: at 4 bits 0.007, 0.020 and 0.015 over all tokens. (Six responses.)
# Left out of KVQuant (2401.18079): keys before RoPE, levels that are not uniform, outliers kept apart.


def pack(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x (..., D) in 2^bits levels: bytes (..., D * bits / 8) uint8, and ranges (..., D / g, 2) fp16, of each g numbers.

    A range is the smallest of the g = gcd(D, 32) neighbours, and the step to the next level. 8 / bits levels a byte.
    """
    groups, largest = wide(x).unflatten(-1, (-1, math.gcd(x.shape[-1], 32))), 2**bits - 1  # (..., D/g, g)
    low, high = groups.aminmax(dim=-1)
    ranges = torch.stack([low, (high - low) / largest], dim=-1)
    ranges = ranges.clamp(-65504, 65504).half()  # what fp16 can hold
    low, step = ranges.to(groups.dtype)[..., None].unbind(-2)  # (..., D/g, 1) each, as `unpack` will see them
    levels = ((groups - low) / step.masked_fill(step == 0, 1)).round().clamp(0, largest).byte().flatten(-2)  # (..., D)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    return (levels.unflatten(-1, (-1, len(shifts))) << shifts).sum(-1, dtype=torch.uint8), ranges


def unpack(packed: Tensor, ranges: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What is left of the numbers that `pack` made these of, (..., D)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    levels = (packed[..., None] >> shifts & 2**bits - 1).flatten(-2).unflatten(-1, (ranges.shape[-2], -1))
    x = wide(levels.to(dtype))  # (..., D/g, g)
    low, step = ranges.to(x.dtype)[..., None].unbind(-2)  # (..., D/g, 1) each
    return x.mul_(step).add_(low).flatten(-2).to(dtype)


# ----------------------------------------------------------------------------------------------------- the cache


@dataclass(eq=False)
class LayerCache:
    """One layer's cache of B rows."""

    policy: Compressor
    layer: int
    budget: int
    slots: int  # a row that holds this many keys is cut to `budget`
    recent: int  # of these, so many are the newest tokens
    parts: dict[str, Tensor]  # keys, values, ... (see Held), each with the rows first
    length: Tensor  # (B,) keys held per row. On the CPU: the host decides when to cut without waiting for the device
    bits: int = 0  # of a key or value; 0: as they come
    evicted_at: Tensor | None = None  # see KVCache.record

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Store keys and values (B, K, T, D), attend with queries (B, H, T, D), then cut the rows that are full.

        positions (B, T). More than one token (prefill) goes into an empty cache only, and attends to the whole prompt
        before anything is evicted; prompts of one length, without padding. Returns (B, H, T, D).
        """
        if queries.shape[2] > 1 and self.length.any():
            raise ValueError("a cache takes many tokens (prefill) only while it is empty, then one at a time")
        newest = {"queries": queries, "newest_keys": keys, "newest_values": values}
        for name in newest.keys() & self.parts.keys():  # a ring: what came at position p lies at p mod W
            row = torch.arange(len(queries), device=queries.device)[:, None]
            W, new = self.parts[name].shape[2], newest[name].transpose(1, 2)  # (B, T, heads, D)
            self.parts[name][row, :, positions[:, -W:] % W] = new[:, -W:]
        step = self._decode if queries.shape[2] == 1 else self._prefill
        return step(queries, keys, values, positions)

    def _stored(self, keys: Tensor, values: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """What a slot gets of keys and values (B, K, T, D) at positions (B, T): parts (B, K, T, ...)."""
        parts = {"keys": keys, "values": values, "positions": positions.int()[:, None].expand(keys.shape[:3])}
        if self.bits:
            parts["keys"], parts["key_ranges"] = pack(keys / self.parts["key_scale"][: len(keys)], self.bits)
            parts["values"], parts["value_ranges"] = pack(values, self.bits)
        return parts

    def _read(self, S: int, positions: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, D) in the first S slots; the tokens at `positions` (B, 1), the last, are in `slot`.

        Of a cache with fewer bits a copy, in which the W newest tokens are exact.
        """
        parts = {name: part[: len(slot)] for name, part in self.parts.items()}
        keys, values = parts["keys"][:, :, :S], parts["values"][:, :, :S]
        if not self.bits:
            return keys, values
        dtype, W = parts["newest_keys"].dtype, parts["newest_keys"].shape[2]
        keys = unpack(keys, parts["key_ranges"][:, :, :S], self.bits, dtype).mul_(parts["key_scale"])
        values = unpack(values, parts["value_ranges"][:, :, :S], self.bits, dtype)
        place, row = torch.arange(W, device=slot.device), torch.arange(len(slot), device=slot.device)[:, None]
        # The newest W tokens lie side by side. In a row with fewer, a place without one falls on the unused last slots.
        there = slot[:, None] - (positions - place) % W  # (B, W) the slot of the token at this place of the ring
        keys[row, :, there] = parts["newest_keys"].transpose(1, 2)
        values[row, :, there] = parts["newest_values"].transpose(1, 2)
        return keys, values

    def _decode(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        B, K = keys.shape[:2]
        self.length[:B] += 1
        used = self.parts["positions"][:B, 0] != EMPTY  # (B, slots): no number of the host is copied to the device
        row, slot = torch.arange(B, device=keys.device), used.sum(-1)  # (B,)
        for name, new in self._stored(keys, values, positions).items():
            self.parts[name][row, :, slot] = new[:, :, 0]  # (B, K, ...)
        # A whole number of 64, or all slots: how a row's sums are rounded does not depend on longer rows.
        longest = max(int(self.length[:B].max()), self.recent)
        S = min(self.slots, -(-longest // 64) * 64)
        visible = (self.parts["positions"][:B, :1, :S] != EMPTY)[:, :, None]  # (B, 1, 1, S)
        k, v = self._read(S, positions, slot)  # (B, K, S, D)
        if self.policy.attention:
            logits = attention_logits(queries, k).squeeze(3)  # (B, K, H/K, S)
            weights = logits.masked_fill(~visible, -math.inf).softmax(-1)
            self.parts["attention"][:B, :, :S] += weights.mean(dim=2)
            out = (weights @ wide(v)).to(v.dtype)  # (B, K, H/K, D)
        else:
            out = F.scaled_dot_product_attention(queries[:, :, 0].unflatten(1, (K, -1)), k, v, attn_mask=visible)
        self._cut(self.parts, positions[:, 0] + 1, {"keys": k, "values": v})
        return out.flatten(1, 2)[:, :, None]  # (B, H, 1, D)

    def _prefill(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        out, T = causal_attention(queries, keys, values), keys.shape[2]
        if self.bits:
            self.parts["key_scale"][:] = keys.abs().amax(dim=2, keepdim=True).clamp(min=1e-4).sqrt()  # (B, K, 1, D)
        prompt = self._stored(keys, values, positions)  # what the layer would hold if it had slots enough
        if self.policy.attention:
            prompt["attention"] = prompt_attention(queries, keys)
        for name, part in prompt.items():
            self.parts[name][:, :, :T] = part[:, :, : self.slots]
        self.length[:] = T
        self._cut(self.parts | prompt, positions[:, -1] + 1, {"keys": keys, "values": values})
        return out

    def _cut(self, source: dict[str, Tensor], seen: Tensor, attended: dict[str, Tensor]) -> None:
        """Leave `budget` keys of each full row of `source`, in order, in the first slots; empty the others.

        seen (B,): the tokens of each row so far. attended: the keys and values that a policy reads. One part at a time:
        the largest temporaries are the surviving keys of one layer and, where not all of its rows are cut, a copy of
        the keys to be scored.
        """
        full = (self.length[: len(seen)] >= self.slots).nonzero()[:, 0]
        if self.policy.score is None or not len(full):
            return
        rows = slice(len(seen)) if len(full) == len(seen) else full.to(seen.device)  # a slice copies nothing
        held = Held(source | attended, rows, seen[rows], self.recent, self.layer)
        survivors = choose(self.policy.score(held), held, self.budget)  # (b, K, budget)
        if self.evicted_at is not None:
            row, head, slot = (held.positions != EMPTY).scatter(2, survivors, False).nonzero(as_tuple=True)
            place = held.ids[row], head, held.positions[row, head, slot].long()
            self.evicted_at[place] = held.seen[row].to(self.evicted_at.dtype)
        row = torch.arange(len(self.length), device=seen.device)[rows][:, None, None]
        head = torch.arange(survivors.shape[1], device=seen.device)[:, None]
        for name in PER_SLOT & source.keys():
            self.parts[name][rows, :, : self.budget] = source[name][row, head, survivors]
            # attention weights of 0 do not hide what is left in an unused slot if it is inf or NaN: 0 * inf is NaN
            self.parts[name][rows, :, self.budget :] = EMPTY if name == "positions" else 0
        self.length[full] = self.budget


def prompt_attention(queries: Tensor, keys: Tensor, chunk: int = 256) -> Tensor:
    """Attention that keys (B, K, T, D) receive from all queries (B, H, T, D) of a prompt, (B, K, T) fp32: h2o's sums.

    In chunks of queries, so that T x T weights never exist.
    """
    place = torch.arange(keys.shape[2], device=keys.device)
    received = torch.zeros(keys.shape[:3], device=keys.device)
    for some in place.split(chunk):
        logits = attention_logits(queries[:, :, some], keys)  # (B, K, H/K, chunk, T)
        weights = logits.masked_fill(place > some[:, None], -math.inf).softmax(-1)
        received += weights.mean(dim=2).sum(dim=2)
    return received


class KVCache:
    """The caches of all layers for B rows; index it to get a layer's."""

    def __init__(
        self, *, rows: int, layers: int, heads: int, kv_heads: int, head_dim: int, max_length: int,
        compressor: str = "snapkv", budget: int = 512, buffer: int = 128, window: int = 8, kv_bits: int = 0,
        seeds: Tensor | None = None, dtype: torch.dtype = torch.float32, device="cpu",
    ):  # fmt: skip
        """max_length: the slots of `full`. seeds (B,) int64: for random draws. ValueError: see `check_settings`."""
        policy = check_settings(compressor, budget, buffer, window, kv_bits)
        if head_dim * kv_bits % 8:
            raise ValueError(f"{head_dim} numbers of {kv_bits} bits are no whole bytes: take more kv_bits, or 0")
        budgets, least = policy.layer_budgets(budget, layers, window), window + policy.sinks + 1
        if policy.score and (len(budgets) != layers or sum(budgets) != layers * budget or min(budgets) < least):
            raise ValueError(f"{layers} budgets of at least {least} must have the sum {layers * budget}, not {budgets}")
        self.active, self.layers = rows, []  # the first `active` rows of every part are in use
        self.taken = 0  # rows that `take` ever filled
        zeros = partial(torch.zeros, device=device)
        for layer, layer_budget in enumerate(budgets):
            slots = layer_budget + buffer if policy.score else max_length
            number = {"dtype": torch.uint8 if kv_bits else dtype}
            size = head_dim * kv_bits // 8 or head_dim
            parts = {name: zeros(rows, kv_heads, slots, size, **number) for name in ("keys", "values")}
            parts["positions"] = zeros(rows, kv_heads, slots, dtype=torch.int32) + EMPTY
            if kv_bits:
                for name in ("key_ranges", "value_ranges"):
                    parts[name] = zeros(rows, kv_heads, slots, head_dim // math.gcd(head_dim, 32), 2, dtype=torch.half)
                for name in ("newest_keys", "newest_values"):
                    parts[name] = zeros(rows, kv_heads, min(window, slots), head_dim, dtype=dtype)
                parts["key_scale"] = zeros(rows, kv_heads, 1, head_dim, dtype=dtype) + 1
            if policy.queries:
                parts["queries"] = zeros(rows, heads, window, head_dim, dtype=dtype)
            if policy.attention:
                parts["attention"] = zeros(rows, kv_heads, slots)
            if policy.seeds:
                parts["seeds"] = zeros(rows, dtype=torch.long) + (0 if seeds is None else seeds.to(device))
            recent, length = max(window, int(policy.recent_share * layer_budget)), torch.zeros(rows, dtype=torch.long)
            self.layers.append(LayerCache(policy, layer, layer_budget, slots, recent, parts, length, kv_bits))

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def rows(self, first: int, last: int) -> list[LayerCache]:
        """A view of some neighbouring rows, to prefill them alone."""
        part = slice(first, last)
        parts = [{name: whole[part] for name, whole in layer.parts.items()} for layer in self.layers]
        return [replace(layer, parts=p, length=layer.length[part]) for layer, p in zip(self.layers, parts, strict=True)]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part, over all layers. Constant while rows sample, finish and are dropped."""
        return {name: sum(layer.parts[name].nbytes for layer in self.layers) for name in self.layers[0].parts}

    @property
    def tokens(self) -> float:
        """Keys held by the active rows, summed over rows and averaged over layers."""
        return sum(int(layer.length[: self.active].sum()) for layer in self.layers) / len(self.layers)

    @property
    def free(self) -> int:
        """Rows that are not in use."""
        return len(self.layers[0].length) - self.active

    def take(self, prefilled: KVCache, group_size: int) -> None:
        """Copy each row of another cache into group_size free rows, AABB: one prefill serves a group.

        In the record they stand behind all that were taken before, whichever rows of the cache they get.
        """
        count = prefilled.active * group_size
        rows, numbers = slice(self.active, self.active + count), slice(self.taken, self.taken + count)
        for layer, other in zip(self.layers, prefilled.layers, strict=True):
            layer.length[rows] = other.length.repeat_interleave(group_size)
            for name, part in other.parts.items():
                layer.parts[name][rows] = part.repeat_interleave(group_size, dim=0)
            if layer.evicted_at is not None:
                layer.evicted_at[numbers] = other.evicted_at.repeat_interleave(group_size, dim=0)
                layer.parts["ids"][rows] = torch.arange(numbers.start, numbers.stop, device=other.evicted_at.device)
        self.active, self.taken = rows.stop, numbers.stop

    def compact(self, alive: Tensor) -> Tensor:
        """Drop, in place, the active rows where alive (B,) bool, on the CPU, is False. Returns the new order, (b,)."""
        self.active = int(alive.sum())
        order = torch.arange(self.active)
        holes = (~alive[: self.active]).nonzero()[:, 0]
        order[holes] = alive[self.active :].nonzero()[:, 0] + self.active  # rows from the end move into the holes
        device = self.layers[0].parts["keys"].device
        there, here = holes.to(device), order[holes].to(device)
        for layer in self.layers:
            layer.length[holes] = layer.length[order[holes]]
            for part in layer.parts.values():
                part[there] = part[here]
        return order

    def record(self, rows: int, max_length: int) -> None:
        """From now on write down when each key goes: layer.evicted_at (rows, K, max_length), of all that are ever held.

        By the tokens seen until then: the query at p sees the key at j where j <= p < evicted_at[j]. A key that stays
        has the largest number of the dtype, which is int16 if the lengths allow it, else int32. What kv_bits rounds is
        not in the record: a replay of it sees every key as it came.
        """
        dtype = record_dtype(max_length)
        for layer in self.layers:
            B, K, device = *layer.parts["positions"].shape[:2], layer.parts["positions"].device
            layer.evicted_at = torch.full((rows, K, max_length), torch.iinfo(dtype).max, dtype=dtype, device=device)
            layer.parts["ids"] = torch.arange(B, device=device)


# ----------------------------------------------------------------------------------------------------- replay


def record_dtype(max_length: int) -> torch.dtype:
    """The smallest integers that count max_length tokens and have one to spare, for a key that stays."""
    return torch.int16 if max_length < torch.iinfo(torch.int16).max else torch.int32


@dataclass(frozen=True, eq=False)
class Replay:
    """A layer's recorded evictions in the place of its cache: every query sees again what it saw while sampling.

    One forward of the whole sequences, padded on the right, then gives the sampler's own log-probs and, with gradient,
    the sparse policy's: which keys survive is piecewise constant in the weights, so the choice itself has none.
    """

    evicted_at: Tensor  # (B, K, at least T), see KVCache.record
    chunk: int = 256  # queries at a time, so that T x T masks never exist

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Attention of queries (B, H, T, D) to keys and values (B, K, T, D), those of whole sequences: (B, H, T, D)."""
        seen, outs = 0, []
        for some in queries.split(self.chunk, dim=2):  # (B, H, t, D), behind `seen` others
            seen += some.shape[2]
            held = keys[:, :, :seen], values[:, :, :seen], self.evicted_at[:, :, :seen]
            # the backward pass computes a chunk again: what is kept for it has no mask
            outs.append(checkpoint(replay_attention, some, *held, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outs, dim=2)


def replay_attention(queries: Tensor, keys: Tensor, values: Tensor, evicted_at: Tensor) -> Tensor:
    """Attention of the newest queries (B, H, t, D) of S tokens to the keys and values (B, K, S, D) each of them saw."""
    (H, t), (K, S) = queries.shape[1:3], keys.shape[1:3]
    place = torch.arange(S, device=keys.device)
    query = place[-t:, None]
    visible = (place <= query) & (query < evicted_at[:, :, None])  # (B, K, t, S)
    grouped = queries.unflatten(1, (K, H // K)).flatten(2, 3)  # (B, K, H/K * t, D): the heads of a KV head in a row
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible.repeat(1, 1, H // K, 1))
    return out.unflatten(2, (H // K, t)).flatten(1, 2)  # (B, H, t, D)
