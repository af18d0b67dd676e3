"""kvcache.py as a specification: replay, the right keys, what holds at every step, memory, settings."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import slow_policies as slow
import torch
import torch.nn.functional as F
from helpers import cut_times, held_after, peak_bytes, replay, rounded, seeded, tiny_model, token_by_token
from torch import Tensor

import kvcache
from kvcache import (
    COMPRESSORS,
    EMPTY,
    Compressor,
    Held,
    KVCache,
    LayerCache,
)
from model import load_model
from rollout import cache_for, rollout
from task import load_problems, load_tokenizer, prepare

# ------------------------------------------------------------------------------------------------------- replay

PROMPTS = [[1, 2, 3], list(range(4, 30)) * 2, [5, 6, 7, 8, 9] * 4]  # below the window, beyond the cache, between
SMALL = {"budget": 16, "buffer": 5, "window": 4}


def recorded(model, compressor, *, group_size=2, max_new_tokens=24, **settings):
    """A rollout with the record of its evictions."""
    return rollout(
        model,
        PROMPTS,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        eos_ids=[2, 3],
        compressor=compressor,
        generator=seeded(1),
        record=True,
        **(SMALL | settings),
    )


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "tolerance"),
    [
        (1, torch.float32, 1e-5),
        (2, torch.float32, 1e-5),
        (4, torch.float32, 1e-5),
        (2, torch.float64, 1e-12),
        (2, torch.bfloat16, 0.1),
    ],
)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_compressed_sampling_equals_one_dense_forward_under_the_mask_of_its_evictions(
    compressor, kv_heads, dtype, tolerance
):
    """The replay theorem, for ragged prompts, multi-query to multi-head, several cuts, early ends."""
    model = tiny_model(kv_heads=kv_heads, dtype=dtype)
    r = recorded(model, compressor)
    logp, _ = replay(model, r)
    assert (logp - r.logp_sparse).abs().max() < tolerance

    cuts = max(len(cut_times(gone.tolist())) for layer in r.evicted_at for gone in layer.flatten(0, 1))
    assert (cuts == 0) if compressor == "full" else (cuts >= 3)
    assert r.response_lengths.min() < r.response_lengths.max()


def test_replay_holds_when_every_token_cuts_and_the_window_is_longer_than_a_prompt():
    """The theorem at its edge: buffer 1, window 8, prompts of 1 token."""
    model = tiny_model()
    prompts = [[7], [8]]
    r = rollout(
        model,
        prompts,
        group_size=1,
        max_new_tokens=30,
        eos_ids=[],
        budget=9,
        buffer=1,
        window=8,
        record=True,
        generator=seeded(2),
    )
    assert cut_times(r.evicted_at[0][0, 0].tolist()) == list(range(10, 31))
    assert (replay(model, r)[0] - r.logp_sparse).abs().max() < 1e-5


# ------------------------------------------------------------------------------- what holds at every step of a cache


@dataclass
class Step:
    """One layer right after a step: tokens seen (B,), output (B, H, T, D), length (B,), and its parts, copied."""

    seen: list[int]
    output: Tensor
    length: list[int]
    parts: dict[str, Tensor]


def pools(compressor: str) -> bool:
    """Whether this policy smooths its scores with a kernel."""
    return "kernel" in inspect.signature(COMPRESSORS[compressor].score).parameters


class Run:
    """A cache of random settings fed with random queries, keys and values: ragged prompts, then single tokens.

    The padding of the prompts is full of large numbers, so that any use of it shows.
    """

    def __init__(self, compressor: str, seed: int):
        pick = random.Random(f"{compressor} {seed}")
        self.compressor, self.layers = compressor, pick.choice([2, 3])
        self.window, self.buffer, self.kernel = pick.randint(1, 6), (4, 1, 6)[seed], (7, 3, 1)[seed]
        self.budget = self.window + 5 + pick.randint(0, 8)  # 5: room for the sinks
        B, K, G, D = pick.randint(2, 3), pick.randint(1, 3), pick.randint(1, 3), pick.choice([4, 8])
        slots = self.budget + self.buffer
        self.prompts = [pick.randint(1, 3), slots + pick.randint(0, 2 * slots), pick.randint(1, slots)][:B]
        decoded = max(3 * self.buffer, slots)
        T, noise = max(self.prompts) + decoded, torch.Generator().manual_seed(seed)
        self.queries, self.keys, self.values = (
            2 * torch.randn(self.layers, B, heads, T, D, generator=noise) for heads in (K * G, K, K)
        )
        self.seeds = torch.randint(1 << 24, (B,), generator=noise)

        policy = COMPRESSORS[compressor]
        if pools(compressor):
            policy = replace(policy, score=partial(policy.score, kernel=self.kernel))
        with mock.patch.dict(COMPRESSORS, {compressor: policy}):
            self.cache = KVCache(
                rows=B, layers=self.layers, heads=K * G, kv_heads=K, head_dim=D, max_length=T, compressor=compressor,
                budget=self.budget, buffer=self.buffer, window=self.window, seeds=self.seeds,
            )  # fmt: skip
        self.steps: list[list[Step]] = [[] for _ in range(self.layers)]
        for t in range(decoded):
            for layer in range(self.layers):
                self._feed(layer, t)

    def _feed(self, layer: int, t: int) -> None:
        cache, B = self.cache[layer], len(self.prompts)
        x = self.queries[layer], self.keys[layer], self.values[layer]  # (B, heads, T, D) each
        if t == 0:  # each prompt alone, as neighbours of one length would be
            output = torch.zeros(*x[0].shape[:2], max(self.prompts), x[0].shape[3])
            for b, P in enumerate(self.prompts):
                own = [tensor[b : b + 1, :, :P] for tensor in x]
                output[b, :, :P] = self.cache.rows(b, b + 1)[layer].attend(*own, torch.arange(P)[None])[0]
        else:
            places = torch.tensor(self.prompts) + t - 1  # (B,)
            new = [tensor[torch.arange(B), :, places][:, :, None] for tensor in x]
            output = cache.attend(*new, places[:, None])
        parts = {name: part.clone() for name, part in cache.parts.items()}
        self.steps[layer].append(Step([p + t for p in self.prompts], output, cache.length.tolist(), parts))

    def each(self):
        """Every (layer, t, row, KV head) there was."""
        B, K = self.keys.shape[1:3]
        return itertools.product(range(self.layers), range(len(self.steps[0])), range(B), range(K))

    def heads(self):
        """Every layer, row, KV head, and its past."""
        for layer, b in itertools.product(range(self.layers), range(len(self.prompts))):
            for k, past in enumerate(self.pasts(layer, b)):
                yield layer, b, k, past

    def kept(self, layer: int, t: int, b: int, k: int) -> list[int]:
        """Positions held after step t, in the order of their slots."""
        step = self.steps[layer][t]
        return step.parts["positions"][b, k, : step.length[b]].tolist()

    def before(self, layer: int, t: int, b: int, k: int) -> list[int]:
        """Positions held during step t: with its new tokens, before its cut."""
        old = self.kept(layer, t - 1, b, k) if t else range(self.prompts[b] - 1)
        return [*old, self.steps[layer][t].seen[b] - 1]

    def budgets(self) -> list[int]:
        """Of each layer."""
        return [self.cache[layer].budget for layer in range(self.layers)]

    def pasts(self, layer: int, b: int) -> list[slow.Past]:
        """What a slow policy needs to know about a row, by KV head."""
        K, G = self.keys.shape[2], self.queries.shape[2] // self.keys.shape[2]
        heads: list[slow.Past] = []
        for k in range(K):
            sees = [list(range(p + 1)) for p in range(self.prompts[b])]
            sees += [self.before(layer, t, b, k) for t in range(1, len(self.steps[0]))]
            draws = [slow.draw(int(self.seeds[b]), layer * K + k, p) for p in range(len(sees))]
            queries = self.queries[layer, b, k * G : (k + 1) * G].double()
            heads.append(slow.Past(queries, self.keys[layer, b, k].double(), sees, draws, heads))
        return heads


EVICTING = [name for name, policy in COMPRESSORS.items() if policy.score]


@pytest.fixture(scope="module", params=[(name, seed) for name in EVICTING for seed in range(3)], ids=str)
def run(request) -> Run:
    return Run(*request.param)


def test_right_keys_survive_every_cut(run):
    """The kept sets are those of the slow formulas, for random shapes, windows and kernels."""
    options = {"kernel": run.kernel} if pools(run.compressor) else {}
    cuts = 0
    for layer, b, k, past in run.heads():
        for t in range(len(run.steps[layer])):
            held, kept = run.before(layer, t, b, k), run.kept(layer, t, b, k)
            if held != kept:
                budget = run.budgets()[layer]
                recent = slow.recent(run.compressor, run.window, budget)
                scores = slow.POLICIES[run.compressor](past, held, recent, **options)
                slow.assert_same_choice(kept, scores, held, recent, budget)
                cuts += 1
    assert cuts > 3


def test_row_is_cut_to_its_budget_when_it_holds_budget_plus_buffer(run):
    """SnapKV 23, KVCache-Factory 20: per row, at prefill and at every later token."""
    for layer, t, b, k in run.each():
        budget, held = run.budgets()[layer], len(run.before(layer, t, b, k))
        expected = budget if held >= budget + run.buffer else held
        assert run.steps[layer][t].length[b] == expected < budget + run.buffer


def test_newest_window_always_survives(run):
    """The W newest tokens are never scored."""
    for layer, t, b, k in run.each():
        seen = run.steps[layer][t].seen[b]
        newest = list(range(max(0, seen - run.window), seen))
        assert run.kept(layer, t, b, k)[-run.window :] == newest


def test_kept_positions_increase_and_come_from_what_was_held(run):
    """Original positions, in order, unique, no padding; streaming-llm 48: they never change."""
    for layer, t, b, k in run.each():
        kept = run.kept(layer, t, b, k)
        assert kept == sorted(set(kept) & set(run.before(layer, t, b, k)))


def test_survivors_are_bit_identical_to_what_was_cached(run):
    """Keys and values move with their positions and are never recomputed."""
    for layer, t, b, k in run.each():
        kept, parts = run.kept(layer, t, b, k), run.steps[layer][t].parts
        assert torch.equal(parts["keys"][b, k, : len(kept)], run.keys[layer, b, k, kept])
        assert torch.equal(parts["values"][b, k, : len(kept)], run.values[layer, b, k, kept])


def test_unused_slots_are_zero(run):
    """Pytorch 103963: what stands in a masked slot can leak, so nothing stands there."""
    for layer, t, b, k in run.each():
        step = run.steps[layer][t]
        empty = {name: step.parts[name][b, k, step.length[b] :] for name in ("keys", "values", "positions")}
        assert not empty["keys"].any() and not empty["values"].any() and (empty["positions"] == EMPTY).all()


def test_scoring_leaves_the_cache_untouched(run):
    """nano-aha: an in-place write through a view; a policy is a pure function of what is held."""
    for layer in range(run.layers):
        cache = run.cache[layer]
        before = {name: part.clone() for name, part in cache.parts.items()}
        seen = torch.tensor(run.steps[layer][-1].seen)
        cache.policy.score(Held(cache.parts, slice(len(seen)), seen, run.window, layer))
        assert all(torch.equal(before[name], part) for name, part in cache.parts.items())


def test_token_attends_to_all_that_is_held_before_the_cut(run):
    """VeloxQuant-MLX 370: attend, then cut, at prefill as well; padding and empty slots are never attended."""
    for layer, b, k, past in run.heads():
        G, values = len(past.queries), run.values[layer, b, k].double()
        for p, g in itertools.product(range(len(past.sees)), range(G)):
            weights = slow.softmax(past.logits(g, p, past.sees[p]))
            expected = values.new_tensor(list(weights.values())) @ values[list(weights)]  # (D,)
            t = max(0, p - run.prompts[b] + 1)
            output = run.steps[layer][t].output[b, k * G + g, p if t == 0 else 0]
            assert torch.allclose(output.double(), expected, atol=1e-5)


# ------------------------------------------------------------------------------------------ the right keys, for real

ASSETS = Path(__file__).parents[1] / "assets"


@pytest.fixture(scope="module", params=["random weights", "bundled model"])
def sampler(request):
    """A model in fp64, prompts for it, and settings that cut often."""
    if request.param == "random weights":
        return tiny_model(dtype=torch.float64), PROMPTS, {"max_new_tokens": 16} | SMALL
    if not (ASSETS / "model" / "config.json").exists():
        pytest.skip("assets/model is not there: assets/make_bundled.py makes it")
    tokenizer, _ = load_tokenizer(ASSETS / "model")
    prompts = [p.ids for p in prepare(load_problems(ASSETS / "long-heldout.jsonl")[:1], tokenizer, 1000)]
    model = load_model(ASSETS / "model", dtype=torch.float64)
    return model, prompts, {"max_new_tokens": 40, "budget": 24, "buffer": 8, "window": 4}


@pytest.mark.parametrize("compressor", EVICTING)
def test_right_keys_survive_every_cut_of_a_rollout(sampler, compressor):
    """With the queries and keys of the replayed forward, each formula keeps what was kept."""
    model, prompts, settings = sampler
    c = model.config
    r = rollout(
        model, prompts, group_size=1, eos_ids=[], compressor=compressor, generator=seeded(3), record=True, **settings
    )
    draws = torch.rand(len(prompts), 1 + settings["max_new_tokens"], generator=seeded(3))[:, 0]
    budgets = COMPRESSORS[compressor].layer_budgets(settings["budget"], c.layers, settings["window"])
    _, mask = replay(model, r)
    G, cuts = c.heads // c.kv_heads, 0
    for layer, b in itertools.product(range(c.layers), range(len(prompts))):
        queries, keys = (x[b].double() for x in mask.seen[layer])
        evicted_at, heads = r.evicted_at[layer][b].tolist(), []
        for k, gone in enumerate(evicted_at):
            sees = [[j for j in range(p + 1) if gone[j] > p] for p in range(len(keys[0]))]
            numbers = [slow.draw(int(draws[b] * 2**24), layer * c.kv_heads + k, p) for p in range(len(sees))]
            heads.append(slow.Past(queries[k * G : (k + 1) * G], keys[k], sees, numbers, heads))
        recent = slow.recent(compressor, settings["window"], budgets[layer])
        for past, gone in zip(heads, evicted_at, strict=True):
            for seen in cut_times(gone):
                held, kept = [j for j in range(seen) if gone[j] >= seen], held_after(gone, seen)
                scores = slow.POLICIES[compressor](past, held, recent)
                slow.assert_same_choice(kept, scores, held, recent, budgets[layer])
                cuts += 1
    assert cuts >= 3 * c.layers * c.kv_heads


def test_each_layer_and_each_head_chooses_for_itself():
    """In the released radix_attention.py layer 0 chooses for all layers and all heads."""
    gone = torch.stack(recorded(tiny_model(), "snapkv").evicted_at)  # (L, N, K, T)
    assert (gone[0] != gone[1]).any() and (gone[:, :, 0] != gone[:, :, 1]).any()


# ----------------------------------------------------------------------------------- hand-made cases and differences


def keeps(compressor, keys, queries=None, *, budget, window=1, score=None) -> list[int]:
    """The positions that survive when one head's prompt, keys and queries (T, D), is cut from T to `budget`."""
    keys = torch.tensor(keys, dtype=torch.float)[None, None]  # (1, 1, T, D)
    queries = torch.zeros_like(keys) if queries is None else torch.tensor(queries, dtype=torch.float)[None, None]
    T, D = keys.shape[2:]
    cache = KVCache(
        rows=1, layers=1, heads=1, kv_heads=1, head_dim=D, max_length=T, compressor=compressor, budget=budget,
        buffer=T - budget, window=window,
    )  # fmt: skip
    cache[0].attend(queries, keys, keys, torch.arange(T)[None])
    return cache[0].parts["positions"][0, 0, :budget].tolist()


