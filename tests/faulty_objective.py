"""Wrong variants of the objective and of dense scoring, one for each fault that others shipped or that lies close.

Each takes the arguments of the function it stands for and is wrong in one place. Its docstring says what goes wrong and
where that was reported. See faulty.py.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import test_grpo as facts
import test_rollout as scoring
import torch
from faulty import wrong

from grpo import (
    consistency_ratio,
    correct,
    group_advantages,
    kl_to_reference,
    log_ratio,
    mismatch_metrics,
    policy_loss,
    rejection_mask,
    reward_metrics,
    surrogate_loss,
)
from rollout import response_logprobs, token_logprobs

# ------------------------------------------------------------------------------------------------------ advantages


@wrong("grpo.group_advantages", facts.test_advantage_is_reward_less_mean_over_unbiased_std)
def biased_std(rewards, group_size):
    """The std divides by G, not G - 1."""
    return group_advantages(rewards, group_size) * (group_size / (group_size - 1)) ** 0.5


@wrong("grpo.group_advantages", facts.test_equal_rewards_give_exactly_zero)
def no_test_for_equality(rewards, group_size):
    """The rounding error of a mean is divided by 1e-6 and learnt from."""
    groups = rewards.view(-1, group_size)
    std = groups.std(1, keepdim=True) if group_size > 1 else 0
    return ((groups - groups.mean(1, keepdim=True)) / (std + 1e-6)).flatten()


@wrong("grpo.group_advantages", facts.test_groups_are_positions_whatever_the_prompts)
def groups_merged_by_prompt(rewards, group_size):
    """Two groups with the same prompt become one (Search-R1 88, GRPO-Zero)."""
    return group_advantages(rewards, len(rewards))


@wrong("grpo.group_advantages", facts.test_groups_are_positions_whatever_the_prompts)
def groups_tiled(rewards, group_size):
    """Row i is taken to belong to group i mod N / G (Search-R1 88)."""
    return group_advantages(rewards.view(group_size, -1).T.flatten(), group_size).view(-1, group_size).T.flatten()


@wrong("test_grpo.objective", facts.test_rejected_response_stays_in_its_groups_baseline)
def baseline_of_the_survivors(rewards, group_size, logp, logp_old, logp_sparse, mask):
    """A rejected response no longer moves its siblings' baseline (verl PR 6375, 6452)."""
    accepted = rejection_mask(logp_old, logp_sparse, mask).view(-1, group_size)
    mean = (rewards.view(-1, group_size) * accepted).sum(1, keepdim=True) / accepted.sum(1, keepdim=True)
    return policy_loss(logp, logp_old, logp_sparse, (rewards.view(-1, group_size) - mean).flatten(), mask)[0]


# --------------------------------------------------------------------------------------------------- dense log-probs


@wrong("rollout.token_logprobs", scoring.test_logprobs_are_taken_at_the_sampling_temperature)
def scored_at_temperature_one(hidden, head, targets, *, temperature=1.0, **settings):
    """The learner forgets the temperature of the sampler (trl PR 3029, 4159)."""
    return token_logprobs(hidden, head, targets, **settings)


@wrong("rollout.token_logprobs", scoring.test_never_more_logits_than_one_chunk)
def all_logits_at_once(hidden, head, targets, *, chunk=1024, **settings):
    """Tokens x vocabulary is materialised."""
    return token_logprobs(hidden, head, targets, chunk=targets.numel(), **settings)


@wrong("rollout.token_logprobs", scoring.test_never_more_logits_than_one_chunk)
def chunks_kept_for_the_backward(hidden, head, targets, *, temperature=1.0, chunk=1024):
    """Chunks, but all their logits stay alive until the backward pass."""
    logits = torch.cat([head(h) for h in hidden.flatten(0, -2).split(chunk)]) / temperature
    logp = logits.log_softmax(-1)
    return (logp.gather(-1, targets.flatten()[:, None]).view(targets.shape),)


@wrong("rollout.response_logprobs", scoring.test_response_logprobs_score_each_token_from_the_place_before)
def scored_one_place_late(decoder, r, rows, **settings):
    """A token is scored by the logits that follow it."""

    def hidden(tokens, cache):
        return decoder.hidden(tokens, cache).roll(-1, 1)

    late = SimpleNamespace(**vars(decoder) | {"hidden": hidden})
    return response_logprobs(late, r, rows, **settings)


