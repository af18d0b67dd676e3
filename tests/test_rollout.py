"""rollout.py as a specification: the identity limit, independence of rows, sampling, ends, counts, dense scoring."""

from __future__ import annotations

import dataclasses
import math
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import VisibilityMask, constant_model, held_after, replay, seeded, tiny_model, visibility
from torch import Tensor
from torch.testing import assert_close

import rollout as module
from grpo import consistency_ratio, rejection_mask
from kvcache import COMPRESSORS, LayerCache
from rollout import Rollout, rollout

PROMPTS = [[1, 2, 3], list(range(4, 30)) * 2, [5, 6, 7, 8] * 4]  # below the window, beyond the cache, between
R = 16
sparse = partial(rollout, max_new_tokens=R, eos_ids=[2, 3], budget=16, buffer=5, window=4)


def dense(model, r: Rollout) -> Tensor:
    """logp_old (N, R): what the learner says of the sampled tokens."""
    return module.rescore(model, r, micro_tokens=1000)[0]


# ------------------------------------------------------------------------------------------------ the identity limit


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_budget_that_covers_the_sequence_makes_sampler_and_dense_policy_one(compressor):
    """logp_sparse = logp_old, xi = 1 to 1e-5, none rejected. (PyramidKV gives its last layer budget / 20.)"""
    model, T = tiny_model(), 0.7
    r = sparse(model, PROMPTS, group_size=2, compressor=compressor, budget=1600, temperature=T, generator=seeded(1))
    logp_old = dense(model, r)
    assert (logp_old - r.logp_sparse).abs().max() < 1e-5
    assert (consistency_ratio(logp_old, r.logp_sparse, r.mask) - 1).abs().max() < 1e-5
    assert rejection_mask(logp_old, r.logp_sparse, r.mask).all()


@pytest.mark.parametrize("compressor", [name for name, policy in COMPRESSORS.items() if policy.score])
def test_a_small_budget_makes_them_differ(compressor):
    """The other side of the limit: eviction is real, so the mismatch that Sparse-RL corrects is real."""
    model = tiny_model()
    r = sparse(model, PROMPTS, group_size=2, compressor=compressor, generator=seeded(1))
    logp_old = dense(model, r)
    assert (logp_old - r.logp_sparse).abs().max() > 0.1


def test_next_query_stands_at_the_number_of_tokens_seen():
    """VeloxQuant-MLX 171, 389: after an eviction the query is rotated at the tokens seen, not at the keys kept."""
    seen, attend = [], LayerCache.attend

    def watched(self, queries, keys, values, positions):
        seen.append(positions[:, -1].tolist())
        return attend(self, queries, keys, values, positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerCache, "attend", watched)
        sparse(tiny_model(layers=1), [[4] * 7, [5] * 30], group_size=1, eos_ids=[], max_new_tokens=20)
    assert seen[2:] == [[7 + t, 30 + t] for t in range(19)]  # the first two are the prompts


# ------------------------------------------------------------------------------------------------ rows by themselves


def assert_same_row(batch: Rollout, i: int, alone: Rollout, j: int = 0) -> None:
    """Row i of one rollout is row j of another: tokens exactly, log-probs to 1e-5, evictions exactly."""
    assert batch.response(i) == alone.response(j)
    assert bool(batch.finished[i]) == bool(alone.finished[j])
    n, T = int(batch.response_lengths[i]), int(batch.prompt_lengths[i] + batch.response_lengths[i])
    assert (batch.logp_sparse[i, :n] - alone.logp_sparse[j, :n]).abs().max() < 1e-5
    for ours, theirs in zip(batch.evicted_at, alone.evicted_at, strict=True):
        assert torch.equal(ours[i, :, :T], theirs[j, :, :T])


