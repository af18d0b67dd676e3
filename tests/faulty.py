"""Wrong variants of the objective and of dense scoring, one for each fault that others shipped or that lies close.

test_faulty.py sees each caught.

Each takes the arguments of the function it stands for and is wrong in one place. Its docstring says what goes wrong and
where that was reported.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

import grpo
import rollout
from grpo import (
    correct,
    group_advantages,
    log_ratio,
    mismatch_metrics,
    policy_loss,
    rejection_mask,
    reward_metrics,
    surrogate_loss,
)

# ------------------------------------------------------------------------------------------------------ advantages


def biased_std(rewards, group_size):
    """The std divides by G, not G - 1."""
    return group_advantages(rewards, group_size) * (group_size / (group_size - 1)) ** 0.5


def no_test_for_equality(rewards, group_size):
    """The rounding error of a mean is divided by 1e-6 and learnt from."""
    groups = rewards.view(-1, group_size)
    std = groups.std(1, keepdim=True) if group_size > 1 else 0
    return ((groups - groups.mean(1, keepdim=True)) / (std + 1e-6)).flatten()


def groups_merged_by_prompt(rewards, group_size):
    """Two groups with the same prompt become one (Search-R1 88, GRPO-Zero)."""
    return group_advantages(rewards, len(rewards))


def groups_tiled(rewards, group_size):
    """Row i is taken to belong to group i mod N / G (Search-R1 88)."""
    return group_advantages(rewards.view(group_size, -1).T.flatten(), group_size).view(-1, group_size).T.flatten()


def baseline_of_the_survivors(rewards, group_size, logp, logp_old, logp_sparse, mask):
    """A rejected response no longer moves its siblings' baseline (verl PR 6375, 6452)."""
    accepted = rejection_mask(logp_old, logp_sparse, mask).view(-1, group_size)
    mean = (rewards.view(-1, group_size) * accepted).sum(1, keepdim=True) / accepted.sum(1, keepdim=True)
    return policy_loss(logp, logp_old, logp_sparse, (rewards.view(-1, group_size) - mean).flatten(), mask)[0]


# --------------------------------------------------------------------------------------------------- dense log-probs


def scored_at_temperature_one(hidden, head, targets, *, temperature=1.0, **settings):
    """The learner forgets the temperature of the sampler (trl PR 3029, 4159)."""
    return rollout.token_logprobs(hidden, head, targets, **settings)


def all_logits_at_once(hidden, head, targets, *, chunk=1024, **settings):
    """Tokens x vocabulary is materialised."""
    return rollout.token_logprobs(hidden, head, targets, chunk=targets.numel(), **settings)


def chunks_kept_for_the_backward(hidden, head, targets, *, temperature=1.0, chunk=1024):
    """Chunks, but all their logits stay alive until the backward pass."""
    logits = torch.cat([head(h) for h in hidden.flatten(0, -2).split(chunk)]) / temperature
    logp = logits.log_softmax(-1)
    return (logp.gather(-1, targets.flatten()[:, None]).view(targets.shape),)


def scored_one_place_late(decoder, r, rows, **settings):
    """A token is scored by the logits that follow it."""

    def hidden(tokens, cache):
        return decoder.hidden(tokens, cache).roll(-1, 1)

    late = SimpleNamespace(**vars(decoder) | {"hidden": hidden})
    return rollout.response_logprobs(late, r, rows, **settings)


def temperature_forgotten(decoder, r, rows, **settings):
    """The learner forgets the temperature of the sampler (trl PR 3029, 4159)."""
    return rollout.response_logprobs(decoder, replace(r, temperature=1.0), rows, **settings)


def first_rows_scored(decoder, r, rows, **settings):
    """As many rows as were asked for, and not those."""
    return rollout.response_logprobs(decoder, r, torch.arange(len(rows)), **settings)


# --------------------------------------------------------------------------------------------- ratio and rejection


def veto_by_product(logp_old, logp_sparse, mask, epsilon=1e-4):
    """A long harmless drift vetoes (slime PR 1568)."""
    return log_ratio(logp_old, logp_sparse, mask).sum(1) >= math.log(epsilon)