@wrong("rollout.response_logprobs", scoring.test_response_logprobs_score_each_token_from_the_place_before)
def temperature_forgotten(decoder, r, rows, **settings):
    """The learner forgets the temperature of the sampler (trl PR 3029, 4159)."""
    return response_logprobs(decoder, replace(r, temperature=1.0), rows, **settings)


@wrong("rollout.response_logprobs", scoring.test_response_logprobs_score_each_token_from_the_place_before)
def first_rows_scored(decoder, r, rows, **settings):
    """As many rows as were asked for, and not those."""
    return response_logprobs(decoder, r, torch.arange(len(rows)), **settings)


# --------------------------------------------------------------------------------------------- ratio and rejection


@wrong("grpo.rejection_mask", facts.test_long_harmless_drift_is_accepted)
def veto_by_product(logp_old, logp_sparse, mask, epsilon=1e-4):
    """A long harmless drift vetoes (slime PR 1568)."""
    return log_ratio(logp_old, logp_sparse, mask).sum(1) >= math.log(epsilon)


@wrong("grpo.rejection_mask", facts.test_smallest_single_ratio_decides)
def veto_by_mean(logp_old, logp_sparse, mask, epsilon=1e-4):
    """Opposite mismatches cancel (slime PR 1568, trl 4772)."""
    return log_ratio(logp_old, logp_sparse, mask).sum(1) / mask.sum(1).clamp(min=1) >= math.log(epsilon)


@wrong("grpo.rejection_mask", facts.test_log_ratio_of_exactly_log_epsilon_is_accepted, torch.float64)
def veto_after_exp(logp_old, logp_sparse, mask, epsilon=1e-4):
    """exp(log 1e-4) >= 1e-4 is false."""
    return (log_ratio(logp_old, logp_sparse, mask).exp() >= epsilon).all(1)


@wrong("grpo.rejection_mask", facts.test_rejection_looks_at_the_raw_ratio)
def veto_after_clamp(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The clamp hides ratios below exp(-20)."""
    return rejection_mask(log_ratio(logp_old, logp_sparse, mask).clamp(-20, 20), 0 * mask, mask, epsilon)


@wrong("grpo.rejection_mask", facts.test_padding_never_rejects)
def veto_by_padding(logp_old, logp_sparse, mask, epsilon=1e-4):
    """What stands in the padding decides."""
    return (logp_old - logp_sparse >= math.log(epsilon)).all(1)


@wrong("grpo.rejection_mask", facts.test_ratio_that_is_not_a_number_rejects)
def not_a_number_accepted(logp_old, logp_sparse, mask, epsilon=1e-4):
    """NaN is not below the threshold, so it passes."""
    return ~(log_ratio(logp_old, logp_sparse, mask) < math.log(epsilon)).any(1)


@wrong("grpo.rejection_mask", facts.test_epsilon_must_be_positive, 0.0)
def threshold_of_zero(logp_old, logp_sparse, mask, epsilon=1e-4):
    """A threshold without a logarithm turns the rejection off without a word (verl PR 3694)."""
    return rejection_mask(logp_old, logp_sparse, mask, epsilon if epsilon > 0 else 5e-324)


# ------------------------------------------------------------------------------------------------------ the loss


@wrong("grpo.policy_loss", facts.test_rejected_responses_count_below_the_line)
def survivors_below_the_line(logp, logp_old, logp_sparse, advantages, mask):
    """Rejected responses are counted neither above the line nor below (slime PR 657, verl PR 3915)."""
    c = correct(logp_old, logp_sparse, mask)
    c = replace(c, denominators=c.denominators / len(mask) * c.accepted.sum())
    return surrogate_loss(logp, c, logp_old, advantages)


@wrong("grpo.policy_loss", facts.test_rejected_tokens_count_below_the_line_of_a_token_mean)
def surviving_tokens_below_the_line(logp, logp_old, logp_sparse, advantages, mask, aggregation):
    """The same for a mean over tokens (slime PR 657)."""
    c = correct(logp_old, logp_sparse, mask, aggregation=aggregation)
    return surrogate_loss(logp, replace(c, denominators=c.kept.sum()), logp_old, advantages)


@wrong("grpo.policy_loss", facts.test_response_divides_by_its_own_length)
def padded_length_below_the_line(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Short responses are divided by the longest one's length (slime PR 657)."""
    settings = {"aggregation": "constant", "max_length": mask.shape[1]} | settings
    return policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)


