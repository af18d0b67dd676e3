"""The policies once more, slowly: one row and one KV head at a time, from their formulas.

Nothing is shared with kvcache.py. Keys are named by their positions. A policy returns a score for each position it
decides about, those of `held` (in increasing order) but for the W newest; of H2O, the `recent` newest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

Scores = dict[int, float]  # position -> score


@dataclass(frozen=True)
class Past:
    """All that one KV head of one row has met."""

    queries: Tensor  # (G, T, D) float64, of the query heads it serves
    keys: Tensor  # (T, D) float64
    sees: list[list[int]]  # the positions that each query attended to
    draws: list[float] = field(default_factory=list)  # one per position
    layer: list[Past] = field(default_factory=list)  # of all KV heads of the row's layer, this one too

    def logits(self, g: int, p: int, positions: list[int]) -> Scores:
        """q k / sqrt(D) of query head g at position p."""
        scale = math.sqrt(self.keys.shape[-1])
        return dict(zip(positions, (self.keys[positions] @ self.queries[g, p] / scale).tolist(), strict=True))

    @cached_property
    def paid(self) -> list[Scores]:
        """The attention that each query pays, in the mean over the query heads."""
        G, out = len(self.queries), []
        for p, positions in enumerate(self.sees):
            heads = [softmax(self.logits(g, p, positions)) for g in range(G)]
            out.append({j: sum(head[j] for head in heads) / G for j in positions})
        return out


def softmax(logits: Scores) -> Scores:
    top = max(logits.values())
    powers = {j: math.exp(x - top) for j, x in logits.items()}
    total = sum(powers.values())
    return {j: x / total for j, x in powers.items()}


def max_pool(scores: Scores, kernel: int) -> Scores:
    """The largest score among the `kernel` neighbours in the cache, itself in the middle."""
    values, reach = list(scores.values()), kernel // 2
    return {j: max(values[max(0, n - reach) : n + reach + 1]) for n, j in enumerate(scores)}


def streaming(past: Past, held: list[int], window: int, sinks: int = 4) -> Scores:
    return {j: math.inf if j < sinks else j for j in held[:-window]}


def random(past: Past, held: list[int], window: int) -> Scores:
    return {j: past.draws[j] for j in held[:-window]}


def h2o(past: Past, held: list[int], recent: int) -> Scores:
    seen = held[-1] + 1
    return {j: sum(past.paid[p].get(j, 0.0) for p in range(seen)) for j in held[:-recent]}


def snapkv_mean(past: Past, held: list[int], window: int, kernel: int = 7) -> Scores:
    attention = dict.fromkeys(held[:-window], 0.0)
    G = len(past.queries)
    for p in held[-window:]:
        for g in range(G):
            weights = softmax(past.logits(g, p, [j for j in held if j <= p]))
            for j in attention:
                attention[j] += weights[j] / (window * G)
    return max_pool(attention, kernel)


def snapkv(past: Past, held: list[int], window: int, kernel: int = 7) -> Scores:
    older = held[:-window]
    importance = dict.fromkeys(older, 0.0)
    for p in held[-window:]:
        heads = [past.logits(g, p, older) for g in range(len(past.queries))]
        for j, share in softmax({j: max(logits[j] for logits in heads) for j in older}).items():
            importance[j] += share / window
    return max_pool(importance, kernel)


def rkv(past: Past, held: list[int], window: int, kernel: int = 7, weight: float = 0.1, similar: float = 0.5) -> Scores:
    importance, n = snapkv(past, held, window, kernel), len(held)
    unit = past.keys[held] / past.keys[held].norm(dim=-1, keepdim=True)
    cosine = (unit @ unit.T).tolist()
    for i in range(n):
        cosine[i][i] = 0.0
        alike = [j for j in range(n) if cosine[i][j] > similar]
        if alike:
            cosine[i][alike[-1]] = 0.0
    redundancy = softmax({held[j]: sum(cosine[i][j] for i in range(n)) / n for j in range(n)})
    return {j: weight * importance[j] - (1 - weight) * redundancy[j] for j in importance}


def tova(past: Past, held: list[int], window: int) -> Scores:
    last, K = held[-1], len(past.layer)
    return {j: sum(head.paid[last][j] for head in past.layer) / K for j in held[:-window]}


def scissorhands(past: Past, held: list[int], window: int) -> Scores:
    pivotal = dict.fromkeys(held[:-window], 0)
    for p in held[-window:]:
        for g in range(len(past.queries)):
            sees = [j for j in held if j <= p]
            weights = softmax(past.logits(g, p, sees))
            for j in pivotal:
                pivotal[j] += weights[j] >= 1 / len(sees)
    return pivotal


def keynorm(past: Past, held: list[int], window: int) -> Scores:
    return {j: -math.sqrt(sum(x * x for x in past.keys[j].tolist())) for j in held[:-window]}


POLICIES = {
    "streaming": streaming,
    "random": random,
    "h2o": h2o,
    "snapkv": snapkv,
    "snapkv-mean": snapkv_mean,
    "rkv": rkv,
    "tova": tova,
    "scissorhands": scissorhands,
    "keynorm": keynorm,
    "pyramidkv": snapkv,
}


def recent(policy: str, window: int, budget: int) -> int:
    """How many of the newest tokens survive in any case: H2O gives them half of the budget."""
    return max(window, budget // 2) if policy == "h2o" else window


def survivors(scores: Scores, held: list[int], recent: int, budget: int) -> list[int]:
    """The newest, and the best of the others: of two equal scores the newer."""
    ascending = sorted(scores, key=lambda j: (scores[j], j))
    return sorted(ascending[len(held) - budget :]) + held[-recent:]


def assert_same_choice(kept: list[int], scores: Scores, held: list[int], recent: int, budget: int) -> None:
    """`kept` is what these scores keep; keys may only be exchanged whose scores differ by rounding (but do differ)."""
    expected = survivors(scores, held, recent, budget)
    assert len(kept) == len(expected)
    exchanged = [scores.get(j, math.inf) for j in set(kept) ^ set(expected)]
    if exchanged:
        gap = max(exchanged) - min(exchanged)
        assert 0 < gap < 1e-6 * max(1.0, abs(max(exchanged))), f"kept {kept}, the formula keeps {expected}"


def draw(seed: int, stream: int, position: int) -> float:
    """SplitMix64 of a row's seed, then of that plus stream and position, in Python's own integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return (mix((mix(seed) + (stream << 32) + position) % 2**64) >> 40) / 2**24