def test_equal_scores_keep_the_newer():
    """Pytorch 127196: top-k settles ties differently by backend (on CPU it keeps the oldest)."""
    positions = torch.arange(12).expand(1, 1, 12).int()
    held = Held({"positions": positions}, slice(1), seen=torch.tensor([12]), recent=2)
    assert kvcache.choose(torch.zeros(1, 1, 12), held, budget=5).tolist() == [[[7, 8, 9, 10, 11]]]
    for seed in range(20):
        scores = torch.randint(3, (1, 1, 12), generator=seeded(seed)).float()
        expected = slow.survivors(dict(enumerate(scores[0, 0, :10].tolist())), list(range(12)), 2, 5)
        assert kvcache.choose(scores, held, budget=5)[0, 0].tolist() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.finfo(torch.float64).min])
def test_no_score_evicts_the_window_or_keeps_an_unused_slot(value):
    """A policy of one's own may give anything: a score that is not a number is the lowest, infinities are scores."""
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, EMPTY, EMPTY], dtype=torch.int32)[None, None]
    held = Held({"positions": positions}, slice(1), seen=torch.tensor([8]), recent=2)
    scores = torch.arange(10.0, dtype=torch.float64)[None, None]
    scores[..., :4] = value
    expected = [2, 3, 6, 7] if value == math.inf else [4, 5, 6, 7]
    assert kvcache.choose(scores, held, budget=4)[0, 0].tolist() == expected
    assert kvcache.choose(torch.full_like(scores, value), held, budget=4)[0, 0].tolist() == [4, 5, 6, 7]


