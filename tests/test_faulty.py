"""Every wrong variant in faulty.py is caught: a fact that holds for the real function does not hold for the variant.

The facts are the tests themselves, which take the function they are about as their last argument.
"""

import inspect
from functools import partial

import faulty
import pytest
import test_grpo as facts
import test_rollout as scoring

CAUGHT_BY = {
    # advantages
    "biased_std": facts.test_advantage_is_reward_less_mean_over_unbiased_std,
    "no_test_for_equality": facts.test_equal_rewards_give_exactly_zero,
    "groups_merged_by_prompt": facts.test_groups_are_positions_whatever_the_prompts,
    "groups_tiled": facts.test_groups_are_positions_whatever_the_prompts,
    "baseline_of_the_survivors": facts.test_rejected_response_stays_in_its_groups_baseline,
    # dense log-probs
    "scored_at_temperature_one": scoring.test_logprobs_are_taken_at_the_sampling_temperature,
    "all_logits_at_once": scoring.test_never_more_logits_than_one_chunk,
    "chunks_kept_for_the_backward": scoring.test_never_more_logits_than_one_chunk,
    "scored_one_place_late": scoring.test_response_logprobs_score_each_token_from_the_place_before,
    "temperature_forgotten": scoring.test_response_logprobs_score_each_token_from_the_place_before,
    "first_rows_scored": scoring.test_response_logprobs_score_each_token_from_the_place_before,
    # ratio and rejection
    "veto_by_product": facts.test_long_harmless_drift_is_accepted,
    "veto_by_mean": facts.test_smallest_single_ratio_decides,
    "veto_after_exp": partial(facts.test_log_ratio_of_exactly_log_epsilon_is_accepted, facts.torch.float64),
    "veto_after_clamp": facts.test_rejection_looks_at_the_raw_ratio,
    "veto_by_padding": facts.test_padding_never_rejects,
    "not_a_number_accepted": facts.test_ratio_that_is_not_a_number_rejects,
    "threshold_of_zero": partial(facts.test_epsilon_must_be_positive, 0.0),
    # the loss
    "survivors_below_the_line": facts.test_rejected_responses_count_below_the_line,
    "surviving_tokens_below_the_line": facts.test_rejected_tokens_count_below_the_line_of_a_token_mean,
    "padded_length_below_the_line": facts.test_response_divides_by_its_own_length,
    "empty_response_trains_a_pad": facts.test_empty_response_contributes_nothing,
    "mean_of_the_kept_tokens": facts.test_nothing_left_gives_exact_zeros,
    "loss_of_zero_skipped": facts.test_loss_of_the_first_update_is_zero_and_its_gradient_is_not,
    "both_log_probs_attached": facts.test_gradient_reaches_the_logits,
    "xi_attached": facts.test_gradient_reaches_the_logits,
    "sign_flipped": facts.test_one_step_raises_what_was_rewarded,
    "each_micro_batch_for_itself": facts.test_one_quarter_for_every_split,
    "weights_normalised_in_each_micro_batch": partial(facts.test_micro_batches_add_up, "released", "response", 0.1),
    "product_of_ratios": facts.test_three_hundred_small_ratios_stay_finite,
    "normalised_then_truncated": facts.test_released_weights_are_truncated_first_and_normalised_second,
    "mean_weight_of_the_kept_tokens": facts.test_released_divides_by_the_mean_over_all_tokens,
    "mean_weight_before_the_cap": facts.test_the_mean_of_released_is_taken_after_clamp_and_cap,
    "mean_weight_over_the_padding": facts.test_the_mean_of_released_is_taken_after_clamp_and_cap,
    "released_divides_by_all_tokens": facts.test_released_divides_a_response_by_its_kept_tokens,
    "clip_of_the_product": facts.test_clip_bounds_the_staleness_ratio_alone,
    "clip_without_minimum": partial(facts.test_clip_only_ever_lowers_the_objective, 0.5, 1, 0.5),
    "masked_by_multiplication": partial(facts.test_padding_does_not_matter, "sparse-rl", "response", facts.NAN),
    "xi_of_the_learner": partial(facts.test_loss_and_gradient_equal_the_formula, "sparse-rl", "response"),
    "full_product_as_weight": facts.test_reweighting_moves_exactly_the_token_to_the_dense_policy,
    "no_weights": facts.test_reweighting_is_unbiased_for_one_step,
    "kl_of_rejected_responses": facts.test_kl_is_averaged_like_the_policy_term_inside_the_rejection,
    "kl_weighted_by_xi": partial(
        facts.test_kl_has_the_denominators_of_the_policy_term_and_no_xi, "sparse-rl", "response"
    ),
    "weight_of_zero_dropped": facts.test_a_token_of_weight_zero_is_still_kept,
    "inputs_overwritten": facts.test_inputs_are_left_untouched,
    # the KL
    "k3_the_other_way_round": facts.test_k3_value_and_gradient,
    "k1": facts.test_k3_estimates_one_divergence_and_descends_the_other,
    "k3_without_expm1": facts.test_k3_keeps_its_digits_near_zero,
    # metrics
    "metrics_of_the_survivors": facts.test_metrics_are_those_of_all_sampled_tokens,
    "veto_rate_of_the_survivors": facts.test_rejected_share_is_taken_before_anything_is_dropped,
    "survivors_counted_as_vetoed": facts.test_rejected_share_is_taken_before_anything_is_dropped,
    "signed_mean": facts.test_opposite_mismatches_do_not_cancel,
    "divergence_the_other_way_round": facts.test_sampler_kl_estimates_the_divergence_of_sampler_and_dense_policy,
    "extremes_of_the_padding": partial(facts.test_padding_is_no_extreme, facts.NAN),
    "only_failures_without_signal": facts.test_groups_without_signal_are_counted,
}
VARIANTS = [name for name, f in vars(faulty).items() if inspect.isfunction(f) and f.__module__ == "faulty"]


@pytest.mark.parametrize("name", VARIANTS)
def test_faulty_variant_is_caught(name):
    """The fact fails on the variant, by an assertion of its own (it passes on the real function in its own file)."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        CAUGHT_BY[name](getattr(faulty, name))
