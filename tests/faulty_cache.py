"""Wrong variants of the cache, of replay and of the sampler, small, as other code bases shipped them. See faulty.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import test_kvcache as cache
import test_replay as learner
import test_rollout as sampling
import torch
import torch.nn.functional as F
from faulty import wrong
from helpers import seeded

from kvcache import (
    EMPTY,
    KVCache,
    LayerCache,
    attention_logits,
    choose,
    pack,
    pool_older,
    pyramid_budgets,
    replay_attention,
    rkv,
    snapkv,
    snapkv_mean,
    unpack,
    window_logits,
)
from model import Decoder
from rollout import sample

INIT, COMPACT, TAKE, HIDDEN = KVCache.__init__, KVCache.compact, KVCache.take, Decoder.hidden
ATTEND, CUT, READ, PREFILL = LayerCache.attend, LayerCache._cut, LayerCache._read, LayerCache._prefill
CACHES, CALLS = itertools.count(), itertools.count()  # what a module remembers and should not
SPARSE, WHERE, SOFTMAX = sampling.sparse, torch.where, torch.Tensor.softmax
BYTES = cache.test_keys_and_values_take_exactly_the_bytes_of_their_slots
QUANTISED = cache.test_quantised_sampling_equals_each_steps_attention_over_what_the_cache_held
LEARNER = learner.test_the_replay_learner_is_the_policy_that_sampled
REPLAY = cache.test_compressed_sampling_equals_one_dense_forward_under_the_mask_of_its_evictions


def of_run(fact, compressor: str, seed: int = 0):
    """A fact about every step of a cache, for a fresh run."""
    return lambda: fact(cache.Run(compressor, seed))


# --------------------------------------------------------------------------------------------------------- the cache


@wrong("kvcache.LayerCache.attend", of_run(cache.test_token_attends_to_all_that_is_held_before_the_cut, "snapkv"))
def evict_before_attending(self, queries, keys, values, positions):
    """VeloxQuant-MLX 370: a full row loses keys before its newest token has seen them."""
    if queries.shape[2] == 1:
        self.slots -= 1
        self._cut(self.parts, positions[:, 0], {})
        self.slots += 1
    return ATTEND(self, queries, keys, values, positions)


@wrong("model.Decoder.hidden", sampling.test_next_query_stands_at_the_number_of_tokens_seen)
@wrong("model.Decoder.hidden", REPLAY, "snapkv", 2, torch.float32, 1e-5)
def rotate_at_keys_kept(self, tokens, positions=None, cache=None):
    """VeloxQuant-MLX 171, 389: the next query stands at the number of keys kept."""
    if isinstance(cache, KVCache) and tokens.shape[1] == 1:
        positions = cache[0].length[: len(tokens), None]
    return HIDDEN(self, tokens, positions, cache)


@wrong("kvcache.KVCache.__init__", BYTES, "snapkv", torch.float32)
def repeat_keys_for_gqa(self, *, heads, kv_heads, **sizes):
    """SnapKV 16, 22: keys repeated to the query heads before they are cached."""
    INIT(self, heads=heads, kv_heads=heads, **sizes)


@wrong("kvcache.choose", cache.test_equal_scores_keep_the_newer)
def ties_to_the_older(scores, held, budget):
    """pytorch 127196: whatever top-k does, here the oldest of equals."""
    ranked = scores.masked_fill(~held.older, torch.inf).masked_fill(held.positions == EMPTY, -torch.inf)
    return ranked.argsort(dim=-1, descending=True, stable=True)[..., :budget].sort(-1).values


@wrong("torch.Tensor.nan_to_num", cache.test_no_score_evicts_the_window_or_keeps_an_unused_slot, torch.nan)
def not_a_number_wins(x, nan):
    """A descending sort puts NaN first."""
    return WHERE(x.isnan(), torch.inf, x.clamp(min=nan))


@wrong("kvcache.choose", of_run(cache.test_newest_window_always_survives, "h2o"))
def forget_the_window(scores, held, budget):
    """The newest tokens compete with the others."""
    return choose(scores, replace(held, recent=0), budget)


@wrong("kvcache.streaming", cache.test_streaming_keeps_four_sinks_and_the_newest)
def forget_the_sinks(held):
    """keys_values 140: the first tokens go."""
    return held.positions.float()


@wrong("kvcache.choose", cache.test_each_layer_and_each_head_chooses_for_itself)
def first_head_decides(scores, held, budget):
    """Released radix_attention.py: one choice for all heads."""
    kept = choose(scores, held, budget)
    return kept[:, :1].expand_as(kept)


@wrong("kvcache.rkv", sampling.test_a_row_does_not_depend_on_its_batch_mates, "rkv", 0)
def first_row_decides(held):
    """R-KV: every row scored with row 0's redundancy."""
    keys = held.parts["keys"][:1].expand_as(held.parts["keys"])
    return rkv(replace(held, parts=held.parts | {"keys": keys}))