@pytest.mark.parametrize("compressor", ["full", "snapkv", "h2o"])
def test_in_bf16_a_response_does_not_depend_on_longer_prompts_beside_it(compressor):
    """verl 6280: padding to another length, or more slots in use, rounds otherwise. Bit for bit, on a CPU."""
    model = tiny_model(heads=6, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    prompts = torch.randint(4, 31, (3, 20), generator=seeded(0)).tolist()
    longer = torch.randint(4, 31, (2, 75), generator=seeded(1)).tolist()
    how = {"group_size": 2, "max_new_tokens": 60, "eos_ids": [], "compressor": compressor, "budget": 60, "buffer": 29}
    alone = rollout(model, prompts, generator=seeded(2), **how)
    beside = rollout(model, prompts + longer, generator=seeded(2), **how)
    assert [beside.response(i) for i in range(6)] == [alone.response(i) for i in range(6)]
    assert torch.equal(beside.logp_sparse[:6], alone.logp_sparse)


@pytest.mark.parametrize(
    ("compressor", "kv_bits"), [*((name, 0) for name in COMPRESSORS), ("full", 8), ("snapkv", 4), ("h2o", 2)]
)
def test_a_row_does_not_depend_on_its_batch_mates(compressor, kv_bits):
    """R-KV scores row 1 with row 0's redundancy. Row i alone meets its own uniform numbers again.

    Where keys are rounded in fp64: a last bit flips a level.
    """
    model = tiny_model(dtype=torch.float64 if kv_bits else torch.float32)
    prompts = [*PROMPTS, [9] * 16, [1, 3] * 9]  # cut together, apart, ending early
    how = {"group_size": 1, "compressor": compressor, "kv_bits": kv_bits, "record": True}
    batch = sparse(model, prompts, generator=seeded(10), **how)
    assert batch.response_lengths.min() < batch.response_lengths.max()
    for i, prompt in enumerate(prompts):
        alone = sparse(model, [prompt], generator=seeded(10, skip=i * (1 + R)), **how)
        assert_same_row(batch, i, alone)


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_earlier_rollouts_leave_no_trace(compressor):
    """KVCache-Factory 15: state on the module; here neither a finished nor a broken rollout changes the next."""
    model = tiny_model()
    again = partial(sparse, model, PROMPTS[1:], group_size=2, compressor=compressor, record=True)
    first = again(generator=seeded(5))
    sparse(model, PROMPTS, group_size=3, compressor=compressor, generator=seeded(6))
    with pytest.MonkeyPatch.context() as broken:
        steps = iter(range(9))
        real = module.sample
        broken.setattr(module, "sample", lambda *x, **how: real(*x, **how) if next(steps) < 8 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again(generator=seeded(7))
    second = again(generator=seeded(5))
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.logp_sparse, second.logp_sparse)
    assert all(torch.equal(a, b) for a, b in zip(first.evicted_at, second.evicted_at, strict=True))


def test_the_weights_and_the_prompts_are_left_untouched():
    """nano-aha: an in-place write through a view made 3 response tokens 8."""
    model, prompts = tiny_model(), [list(p) for p in PROMPTS]
    before = [p.clone() for p in model.parameters()]
    sparse(model, prompts, group_size=2, generator=seeded(1))
    assert prompts == PROMPTS and all(map(torch.equal, before, model.parameters()))


TIMES_AND_BYTES = ("seconds", "cache_bytes", "dense_bytes")


@pytest.mark.parametrize("compressor", ["random", "snapkv", "full"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 100])
def test_responses_do_not_depend_on_how_many_rows_are_sampled_at_once(compressor, rows):
    """A matter of memory, not of the result: every field, the record of the evictions included."""
    how = {"max_new_tokens": R, "eos_ids": [2, 3], "compressor": compressor, "budget": 16, "buffer": 5, "window": 4}
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[2]]  # the longest first, so that the others need padding
    how |= {"group_size": 2, "record": True, "temperature": 0.9}
    whole = rollout(tiny_model(), prompts, generator=seeded(8), **how)
    parts = rollout(tiny_model(), prompts, rows=rows, generator=seeded(8), **how)
    for name in {field.name for field in dataclasses.fields(Rollout)} - {*TIMES_AND_BYTES, "logp_sparse"}:
        assert_close(
            getattr(parts, name), getattr(whole, name), atol=0, rtol=0, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert_close(parts.logp_sparse, whole.logp_sparse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("group_size, rows, held", [(2, 1, 2), (2, 3, 2), (2, 5, 4), (2, 99, 24), (1, 1, 1), (1, 5, 5)])
def test_a_freed_place_is_taken_at_once(group_size, rows, held, monkeypatch):
    """At most so many rows (a group at least) at a time; once a group's worth is free, the next prompt begins."""
    sizes = []
    monkeypatch.setattr(
        module, "sample", lambda logits, *a, f=module.sample, **k: sizes.append(len(logits)) or f(logits, *a, **k)
    )
    how = {"group_size": group_size, "max_new_tokens": 9, "eos_ids": [*range(6)], "compressor": "full"}
    r = rollout(constant_model([0.0] * 31), [[12 + i] for i in range(12)], rows=rows, generator=seeded(3), **how)
    waiting, left, expected = r.response_lengths.view(-1, group_size).tolist(), [], []
    assert len({*r.response_lengths.tolist()}) > 3  # long and short ones
    while waiting or left:
        while waiting and len(left) + group_size <= held:
            left += waiting.pop(0)
        expected.append(len(left))
        left = [n - 1 for n in left if n > 1]
    assert sizes == expected and max(sizes) == held
    keys = 2 * 2 * 2 * 8 * held * (1 + 9) * 4  # keys and values, L, K, D
    assert r.dense_bytes == keys == r.cache_bytes["keys"] + r.cache_bytes["values"]


def test_ranks_add_their_bytes_and_take_as_long_as_the_slowest():
    """They sample at the same time, each into a cache of its own."""
    model = tiny_model()
    one, two = (sparse(model, ps, group_size=2, compressor="full") for ps in (PROMPTS[:1], PROMPTS[1:]))
    r = Rollout.side_by_side([one, two])
    assert r.cache_bytes == {name: one.cache_bytes[name] + two.cache_bytes[name] for name in one.cache_bytes}
    assert r.dense_bytes == one.dense_bytes + two.dense_bytes and r.seconds == max(one.seconds, two.seconds)
    assert (
        r.tokens.shape[0] == len(one.tokens) + len(two.tokens)
        and r.cached_tokens == one.cached_tokens + two.cached_tokens
    )


def test_groups_follow_the_order_of_the_prompts():
    """nanoGRPO: prompts repeated AABB, samples tiled ABAB. The log-probs tell which prompt a response followed."""
    model = tiny_model()
    r = sparse(model, [[7, 8, 9], [11] * 5], group_size=3, compressor="full", generator=seeded(1))
    assert r.prompt_lengths.tolist() == [3, 3, 3, 5, 5, 5]
    assert [r.tokens[i, :n].tolist() for i, n in enumerate(r.prompt_lengths)] == [[7, 8, 9]] * 3 + [[11] * 5] * 3
    assert (dense(model, r) - r.logp_sparse).abs().max() < 1e-5


def test_each_member_of_a_group_draws_its_first_token():
    """nanochat PR 201: the first token was sampled once and copied to all samples of a prompt."""
    r = sparse(constant_model([0.0] * 31), [[1]], group_size=16, max_new_tokens=1, eos_ids=[], generator=seeded(1))
    assert len(set(r.tokens[:, 1].tolist())) > 4


# ------------------------------------------------------------------------------------------------------- the sampler


def test_log_prob_is_taken_at_the_sampling_temperature():
    """trl PR 3029, 4159: logits [2, 1, 0, -1] at 0.6, token 1: -1.8747, and the learner says the same."""
    logits = torch.tensor([[2.0, 1, 0, -1]])
    token, logp = module.sample(logits, torch.tensor([0.9]), temperature=0.6)
    assert (token.item(), round(logp.item(), 4)) == (1, -1.8747)
    model = constant_model(logits[0].tolist())
    r = sparse(model, [[0]], group_size=8, temperature=0.6, eos_ids=[], generator=seeded(1))
    logp_old = dense(model, r)
    ones = r.tokens[:, 1:] == 1
    assert ones.any() and (r.logp_sparse[ones] + 1.8747).abs().max() < 1e-4
    assert (logp_old - r.logp_sparse).abs().max() < 1e-5


def test_frequencies_are_those_of_the_softmax():
    """Inverse CDF: with evenly spread uniform numbers each token's share is its probability, to one draw."""
    logits, n = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0]), 10_000
    tokens, _ = module.sample(logits.expand(n, -1), (torch.arange(n) + 0.5) / n, temperature=2.0)
    shares = torch.bincount(tokens, minlength=5) / n
    assert (shares - (logits / 2).softmax(-1)).abs().max() <= 2 / n


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_token_of_probability_zero_is_never_drawn(top_p):
    """Not even for u = 0 and for the largest u below 1, at the first, a middle and the last place."""
    u = torch.tensor([0.0, 1e-30, 0.25, 0.5, 0.75, 1 - 2**-24])
    impossible = torch.tensor([True, False, True, False, False, True, True])
    logits = torch.zeros(7).masked_fill(impossible, -torch.inf)
    tokens, logp = module.sample(logits.expand(len(u), -1), u, top_p=top_p)
    assert not impossible[tokens].any() and logp.isfinite().all()
    assert tokens[0] == 1 and tokens[-1] == 4