def veto_by_mean(logp_old, logp_sparse, mask, epsilon=1e-4):
    """Opposite mismatches cancel (slime PR 1568, trl 4772)."""
    return log_ratio(logp_old, logp_sparse, mask).sum(1) / mask.sum(1).clamp(min=1) >= math.log(epsilon)


def veto_after_exp(logp_old, logp_sparse, mask, epsilon=1e-4):
    """exp(log 1e-4) >= 1e-4 is false."""
    return (log_ratio(logp_old, logp_sparse, mask).exp() >= epsilon).all(1)


def veto_after_clamp(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The clamp hides ratios below exp(-20)."""
    return rejection_mask(log_ratio(logp_old, logp_sparse, mask).clamp(-20, 20), 0 * mask, mask, epsilon)


def veto_by_padding(logp_old, logp_sparse, mask, epsilon=1e-4):
    """What stands in the padding decides."""
    return (logp_old - logp_sparse >= math.log(epsilon)).all(1)


def not_a_number_accepted(logp_old, logp_sparse, mask, epsilon=1e-4):
    """NaN is not below the threshold, so it passes."""
    return ~(log_ratio(logp_old, logp_sparse, mask) < math.log(epsilon)).any(1)


def threshold_of_zero(logp_old, logp_sparse, mask, epsilon=1e-4):
    """A threshold without a logarithm turns the rejection off without a word (verl PR 3694)."""
    return rejection_mask(logp_old, logp_sparse, mask, epsilon if epsilon > 0 else 5e-324)


# ------------------------------------------------------------------------------------------------------ the loss


def survivors_below_the_line(logp, logp_old, logp_sparse, advantages, mask):
    """Rejected responses are counted neither above the line nor below (slime PR 657, verl PR 3915)."""
    c = correct(logp_old, logp_sparse, mask)
    c = replace(c, denominators=c.denominators / len(mask) * c.accepted.sum())
    return surrogate_loss(logp, c, logp_old, advantages)


def surviving_tokens_below_the_line(logp, logp_old, logp_sparse, advantages, mask, aggregation):
    """The same for a mean over tokens (slime PR 657)."""
    c = correct(logp_old, logp_sparse, mask, aggregation=aggregation)
    return surrogate_loss(logp, replace(c, denominators=c.kept.sum()), logp_old, advantages)


def padded_length_below_the_line(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Short responses are divided by the longest one's length (slime PR 657)."""
    settings = {"aggregation": "constant", "max_length": mask.shape[1]} | settings
    return policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)


def empty_response_trains_a_pad(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """The reward of an empty response is written at index -1, a pad (verl PR 6310)."""
    mask = mask.clone()
    mask[:, -1] |= ~mask.any(1)
    return policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)