@wrong("torch.where", cache.test_rkv_lets_nothing_off_for_a_key_without_a_similar_one)
def similarity_slip(condition, x, y):
    """R-KV's public code: a key without a similar one lets off slot 0."""
    return WHERE(condition, x, 0 if isinstance(y, int) and y == -1 else y)


@wrong("kvcache.prompt_attention", cache.test_h2o_accumulates_over_all_queries)
def last_query_only(queries, keys):
    """H2O without its sums: what the last query pays."""
    logits = queries[:, :, -1:].unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT / keys.shape[3] ** 0.5
    return logits.softmax(-1).mean(2)[:, :, 0]


@wrong("kvcache.KVCache.__init__", cache.test_h2o_gives_half_of_its_budget_to_the_newest)
@wrong("kvcache.KVCache.__init__", of_run(cache.test_right_keys_survive_every_cut, "h2o"))
def heavy_hitters_only(self, *, window, **sizes):
    """H2O without its recent half: only the window is safe."""
    INIT(self, window=window, **sizes)
    for layer in self.layers:
        layer.recent = window


@wrong("kvcache.attention_logits", cache.test_h2o_in_half_precision_rounds_its_output_only)
def logits_rounded(queries, keys):
    """bf16 products reach the softmax rounded to 8 bits."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    return (grouped @ keys[:, :, None].mT / keys.shape[3] ** 0.5).float()


@wrong("torch.Tensor.softmax", cache.test_h2o_in_half_precision_rounds_its_output_only)
def weights_rounded(x, dim):
    """Attention weights are rounded to 8 bits before they meet the values."""
    weights = SOFTMAX(x, dim)
    return weights if x.dtype == torch.float64 else weights.bfloat16().float()


@wrong("kvcache.PER_SLOT", of_run(cache.test_right_keys_survive_every_cut, "h2o"))
def state_stays_behind():
    """What a policy has summed up per key is not moved with the key."""
    return {"keys", "values", "positions"}


@wrong("kvcache.PER_SLOT", of_run(cache.test_survivors_are_bit_identical_to_what_was_cached, "snapkv"))
def keys_stay_behind():
    """Positions move to the front, their keys do not."""
    return {"positions", "values", "attention"}


@wrong("kvcache.LayerCache.attend", sampling.test_a_row_does_not_depend_on_its_batch_mates, "streaming", 0)
def rows_cut_together(self, queries, keys, values, positions):
    """As soon as one row is full, all are cut: a row depends on its batch-mates."""
    B = len(queries)
    before = self.length[:B].clone()
    out = ATTEND(self, queries, keys, values, positions)
    if (self.length[:B] < before).any():
        slots, self.slots = self.slots, self.budget + 1
        self._cut(self.parts, positions[:, 0] + 1, {})
        self.slots = slots
    return out


@wrong("kvcache.random", cache.test_random_draws_once_per_key)
def fresh_draws(held):
    """`random` draws again at each cut."""
    return torch.rand(held.positions.shape)


@wrong("kvcache.random", sampling.test_a_row_does_not_depend_on_its_batch_mates, "random", 0)
def draws_of_the_batch(held):
    """`random` draws by place in the batch."""
    return torch.rand(held.positions.shape, generator=seeded(0))


@wrong("kvcache.snapkv_mean", of_run(cache.test_right_keys_survive_every_cut, "snapkv-mean", 1))
def window_without_causality(held, kernel=7):
    """The window's queries see keys that are newer than they are."""
    logits = attention_logits(held.queries, held.keys)
    attention = logits.masked_fill((held.positions == EMPTY)[:, :, None, None], -torch.inf).softmax(-1)
    return pool_older(attention.mean(dim=(2, 3)), held, kernel)