def test_the_last_token_is_in_range_when_the_probabilities_sum_to_less_than_one():
    """Rounding: over 50,000 equal logits the running sum does not end at 1, and u may lie above its end."""
    logits = torch.zeros(1, 50_000)
    tokens, logp = module.sample(logits, torch.tensor([1 - 2**-24]))
    assert 49_000 < tokens.item() < 50_000 and abs(logp.item() + 10.8198) < 1e-3


def test_top_p_keeps_the_nucleus_and_reports_the_full_softmax():
    """trl 6789, ms-swift PR 8442: probabilities .5 .3 .15 .05 at top_p 0.7 leave two tokens; log-probs stay whole."""
    p, n = torch.tensor([0.15, 0.5, 0.05, 0.3]), 1000
    tokens, logp = module.sample(p.log().expand(n, -1), torch.arange(n) / n, top_p=0.7)
    assert set(tokens.tolist()) == {1, 3}
    assert abs((tokens == 1).double().mean().item() - 0.5 / 0.8) < 2 / n
    assert torch.allclose(logp, p[tokens].log())


def test_temperature_zero_takes_the_most_likely_token():
    """Greedy decoding for evaluation; the uniform number does not matter, the log-prob is that of temperature 1."""
    logits = torch.randn(64, 31, generator=seeded(1))
    tokens, logp = module.sample(logits, torch.rand(64, generator=seeded(2)), temperature=0)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logp, logits.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 0.5, 1.0, 2.0, 0.0])