def test_scores_of_another_shape_are_refused():
    """A score per row, say, would be broadcast without a word: every head would keep the same keys."""
    held = Held({"positions": torch.arange(6).int().expand(1, 2, 6)}, slice(1), seen=torch.tensor([6]), recent=2)
    for shape in ((1, 1, 6), (6,), (1, 2, 4), (2, 2, 6)):
        with pytest.raises(ValueError, match=r"shape \(B, K, S\) = \(1, 2, 6\), not"):
            kvcache.choose(torch.zeros(shape), held, budget=4)


def test_streaming_keeps_four_sinks_and_the_newest():
    """StreamingLLM 2309.17453; keys_values 140: with the first tokens evicted, every configuration scored 0."""
    assert keeps("streaming", [[0.0]] * 20, budget=8) == [0, 1, 2, 3, 16, 17, 18, 19]


def test_h2o_accumulates_over_all_queries():
    """H2O 2306.14048: sums 1.74 and 1.17; the last query alone gives 0.24 and 0.67."""
    assert keeps("h2o", [[1.0], [2.0], [0.0]], [[0.0], [0.0], [1.0]], budget=2) == [0, 2]


def test_h2o_gives_half_of_its_budget_to_the_newest():
    """H2O 2306.14048, heavy_ratio = recent_ratio: keys 0 to 4 are the heavy hitters, and still 6 to 9 survive."""
    keys = [[9.0 - p] for p in range(5)] + [[0.0]] * 5
    assert keeps("h2o", keys, [[1.0]] * 10, budget=8) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert keeps("h2o", keys, [[1.0]] * 10, budget=7) == [0, 1, 2, 3, 7, 8, 9]  # of an odd budget the smaller half
    assert keeps("h2o", keys, [[1.0]] * 10, budget=7, window=6) == [0, 4, 5, 6, 7, 8, 9]  # the window at the least


