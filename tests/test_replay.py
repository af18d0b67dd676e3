"""The replay learner: it attends to what the sampler attended to, so its policy is the sampler's, gradient included."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers import cut_times, peak_bytes, replay, seeded, tiny_model, token_by_token
from runs_of_train import assert_same_run, lines, run
from torch import Tensor

import rollout as module
import train
from grpo import correct, mismatch_metrics
from kvcache import COMPRESSORS, Replay, record_dtype
from model import Decoder
from rollout import Rollout, cache_for, rescore, response_logprobs, rollout_shared

PROMPTS = [[1, 2, 3], list(range(4, 30)) * 2, [5, 6, 7, 8, 9] * 4]  # below the window, cut at prefill, between
SMALL = {"budget": 16, "buffer": 5, "window": 4, "group_size": 2, "max_new_tokens": 24, "eos_ids": [2, 3]}


def recorded(model: Decoder, compressor: str, **settings) -> Rollout:
    """A rollout with the record of its evictions, in two batches."""
    how = SMALL | {"rows": 4, "record": True, "generator": seeded(1), "compressor": compressor} | settings
    return rollout_shared(model, PROMPTS, **how)


def learner(model: Decoder, r: Rollout, function=response_logprobs) -> Tensor:
    """log-probs (N, R) of all responses under replay, with gradient."""
    (logp,) = function(model, r, torch.arange(len(r.tokens)), replay=True)
    return logp


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_replay_learner_is_the_policy_that_sampled(compressor, dtype, tolerance):
    """logp_old = logp_sparse through the product path, ragged prompts, batches, early ends, in chunks of 7 queries."""
    model = tiny_model(dtype=dtype)
    r = recorded(model, compressor)
    assert r.response_lengths.min() < r.response_lengths.max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Replay", lambda evicted_at: Replay(evicted_at, chunk=7))
        logp_old, _ = rescore(model, r, micro_tokens=150, replay=True)
    assert (logp_old - r.logp_sparse).abs().max() < tolerance
    if dtype != torch.bfloat16:
        assert (replay(model, r)[0] - logp_old).abs().max() < tolerance  # the independent slow path of helpers.py
        assert mismatch_metrics(logp_old, r.logp_sparse, r.mask)["xi_min"] > 1 - 1e-4
        assert correct(logp_old, r.logp_sparse, r.mask).accepted.all()
    if compressor != "full" and dtype == torch.float32:
        dense, _ = rescore(model, r, micro_tokens=150)
        assert (dense - r.logp_sparse).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("compressor", "checkpointing"), [("snapkv", False), ("snapkv", True), ("pyramidkv", False), ("h2o", False)]
)
def test_its_gradient_is_that_of_each_steps_attention_over_the_keys_held(compressor, checkpointing):
    """Against a slow path that takes a token at a time; with and without the layers' own checkpointing."""
    model = tiny_model(dtype=torch.float64)
    r = recorded(model, compressor, group_size=1)
    weight = torch.randn(r.mask.shape, generator=seeded(5), dtype=torch.float64) * r.mask  # so that no term cancels
    slow = torch.autograd.grad((token_by_token(model, r) * weight).sum(), list(model.parameters()))
    model.checkpointing = checkpointing
    fast = torch.autograd.grad((learner(model, r) * weight).sum(), list(model.parameters()))
    for a, b in zip(fast, slow, strict=True):
        assert (a - b).abs().max() < 1e-10 * b.abs().max()


def forced(model: Decoder, r: Rollout, i: int, **settings) -> tuple[Tensor, list[Tensor]]:
    """Row i's tokens through a compressed cache: the sampler's log-probs of the response (R,), and the evictions."""
    P, n = int(r.prompt_lengths[i]), int(r.lengths[i])
    cache = cache_for(model.config, 1, r.tokens.shape[1], dtype=torch.float64, **settings)
    cache.record(1, r.tokens.shape[1])
    logits = [model(r.tokens[i : i + 1, :P], cache=cache)[0, -1]]
    logits += [model(r.tokens[i : i + 1, t : t + 1], torch.tensor([[t]]), cache)[0, 0] for t in range(P, n - 1)]
    logp = torch.stack(logits).log_softmax(-1)  # (n - P, V)
    return logp.gather(1, r.tokens[i, P:n, None])[:, 0], [layer.evicted_at for layer in cache.layers]


@pytest.mark.parametrize("compressor", ["snapkv", "rkv", "h2o"])
def test_the_choice_of_keys_has_no_gradient_of_its_own(compressor):
    """Which keys go is piecewise constant in the weights: the sampler's difference quotient is replay's derivative."""
    model = tiny_model(dtype=torch.float64)
    r, settings = recorded(model, compressor), {"compressor": compressor, "budget": 16, "buffer": 5, "window": 4}
    i = 2  # its prompt is cut at prefill
    direction = [torch.randn(p.shape, generator=seeded(9), dtype=torch.float64) for p in model.parameters()]
    gradient = torch.autograd.grad(learner(model, r)[i].sum(), list(model.parameters()))
    slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))

    def at(step: float) -> tuple[Tensor, list[Tensor]]:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, d in zip(moved.parameters(), direction, strict=True):
                p += step * d
            return forced(moved, r, i, **settings)

    (up, gone_up), (down, gone_down) = at(1e-6), at(-1e-6)
    n = int(r.lengths[i])
    for above, below, record in zip(gone_up, gone_down, r.evicted_at, strict=True):
        assert torch.equal(above[0, :, :n], below[0, :, :n])
        assert torch.equal(above[0, :, :n], record[i, :, :n])
    assert abs((up.sum() - down.sum()) / 2e-6 - slope) < 1e-5 * abs(slope)