def test_logits_that_overflow_when_divided_have_log_probs(temperature):
    """3e38 / 1e-3 is beyond fp32, and inf - inf is no number: sampler and learner still say 0 and minus infinity."""
    logits, targets = torch.tensor([[0.0, 3e38, 2e38, -3e38]] * 2), torch.tensor([1, 0])
    tokens, logp = module.sample(logits, torch.tensor([0.0, 1 - 2**-24]), temperature)
    assert tokens.tolist() == [1, 1] and logp.tolist() == [0, 0]
    hidden = logits.clone().requires_grad_()
    scored, entropy = module.token_logprobs(hidden, lambda h: h, targets, temperature=temperature or 1.0, entropy=True)
    assert scored[0] == 0 and scored[1] <= -1e38 and entropy.tolist() == [0, 0]
    assert torch.autograd.grad(scored[0], hidden)[0].isfinite().all()
    r = sparse(constant_model(logits[0].tolist()), [[0]], group_size=2, temperature=temperature, eos_ids=[])
    assert (r.tokens == torch.tensor([0] + [1] * R)).all() and not r.logp_sparse.any()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_ordinary_logits_have_the_log_probs_of_the_formula(temperature):
    """log softmax(logits / T), in float64 to its last digits and in fp32 to 1e-5."""
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-5)):
        logits = 5 * torch.randn(64, 1000, generator=seeded(1), dtype=dtype)
        tokens, logp = module.sample(logits, torch.rand(64, generator=seeded(2)).to(dtype), temperature)
        expected = (logits.double() / temperature).softmax(-1).log().gather(-1, tokens[:, None])[:, 0]
        assert logp.dtype == dtype and (logp - expected).abs().max() < tolerance


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_inverse_cdf_is_a_search_in_the_running_sum(top_p):
    """Where the running sum grows, as on a CPU, the token is the first whose sum exceeds u times the last."""
    logits = 4 * torch.randn(256, 500, generator=seeded(1))
    logits[torch.rand(logits.shape, generator=seeded(2)) < 0.4] = -torch.inf
    u = torch.rand(256, generator=seeded(3))
    u[:3] = torch.tensor([0.0, 1e-30, 1 - 2**-24])
    p = logits.log_softmax(-1).exp()
    if top_p < 1:
        ranked, order = p.sort(-1, descending=True)
        p = p.scatter(-1, order, ranked.masked_fill(ranked.cumsum(-1) - ranked >= top_p, 0))
    cdf = p.cumsum(-1)
    threshold = torch.minimum(u * cdf[:, -1], torch.nextafter(cdf[:, -1], torch.tensor(0.0)))[:, None]
    expected = torch.searchsorted(cdf, threshold, right=True)[:, 0]
    assert torch.equal(module.sample(logits, u, top_p=top_p)[0], expected)