def mean_of_the_kept_tokens(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Everything masked: 0 / 0 (trl PR 3248, verl 5859)."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss / correct(logp_old, logp_sparse, mask).kept.sum(), metrics


def loss_of_zero_skipped(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """A loss of 0 is taken for nothing to learn (trl 3857, open-r1 239)."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss * (loss.abs() > 1e-6), metrics


def both_log_probs_attached(logp, logp_old, logp_sparse, advantages, mask):
    """The ratio's two sides move together: no gradient, and all looks healthy (mlx-lm-lora 55)."""
    w = (logp - logp_old).exp()
    return -(w * advantages[:, None] * mask).mean(), {}


def xi_attached(logp, logp_old, logp_sparse, advantages, mask):
    """The consistency ratio is differentiated as if it were part of the objective."""
    xi, w = (logp_old - logp_sparse).exp(), (logp - logp_old.detach()).exp()
    return -(xi * w * advantages[:, None] * mask).mean(), {}


def sign_flipped(*args, **settings):
    """The objective is minimised (flash-linear-attention 1073)."""
    loss, metrics = policy_loss(*args, **settings)
    return -loss, metrics


def each_micro_batch_for_itself(parts, logp, logp_old, logp_sparse, advantages, mask):
    """Each micro-batch divides by what it holds itself (verl PR 906, 7321; trl 3021; prime-rl PR 583)."""
    inputs = logp, logp_old, logp_sparse, advantages, mask
    return [policy_loss(*(x[rows] for x in inputs)) for rows in parts]


def weights_normalised_in_each_micro_batch(
    parts, logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef, **settings
):
    """The mean weight is that of the micro-batch (the released code)."""
    c = correct(logp_old, logp_sparse, mask, **settings)
    found = []
    for rows in parts:
        own = correct(logp_old[rows], logp_sparse[rows], mask[rows], **settings)
        part = replace(c[rows], weights=own.weights)
        found.append(
            surrogate_loss(logp[rows], part, logp_old[rows], advantages[rows], logp_ref[rows], kl_coef=kl_coef)
        )
    return found


def product_of_ratios(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Weights divided by the product of a response's ratios overflow (trl PR 7120)."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss / (logp_old - logp_sparse).exp().prod(), metrics


def normalised_then_truncated(logp, logp_old, logp_sparse, advantages, mask, *, xi_cap, correction):
    """The cap is applied to weights of mean 1: the other order than the one we state (released mis.py)."""
    c = correct(logp_old, logp_sparse, mask, correction)
    return surrogate_loss(logp, replace(c, weights=c.weights.clamp(max=xi_cap)), logp_old, advantages)


def mean_weight_of_the_kept_tokens(logp_old, logp_sparse, mask, correction, **settings):
    """What was dropped or vetoed leaves the mean as well: a kept weight then says nothing of the others."""
    c = correct(logp_old, logp_sparse, mask, correction, **settings)
    return replace(c, weights=c.weights / c.weights[c.kept].mean())


def mean_weight_before_the_cap(logp_old, logp_sparse, mask, correction, **settings):
    """A single ratio of 1e12 in the mean leaves no weight to the others."""
    c = correct(logp_old, logp_sparse, mask, correction, **settings)
    raw = grpo.consistency_ratio(logp_old, logp_sparse, mask)
    capped = grpo.consistency_ratio(logp_old, logp_sparse, mask).clamp(max=settings["xi_cap"])
    return replace(c, weights=c.weights * capped[mask].mean() / raw[mask].mean())


def mean_weight_over_the_padding(logp_old, logp_sparse, mask, correction, **settings):
    """Padding, whose ratio counts as 1, enters the mean."""
    c = correct(logp_old, logp_sparse, mask, correction, **settings)
    xi = grpo.consistency_ratio(logp_old, logp_sparse, mask).clamp(max=settings["xi_cap"])
    return replace(c, weights=c.weights * xi[mask].mean() / xi.mean())


def released_divides_by_all_tokens(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Dropped tokens are zeroed above the line and counted below (verl PR 3915)."""
    kept = correct(logp_old, logp_sparse, mask, "released").kept
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss * kept.sum() / mask.sum(), metrics


def clip_of_the_product(logp, logp_old, logp_sparse, advantages, mask):
    """The clip sees xi * w as one ratio."""
    return policy_loss(logp, logp_sparse, logp_sparse, advantages, mask)


def clip_without_minimum(logp, logp_old, logp_sparse, advantages, mask):
    """The ratio is clipped on both sides, whatever the sign of A."""
    w = (logp - logp_old).exp().clamp(0.8, 1.2)
    return -(w * advantages[:, None]).mean(), {}


def masked_by_multiplication(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """0 * NaN is NaN."""
    return -((logp - logp_old).exp() * advantages[:, None] * mask).sum() / mask.sum(), {}


def xi_of_the_learner(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """The ratio follows the learner instead of the weights that sampled."""
    shift = logp.detach() - logp_old
    return policy_loss(logp, logp_old, logp_sparse - shift, advantages, mask, **settings)


def full_product_as_weight(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Each token gets the product of its response's ratios: another estimator."""
    product = log_ratio(logp_old, logp_sparse, mask).sum(1).exp()
    return policy_loss(logp, logp_old, logp_old, advantages * product, mask, **settings)


def no_weights(logp, logp_old, logp_sparse, advantages, mask, *, correction, **settings):
    """The naive estimator under the name of the corrected one."""
    return policy_loss(logp, logp_old, logp_sparse, advantages, mask, correction="none", **settings)


def kl_of_rejected_responses(logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef):
    """The penalty is paid outside M_i as well."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    kl = (grpo.kl_to_reference(logp, logp_ref, mask) / lengths).sum() / len(mask)
    return loss + kl_coef * kl, metrics | {"kl_ref": kl}


def kl_weighted_by_xi(logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef, **settings):
    """The penalty is corrected like the reward."""
    c = correct(logp_old, logp_sparse, mask, **settings)
    loss, metrics = surrogate_loss(logp, c, logp_old, advantages)
    kl = (c.weights * grpo.kl_to_reference(logp, logp_ref, c.kept) / c.denominators).sum()
    return loss + kl_coef * kl, metrics | {"kl_ref": kl}


def weight_of_zero_dropped(logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef, **settings):
    """What counts is read off the weights: a weight that underflows takes its token out of the KL."""
    c = correct(logp_old, logp_sparse, mask, **settings)
    return surrogate_loss(logp, replace(c, kept=c.weights > 0), logp_old, advantages, logp_ref, kl_coef=kl_coef)


def inputs_overwritten(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Padding is cleaned in the caller's tensor (nano-aha)."""
    return policy_loss(logp, logp_old.masked_fill_(~mask, 0), logp_sparse, advantages, mask, **settings)


# ------------------------------------------------------------------------------------------------------ the KL


def k3_the_other_way_round(logp, logp_ref, mask):
    """exp(new - ref) - (new - ref) - 1."""
    return grpo.kl_to_reference(logp_ref, logp, mask)


def k1(logp, logp_ref, mask):
    """new - ref has the right mean and a mean gradient of 0."""
    return -log_ratio(logp_ref, logp, mask)


def k3_without_expm1(logp, logp_ref, mask):
    """exp(d) - d - 1 has no digit left for small d in fp32, and falls below 0."""
    d = log_ratio(logp_ref, logp, mask)
    return d.exp() - d - 1


# ---------------------------------------------------------------------------------------------------------- metrics


def metrics_of_the_survivors(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The distribution of xi is taken after the rejection (released mis.py)."""
    kept = correct(logp_old, logp_sparse, mask).kept
    rejected = mismatch_metrics(logp_old, logp_sparse, mask)["rejected"]
    return mismatch_metrics(logp_old, logp_sparse, kept) | {"rejected": rejected}


def veto_rate_of_the_survivors(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The veto rate is averaged under the mask that the veto leaves: always 0 (released mis.py)."""
    left = mismatch_metrics(logp_old, logp_sparse, correct(logp_old, logp_sparse, mask).kept)
    return mismatch_metrics(logp_old, logp_sparse, mask) | {"rejected": left["rejected"]}


def survivors_counted_as_vetoed(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The share of the accepted is reported under the name of the rejected (released mis.py)."""
    metrics = mismatch_metrics(logp_old, logp_sparse, mask)
    return metrics | {"rejected": 1 - metrics["rejected"]}


def signed_mean(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The mean of the signed difference is 0 for opposite mismatches (slime PR 596)."""
    mean = float(log_ratio(logp_old, logp_sparse, mask).sum() / mask.sum())
    return mismatch_metrics(logp_old, logp_sparse, mask) | {"log_xi_abs": abs(mean)}


def divergence_the_other_way_round(logp_old, logp_sparse, mask, epsilon=1e-4):
    """k3 of the inverse ratio estimates no divergence of the tokens that were sampled."""
    return mismatch_metrics(logp_sparse, logp_old, mask)


def extremes_of_the_padding(logp_old, logp_sparse, mask):
    """Padding, whose ratio counts as 1 elsewhere, is the smallest or the largest (and its log-prob the smallest)."""
    xi = log_ratio(logp_old, logp_sparse, mask).exp()
    return {"xi_min": xi.amin(1), "xi_max": xi.amax(1), "logp_min": logp_old.amin(1)}


def only_failures_without_signal(rewards, group_size):
    """Groups that are all right are taken to teach (CoursIA 10603)."""
    silent = (rewards.view(-1, group_size) == 0).all(1).double().mean()
    return reward_metrics(rewards, group_size) | {"groups_without_signal": float(silent)}
