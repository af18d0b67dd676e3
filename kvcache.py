"""The KV cache, and the policies that compress it.

Sampling writes a key and a value per token, layer and KV head. Here each layer holds them in S = budget + buffer
slots, allocated once. A new token is written to the next free slot and attends to everything that is still held.
Then each row that holds budget + buffer keys is cut to `budget`: its W newest tokens survive, and of the older
ones those with the highest score, in each layer and KV head by itself. Survivors move to the front slots in order
of position. They keep their original positions: keys are stored after RoPE, so a compressed cache differs from a
dense one by eviction alone.

A policy is a scoring function, "higher survives" (see `COMPRESSORS` at the end). Choosing, ties, windows,
gathering and memory exist once, in `choose` and `LayerCache`.

Shapes: B rows, T tokens, S slots, H query heads, K KV heads, D head dimension, W window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model import wide

EMPTY = torch.iinfo(torch.int32).max  # the position of an unused slot: later than any query, so never visible
PER_SLOT = ("keys", "values", "positions", "state")  # the parts of a cache that move when a row is cut


# ------------------------------------------------------------------------------------------ what a policy sees


@dataclass(frozen=True)
class Held:
    """What some rows hold when they are cut. A policy reads it and returns a score per slot, (B, K, S).

    Scores of the window and of unused slots are ignored. Nothing here may be written to.
    """

    parts: dict[str, Tensor]
    rows: Tensor | slice  # which rows of `parts` are being cut
    window: int  # W

    def part(self, name: str) -> Tensor:
        """One part of these rows. Raises ValueError if the policy did not say that it needs it."""
        if name not in self.parts:
            raise ValueError(
                f"nothing is kept as {name} for this policy: say queries=True, or which state, in its Compressor"
            )
        return self.parts[name][self.rows]

    @property
    def keys(self) -> Tensor:
        """(B, K, S, D), after RoPE."""
        return self.part("keys")

    @property
    def values(self) -> Tensor:
        """(B, K, S, D)."""
        return self.part("values")

    @property
    def positions(self) -> Tensor:
        """(B, K, S) int32: place of each key in its sequence, increasing; EMPTY where the slot is unused."""
        return self.part("positions")

    @property
    def state(self) -> Tensor:
        """(B, K, S) fp32: what the policy keeps per key (see `Compressor.state`)."""
        return self.part("state")

    @property
    def queries(self) -> Tensor:
        """(B, H, W, D), after RoPE: the W newest queries, in any order (see `query_positions`)."""
        return self.part("queries")

    @property
    def query_positions(self) -> Tensor:
        """(B, W) int32."""
        return self.part("query_positions")

    @property
    def used(self) -> Tensor:
        """(B, K, S) bool: the slots that hold a key."""
        return self.positions != EMPTY

    @property
    def older(self) -> Tensor:
        """(B, K, S) bool: the keys a policy decides about, those outside the window of the W newest tokens."""
        newest = self.positions.masked_fill(~self.used, -1).amax(-1, keepdim=True)
        return self.positions <= newest - self.window


def choose(scores: Tensor, held: Held, budget: int) -> Tensor:
    """The slots that survive, (B, K, budget), in increasing order.

    The window always survives, unused slots never do, and a score that is not a number is the lowest; equal scores
    keep the newer key (max-pooling makes plateaus, so ties are common, and top-k would settle them differently on
    each backend). Raises ValueError unless there is a score for each slot.
    """
    older, used = held.older, held.used
    if scores.shape != used.shape:
        raise ValueError(f"a policy scores each slot: shape (B, K, S) = {(*used.shape,)}, not {(*scores.shape,)}")
    scores = wide(scores)
    finite = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)  # infinities too: between the window and the unused
    ranked = finite.masked_fill(used & ~older, math.inf).masked_fill(~used, -math.inf)
    # A stable sort keeps the first of equals: reversed slots put the newest first.
    order = ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :budget]
    return (ranked.shape[-1] - 1 - order).sort(-1).values


# -------------------------------------------------------------------------------------------------- the policies


def streaming(held: Held, sinks: int = 4) -> Tensor:
    """StreamingLLM (2309.17453): the first `sinks` positions and the newest tokens.

    Positions stay the original ones; the paper re-numbers the keys inside the cache.
    """
    positions = held.positions.float()
    return positions.masked_fill(held.positions < sinks, math.inf)


def random(held: Held) -> Tensor:
    """The baseline every policy must beat: one uniform draw per key, made when it is cached and carried with it.

    (A fresh draw at each cut would favour new keys, which have survived fewer of them.)
    """
    return held.state


def h2o(held: Held) -> Tensor:
    """H2O (2306.14048), heavy hitters: attention received from all queries since the key was cached.

    Summed over queries, averaged over the query heads of a KV head. The paper accumulates; Sparse-RL's released code,
    and the H2O in the R-KV repository, look at the last query only.
    """
    return held.state


def window_logits(held: Held) -> Tensor:
    """q k / sqrt(D) of the window's queries over all held keys, (B, K, H/K, W, S), -inf for a later key."""
    keys = held.keys
    queries = held.queries.unflatten(1, (keys.shape[1], -1))  # (B, K, H/K, W, D)
    logits = queries.flatten(2, 3) @ keys.mT / math.sqrt(keys.shape[-1])  # (B, K, H/K * W, S)
    later = held.positions[:, :, None, :] > held.query_positions[:, None, :, None]  # (B, K, W, S)
    return wide(logits).unflatten(2, queries.shape[2:4]).masked_fill(later[:, :, None], -math.inf)


