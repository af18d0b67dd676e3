"""A test counts when it has been seen to fail: each faulty variant breaks the fact that it concerns."""

from __future__ import annotations

from functools import partial

import faulty_cache as faulty
import pytest
import test_kvcache as cache
import test_rollout as rollout
import torch


def of_run(fact, compressor: str, seed: int = 0):
    """A fact about every step of a cache, for a fresh run under the fault."""
    return lambda: fact(cache.Run(compressor, seed))


replay = partial(
    cache.test_compressed_sampling_equals_one_dense_forward_under_the_mask_of_its_evictions,
    kv_heads=2,
    dtype=torch.float32,
    tolerance=1e-5,
)
exact_bytes = cache.test_keys_and_values_take_exactly_the_bytes_of_their_slots

CAUGHT = [
    (faulty.evict_before_attending, of_run(cache.test_token_attends_to_all_that_is_held_before_the_cut, "snapkv")),
    (faulty.rotate_at_keys_kept, rollout.test_next_query_stands_at_the_number_of_tokens_seen),
    (faulty.rotate_at_keys_kept, partial(replay, "snapkv")),
    (faulty.repeat_keys_for_gqa, partial(exact_bytes, "snapkv", torch.float32)),
    (faulty.ties_to_the_older, cache.test_equal_scores_keep_the_newer),
    (faulty.not_a_number_wins, partial(cache.test_no_score_evicts_the_window_or_keeps_an_unused_slot, torch.nan)),
    (faulty.forget_the_window, of_run(cache.test_newest_window_always_survives, "h2o")),
    (faulty.forget_the_sinks, cache.test_streaming_keeps_four_sinks_and_the_newest),
    (faulty.first_head_decides, cache.test_each_layer_and_each_head_chooses_for_itself),
    (faulty.first_row_decides, partial(rollout.test_a_row_does_not_depend_on_its_batch_mates, "rkv")),
    (faulty.similarity_slip, cache.test_rkv_lets_nothing_off_for_a_key_without_a_similar_one),
    (faulty.last_query_only, cache.test_h2o_accumulates_over_all_queries),
    (faulty.heavy_hitters_only, cache.test_h2o_gives_half_of_its_budget_to_the_newest),
    (faulty.heavy_hitters_only, of_run(cache.test_right_keys_survive_every_cut, "h2o")),
    (faulty.logits_rounded, cache.test_h2o_in_half_precision_rounds_its_output_only),
    (faulty.weights_rounded, cache.test_h2o_in_half_precision_rounds_its_output_only),
    (faulty.state_stays_behind, of_run(cache.test_right_keys_survive_every_cut, "h2o")),
    (faulty.keys_stay_behind, of_run(cache.test_survivors_are_bit_identical_to_what_was_cached, "snapkv")),
    (faulty.rows_cut_together, partial(rollout.test_a_row_does_not_depend_on_its_batch_mates, "streaming")),
    (faulty.fresh_draws, cache.test_random_draws_once_per_key),
    (faulty.draws_of_the_batch, partial(rollout.test_a_row_does_not_depend_on_its_batch_mates, "random")),
    (faulty.window_without_causality, of_run(cache.test_right_keys_survive_every_cut, "snapkv-mean", 1)),
    (faulty.query_heads_pooled_the_other_way, cache.test_the_two_ways_to_pool_the_query_heads_of_a_kv_head),
    (faulty.query_heads_pooled_the_other_way, of_run(cache.test_right_keys_survive_every_cut, "snapkv")),
    (faulty.query_heads_pooled_the_other_way, of_run(cache.test_right_keys_survive_every_cut, "snapkv", 1)),
    (faulty.importance_among_all_held, cache.test_the_two_ways_to_pool_the_query_heads_of_a_kv_head),
    (faulty.importance_among_all_held, of_run(cache.test_right_keys_survive_every_cut, "snapkv", 1)),
    (faulty.importance_among_all_held, of_run(cache.test_right_keys_survive_every_cut, "rkv")),
    (faulty.pooling_over_the_window, cache.test_snapkv_pools_over_older_neighbours_only),
    (faulty.budget_at_prefill_only, rollout.test_held_keys_never_exceed_budget_plus_buffer),
    (faulty.dirty_slots, of_run(cache.test_unused_slots_are_zero, "snapkv")),
    (faulty.grow_by_gathering, partial(cache.test_memory_stays_where_it_is_through_a_rollout, "snapkv")),
    (faulty.lose_the_state_of_dropped_rows, partial(cache.test_dropped_rows_leave_the_others_whole, "snapkv")),
    (faulty.lose_the_state_of_dropped_rows, partial(rollout.test_a_row_does_not_depend_on_its_batch_mates, "random")),
    (faulty.only_the_first_is_compressed, partial(rollout.test_earlier_rollouts_leave_no_trace, "snapkv")),
    (faulty.capacity_overwritten, cache.test_a_cache_does_not_change_the_settings_of_the_next),
    (
        faulty.pyramid_of_the_whole_budget,
        partial(cache.test_pyramid_divides_what_lies_beyond_the_window, 512, [992, 671, 352, 33]),
    ),
    (faulty.log_prob_at_temperature_one, rollout.test_log_prob_is_taken_at_the_sampling_temperature),
    (faulty.log_prob_of_the_nucleus, rollout.test_top_p_keeps_the_nucleus_and_reports_the_full_softmax),
    (faulty.search_left, partial(rollout.test_a_token_of_probability_zero_is_never_drawn, 1.0)),
    (faulty.one_draw_for_the_group, rollout.test_each_member_of_a_group_draws_its_first_token),
    (faulty.numbers_by_place_in_the_batch, partial(rollout.test_a_row_does_not_depend_on_its_batch_mates, "full")),
    (faulty.eos_dropped, rollout.test_the_sampled_eos_belongs_to_the_response),
    (faulty.first_eos_only, rollout.test_a_row_ends_at_any_of_several_eos_ids),
    (faulty.pad_ends_the_response, rollout.test_a_sampled_pad_id_is_an_ordinary_token),
    (faulty.samples_tiled, rollout.test_groups_follow_the_order_of_the_prompts),
    (faulty.ids_re_encoded, rollout.test_the_log_probs_are_those_of_the_very_ids_in_the_record),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "fact"), CAUGHT, ids=[fault.__name__ for fault, _ in CAUGHT])
def test_fault_is_caught(fault, fact, monkeypatch):
    """The fact holds for the real code (its own test says so) and not for the faulty one."""
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        fact()