def test_h2o_in_half_precision_rounds_its_output_only():
    """Logits, weights and their product with the values stay in fp32, whatever type keys and values have.

    Against float64 on the same bf16 inputs, with logits of standard deviation 10.
    """
    B, H, K, T, D = 2, 4, 2, 200, 64
    q, k, v = (torch.randn(B, n, T, D, generator=seeded(i)) for i, n in enumerate((H, K, K)))
    q, k, v = (10 * q).bfloat16(), k.bfloat16(), v.bfloat16()
    cache = KVCache(
        rows=B, layers=1, heads=H, kv_heads=K, head_dim=D, max_length=0, compressor="h2o", budget=300, buffer=1,
        dtype=torch.bfloat16,
    )  # fmt: skip
    received = torch.zeros(B, K, T, dtype=torch.float64)
    for p in range(T):
        ours = cache[0].attend(q[:, :, p, None], k[:, :, p, None], v[:, :, p, None], torch.full((B, 1), p))
        seen = (q[:, :, p, None], k[:, :, : p + 1], v[:, :, : p + 1])
        theirs = F.scaled_dot_product_attention(*seen, enable_gqa=True)
        exact = F.scaled_dot_product_attention(*(x.double() for x in seen), enable_gqa=True)
        logits = seen[0].double() @ seen[1].double().repeat_interleave(H // K, 1).mT / D**0.5  # (B, H, 1, p + 1)
        received[:, :, : p + 1] += logits.softmax(-1).unflatten(1, (K, -1)).mean(2)[:, :, 0]
        assert ((ours.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()  # the last rounding
        assert (ours.double() - exact).abs().max() <= 2 * (theirs.double() - exact).abs().max() + 1e-4
    assert (cache[0].parts["attention"][:, :, :T].double() - received).abs().max() < 1e-3
    whole = kvcache.prompt_attention(q, k)
    assert (whole.double() - received).abs().max() < 1e-3


def test_h2o_sums_of_a_prompt_do_not_depend_on_the_chunk():
    """Queries come in chunks, so that T x T weights never exist."""
    q, k = torch.randn(2, 4, 50, 8, generator=seeded(0)), torch.randn(2, 2, 50, 8, generator=seeded(1))
    whole = kvcache.prompt_attention(q, k)  # (B, K, T)
    assert torch.allclose(kvcache.prompt_attention(q, k, chunk=7), whole, atol=1e-5)
    assert torch.allclose(whole.sum(-1), torch.full((2, 2), 50.0))  # each query pays 1 in all


def test_rkv_lets_nothing_off_for_a_key_without_a_similar_one():
    """R-KV 2505.24133: cosines 0.4 and 0.2 to the newest key, so key 0 goes; the public code empties column 0."""
    assert keeps("rkv", [[1.0, 0, 0], [0, 1, 0], [0.4, 0.2, 0.8**0.5]], budget=2) == [1, 2]


def test_rkv_counts_similarities_below_the_threshold():
    """0.2 and 0.4 are both below 0.5, and still key 1 is the more redundant one."""
    assert keeps("rkv", [[1.0, 0, 0], [0, 1, 0], [0.2, 0.4, 0.8**0.5]], budget=2) == [0, 2]


def test_tova_asks_the_newest_query_alone_and_all_heads_of_the_layer():
    """TOVA 2401.06104: one kept set a layer, by the mean over its heads; the query before looked at key 0 alone.

    By hand: KV head 0's query pays (1, 7, 1, 1) / 10, KV head 1's (3, 1, 5, 1) / 10: the mean is 0.2, 0.4, 0.3, 0.1.
    """
    pays = torch.tensor([[1.0, 7, 1, 1], [3, 1, 5, 1]]).log()  # (K, S)
    before = torch.tensor([1.0, 0, 0, 0]).expand(2, 4)
    parts = {
        "keys": torch.stack([before, pays], dim=2)[None] * 2**0.5,  # (1, 2, 4, 2)
        "queries": torch.tensor([[100.0, 0], [0, 1]]).expand(1, 2, 2, 2),  # (B, H, W, D): position 3 lies at 3 mod 2
        "positions": torch.arange(4).int().expand(1, 2, 4),
    }
    scores = kvcache.tova(Held(parts, slice(1), seen=torch.tensor([4]), recent=1))
    assert torch.allclose(scores[0], torch.tensor([0.2, 0.4, 0.3, 0.1]).expand(2, 4))


def test_scissorhands_counts_how_often_a_key_is_attended_above_the_average():
    """Scissorhands 2305.17118: of three keys each is pivotal once, though their sums are 0.7, 0.5 and 0.6.

    By hand: the first query sees three keys and pays (6, 1, 3) / 10, the average is 1/3; the second pays
    (1, 4, 3, 2) / 10, the average is 1/4.
    """
    first, second = torch.tensor([[6.0, 1, 3, 9], [1, 4, 3, 2]]).log()
    parts = {
        "keys": torch.stack([first, second], dim=1)[None, None] * 2**0.5,  # (1, 1, 4, 2)
        "queries": torch.eye(2)[None, None],  # (1, 1, 2, 2): those of positions 2 and 3
        "positions": torch.arange(4).int()[None, None],
    }
    held = Held(parts, slice(1), seen=torch.tensor([4]), recent=1)
    assert kvcache.scissorhands(held)[0, 0].tolist() == [1, 1, 1, 0]


def test_keynorm_keeps_the_small_norms():
    """2406.11430: by the L2 norm; of (3, 4), (-1, 0), (6, 0), (0, 5.5) the first two."""
    assert keeps("keynorm", [[3.0, 4], [-1, 0], [6, 0], [0, 5.5], [9, 9]], budget=3) == [0, 1, 4]


def test_keynorm_keeps_the_newer_of_two_keys_that_are_one_but_for_their_rotation():
    """A token's keys in the first layer, at many positions: their norms differ by rounding alone, and are equal."""
    turned = torch.arange(40) * 0.7
    keys = 5 * torch.stack([turned.cos(), turned.sin()], dim=1)
    assert keys.norm(dim=1).unique().numel() > 1
    assert keeps("keynorm", keys.tolist(), budget=10) == list(range(30, 40))


def test_snapkv_pools_over_older_neighbours_only():
    """SnapKV 2404.14469: key 3 is attended most and lifts its 3 neighbours; the window's own key 8 lifts none."""
    keys = [[0.0], [0.0], [0.0], [5.0], [0.0], [0.0], [0.0], [0.0], [9.0]]
    for name in ("snapkv", "snapkv-mean"):
        assert keeps(name, keys, [[1.0]] * 9, budget=5) == [3, 4, 5, 6, 8]


def test_the_two_ways_to_pool_the_query_heads_of_a_kv_head():
    """Two query heads, whose logits for three older keys and the window's own are these, by hand."""
    first, second = torch.tensor([4.0, 1, 1, 2]).log(), torch.tensor([1.0, 3, 1, 3]).log()
    parts = {
        "keys": torch.stack([first, second], dim=1)[None, None] * 2**0.5,  # (1, 1, 4, 2)
        "queries": torch.eye(2)[None, :, None],  # (1, 2, 1, 2)
        "positions": torch.arange(4).int()[None, None],
    }
    held = Held(parts, slice(1), seen=torch.tensor([4]), recent=1)
    mean, largest = (score(held, kernel=1)[0, 0, :3] for score in (kvcache.snapkv_mean, kvcache.snapkv))
    assert torch.allclose(mean, torch.tensor([4 + 1, 1 + 3, 1 + 1]) / 16)  # of 4, 1, 1 and of 1, 3, 1, all of 8
    assert torch.allclose(largest, torch.tensor([4, 3, 1]) / 8)  # of the largest logits, the window's own left out


def test_random_draws_once_per_key():
    """Survivors are spread evenly over the past; a fresh draw at each cut would favour new keys."""
    cache = KVCache(
        rows=1, layers=1, heads=64, kv_heads=64, head_dim=1, max_length=0, compressor="random", budget=12, buffer=4,
        window=2,
    )  # fmt: skip
    for p in range(212):
        x = torch.zeros(1, 64, 1, 1)
        cache[0].attend(x, x, x, torch.tensor([[p]]))
    kept = cache[0].parts["positions"][0, :, :10].double()  # (K, budget - W)
    assert abs(float(kept.mean()) - 104.5) < 10  # the standard error is 2.4


def test_random_draws_are_uniform_and_apart_for_rows_layers_heads_and_positions():
    """The hash behind `random`: right moments, and no two streams alike."""
    parts = {"seeds": torch.tensor([5, 6]), "positions": torch.arange(1000).int().expand(2, 2, -1)}
    both = (COMPRESSORS["random"].score(Held(parts, slice(2), torch.tensor([1000] * 2), 1, layer)) for layer in (0, 1))
    draws = torch.cat([draws.flatten(0, 1) for draws in both])
    assert draws.min() >= 0 and draws.max() < 1
    assert abs(float(draws.mean()) - 1 / 2) < 0.02 and abs(float(draws.var()) - 1 / 12) < 0.01
    correlation = torch.corrcoef(draws)  # 8 streams of 1000 draws
    assert (correlation - torch.eye(8)).abs().max() < 0.15


@pytest.mark.parametrize(
    ("budget", "layers", "window"), [(512, 4, 8), (512, 30, 8), (20, 5, 8), (10, 10, 8), (3, 5, 1), (40, 1, 4)]
)
def test_pyramid_budgets_fall_linearly_with_the_same_sum(budget, layers, window):
    """PyramidKV 2406.02069, at the same memory as the others; no layer below its window and one more key."""
    budgets = kvcache.pyramid_budgets(budget, layers, window)
    last = window + max((budget - window) // 20, 1) if layers > 1 else budget
    ideal = torch.linspace(2 * budget - last, last, layers, dtype=torch.float64)
    assert sum(budgets) == layers * budget
    assert (torch.tensor(budgets) - ideal).abs().max() <= 1
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == last > window


@pytest.mark.parametrize(("budget", "budgets"), [(72, [134, 92, 51, 11]), (512, [992, 671, 352, 33])])
def test_pyramid_divides_what_lies_beyond_the_window(budget, budgets):
    """The public code divides budget - window by beta, 64 / 20 = 3 and 504 / 20 = 25, and adds the window of 8."""
    assert kvcache.pyramid_budgets(budget, layers=4, window=8) == budgets


def test_a_cache_does_not_change_the_settings_of_the_next():
    """The released pyramidkv overwrites its capacity at every call: 64, 107, 189, crash."""
    caches = [cache_for(tiny_model().config, 2, 99, compressor="pyramidkv", **SMALL) for _ in range(3)]
    slots = [[layer.slots for layer in cache.layers] for cache in caches]
    assert slots[0] == slots[1] == slots[2]


# -------------------------------------------------------------------------------------------------------- memory


KINDS = [(name, 0) for name in COMPRESSORS] + [("full", 8), ("snapkv", 4), ("h2o", 2)]  # policies and bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_keys_and_values_take_exactly_the_bytes_of_their_slots(compressor, dtype):
    """2 L B K (budget + buffer) D itemsize; K, not H (SnapKV 16, 22)."""
    c = tiny_model(layers=3).config
    cache = cache_for(c, 5, 77, compressor=compressor, dtype=dtype, **SMALL)
    slots = 77 if compressor == "full" else SMALL["budget"] + SMALL["buffer"]
    expected = 2 * c.layers * 5 * c.kv_heads * slots * c.head_dim * dtype.itemsize
    assert cache.nbytes["keys"] + cache.nbytes["values"] == expected


@pytest.mark.parametrize(("compressor", "kv_bits"), KINDS)
def test_memory_stays_where_it_is_through_a_rollout(compressor, kv_bits):
    """After the prompts were expanded to their groups no step, cut or dropped row moves a byte."""
    seen = set()
    attend = LayerCache.attend

    def watched(self, queries, *rest):
        out = attend(self, queries, *rest)
        if queries.shape[2] == 1:
            seen.add((self.layer, tuple((name, part.data_ptr(), part.nbytes) for name, part in self.parts.items())))
        return out

    model = tiny_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCache, "attend", watched)
        r = recorded(model, compressor, kv_bits=kv_bits)
    assert r.response_lengths.min() < r.response_lengths.max()  # rows were dropped
    assert len(seen) == model.config.layers


@pytest.mark.parametrize(("compressor", "kv_bits"), KINDS)
def test_dropped_rows_leave_the_others_whole(compressor, kv_bits):
    """Rows are compacted in place with all that belongs to them, whatever a policy keeps beside."""
    model = tiny_model()
    how = {"compressor": compressor, "seeds": torch.arange(5), "kv_bits": kv_bits}
    cache = cache_for(model.config, 5, 99, **how, **SMALL)
    model.hidden(torch.randint(31, (5, 18), generator=seeded(0)), cache=cache)
    before = [{name: part.clone() for name, part in layer.parts.items()} for layer in cache]
    order = cache.compact(torch.tensor([False, True, False, True, True]))
    assert sorted(order.tolist()) == [1, 3, 4] and cache.active == 3
    for layer, parts in zip(cache, before, strict=True):
        assert all(torch.equal(layer.parts[name][:3], part[order]) for name, part in parts.items())


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("compressor", [name for name in EVICTING if name != "pyramidkv"])
def test_cut_allocates_at_most_one_layers_survivors(compressor, rows):
    """Gathering all layers at once would make the peak rise by half. (R-KV's cosines never exist whole.)"""
    B, H, K, D, budget, buffer = 4, 4, 2, 64, 96, 16
    cache = KVCache(
        rows=B, layers=1, heads=H, kv_heads=K, head_dim=D, max_length=0, compressor=compressor, budget=budget,
        buffer=buffer,
    )  # fmt: skip
    q, k = torch.randn(B, H, 1, D, generator=seeded(0)), torch.randn(B, K, 1, D, generator=seeded(1))
    for p in range(budget + buffer - 1):
        cache[0].attend(q, k, k, torch.full((B, 1), p))
    cache[0].length[rows:] -= 1  # as if their prompts were shorter
    peak = peak_bytes(lambda: cache[0].attend(q, k, k, torch.full((B, 1), budget + buffer - 1)))
    assert cache[0].length.tolist() == [budget] * rows + [budget + buffer - 1] * (B - rows)
    assert 0 < peak <= 2 * B * K * budget * D * 4


# ---------------------------------------------------------------------------------------------------- fewer bits


@torch.no_grad()
@pytest.mark.parametrize(
    ("compressor", "kv_bits"), [*((name, 4) for name in COMPRESSORS), ("full", 2), ("snapkv", 8), ("snapkv", 2)]
)
def test_quantised_sampling_equals_each_steps_attention_over_what_the_cache_held(compressor, kv_bits):
    """A key is exact while it is among the W newest and rounded later, so one forward under one mask is not enough.

    Against a slow path that rounds by itself, a token at a time; in fp64, as a last bit flips a level. Ragged prompts,
    several cuts, groups, early ends.
    """
    model = tiny_model(dtype=torch.float64)
    r = recorded(model, compressor, kv_bits=kv_bits)
    assert r.response_lengths.min() < r.response_lengths.max()
    assert (token_by_token(model, r, kv_bits, SMALL["window"]) - r.logp_sparse).abs().max() < 1e-9
    assert (replay(model, r)[0] - r.logp_sparse).abs().max() > 1e-4  # of exact keys


@torch.no_grad()
def test_quantised_sampling_at_its_edge():
    """Buffer 1, a window longer than the prompt, and prompts of a token, which give no scale."""
    model = tiny_model(dtype=torch.float64)
    how = {"group_size": 1, "max_new_tokens": 30, "eos_ids": [], "record": True, "generator": seeded(2)}
    r = rollout(model, [[7], [8]], budget=9, buffer=1, window=8, kv_bits=4, **how)
    assert (token_by_token(model, r, 4, 8) - r.logp_sparse).abs().max() < 1e-9
    r = rollout(model, [[7], [8, 9]], compressor="full", window=100, kv_bits=2, **how)  # more exact than ever held
    assert (replay(model, r)[0] - r.logp_sparse).abs().max() < 1e-9


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_number_moves_by_half_a_step_at_most(bits):
    """2^bits levels from the smallest to the largest of each 32 neighbours; what is packed again stays what it is."""
    x = 3 * torch.randn(5, 7, 64, generator=seeded(0), dtype=torch.float64) + 1
    packed, ranges = kvcache.pack(x, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (5, 7, 64 * bits // 8) and ranges.shape == (5, 7, 2, 2)
    left = kvcache.unpack(packed, ranges, bits, x.dtype)
    groups = x.unflatten(-1, (2, 32))
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**bits - 1)
    assert ((left - x).unflatten(-1, (2, 32)).abs() <= step / 2 + 2**-11 * groups.abs().amax()).all()  # fp16 ranges
    assert len(left[0, 0, :32].unique()) <= 2**bits
    assert left[0, 0].tolist() == rounded(x[0, 0].tolist(), bits, 32)
    assert torch.equal(kvcache.unpack(*kvcache.pack(left, bits), bits, x.dtype), left)


def test_levels_share_a_byte():
    """By hand: -1 to 14 in 16 levels, two a byte, the first in the low half; 0 to 3 in 4 levels, four a byte."""
    packed, ranges = kvcache.pack(torch.tensor([-1.0, 14, 0, 2.4]), 4)
    assert packed.tolist() == [0 + 16 * 15, 1 + 16 * 3] and ranges.tolist() == [[-1, 1]]
    assert kvcache.unpack(packed, ranges, 4, torch.float32).tolist() == [-1, 14, 0, 2]
    packed, ranges = kvcache.pack(torch.tensor([3.0, 2, 0, 1]), 2)
    assert packed.tolist() == [3 + 4 * 2 + 16 * 0 + 64 * 1] and ranges.tolist() == [[0, 1]]


@pytest.mark.parametrize("x", [[5.0] * 8, [0.0] * 8, [1e-9] + [0.0] * 7, [3e38, -3e38] * 4], ids=str)
def test_no_numbers_make_what_is_left_of_them_infinite(x):
    """Equal numbers have a step of 0, tiny ones one below fp16's, and huge ones are cut to its largest."""
    x = torch.tensor(x)
    left = kvcache.unpack(*kvcache.pack(x, 4), 4, torch.float32)
    assert left.isfinite().all()
    assert (left - x).abs().max() < 1e-7 or x.abs().max() > 65504


def test_a_cut_moves_levels_and_does_not_round_again():
    """After ten cuts each level and range is still that of the key it was made of."""
    cache = KVCache(
        rows=1, layers=1, heads=2, kv_heads=2, head_dim=8, max_length=0, compressor="snapkv", budget=16, buffer=4,
        window=4, kv_bits=4,
    )  # fmt: skip
    x = torch.randn(1, 2, 60, 8, generator=seeded(0))
    x[:, :, :3] *= 3  # attended to longest
    cache[0].attend(*[x[:, :, :20]] * 3, torch.arange(20)[None])
    for p in range(20, 60):
        cache[0].attend(*[x[:, :, p, None]] * 3, torch.tensor([[p]]))
    parts = cache[0].parts
    assert cache[0].length.tolist() == [16] and parts["positions"].min() < 20
    for name, scale in (("key", parts["key_scale"]), ("value", 1)):
        packed, ranges = kvcache.pack(x / scale, 4)  # (1, 2, 60, ...)
        for k in range(2):
            kept = parts["positions"][0, k, :16].long()
            assert torch.equal(parts[f"{name}s"][0, k, :16], packed[0, k, kept])
            assert torch.equal(parts[f"{name}_ranges"][0, k, :16], ranges[0, k, kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_bits", [2, 4, 8])
def test_quantised_keys_and_values_take_exactly_their_bits(kv_bits, dtype):
    """Levels, a range of 4 bytes for each 32 neighbours, W exact tokens, a scale a channel: 0.16 of fp32 at 4 bits."""
    c, budget, W = tiny_model(layers=3, head_dim=64).config, 504, 8
    cache = cache_for(c, 5, 77, budget=budget, buffer=8, window=W, kv_bits=kv_bits, dtype=dtype)
    heads, slots = 2 * 3 * 5 * c.kv_heads, budget + 8
    expected = {
        "keys": heads * slots * 64 * kv_bits // 8,
        "key_ranges": heads * slots * 2 * 4,
        "newest_keys": heads * W * 64 * dtype.itemsize,
    }
    for name, size in expected.items():
        assert cache.nbytes[name] + cache.nbytes[name.replace("key", "value")] == size
    assert cache.nbytes["key_scale"] == heads // 2 * 64 * dtype.itemsize
    held = sum(part.untyped_storage().nbytes() for layer in cache for part in layer.parts.values())
    assert held == sum(cache.nbytes.values())
    if (kv_bits, dtype) == (4, torch.float32):
        assert 0.15 < sum(expected.values()) / (heads * slots * 64 * 4) < 0.18


@pytest.mark.parametrize("compressor", ["full", "snapkv", "h2o", "rkv"])
def test_no_more_than_one_layers_keys_and_values_are_ever_whole(compressor):
    """A step through eight layers, cuts included, takes far less than the keys and values of all of them in fp32."""
    B, K, D, S, L = 4, 2, 64, 112, 8
    cache = KVCache(
        rows=B, layers=L, heads=K, kv_heads=K, head_dim=D, max_length=S, compressor=compressor, budget=96, buffer=16,
        kv_bits=4,
    )  # fmt: skip
    x = torch.randn(B, K, S, D, generator=seeded(0))

    def step(first: int, last: int) -> None:
        for layer in cache:
            layer.attend(*[x[:, :, first:last]] * 3, torch.arange(first, last).expand(B, -1))

    step(0, S - 1)
    layer = 2 * B * K * S * D * 4  # bytes of its keys and values
    assert 0 < peak_bytes(lambda: step(S - 1, S)) < 2.5 * layer < L * layer / 3


def test_fewer_bits_move_the_sampler_further():
    """8 bits are close to none, and 2 are far from it."""
    model = tiny_model(dtype=torch.float64)
    away = []
    for kv_bits in (8, 4, 2):
        r = recorded(model, "full", kv_bits=kv_bits)
        away.append(float((replay(model, r)[0] - r.logp_sparse).abs().max()))
    assert 0 < away[0] < 0.05 < away[1] < away[2]


# ------------------------------------------------------------------------------------------------------ bad settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"compressor": "snap"}, "unknown compressor 'snap'"),
        ({"budget": 8, "window": 8}, "budget 8 must exceed the window of 8"),
        ({"budget": 12, "window": 8, "compressor": "streaming"}, "budget 12 must exceed the window of 8 [+] 4 sinks"),
        ({"buffer": 0}, "buffer 0 and window 8 must be at least 1"),
        ({"window": 0}, "buffer 128 and window 0 must be at least 1"),
        ({"kv_bits": 3}, "kv_bits 3 must be 2, 4 or 8, or 0"),
        ({"kv_bits": 4, "window": 0, "compressor": "full"}, "buffer 128 and window 0 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(settings, sentence):
    """R-KV 7: the default options crash. Here they are checked together, before anything is allocated."""
    with pytest.raises(ValueError, match=sentence):
        cache_for(tiny_model().config, 1, 10, **settings)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ({"layer_budgets": lambda budget, layers, window: [budget + 8, budget - 8]}, "2 budgets of at least 9 .* 24"),
        ({"layer_budgets": lambda budget, layers, window: [budget]}, "2 budgets of at least 9 .* the sum 24, not .12]"),
        ({"layer_budgets": lambda budget, layers, window: [budget + 1] * 2}, "must have the sum 24, not .13, 13"),
        ({"score": kvcache.snapkv_mean}, "nothing is kept as queries for this policy: say queries=True"),
        ({"score": kvcache.h2o}, "nothing is kept as attention for this policy: say attention=True"),
        ({"score": lambda held: held.keysteps}, "nothing is kept as keysteps for this policy"),
    ],
)
def test_a_policy_declared_wrongly_is_refused_with_a_sentence(policy, sentence, monkeypatch):
    """Otherwise the window would not survive, or the scores would be those of another policy."""
    with pytest.raises(ValueError, match=sentence):
        monkeypatch.setitem(COMPRESSORS, "mine", Compressor(**{"score": kvcache.streaming} | policy))
        cache = cache_for(tiny_model(layers=2).config, 1, 99, compressor="mine", budget=12, buffer=4, window=8)
        x = torch.randn(1, cache[0].parts["keys"].shape[1], 20, cache[0].parts["keys"].shape[3])
        cache[0].attend(x, x, x, torch.arange(20)[None])


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_default_settings_work_together(compressor):
    """R-KV 7: budget 512, buffer 128, window 8 are accepted for every compressor."""
    cache = cache_for(tiny_model().config, 1, 700, compressor=compressor)
    assert cache[0].slots == {"full": 700, "pyramidkv": 991 + 128}.get(compressor, 640)


def test_many_tokens_are_refused_by_a_cache_that_is_not_empty():
    """Pytorch 108108: a prompt that continues a cache would need a mask; it is an error, not a wrong one."""
    cache = cache_for(tiny_model().config, 1, 10)
    tiny_model().hidden(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(ValueError, match="only while it is empty"):
        tiny_model().hidden(torch.tensor([[4, 5]]), cache=cache)