def test_the_largest_uniform_number_lies_below_every_total(monkeypatch):
    """(1 - 2^-24) * total rounds to less than total for each of the fp32 totals from 1/2 to 2, so a token is found."""
    totals = torch.arange(126 << 23, 128 << 23, dtype=torch.int32).view(torch.float32)  # by their bits
    for total in totals.split(1 << 20):
        cdf = torch.stack([torch.zeros_like(total), total], dim=1)  # (B, 2)
        monkeypatch.setattr(Tensor, "cumsum", lambda self, dim, cdf=cdf: cdf.clone())
        assert module.sample(torch.zeros_like(cdf), torch.full_like(total, 1 - 2**-24))[0].all()


def test_a_running_sum_that_falls_back_draws_no_impossible_token(monkeypatch):
    """A parallel sum may fall by a rounding. The largest sum is the total, wherever it stands, and a token of
    probability 0 that stands above is passed over."""
    p = torch.tensor([0.25, 0.0, 0.25, 0.0, 0.25, 0.25, 0.0])
    running = torch.tensor([0.25, 0.2501, 0.5, 0.4999, 0.75, 1.0, 1.0001])
    monkeypatch.setattr(Tensor, "cumsum", lambda self, dim: running.expand(self.shape).clone())
    u = torch.tensor([0.0, 0.24, 0.25, 0.25005, 0.49, 0.49995, 0.5, 0.75, 1 - 2**-24])
    tokens, _ = module.sample(p.log().expand(len(u), -1), u)
    assert tokens.tolist() == [0, 0, 2, 2, 2, 2, 4, 5, 5]
    running[4], running[5] = 1.0, 0.9999  # the last possible token stands below the one before
    assert module.sample(p.log().expand(len(u), -1), u)[0].tolist() == [0, 0, 2, 2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_numbers_ends_in_a_sentence(bad, top_p):
    """No token can be drawn: the log-prob is NaN, and the rollout says what is wrong with the weights."""
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 0.0, 0.0]])
    tokens, logp = module.sample(logits, torch.tensor([0.5, 0.5]), top_p=top_p)
    assert logp[0].isnan() and logp[1].isfinite() and set(tokens.tolist()) <= {0, 1, 2}
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[5] = bad
    with pytest.raises(FloatingPointError, match="weights are too large"):
        sparse(model, PROMPTS, group_size=1, top_p=top_p)


# --------------------------------------------------------------------------------------------------- ends and masks


def test_the_sampled_eos_belongs_to_the_response():
    """rasbt PR 185, RAGEN 59: an EOS that is dropped is never trained. Here: token, mask and log-prob."""
    r = sparse(tiny_model(), PROMPTS, group_size=4, generator=seeded(1))
    assert r.finished.any() and not r.finished.all()
    for i, n in enumerate(r.response_lengths.tolist()):
        eos = [t for t, token in enumerate(r.response(i)) if token in (2, 3)]
        assert eos == ([n - 1] if r.finished[i] else [])
        assert r.finished[i] or n == R
        assert r.mask[i].sum() == n and (r.logp_sparse[i, :n] < 0).all() and not r.logp_sparse[i, n:].any()


def test_a_row_ends_at_any_of_several_eos_ids():
    """trl PR 7039: models have several, such as <|im_end|> and <|endoftext|>. The number in the padding may be one."""
    for eos_ids in ([5, 7], [0, 7]):
        r = sparse(constant_model([0.0] * 8), [[1]], group_size=32, eos_ids=eos_ids, generator=seeded(1))
        assert {r.response(i)[-1] for i in range(32) if r.finished[i]} == set(eos_ids)
        assert not any(token in eos_ids for i in range(32) for token in r.response(i)[:-1])