def pool_older(scores: Tensor, held: Held, kernel: int) -> Tensor:
    """Each older slot takes the largest score within kernel // 2 slots of it; the window takes no part."""
    return F.max_pool1d(scores.masked_fill(~held.older, -math.inf), kernel, stride=1, padding=kernel // 2)


def snapkv(held: Held, kernel: int = 7) -> Tensor:
    """SnapKV (2404.14469): attention that the W newest queries pay, smoothed over neighbouring keys.

    softmax(q k / sqrt(D)) per query head over all held keys; mean over the W queries and over the query heads of a
    KV head; max-pooled over `kernel` older slots. The paper has W = 32 or 64 and compresses the prompt once; the
    released runs of Sparse-RL have W = 8 and compress while decoding as well, as here.
    """
    attention = window_logits(held).softmax(-1)  # (B, K, H/K, W, S)
    return pool_older(attention.mean(dim=(2, 3)), held, kernel)


def rkv(held: Held, weight: float = 0.1, threshold: float = 0.5, kernel: int = 7, chunk: int = 16) -> Tensor:
    """R-KV (2505.24133): `weight` * importance - (1 - `weight`) * redundancy.

    Importance is SnapKV's with two changes: the logits are max-pooled over the query heads of a KV head before the
    softmax, and the softmax runs over the older keys only. Redundancy is the mean cosine between a key and every
    held key, after the newest similar key of each (cosine > `threshold`) was let off, as a softmax over held keys.
    The threshold does not remove small cosines from the mean. Where a key has no similar one, the public code lets
    off slot 0 instead, which is a slip; here nothing is let off. Cosines are taken for `chunk` keys at a time, so
    that S x S of them never exist.
    """
    logits = window_logits(held).amax(dim=2)  # (B, K, W, S)
    importance = logits.masked_fill(~held.older[:, :, None], -math.inf).softmax(-1).mean(dim=2)  # (B, K, S)

    used, keys = held.used, wide(held.keys)  # (B, K, S), (B, K, S, D)
    inverse = 1 / keys.norm(dim=-1).clamp(min=1e-12)  # (B, K, S)
    slots = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device)
    total = torch.zeros_like(inverse)
    for some in slots.split(chunk):  # how similar every key is to key i, for some i
        apart = used[:, :, some, None] & used[:, :, None] & (some[:, None] != slots)
        cosine = keys[:, :, some] @ keys.mT * inverse[:, :, some, None] * inverse[:, :, None]  # (B, K, chunk, S)
        cosine = cosine.masked_fill(~apart, 0)
        newest_similar = torch.where(cosine > threshold, slots, -1).amax(-1, keepdim=True)  # -1 if there is none
        total += cosine.masked_fill(slots == newest_similar, 0).sum(dim=2)
    mean = total / used.sum(-1, keepdim=True)
    redundancy = mean.masked_fill(~used, -math.inf).softmax(-1)
    return weight * pool_older(importance, held, kernel) - (1 - weight) * redundancy