@wrong("kvcache.snapkv", cache.test_the_two_ways_to_pool_the_query_heads_of_a_kv_head)
@wrong("kvcache.snapkv", of_run(cache.test_right_keys_survive_every_cut, "snapkv"))
@wrong("kvcache.snapkv", of_run(cache.test_right_keys_survive_every_cut, "snapkv", 1))
def mean_of_the_query_heads(held, kernel=7):
    """The mean of the attention for the maximum of the logits."""
    return snapkv_mean(held, kernel)


@wrong("kvcache.snapkv_mean", cache.test_the_two_ways_to_pool_the_query_heads_of_a_kv_head)
@wrong("kvcache.snapkv_mean", of_run(cache.test_right_keys_survive_every_cut, "snapkv-mean"))
def largest_of_the_query_heads(held, kernel=7):
    """The maximum of the logits for the mean of the attention."""
    return snapkv(held, kernel)


@wrong("kvcache.snapkv", cache.test_the_two_ways_to_pool_the_query_heads_of_a_kv_head)
@wrong("kvcache.snapkv", of_run(cache.test_right_keys_survive_every_cut, "snapkv", 1))
@wrong("kvcache.snapkv", of_run(cache.test_right_keys_survive_every_cut, "rkv"))
def importance_among_all_held(held, kernel=7):
    """R-KV's importance, and the released snapkv, with a softmax over the window's keys as well."""
    attention = window_logits(held).amax(dim=2).softmax(-1)
    return pool_older(attention.mean(dim=2), held, kernel)


@wrong("kvcache.tova", cache.test_tova_asks_the_newest_query_alone_and_all_heads_of_the_layer)
@wrong("kvcache.tova", of_run(cache.test_right_keys_survive_every_cut, "tova"))
def each_head_for_itself(held):
    """TOVA without the other KV heads of its layer."""
    own = window_logits(held).softmax(-1)[torch.arange(len(held.seen)), :, :, (held.seen - 1) % held.queries.shape[2]]
    return own.mean(dim=2)


@wrong("kvcache.tova", cache.test_tova_asks_the_newest_query_alone_and_all_heads_of_the_layer)
@wrong("kvcache.tova", of_run(cache.test_right_keys_survive_every_cut, "tova"))
def the_whole_window(held):
    """TOVA by all W queries, not the newest."""
    return window_logits(held).softmax(-1).mean(dim=(1, 2, 3))[:, None].expand(held.positions.shape)


@wrong("kvcache.scissorhands", cache.test_scissorhands_counts_how_often_a_key_is_attended_above_the_average)
@wrong("kvcache.scissorhands", of_run(cache.test_right_keys_survive_every_cut, "scissorhands"))
def sums_for_counts(held):
    """Scissorhands' history as a sum of attention: one query can make a key."""
    return window_logits(held).softmax(-1).sum(dim=(2, 3))


@wrong("kvcache.scissorhands", cache.test_scissorhands_counts_how_often_a_key_is_attended_above_the_average)
def average_over_what_is_not_seen(held):
    """1 / S for 1 / t: keys later than a query lower its average."""
    attention = window_logits(held).softmax(-1)
    return (attention >= 1 / attention.shape[-1]).sum(dim=(2, 3)).float()


@wrong("kvcache.keynorm", cache.test_keynorm_keeps_the_small_norms)
@wrong("kvcache.keynorm", of_run(cache.test_right_keys_survive_every_cut, "keynorm"))
def large_norms_survive(held):
    """The sign."""
    return held.keys.norm(dim=-1)