def test_a_sampled_pad_id_is_an_ordinary_token():
    """GRPO-Zero, trl PR 6357: a row that samples the padding's id goes on, and the mask counts it."""
    r = sparse(constant_model([9.0, 0.0, 0.0]), [[0, 0]], group_size=4, eos_ids=[2], generator=seeded(1))
    zeros = [i for i in range(4) if 0 in r.response(i)[:-1]]
    assert zeros
    for i in range(4):
        assert r.mask[i].sum() == r.response_lengths[i] == len(r.response(i))


def test_an_eos_in_the_prompt_ends_nothing():
    """Masks come from lengths (trl PR 6357): chat prompts are full of end-of-turn tokens."""
    r = sparse(constant_model([0.0, 0.0, -99.0]), [[2, 2, 1, 2]], group_size=2, eos_ids=[2], generator=seeded(1))
    assert r.response_lengths.tolist() == [R, R] and not r.finished.any()


def test_the_log_probs_are_those_of_the_very_ids_in_the_record():
    """rllm 816, slime PR 117: the learner consumes the sampled ids; each log-prob is found again at its own id."""
    model = tiny_model()
    r = sparse(model, PROMPTS, group_size=2, record=True, generator=seeded(1))
    assert (replay(model, r)[0] - r.logp_sparse).abs().max() < 1e-5
    r.tokens[:, -1] = (r.tokens[:, -1] + 1) % 31
    assert (replay(model, r)[0] - r.logp_sparse).abs().max() > 1e-2


def test_no_prompt_and_an_empty_prompt_are_refused():
    """There is no first logit without a token."""
    for prompts in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least one"):
            sparse(tiny_model(), prompts, group_size=1)


def test_evaluation_after_prefill_of_one_token_prompts_equals_the_dense_model():
    """The smallest prompt: a batch of single tokens is a prefill of length 1."""
    model = tiny_model()
    r = sparse(model, [[4], [5]], group_size=1, compressor="full", record=True, generator=seeded(1))
    mask = VisibilityMask(visibility(r.evicted_at, r.tokens.shape[1]))
    assert torch.allclose(model(r.tokens), model(r.tokens, cache=mask), atol=1e-5)
    assert (replay(model, r)[0] - r.logp_sparse).abs().max() < 1e-5


# ------------------------------------------------------------------------------------------------------------ counts


def test_saved_tokens_are_counted_by_hand():
    """Budget 8, buffer 2, prompts of 3 and 12, 6 steps: held 3 4 5 6 7 8 and (cut at 10) 8 9 8 9 8 9."""
    r = rollout(
        tiny_model(), [[4] * 3, [5] * 12], group_size=1, max_new_tokens=6, eos_ids=[], budget=8, buffer=2, window=2,
        compressor="snapkv", generator=seeded(1),
    )  # fmt: skip
    assert r.cached_tokens == (3 + 4 + 5 + 6 + 7 + 8) + (8 + 9 + 8 + 9 + 8 + 9)
    dense_tokens = (3 + 4 + 5 + 6 + 7 + 8) + (12 + 13 + 14 + 15 + 16 + 17)
    assert r.statistics["kv_saved"] == 1 - r.cached_tokens / dense_tokens == 1 - 84 / 120


def test_finished_rows_are_not_counted():
    """Each of 2 x 4 rows counts for as many steps as it samples tokens; `full` saves nothing."""
    r = sparse(tiny_model(), PROMPTS, group_size=4, compressor="full", generator=seeded(1))
    steps = zip(r.prompt_lengths.tolist(), r.response_lengths.tolist(), strict=True)
    assert r.cached_tokens == sum(P + t for P, n in steps for t in range(n))
    assert r.statistics["kv_saved"] == 0


def test_bytes_of_the_dense_cache_are_those_that_full_allocates():
    """What the memory of a sparse rollout is compared with."""
    r = sparse(tiny_model(), PROMPTS, group_size=2, compressor="full")
    assert r.dense_bytes == r.cache_bytes["keys"] + r.cache_bytes["values"]


def test_statistics_are_means_over_the_responses():
    """Lengths, and the share that no EOS ended."""
    r = sparse(tiny_model(), PROMPTS, group_size=4, generator=seeded(2))
    bodies = [r.response(i) for i in range(12)]
    assert 0 < r.finished.sum() < 12
    assert r.statistics["response_length"] == pytest.approx(sum(map(len, bodies)) / 12)
    assert r.statistics["truncated"] == pytest.approx(sum(body[-1] not in (2, 3) for body in bodies) / 12)
    assert r.statistics["tokens_per_second"] == pytest.approx(sum(map(len, bodies)) / r.seconds)