def equal_budgets(budget: int, layers: int, window: int) -> list[int]:
    """The same budget for every layer."""
    return [budget] * layers


def pyramid_budgets(budget: int, layers: int, window: int, beta: float = 20.0) -> list[int]:
    """PyramidKV (2406.02069): budgets fall linearly from the first layer to the last, with the same sum.

    The last layer gets budget / beta, but at least window + 1. The public code scales a capacity that it overwrites
    at every call; here the budgets are computed once.
    """
    spread = budget - max(budget / beta, window + 1)  # of the first and the last layer around the mean
    ideal = [budget + spread * (layers - 1 - 2 * layer) / max(1, layers - 1) for layer in range(layers)]
    whole = [math.floor(share) for share in ideal]
    missing = layers * budget - sum(whole)  # to the same sum: a key more for the first layers
    return [share + (layer < missing) for layer, share in enumerate(whole)]


@dataclass(frozen=True)
class Compressor:
    """A policy: how older keys are scored, and what it needs beside keys, values and positions."""

    score: Callable[[Held], Tensor] | None  # (B, K, S), higher survives; None: nothing is ever evicted
    queries: bool = False  # keep the W newest queries
    state: str | None = None  # a number per key: "attention" received so far, or a "draw" in [0, 1)
    sinks: int = 0  # slots it promises to the first positions, beyond the window
    layer_budgets: Callable[[int, int, int], list[int]] = equal_budgets  # of (budget, L, W), with the sum L * budget

    def __post_init__(self):
        if self.state not in (None, "attention", "draw"):
            raise ValueError(f"a policy's state is 'attention', 'draw' or None, not {self.state!r}")


COMPRESSORS: dict[str, Compressor] = {
    "full": Compressor(None),
    "streaming": Compressor(streaming, sinks=4),
    "random": Compressor(random, state="draw"),
    "h2o": Compressor(h2o, state="attention"),
    "snapkv": Compressor(snapkv, queries=True),
    "rkv": Compressor(rkv, queries=True),
    "pyramidkv": Compressor(snapkv, queries=True, layer_budgets=pyramid_budgets),
}


def check_settings(compressor: str, budget: int, buffer: int, window: int) -> Compressor:
    """The policy by name; ValueError in one sentence if these settings cannot work together."""
    if compressor not in COMPRESSORS:
        raise ValueError(f"unknown compressor {compressor!r}: choose from {', '.join(COMPRESSORS)}")
    policy = COMPRESSORS[compressor]
    if policy.score is None:
        return policy
    if window < 1:
        raise ValueError(f"window {window} must be at least 1: the newest token always stays in the cache")
    if buffer < 1:
        raise ValueError(f"buffer {buffer} must be at least 1: a row is cut when it holds budget + buffer keys")
    if budget <= window + policy.sinks:
        sinks = f" + {policy.sinks} sinks" if policy.sinks else ""
        raise ValueError(f"budget {budget} must exceed the window of {window}{sinks}: raise the budget")
    return policy


# ----------------------------------------------------------------------------------------------------- the cache