def test_a_budget_that_covers_the_sequence_makes_replay_dense():
    """Nothing is evicted: log-probs and gradients of the dense learner, to 1e-6."""
    model = tiny_model()
    r = recorded(model, "snapkv", budget=90)
    assert not any(cut_times(row.tolist()) for layer in r.evicted_at for row in layer.flatten(0, 1))
    (dense,) = response_logprobs(model, r, torch.arange(len(r.tokens)))
    assert (learner(model, r) - dense).abs().max() < 1e-6
    for a, b in zip(
        *(torch.autograd.grad(x.sum(), list(model.parameters())) for x in (learner(model, r), dense)), strict=True
    ):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_the_record_is_as_small_as_its_lengths_allow():
    """int16 below 32,767 tokens; joined with a longer batch's it means the same: what stays is never gone."""
    assert record_dtype(32_766) == torch.int16 and record_dtype(32_767) == torch.int32
    model = tiny_model()
    short = recorded(model, "snapkv", rows=100)
    assert {layer.dtype for layer in short.evicted_at} == {torch.int16}
    wide = [layer.int().masked_fill(layer == torch.iinfo(torch.int16).max, 2**31 - 1) for layer in short.evicted_at]
    longer = replace(short, evicted_at=[torch.nn.functional.pad(x, (0, 3), value=2**31 - 1) for x in wide])
    both = Rollout.side_by_side([short, longer])
    for layer, expected in zip(both.evicted_at, wide, strict=True):
        assert layer.dtype == torch.int32
        gone = layer[..., : expected.shape[-1]] <= 32_766
        assert torch.equal(gone, (expected <= 32_766).repeat(2, 1, 1))
        assert (layer[..., expected.shape[-1] :] == 2**31 - 1).all()
    assert (rescore(model, both, 10_000, replay=True)[0] - both.logp_sparse).abs().max() < 1e-5


def test_no_mask_of_all_queries_ever_exists():
    """Forward and backward at 2,048 tokens stay far below one layer's T x T mask of all heads (fp32: 64 MiB)."""
    model = tiny_model(layers=1, vocab_size=5)
    tokens = torch.randint(5, (1, 2048), generator=seeded(0))
    record = [Replay(torch.full((1, 2, 2048), 2**15 - 1, dtype=torch.int16), chunk=64)]
    peak = peak_bytes(lambda: model.hidden(tokens, cache=record).sum().backward())
    assert peak < 16 * 2**20


@pytest.mark.usefixtures("any_digit_is_half_right")
class TestTraining:
    """`train.py --learner replay`, several cuts a response."""

    OPTIONS = ("--learner", "replay", "--kl-coef", "0.1", "--updates", "2")

    def test_xi_is_one_in_every_step_and_nothing_is_rejected(self, files, tmp_path):
        """A check that runs in each step; every fifth also says how far the dense policy is."""
        metrics = lines(run(files, tmp_path / "run", *self.OPTIONS, "--steps", "6") / "metrics.jsonl")
        assert all(m["kv_saved"] > 0.2 and m["updates_skipped"] < 2 for m in metrics)
        assert all(abs(m["xi_min"] - 1) < 1e-4 and m["rejected"] == 0 and m["sampler_kl"] < 1e-9 for m in metrics)
        assert ["dense_sampler_kl" in m for m in metrics] == [True, False, False, False, False, True]
        assert metrics[0]["dense_sampler_kl"] > 1e-6

    def test_learner_and_reference_see_what_the_sampler_saw(self, files, tmp_path):
        """In the first update logp = logp_old = logp_ref: no KL, and a policy loss of weights 1 and ratios 1."""
        out = run(files, tmp_path / "run", "--learner", "replay", "--kl-coef", "0.1", "--steps", "1")
        (metrics,) = lines(out / "metrics.jsonl")
        records = lines(out / "samples.jsonl")
        assert metrics["grad_norm"] > 0 and 0 <= metrics["kl_ref"] < 1e-9
        mean = sum(record["advantage"] for record in records) / len(records)
        assert abs(metrics["policy_loss"] + mean) < 1e-5

    def test_the_first_gradient_does_not_depend_on_micro_batches_or_checkpointing(self, files, tmp_path):
        """Micro-batches take their rows of the record."""
        norms = [
            lines(run(files, tmp_path / str(i), *self.OPTIONS, "--steps", "1", *more) / "metrics.jsonl")[0]["grad_norm"]
            for i, more in enumerate([[], ["--micro-tokens", "100000"], ["--gradient-checkpointing"]])
        ]
        assert max(norms) - min(norms) < 1e-5 * max(norms) and norms[0] > 0

    def test_a_resumed_run_is_the_same_run(self, files, tmp_path):
        """Bit for bit, in bf16 too; and the learner of a run stays what it was."""
        for dtype in ("float32", "bfloat16"):
            options = [*self.OPTIONS, "--dtype", dtype, "--eval-data", ""]
            whole = run(files, tmp_path / f"whole-{dtype}", *options)
            part = run(files, tmp_path / f"part-{dtype}", *options, "--steps", "2")
            train.main(["--resume", str(part), "--steps", "4"])
            assert_same_run(whole, part)

    def test_replay_of_a_dense_rollout_is_the_dense_run(self, files, tmp_path, capsys):
        """--compressor full evicts nothing: said in a line, and the run is the dense one bit for bit."""
        dense = run(files, tmp_path / "dense", "--compressor", "full")
        same = run(files, tmp_path / "replay", "--compressor", "full", "--learner", "replay")
        assert "replay is dense here" in capsys.readouterr().out
        assert_same_run(dense, same)