def test_held_keys_never_exceed_budget_plus_buffer():
    """SnapKV 23, KVCache-Factory 20: at each step, in each row and head, not only at prefill."""
    r = sparse(tiny_model(), PROMPTS, group_size=1, eos_ids=[], record=True, generator=seeded(1))
    for i, head in ((i, head) for i in range(3) for head in range(2)):
        gone = r.evicted_at[0][i, head].tolist()
        P = int(r.prompt_lengths[i])
        counts = [len(held_after(gone, seen)) for seen in range(P, P + R)]
        assert max(counts) <= 20 and 16 in counts


# ------------------------------------------------------------------------------------------------ dense log-probs


def toy_decoder(V=11, width=4):
    """hidden (N, T, width) is a causal sum of embeddings; head is one matrix; both in float64 with gradient."""
    g = torch.Generator().manual_seed(0)
    embedding, matrix = (torch.randn(V, width, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    return SimpleNamespace(
        hidden=lambda tokens, cache: embedding[tokens].cumsum(1),
        head=lambda h: h @ matrix.T,
        parameters=[embedding, matrix],
        embed_tokens=SimpleNamespace(weight=embedding),
    )


def recorded(tokens: Tensor, prompt_lengths: list[int], response_lengths: list[int], temperature: float) -> Rollout:
    """A rollout of these tokens (N, T), as far as scoring is concerned."""
    nothing = dict.fromkeys(("finished", "cached_tokens", "cache_bytes", "dense_bytes", "seconds"))
    return Rollout(
        tokens=tokens,
        prompt_lengths=torch.tensor(prompt_lengths),
        response_lengths=torch.tensor(response_lengths),
        logp_sparse=torch.zeros(len(tokens), max(response_lengths), dtype=torch.float64),
        temperature=temperature,
        **nothing,
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("chunk", [1, 5, 21, 1000])
def test_token_logprobs_equal_log_softmax(chunk, temperature, dtype, tolerance):
    """Any chunk gives the values, entropies and gradients of one dense log_softmax."""
    g = torch.Generator().manual_seed(chunk)
    hidden = torch.randn(3, 7, 8, generator=g, dtype=dtype).requires_grad_()
    matrix = torch.randn(8, 50, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(50, (3, 7), generator=g)
    upstream = torch.randn(3, 7, generator=g, dtype=dtype)

    dense = (hidden @ matrix / temperature).log_softmax(-1)  # (3, 7, V)
    expected = dense.gather(-1, targets[..., None])[..., 0]
    settings = {"temperature": temperature, "chunk": chunk}
    logp, entropy = module.token_logprobs(hidden, lambda h: h @ matrix, targets, entropy=True, **settings)
    assert_close(logp, expected, atol=tolerance, rtol=tolerance)
    assert_close(entropy, -(dense.exp() * dense).sum(-1).detach(), atol=tolerance, rtol=tolerance)
    assert not entropy.requires_grad
    for got, want in zip(
        *(torch.autograd.grad((x * upstream).sum(), [hidden, matrix]) for x in (logp, expected)), strict=True
    ):
        assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("few", [1, 4, 64])
def test_entropies_are_the_same_bits_however_many_rows_at_a_time(few):
    """21 rows, of 1, 4 (the last group shorter) or more at a time: each keeps its place and its bits."""
    logp = torch.randn(21, 50, generator=torch.Generator().manual_seed(few)).log_softmax(-1)  # (n, V)
    assert torch.equal(module.entropies(logp, few), -(logp.exp() * logp).sum(-1))


def test_logprobs_are_taken_at_the_sampling_temperature():
    """Logits [2, 1, 0, -1] at T = 0.6 give token 1 a log-prob of -1.8747 (trl PR 3029, 4159)."""
    (logp,) = module.token_logprobs(torch.tensor([[2.0, 1, 0, -1]]), lambda h: h, torch.tensor([1]), temperature=0.6)
    assert float(logp) == pytest.approx(-1.8747, abs=5e-5)


def test_extreme_logits_keep_log_prob_and_entropy_finite():
    """Logits of 1,000, -1,000 and minus infinity: the log-prob is exact and the entropy 0, in fp32."""
    logits, targets = torch.tensor([[1000.0, 0.0, -1000.0, -math.inf]] * 2), torch.tensor([0, 2])
    logp, entropy = module.token_logprobs(logits, lambda h: h, targets, entropy=True)
    assert logp.tolist() == [0, -2000] and entropy.tolist() == [0, 0]


def test_never_more_logits_than_one_chunk():
    """Forward and backward, the head sees `chunk` tokens at most; its last logits are gone when it is called again.

    The backward pass begins with the last chunk, whose logits are still there: only the others are computed twice.
    """
    alive, rows, matrix = [], [], torch.randn(8, 50, generator=torch.Generator().manual_seed(0))

    def head(h):
        assert all(old() is None for old in alive)
        logits = h @ matrix
        alive.append(weakref.ref(logits))
        rows.append(len(h))
        return logits

    hidden = torch.ones(5, 6, 8, requires_grad=True)
    (logp,) = module.token_logprobs(hidden, head, torch.zeros(5, 6, dtype=torch.long), chunk=7)
    assert rows == [7, 7, 7, 7, 2]
    logp.sum().backward()
    assert rows == [7, 7, 7, 7, 2, 7, 7, 7, 7]


def test_response_logprobs_score_each_token_from_the_place_before():
    """Token t of a response is predicted at prompt + t - 1; the rest is 0; values and gradients as token by token."""
    decoder, prompts, lengths = toy_decoder(), [3, 1, 5, 2], [4, 3, 0, 1]
    r = recorded(torch.randint(11, (4, 9), generator=seeded(1)), prompts, lengths, temperature=0.7)
    rows = torch.tensor([2, 0, 3])  # some of the responses, in another order
    logp, entropy = module.response_logprobs(decoder, r, rows, entropy=True)

    expected, spread = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for i, (p, n) in enumerate(zip(prompts, lengths, strict=True)):
        for t in range(n):
            row = (decoder.head(decoder.hidden(r.tokens[i : i + 1, : p + t], cache=None)[0, -1]) / 0.7).log_softmax(-1)
            expected[i, t], spread[i, t] = row[r.tokens[i, p + t]], -(row.exp() * row).sum().detach()
    assert_close(logp, expected[rows])
    assert_close(entropy, spread[rows])
    assert not logp[~r.mask[rows]].any() and not entropy[~r.mask[rows]].any()
    got, want = (torch.autograd.grad((x**2).sum(), decoder.parameters) for x in (logp, expected[rows]))
    assert_close(got, want)
    assert torch.equal(module.response_logprobs(decoder, r, rows)[0], logp)


@pytest.mark.parametrize("micro_tokens", [1, 12, 20, 1000])
def test_scores_do_not_depend_on_the_micro_batches(micro_tokens):
    """Rows are scored in batches of similar length and come back in their own order, on the CPU, without gradient."""
    decoder = toy_decoder()
    r = recorded(torch.randint(11, (5, 9), generator=seeded(1)), [3, 1, 5, 2, 4], [4, 3, 1, 1, 2], temperature=0.7)
    logp, entropy = module.rescore(decoder, r, micro_tokens)
    assert not logp.requires_grad and not entropy.requires_grad
    for i in range(5):
        expected = module.response_logprobs(decoder, r, torch.tensor([i]), entropy=True)
        assert_close((logp[i : i + 1], entropy[i : i + 1]), tuple(x.detach() for x in expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_are_taken_in_at_least_fp32(dtype):
    """Half precision is widened, float64 kept."""
    scored = module.token_logprobs(torch.ones(3, 4, dtype=dtype), lambda h: h, torch.tensor([0, 1, 2]), entropy=True)
    assert [x.dtype for x in scored] == [torch.promote_types(dtype, torch.float32)] * 2


def test_greedy_responses_are_scored_at_temperature_one():
    """Their log-probs are those of temperature 1, so that is the temperature of the record."""
    model = tiny_model()
    for temperature, stored in ((0, 1.0), (0.7, 0.7)):
        r = sparse(model, PROMPTS, group_size=1, compressor="full", temperature=temperature, generator=seeded(1))
        assert r.temperature == stored
        assert (dense(model, r) - r.logp_sparse).abs().max() < 1e-5