@wrong("kvcache.keynorm", cache.test_keynorm_keeps_the_newer_of_two_keys_that_are_one_but_for_their_rotation)
def norms_to_the_last_bit(held):
    """Rounding chooses among the keys of one token."""
    return -held.keys.norm(dim=-1)


@wrong("kvcache.pool_older", cache.test_snapkv_pools_over_older_neighbours_only)
def pooling_over_the_window(scores, held, kernel):
    """The window's own attention spreads to the older keys beside it."""
    return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)


@wrong("kvcache.LayerCache._cut", sampling.test_held_keys_never_exceed_budget_plus_buffer)
def budget_at_prefill_only(self, source, seen, attended):
    """SnapKV 23, KVCache-Factory 20: decoding grows on (here: by a slot whenever they are full)."""
    if source is not self.parts:
        CUT(self, source, seen, attended)
    elif self.length.max() == self.slots:
        for name in {"keys", "values", "positions"}:
            slot = torch.full_like(self.parts[name][:, :, :1], EMPTY if name == "positions" else 0)
            self.parts[name] = torch.cat([self.parts[name], slot], dim=2)
        self.slots += 1


@wrong("kvcache.LayerCache._cut", of_run(cache.test_unused_slots_are_zero, "snapkv"))
def dirty_slots(self, source, seen, attended):
    """pytorch 103963: freed slots keep what they held."""
    before = self.length.clone()
    CUT(self, source, seen, attended)
    for name in ("keys", "values"):
        self.parts[name][self.length < before, :, self.budget :] = 1.0


@wrong("kvcache.KVCache.compact", cache.test_memory_stays_where_it_is_through_a_rollout, "snapkv", 0)
def grow_by_gathering(self, alive):
    """Rows that stay are gathered into new tensors."""
    order = COMPACT(self, alive)
    for layer in self.layers:
        layer.parts["keys"] = layer.parts["keys"].clone()
    return order


@wrong("kvcache.KVCache.compact", cache.test_dropped_rows_leave_the_others_whole, "snapkv", 0)
@wrong("kvcache.KVCache.compact", sampling.test_a_row_does_not_depend_on_its_batch_mates, "random", 0)
def lose_the_state_of_dropped_rows(self, alive):
    """Rows are compacted, their queries and seeds are not."""
    left = [{name: layer.parts.pop(name) for name in ("queries", "seeds") if name in layer.parts} for layer in self]
    order = COMPACT(self, alive)
    for layer, parts in zip(self, left, strict=True):
        layer.parts |= parts
    return order


@wrong("kvcache.KVCache.take", sampling.test_responses_do_not_depend_on_how_many_rows_are_sampled_at_once, "snapkv", 2)
def what_was_taken_stands_in_the_record_by_its_row(self, prefilled, group_size):
    """A prompt that takes a finished response's place in the cache takes it in the record as well."""
    self.taken = self.active
    TAKE(self, prefilled, group_size)


@wrong("kvcache.KVCache.take", sampling.test_responses_do_not_depend_on_how_many_rows_are_sampled_at_once, "random", 2)
def a_freed_row_keeps_its_seed(self, prefilled, group_size):
    """The next prompt draws the random scores of the response that had its row."""
    before = [layer.parts["seeds"].clone() for layer in self.layers]
    again = self.taken > 0
    TAKE(self, prefilled, group_size)
    for layer, seeds in zip(self.layers, before, strict=True):
        layer.parts["seeds"] = seeds if again else layer.parts["seeds"]


@wrong("kvcache.KVCache.__init__", sampling.test_earlier_rollouts_leave_no_trace, "snapkv")
def only_the_first_is_compressed(self, **sizes):
    """KVCache-Factory 15: a flag on the module outlives the rollout, and the next ones keep the newest."""
    INIT(self, **sizes)
    if next(CACHES):
        for layer in self.layers:
            layer.policy = replace(layer.policy, score=lambda held: held.positions)