def uniform_hash(seeds: Tensor, layer: int, kv_heads: int, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each row, KV head and position, (B, K, T) fp32, from seeds (B,) and positions (B, T).

    A hash (SplitMix64) of these and of nothing else: a row's draws do not change with its batch-mates or device.
    """

    def mix(x: Tensor) -> Tensor:  # int64 wraps around; masks make the shifts logical
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
        return x ^ (x >> 31 & (1 << 33) - 1)

    heads = torch.arange(kv_heads, device=seeds.device)[:, None] + kv_heads * layer  # (K, 1)
    key = (heads << 32) + positions[:, None, :].long()  # (B, K, T)
    return (mix(mix(seeds)[:, None, None] + key) >> 40 & (1 << 24) - 1).float() / (1 << 24)


class LayerCache:
    """One layer's cache of B rows: `parts` by name, each with the rows first, and `length (B)` valid slots per row.

    `length` lives on the CPU: the host decides by it when to cut, without waiting for the device.
    """

    def __init__(self, policy: Compressor, layer: int, budget: int, slots: int, window: int, parts: dict[str, Tensor]):
        self.policy, self.layer, self.budget, self.slots, self.window = policy, layer, budget, slots, window
        self.parts = parts
        self.length = torch.zeros(len(parts["keys"]), dtype=torch.long)  # (B,)
        self.evicted_at: Tensor | None = None  # see KVCache.record

    # --- attention: write, attend, then cut

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Store keys and values (B, K, T, D), attend with queries (B, H, T, D), then cut the rows that are full.

        positions (B, T). More than one token (prefill) goes into an empty cache only, and attends to the whole prompt
        before anything is evicted; below position 0 is padding on its right, never stored. Returns (B, H, T, D).
        """
        if queries.shape[2] == 1:
            return self._decode(queries, keys, values, positions)
        if self.length.any():
            raise ValueError("a cache takes many tokens (prefill) only while it is empty, then one at a time")
        return self._prefill(queries, keys, values, positions)

    def _decode(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        B, K = keys.shape[:2]
        device = keys.device
        self.length[:B] += 1
        rows, slot = torch.arange(B, device=device), (self.length[:B] - 1).to(device)
        self._write_window(queries, positions)
        new = {"keys": keys[:, :, 0], "values": values[:, :, 0], "positions": positions.int()}  # (B, K, ...)
        if self.policy.state == "draw":
            new["state"] = uniform_hash(self.parts["seeds"][:B], self.layer, K, positions)[:, :, 0]
        for name, part in new.items():
            self.parts[name][rows, :, slot] = part

        S = int(self.length[:B].max())  # slots in use
        k, v = self.parts["keys"][:B, :, :S], self.parts["values"][:B, :, :S]  # (B, K, S, D)
        q = queries[:, :, 0].unflatten(1, (K, -1))  # (B, K, H/K, D): the heads of a KV head side by side
        visible = (torch.arange(S, device=device) <= slot[:, None])[:, None, None]  # (B, 1, 1, S)
        if self.policy.state == "attention":
            logits = wide(q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
            weights = logits.softmax(-1)  # (B, K, H/K, S)
            self.parts["state"][:B, :, :S] += weights.mean(dim=2)
            out = weights.to(v.dtype) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

        full = (self.length[:B] == self.slots).nonzero()[:, 0]
        if self.policy.score and len(full):
            rows = slice(0, B) if len(full) == B else full.to(device)  # a slice is a view: nothing is copied to score
            self._cut(self.parts, rows, positions[:, 0] + 1)
            self.length[full] = self.budget
        return out.flatten(1, 2)[:, :, None]  # (B, H, 1, D)

    def _prefill(self, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        B, K, T, _ = keys.shape
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        self._write_window(queries, positions)
        pad = (positions < 0)[:, None]  # (B, 1, T)
        prompt = {  # one layer's prompt, as if it had slots enough
            "keys": keys.masked_fill(pad[..., None], 0),
            "values": values.masked_fill(pad[..., None], 0),
            "positions": positions.int()[:, None].masked_fill(pad, EMPTY).expand(B, K, T),
        }
        if self.policy.state == "draw":
            prompt["state"] = uniform_hash(self.parts["seeds"][:B], self.layer, K, positions)
        if self.policy.state == "attention":
            prompt["state"] = prompt_attention(queries, keys, pad)
        for name, part in prompt.items():
            self.parts[name][:B, :, :T] = part[:, :, : self.slots]
        seen = (positions >= 0).sum(1)  # (B,)
        self.length[:B] = seen.cpu()
        full = (self.length[:B] >= self.slots).nonzero()[:, 0]
        if self.policy.score and len(full):
            self._cut(self.parts | prompt, full.to(keys.device), seen)
            self.length[full] = self.budget
        return out

    def _write_window(self, queries: Tensor, positions: Tensor) -> None:
        """Keep the newest W of queries (B, H, T, D): the query at position p goes to place p mod W."""
        if not self.policy.queries:
            return
        B, _, T, _ = queries.shape
        # (B, W); below 0 for a prompt shorter than W: such a place is written again long before the row can be cut
        newest = positions.amax(1, keepdim=True) - torch.arange(min(self.window, T), device=positions.device)
        source = (newest - positions[:, :1]).clamp(min=0)[:, None, :, None]  # index along T
        picked = queries.gather(2, source.expand(-1, queries.shape[1], -1, queries.shape[3]))  # (B, H, W, D)
        rows, place = torch.arange(B, device=positions.device)[:, None], newest % self.window
        self.parts["queries"][rows, :, place] = picked.transpose(1, 2)
        self.parts["query_positions"][rows, place] = newest.int()

    # --- eviction

    def _cut(self, source: dict[str, Tensor], rows: Tensor | slice, seen: Tensor) -> None:
        """Keep `budget` keys of each of these rows of `source`, in order, in the first slots; empty the others.

        One part at a time: the temporaries are the surviving keys of one layer and, where not all of its rows are
        cut, a copy of the keys to be scored. `seen (B,)` counts each row's tokens so far.
        """
        held = Held(source, rows, self.window)
        kept = choose(self.policy.score(held), held, self.budget)  # (b, K, budget)
        if self.evicted_at is not None:
            before = held.positions
            gone = held.used.scatter(2, kept, False)
            row, head, _ = gone.nonzero(as_tuple=True)
            ids = self.parts["ids"][rows]
            self.evicted_at[ids[row], head, before[gone].long()] = seen[rows][row].int()
        index = torch.arange(len(self.length), device=kept.device)[rows][:, None, None]
        heads = torch.arange(kept.shape[1], device=kept.device)[:, None]
        for name in PER_SLOT:
            if name in source:
                self.parts[name][rows, :, : self.budget] = source[name][index, heads, kept]
                # attention weights of 0 do not hide what is left in an unused slot if it is inf or NaN: 0 * inf is NaN
                self.parts[name][rows, :, self.budget :] = EMPTY if name == "positions" else 0


def prompt_attention(queries: Tensor, keys: Tensor, pad: Tensor, chunk: int = 256) -> Tensor:
    """Attention each prompt key receives from the whole prompt, (B, K, T) fp32: h2o's sums after prefill.

    queries (B, H, T, D), keys (B, K, T, D), pad (B, 1, T). In chunks of queries, so that T x T weights never exist.
    """
    (B, K, T, D), device = keys.shape, keys.device
    received = torch.zeros(B, K, T, device=device)
    slots = torch.arange(T, device=device)
    for first in range(0, T, chunk):
        q = queries[:, :, first : first + chunk].unflatten(1, (K, -1))  # (B, K, H/K, chunk, D)
        logits = wide(q @ keys[:, :, None].mT / math.sqrt(D))  # (B, K, H/K, chunk, T)
        later = slots > slots[first : first + chunk, None]
        weights = logits.masked_fill(later, -math.inf).softmax(-1).mean(dim=2)  # (B, K, chunk, T)
        received += weights.masked_fill(pad[:, :, first : first + chunk, None], 0).sum(dim=2)
    return received


class KVCache:
    """The caches of all layers for B rows; index it to get a layer's."""

    def __init__(
        self,
        *,
        rows: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        compressor: str = "snapkv",
        budget: int = 512,
        buffer: int = 128,
        window: int = 8,
        seeds: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device="cpu",
    ):
        """max_length: the tokens a row can reach, the slots of `full`. seeds (B,) int64: a row's random draws.

        Raises ValueError if compressor, budget, buffer and window cannot work together.
        """
        policy = check_settings(compressor, budget, buffer, window)

        def allocate(slots: int) -> dict[str, Tensor]:
            parts = {
                "keys": torch.zeros(rows, kv_heads, slots, head_dim, dtype=dtype, device=device),
                "values": torch.zeros(rows, kv_heads, slots, head_dim, dtype=dtype, device=device),
                "positions": torch.full((rows, kv_heads, slots), EMPTY, dtype=torch.int32, device=device),
            }
            if policy.queries:
                parts["queries"] = torch.zeros(rows, heads, window, head_dim, dtype=dtype, device=device)
                parts["query_positions"] = torch.full((rows, window), -1, dtype=torch.int32, device=device)
            if policy.state:
                parts["state"] = torch.zeros(rows, kv_heads, slots, device=device)
            if policy.state == "draw":
                parts["seeds"] = torch.zeros(rows, dtype=torch.long, device=device)
                parts["seeds"] += 0 if seeds is None else seeds.to(device)
            return parts

        self.active = rows  # the first `active` rows of every part are in use
        self.layers = []
        budgets = policy.layer_budgets(budget, layers, window)
        least = window + policy.sinks + 1
        if policy.score and (len(budgets) != layers or sum(budgets) != layers * budget or min(budgets) < least):
            raise ValueError(
                f"the layer budgets of {compressor} must be {layers} numbers of at least {least}, with the sum "
                f"{layers * budget}, not {budgets}"
            )
        for layer, layer_budget in enumerate(budgets):
            slots = layer_budget + buffer if policy.score else max_length
            self.layers.append(LayerCache(policy, layer, layer_budget, slots, window, allocate(slots)))

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by part, over all layers. Constant while rows sample, finish and are dropped."""
        total: dict[str, int] = {}
        for layer in self.layers:
            for name, part in layer.parts.items():
                total[name] = total.get(name, 0) + part.nbytes
        return total

    @property
    def tokens(self) -> float:
        """Keys held by the active rows, summed over rows and averaged over layers."""
        return sum(int(layer.length[: self.active].sum()) for layer in self.layers) / len(self.layers)

    def expand(self, group_size: int) -> None:
        """Repeat each row group_size times, AABB: one prefill serves a group. One layer at a time."""
        self.active *= group_size
        for layer in self.layers:
            for name in layer.parts:
                layer.parts[name] = layer.parts[name].repeat_interleave(group_size, dim=0)
            layer.length = layer.length.repeat_interleave(group_size)
            if "seeds" in layer.parts:  # members of a group draw apart from here on
                members = torch.arange(self.active, device=layer.parts["seeds"].device) % group_size
                layer.parts["seeds"] += members << 32
            if layer.evicted_at is not None:
                layer.evicted_at = layer.evicted_at.repeat_interleave(group_size, dim=0)
                layer.parts["ids"] = torch.arange(self.active, device=layer.evicted_at.device)

    def keep(self, alive: Tensor) -> Tensor:
        """Drop the active rows where alive (B,) bool, on the CPU, is False. Returns the new order of rows, (b,).

        In place: rows from the end move into the holes, no byte is allocated or freed.
        """
        survivors = int(alive.sum())
        order = torch.arange(survivors)
        holes = (~alive[:survivors]).nonzero()[:, 0]
        order[holes] = alive[survivors:].nonzero()[:, 0] + survivors
        for layer in self.layers:
            for part in (layer.length, *layer.parts.values()):
                part[holes.to(part.device)] = part[order[holes].to(part.device)]
        self.active = survivors
        return order

    def record(self, length: int) -> None:
        """From now on write down when each key goes: layer.evicted_at (B, K, length) int32, for every row there was.

        It holds the tokens seen when the key at a position was evicted, EMPTY if it never was: the query at
        position p sees the key at position j where j <= p < evicted_at[j].
        """
        for layer in self.layers:
            rows, kv_heads = layer.parts["keys"].shape[:2]
            device = layer.parts["keys"].device
            layer.evicted_at = torch.full((rows, kv_heads, length), EMPTY, dtype=torch.int32, device=device)
            layer.parts["ids"] = torch.arange(rows, device=device)