@wrong("grpo.policy_loss", facts.test_empty_response_contributes_nothing)
def empty_response_trains_a_pad(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """The reward of an empty response is written at index -1, a pad (verl PR 6310)."""
    mask = mask.clone()
    mask[:, -1] |= ~mask.any(1)
    return policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)


@wrong("grpo.policy_loss", facts.test_nothing_left_gives_exact_zeros)
def mean_of_the_kept_tokens(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Everything masked: 0 / 0 (trl PR 3248, verl 5859)."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss / correct(logp_old, logp_sparse, mask).kept.sum(), metrics


@wrong("grpo.policy_loss", facts.test_loss_of_the_first_update_is_zero_and_its_gradient_is_not)
def loss_of_zero_skipped(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """A loss of 0 is taken for nothing to learn (trl 3857, open-r1 239)."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss * (loss.abs() > 1e-6), metrics


@wrong("grpo.policy_loss", facts.test_gradient_reaches_the_logits)
def both_log_probs_attached(logp, logp_old, logp_sparse, advantages, mask):
    """The ratio's two sides move together: no gradient, and all looks healthy (mlx-lm-lora 55)."""
    w = (logp - logp_old).exp()
    return -(w * advantages[:, None] * mask).mean(), {}


@wrong("grpo.policy_loss", facts.test_gradient_reaches_the_logits)
def xi_attached(logp, logp_old, logp_sparse, advantages, mask):
    """The consistency ratio is differentiated as if it were part of the objective."""
    xi, w = (logp_old - logp_sparse).exp(), (logp - logp_old.detach()).exp()
    return -(xi * w * advantages[:, None] * mask).mean(), {}


@wrong("grpo.policy_loss", facts.test_one_step_raises_what_was_rewarded)
def sign_flipped(*args, **settings):
    """The objective is minimised (flash-linear-attention 1073)."""
    loss, metrics = policy_loss(*args, **settings)
    return -loss, metrics


@wrong("test_grpo.split_loss", facts.test_one_quarter_for_every_split)
def each_micro_batch_for_itself(parts, logp, logp_old, logp_sparse, advantages, mask):
    """Each micro-batch divides by what it holds itself (verl PR 906, 7321; trl 3021; prime-rl PR 583)."""
    inputs = logp, logp_old, logp_sparse, advantages, mask
    return [policy_loss(*(x[rows] for x in inputs)) for rows in parts]


@wrong("test_grpo.split_loss", facts.test_micro_batches_add_up, "released", "response", 0.1)
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


@wrong("grpo.policy_loss", facts.test_three_hundred_small_ratios_stay_finite)
def product_of_ratios(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Weights divided by the product of a response's ratios overflow (trl PR 7120)."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss / (logp_old - logp_sparse).exp().prod(), metrics


@wrong("grpo.policy_loss", facts.test_released_weights_are_truncated_first_and_normalised_second)
def normalised_then_truncated(logp, logp_old, logp_sparse, advantages, mask, *, xi_cap, correction):
    """The cap is applied to weights of mean 1: the other order than the one we state (released mis.py)."""
    c = correct(logp_old, logp_sparse, mask, correction)
    return surrogate_loss(logp, replace(c, weights=c.weights.clamp(max=xi_cap)), logp_old, advantages)


@wrong("grpo.correct", facts.test_released_divides_by_the_mean_over_all_tokens)
def mean_weight_of_the_kept_tokens(logp_old, logp_sparse, mask, correction, **settings):
    """What was dropped or vetoed leaves the mean as well: a kept weight then says nothing of the others."""
    c = correct(logp_old, logp_sparse, mask, correction, **settings)
    return replace(c, weights=c.weights / c.weights[c.kept].mean())


@wrong("grpo.correct", facts.test_the_mean_of_released_is_taken_after_clamp_and_cap)
def mean_weight_before_the_cap(logp_old, logp_sparse, mask, correction, **settings):
    """A single ratio of 1e12 in the mean leaves no weight to the others."""
    c = correct(logp_old, logp_sparse, mask, correction, **settings)
    raw = consistency_ratio(logp_old, logp_sparse, mask)
    capped = consistency_ratio(logp_old, logp_sparse, mask).clamp(max=settings["xi_cap"])
    return replace(c, weights=c.weights * capped[mask].mean() / raw[mask].mean())


@wrong("grpo.correct", facts.test_the_mean_of_released_is_taken_after_clamp_and_cap)
def mean_weight_over_the_padding(logp_old, logp_sparse, mask, correction, **settings):
    """Padding, whose ratio counts as 1, enters the mean."""
    c = correct(logp_old, logp_sparse, mask, correction, **settings)
    xi = consistency_ratio(logp_old, logp_sparse, mask).clamp(max=settings["xi_cap"])
    return replace(c, weights=c.weights * xi[mask].mean() / xi.mean())


@wrong("grpo.policy_loss", facts.test_released_divides_a_response_by_its_kept_tokens)
def released_divides_by_all_tokens(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Dropped tokens are zeroed above the line and counted below (verl PR 3915)."""
    kept = correct(logp_old, logp_sparse, mask, "released").kept
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask, **settings)
    return loss * kept.sum() / mask.sum(), metrics


@wrong("grpo.policy_loss", facts.test_clip_bounds_the_staleness_ratio_alone)
def clip_of_the_product(logp, logp_old, logp_sparse, advantages, mask):
    """The clip sees xi * w as one ratio."""
    return policy_loss(logp, logp_sparse, logp_sparse, advantages, mask)


@wrong("grpo.policy_loss", facts.test_clip_only_ever_lowers_the_objective, 0.5, 1, 0.5)
def clip_without_minimum(logp, logp_old, logp_sparse, advantages, mask):
    """The ratio is clipped on both sides, whatever the sign of A."""
    w = (logp - logp_old).exp().clamp(0.8, 1.2)
    return -(w * advantages[:, None]).mean(), {}


@wrong("grpo.policy_loss", facts.test_padding_does_not_matter, "sparse-rl", "response", math.nan)
def masked_by_multiplication(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """0 * NaN is NaN."""
    return -((logp - logp_old).exp() * advantages[:, None] * mask).sum() / mask.sum(), {}


@wrong("grpo.policy_loss", facts.test_loss_and_gradient_equal_the_formula, "sparse-rl", "response")
def xi_of_the_learner(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """The ratio follows the learner instead of the weights that sampled."""
    shift = logp.detach() - logp_old
    return policy_loss(logp, logp_old, logp_sparse - shift, advantages, mask, **settings)


@wrong("grpo.policy_loss", facts.test_reweighting_moves_exactly_the_token_to_the_dense_policy)
def full_product_as_weight(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Each token gets the product of its response's ratios: another estimator."""
    product = log_ratio(logp_old, logp_sparse, mask).sum(1).exp()
    return policy_loss(logp, logp_old, logp_old, advantages * product, mask, **settings)


@wrong("grpo.policy_loss", facts.test_reweighting_is_unbiased_for_one_step)
def no_weights(logp, logp_old, logp_sparse, advantages, mask, *, correction, **settings):
    """The naive estimator under the name of the corrected one."""
    return policy_loss(logp, logp_old, logp_sparse, advantages, mask, correction="none", **settings)


@wrong("grpo.policy_loss", facts.test_kl_is_averaged_like_the_policy_term_inside_the_rejection)
def kl_of_rejected_responses(logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef):
    """The penalty is paid outside M_i as well."""
    loss, metrics = policy_loss(logp, logp_old, logp_sparse, advantages, mask)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    kl = (kl_to_reference(logp, logp_ref, mask) / lengths).sum() / len(mask)
    return loss + kl_coef * kl, metrics | {"kl_ref": kl}


@wrong("grpo.policy_loss", facts.test_kl_has_the_denominators_of_the_policy_term_and_no_xi, "sparse-rl", "response")
def kl_weighted_by_xi(logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef, **settings):
    """The penalty is corrected like the reward."""
    c = correct(logp_old, logp_sparse, mask, **settings)
    loss, metrics = surrogate_loss(logp, c, logp_old, advantages)
    kl = (c.weights * kl_to_reference(logp, logp_ref, c.kept) / c.denominators).sum()
    return loss + kl_coef * kl, metrics | {"kl_ref": kl}


@wrong("grpo.policy_loss", facts.test_a_token_of_weight_zero_is_still_kept)
def weight_of_zero_dropped(logp, logp_old, logp_sparse, advantages, mask, *, logp_ref, kl_coef, **settings):
    """What counts is read off the weights: a weight that underflows takes its token out of the KL."""
    c = correct(logp_old, logp_sparse, mask, **settings)
    return surrogate_loss(logp, replace(c, kept=c.weights > 0), logp_old, advantages, logp_ref, kl_coef=kl_coef)


@wrong("grpo.policy_loss", facts.test_inputs_are_left_untouched)
def inputs_overwritten(logp, logp_old, logp_sparse, advantages, mask, **settings):
    """Padding is cleaned in the caller's tensor (nano-aha)."""
    return policy_loss(logp, logp_old.masked_fill_(~mask, 0), logp_sparse, advantages, mask, **settings)


# ------------------------------------------------------------------------------------------------------ the KL


@wrong("grpo.kl_to_reference", facts.test_k3_value_and_gradient)
def k3_the_other_way_round(logp, logp_ref, mask):
    """exp(new - ref) - (new - ref) - 1."""
    return kl_to_reference(logp_ref, logp, mask)


@wrong("grpo.kl_to_reference", facts.test_k3_estimates_one_divergence_and_descends_the_other)
def k1(logp, logp_ref, mask):
    """new - ref has the right mean and a mean gradient of 0."""
    return -log_ratio(logp_ref, logp, mask)


@wrong("grpo.kl_to_reference", facts.test_k3_keeps_its_digits_near_zero)
def k3_without_expm1(logp, logp_ref, mask):
    """exp(d) - d - 1 has no digit left for small d in fp32, and falls below 0."""
    d = log_ratio(logp_ref, logp, mask)
    return d.exp() - d - 1


# ---------------------------------------------------------------------------------------------------------- metrics


@wrong("grpo.mismatch_metrics", facts.test_metrics_are_those_of_all_sampled_tokens)
def metrics_of_the_survivors(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The distribution of xi is taken after the rejection (released mis.py)."""
    kept = correct(logp_old, logp_sparse, mask).kept
    rejected = mismatch_metrics(logp_old, logp_sparse, mask)["rejected"]
    return mismatch_metrics(logp_old, logp_sparse, kept) | {"rejected": rejected}


@wrong("grpo.mismatch_metrics", facts.test_rejected_share_is_taken_before_anything_is_dropped)
def veto_rate_of_the_survivors(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The veto rate is averaged under the mask that the veto leaves: always 0 (released mis.py)."""
    left = mismatch_metrics(logp_old, logp_sparse, correct(logp_old, logp_sparse, mask).kept)
    return mismatch_metrics(logp_old, logp_sparse, mask) | {"rejected": left["rejected"]}


@wrong("grpo.mismatch_metrics", facts.test_rejected_share_is_taken_before_anything_is_dropped)
def survivors_counted_as_vetoed(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The share of the accepted is reported under the name of the rejected (released mis.py)."""
    metrics = mismatch_metrics(logp_old, logp_sparse, mask)
    return metrics | {"rejected": 1 - metrics["rejected"]}


@wrong("grpo.mismatch_metrics", facts.test_opposite_mismatches_do_not_cancel)
def signed_mean(logp_old, logp_sparse, mask, epsilon=1e-4):
    """The mean of the signed difference is 0 for opposite mismatches (slime PR 596)."""
    mean = float(log_ratio(logp_old, logp_sparse, mask).sum() / mask.sum())
    return mismatch_metrics(logp_old, logp_sparse, mask) | {"log_xi_abs": abs(mean)}


@wrong("grpo.mismatch_metrics", facts.test_sampler_kl_estimates_the_divergence_of_sampler_and_dense_policy)
def divergence_the_other_way_round(logp_old, logp_sparse, mask, epsilon=1e-4):
    """k3 of the inverse ratio estimates no divergence of the tokens that were sampled."""
    return mismatch_metrics(logp_sparse, logp_old, mask)


@wrong("grpo.extremes", facts.test_padding_is_no_extreme, math.nan)
def extremes_of_the_padding(logp_old, logp_sparse, mask):
    """Padding, whose ratio counts as 1 elsewhere, is the smallest or the largest (and its log-prob the smallest)."""
    xi = log_ratio(logp_old, logp_sparse, mask).exp()
    return {"xi_min": xi.amin(1), "xi_max": xi.amax(1), "logp_min": logp_old.amin(1)}


@wrong("grpo.reward_metrics", facts.test_groups_without_signal_are_counted)
def only_failures_without_signal(rewards, group_size):
    """Groups that are all right are taken to teach (CoursIA 10603)."""
    silent = (rewards.view(-1, group_size) == 0).all(1).double().mean()
    return reward_metrics(rewards, group_size) | {"groups_without_signal": float(silent)}