@wrong("kvcache.pyramid_budgets", cache.test_a_cache_does_not_change_the_settings_of_the_next)
def capacity_overwritten(budget, layers, window):
    """Released pyramidkv: each call changes the last call's capacity."""
    call, (first, *middle, last) = next(CALLS), pyramid_budgets(budget, layers, window)
    return [first - call, *middle, last + call]


@wrong("kvcache.pyramid_budgets", cache.test_pyramid_divides_what_lies_beyond_the_window, 512, [992, 671, 352, 33])
def pyramid_of_the_whole_budget(budget, layers, window):
    """The last layer gets a twentieth of the budget, the window included."""
    spread = budget - max(budget // 20, window + 1)
    return [budget + round(spread * (1 - 2 * layer / (layers - 1))) for layer in range(layers)]


# -------------------------------------------------------------------------------------------------------- fewer bits


@wrong("kvcache.LayerCache._read", QUANTISED, "snapkv", 4)
def newest_rounded_too(self, S, positions, slot):
    """No window in full precision."""
    keys, values = READ(self, S, positions, slot)
    if self.bits:
        p = {name: part[: len(slot)] for name, part in self.parts.items()}
        keys = unpack(p["keys"][:, :, :S], p["key_ranges"][:, :, :S], self.bits, keys.dtype) * p["key_scale"]
    return keys, values


@wrong("kvcache.LayerCache._prefill", QUANTISED, "full", 4)
def prompt_attends_to_rounded_keys(self, queries, keys, values, positions):
    """The prompt is rounded before it has been attended to."""
    keys, values = (unpack(*pack(x, self.bits), self.bits, x.dtype) if self.bits else x for x in (keys, values))
    return PREFILL(self, queries, keys, values, positions)


@wrong("kvcache.PER_SLOT", QUANTISED, "snapkv", 4)
@wrong("kvcache.PER_SLOT", cache.test_a_cut_moves_levels_and_does_not_round_again)
def ranges_stay_behind():
    """Levels move to the front, what they mean does not."""
    return {"keys", "values", "positions", "attention"}


@wrong("kvcache.unpack", cache.test_a_number_moves_by_half_a_step_at_most, 4)
def middle_of_the_level(packed, ranges, bits, dtype):
    """Levels as bins: half a step is added."""
    return unpack(packed, ranges, bits, dtype) + ranges[..., 1].to(dtype).repeat_interleave(32, -1) / 2


@wrong("kvcache.pack", cache.test_levels_share_a_byte)
def last_level_lowest(x, bits):
    """The neighbours of a byte in the other order."""
    return pack(x.unflatten(-1, (-1, 8 // bits)).flip(-1).flatten(-2), bits)


@wrong("kvcache.KVCache.__init__", cache.test_quantised_keys_and_values_take_exactly_their_bits, 4, torch.float32)
def a_level_a_byte(self, *, kv_bits=0, **sizes):
    """Quantised in name: eight bits are kept, of which four are used."""
    INIT(self, kv_bits=kv_bits and 8, **sizes)


@wrong("kvcache.KVCache.__init__", cache.test_quantised_keys_and_values_take_exactly_their_bits, 4, torch.bfloat16)
def more_than_is_counted(self, **sizes):
    """A part is a view of something larger."""
    INIT(self, **sizes)
    for layer in self.layers:
        layer.parts["keys"] = torch.cat([layer.parts["keys"]] * 2)[: len(layer.parts["keys"])]


# ------------------------------------------------------------------------------------------------------------ replay


@wrong("kvcache.replay_attention", LEARNER, "snapkv", torch.float32, 1e-5)
def late_by_one(queries, keys, values, evicted_at):
    """A key is still seen by the query that came after it went."""
    return replay_attention(queries, keys, values, evicted_at + (evicted_at < 2**15 - 1).to(evicted_at.dtype))


@wrong("kvcache.replay_attention", LEARNER, "snapkv", torch.float32, 1e-5)
def heads_interleaved(queries, keys, values, evicted_at):
    """Query head h is served by KV head h mod K."""
    K = keys.shape[1]
    order = torch.arange(queries.shape[1]).view(-1, K).T.flatten()
    return replay_attention(queries[:, order], keys, values, evicted_at)[:, order.argsort()]


@wrong("kvcache.replay_attention", LEARNER, "snapkv", torch.float32, 1e-5)
def one_mask_for_all_heads(queries, keys, values, evicted_at):
    """All heads see what the first KV head held."""
    return replay_attention(queries, keys, values, evicted_at[:, :1].expand_as(evicted_at))


# -------------------------------------------------------------------------------------------------------- the sampler


@wrong("rollout.sample", sampling.test_log_prob_is_taken_at_the_sampling_temperature)
def log_prob_at_temperature_one(logits, uniforms, temperature=1.0, top_p=1.0):
    """trl PR 3029, 4159."""
    tokens, _ = sample(logits, uniforms, temperature, top_p)
    return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@wrong("rollout.sample", sampling.test_top_p_keeps_the_nucleus_and_reports_the_full_softmax)
def log_prob_of_the_nucleus(logits, uniforms, temperature=1.0, top_p=1.0):
    """trl 6789: renormalised after top-p."""
    tokens, logp = sample(logits, uniforms, temperature, top_p)
    return tokens, logp - torch.tensor(top_p).log()


@wrong("rollout.sample", sampling.test_a_token_of_probability_zero_is_never_drawn, 1.0)
def search_left(logits, uniforms, temperature=1.0, top_p=1.0):
    """searchsorted without right=True, and no bound below the total: u = 0 and u near 1 fall on impossible tokens."""
    logp = (logits / (temperature or 1.0)).log_softmax(-1)
    tokens = torch.searchsorted(logp.exp().cumsum(-1), uniforms[:, None])[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


@wrong("rollout.sample", sampling.test_each_member_of_a_group_draws_its_first_token)
def one_draw_for_the_group(logits, uniforms, **how):
    """nanochat PR 201: one number for all rows, so all samples of a prompt start alike."""
    return sample(logits, uniforms[:1].expand_as(uniforms), **how)


@wrong("rollout.sample", sampling.test_a_row_does_not_depend_on_its_batch_mates, "full", 0)
def numbers_by_place_in_the_batch(logits, uniforms, **how):
    """Uniform numbers dealt out to whichever rows are active."""
    return sample(logits, torch.rand(len(uniforms), generator=seeded(len(uniforms))), **how)


@wrong("test_rollout.sparse", sampling.test_the_sampled_eos_belongs_to_the_response)
def eos_dropped(*args, **settings):
    """rasbt PR 185, RAGEN 59."""
    r = SPARSE(*args, **settings)
    return replace(r, response_lengths=r.response_lengths - r.finished.long())


@wrong("test_rollout.sparse", sampling.test_a_row_ends_at_any_of_several_eos_ids)
def first_eos_only(*args, eos_ids, **settings):
    """trl PR 7039."""
    return SPARSE(*args, eos_ids=eos_ids[:1], **settings)


@wrong("test_rollout.sparse", sampling.test_a_sampled_pad_id_is_an_ordinary_token)
def pad_ends_the_response(*args, **settings):
    """GRPO-Zero: lengths by "is not pad"."""
    r = SPARSE(*args, **settings)
    body = torch.tensor([sum(token != 0 for token in r.response(i)) for i in range(len(r.tokens))])
    return replace(r, response_lengths=body)


@wrong("test_rollout.sparse", sampling.test_groups_follow_the_order_of_the_prompts)
def samples_tiled(model, prompts, *, group_size, **settings):
    """nanoGRPO: ABAB where the rest expects AABB."""
    return SPARSE(model, prompts * group_size, group_size=1, **settings)


@wrong("test_rollout.sparse", sampling.test_the_log_probs_are_those_of_the_very_ids_in_the_record)
def ids_re_encoded(*args, **settings):
    """rllm 816, slime PR 117: decode and encode again, and an id is another."""
    r = SPARSE(*args, **settings)
    return replace(r, tokens=torch.where(r.tokens == 7, 8, r.tokens))
