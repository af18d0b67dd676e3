"""Wrong variants of the cache and of the sampler, small, as other code bases shipped them.

Each takes pytest's monkeypatch and puts itself in the place of the right code.
"""

from __future__ import annotations

import dataclasses

import test_kvcache
import test_rollout
import torch
import torch.nn.functional as F

import kvcache
import rollout
from kvcache import COMPRESSORS, KVCache, LayerCache
from model import Decoder


def replace_policy(patch, name: str, **fields) -> None:
    """Change fields of a registered compressor."""
    patch.setitem(COMPRESSORS, name, dataclasses.replace(COMPRESSORS[name], **fields))


# --------------------------------------------------------------------------------------------------------- the cache


def evict_before_attending(patch):
    """VeloxQuant-MLX 370: a full row loses keys before its newest token has seen them."""
    attend = LayerCache.attend

    def early(self, queries, keys, values, positions):
        if queries.shape[2] == 1:
            self.slots -= 1
            self._cut(self.parts, positions[:, 0])
            self.slots += 1
        return attend(self, queries, keys, values, positions)

    patch.setattr(LayerCache, "attend", early)


def rotate_at_keys_kept(patch):
    """VeloxQuant-MLX 171, 389: the next query stands at the number of keys kept."""
    hidden = Decoder.hidden

    def misplaced(self, tokens, positions=None, cache=None):
        if isinstance(cache, KVCache) and tokens.shape[1] == 1:
            positions = cache[0].length[: len(tokens), None]
        return hidden(self, tokens, positions, cache)

    patch.setattr(Decoder, "hidden", misplaced)


def repeat_keys_for_gqa(patch):
    """SnapKV 16, 22: keys repeated to the query heads before they are cached."""
    init = KVCache.__init__
    patch.setattr(KVCache, "__init__", lambda self, **sizes: init(self, **(sizes | {"kv_heads": sizes["heads"]})))


def ties_to_the_older(patch):
    """pytorch 127196: whatever top-k does, here the oldest of equals."""

    def choose(scores, held, budget):
        ranked = scores.masked_fill(~held.older, torch.inf).masked_fill(held.positions == kvcache.EMPTY, -torch.inf)
        return ranked.argsort(dim=-1, descending=True, stable=True)[..., :budget].sort(-1).values

    patch.setattr(kvcache, "choose", choose)
    patch.setattr(test_kvcache, "choose", choose)


def not_a_number_wins(patch):
    """A descending sort puts NaN first."""
    patch.setattr(torch.Tensor, "nan_to_num", lambda x, nan: torch.where(x.isnan(), torch.inf, x.clamp(min=nan)))


def forget_the_window(patch):
    """The newest tokens compete with the others."""
    patch.setattr(kvcache.Held, "older", property(lambda held: held.positions != kvcache.EMPTY))


def forget_the_sinks(patch):
    """keys_values 140: the first tokens go."""
    replace_policy(patch, "streaming", score=lambda held: held.positions.float())


def first_head_decides(patch):
    """Released radix_attention.py: one choice for all heads."""
    choose = kvcache.choose
    patch.setattr(kvcache, "choose", lambda *args: (kept := choose(*args))[:, :1].expand_as(kept))


def first_row_decides(patch):
    """R-KV: every row scored with row 0's redundancy."""

    class OfRowZero(kvcache.Held):
        @property
        def keys(self):
            return self.parts["keys"][:1].expand_as(self.parts["keys"])[self.rows]

    replace_policy(patch, "rkv", score=lambda held: kvcache.rkv(OfRowZero(**vars(held))))


def similarity_slip(patch):
    """R-KV's public code: a key without a similar one lets off slot 0."""
    where = torch.where
    patch.setattr(torch, "where", lambda c, x, y: where(c, x, 0 if isinstance(y, int) and y == -1 else y))


def last_query_only(patch):
    """H2O without its sums: what the last query pays."""

    def received(queries, keys):
        logits = queries[:, :, -1:].unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT / keys.shape[3] ** 0.5
        return logits.softmax(-1).mean(2)[:, :, 0]

    patch.setattr(kvcache, "prompt_attention", received)


def heavy_hitters_only(patch):
    """H2O without its recent half: only the window is safe."""
    replace_policy(patch, "h2o", recent_share=0.0)


def logits_rounded(patch):
    """bf16 products reach the softmax rounded to 8 bits."""

    def rounded(queries, keys):
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        return (grouped @ keys[:, :, None].mT / keys.shape[3] ** 0.5).float()

    patch.setattr(kvcache, "attention_logits", rounded)


def weights_rounded(patch):
    """Attention weights are rounded to 8 bits before they meet the values."""
    softmax = torch.Tensor.softmax

    def rounded(x, dim):
        weights = softmax(x, dim)
        return weights if x.dtype == torch.float64 else weights.bfloat16().float()

    patch.setattr(torch.Tensor, "softmax", rounded)


def state_stays_behind(patch):
    """What a policy has summed up per key is not moved with the key."""
    patch.setattr(kvcache, "PER_SLOT", {"keys", "values", "positions"})


def keys_stay_behind(patch):
    """Positions move to the front, their keys do not."""
    patch.setattr(kvcache, "PER_SLOT", {"positions", "values", "attention"})


def rows_cut_together(patch):
    """As soon as one row is full, all are cut: a row depends on its batch-mates."""
    attend = LayerCache.attend

    def together(self, queries, keys, values, positions):
        B = len(queries)
        before = self.length[:B].clone()
        out = attend(self, queries, keys, values, positions)
        if (self.length[:B] < before).any():
            slots, self.slots = self.slots, self.budget + 1
            self._cut(self.parts, positions[:, 0] + 1)
            self.slots = slots
        return out

    patch.setattr(LayerCache, "attend", together)


def fresh_draws(patch):
    """`random` draws again at each cut."""
    replace_policy(patch, "random", score=lambda held: torch.rand(held.positions.shape))


def draws_of_the_batch(patch):
    """`random` draws by place in the batch."""
    replace_policy(
        patch, "random", score=lambda held: torch.rand(held.positions.shape, generator=test_rollout.seeded(0))
    )


def window_without_causality(patch):
    """The window's queries see keys that are newer than they are."""

    def timeless(held, kernel=7):
        logits = kvcache.attention_logits(held.queries, held.keys)
        attention = logits.masked_fill((held.positions == kvcache.EMPTY)[:, :, None, None], -torch.inf).softmax(-1)
        return kvcache.pool_older(attention.mean(dim=(2, 3)), held, kernel)

    for name, policy in COMPRESSORS.items():
        if policy.score is kvcache.snapkv_mean:
            replace_policy(patch, name, score=timeless)


def query_heads_pooled_the_other_way(patch):
    """The mean of the attention for the maximum of the logits, and the other way about."""
    mean, largest = kvcache.snapkv_mean, kvcache.snapkv
    patch.setattr(test_kvcache, "snapkv_mean", largest)
    patch.setattr(test_kvcache, "snapkv", mean)
    for name, policy in COMPRESSORS.items():
        if policy.score in (mean, largest):
            replace_policy(patch, name, score=largest if policy.score is mean else mean)


def importance_among_all_held(patch):
    """R-KV's importance, and the released snapkv, with a softmax over the window's keys as well."""

    def spread(held, kernel=7):
        attention = kvcache.window_logits(held).amax(dim=2).softmax(-1)
        return kvcache.pool_older(attention.mean(dim=2), held, kernel)

    for name, policy in COMPRESSORS.items():
        if policy.score is kvcache.snapkv:
            replace_policy(patch, name, score=spread)
    patch.setattr(kvcache, "snapkv", spread)
    patch.setattr(test_kvcache, "snapkv", spread)


def pooling_over_the_window(patch):
    """The window's own attention spreads to the older keys beside it."""

    def pool(scores, held, kernel):
        return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)

    patch.setattr(kvcache, "pool_older", pool)


def budget_at_prefill_only(patch):
    """SnapKV 23, KVCache-Factory 20: decoding grows on (here: with slots enough to do so)."""
    init, prefill = KVCache.__init__, LayerCache._prefill
    patch.setattr(KVCache, "__init__", lambda self, **sizes: init(self, **(sizes | {"buffer": 500})))

    def cut_prompts(self, *args):
        out = prefill(self, *args)
        slots, self.slots = self.slots, self.budget + 5
        self._cut(self.parts, self.length.clone())
        self.slots = slots
        return out

    patch.setattr(LayerCache, "_prefill", cut_prompts)


def dirty_slots(patch):
    """pytorch 103963: freed slots keep what they held."""
    cut = LayerCache._cut

    def leave(self, source, seen):
        before = self.length.clone()
        cut(self, source, seen)
        for name in ("keys", "values"):
            self.parts[name][self.length < before, :, self.budget :] = 1.0

    patch.setattr(LayerCache, "_cut", leave)


def grow_by_gathering(patch):
    """SMD experiment 4: survivors are gathered into new tensors."""
    compact = KVCache.compact

    def regather(self, alive):
        order = compact(self, alive)
        for layer in self.layers:
            layer.parts["keys"] = layer.parts["keys"].clone()
        return order

    patch.setattr(KVCache, "compact", regather)


def lose_the_state_of_dropped_rows(patch):
    """Rows are compacted, their queries and seeds are not."""
    compact = KVCache.compact

    def partly(self, alive):
        left = [{name: layer.parts.pop(name) for name in ("queries", "seeds") if name in layer.parts} for layer in self]
        order = compact(self, alive)
        for layer, parts in zip(self, left, strict=True):
            layer.parts |= parts
        return order

    patch.setattr(KVCache, "compact", partly)


def only_the_first_is_compressed(patch):
    """KVCache-Factory 15: a flag on the module outlives the rollout."""
    cut = LayerCache._cut

    def once(self, source, seen):
        before = self.length.clone()
        cut(self, source, seen)
        if not self.length.equal(before):
            replace_policy(patch, "snapkv", score=lambda held: held.positions)

    patch.setattr(LayerCache, "_cut", once)


def capacity_overwritten(patch):
    """Released pyramidkv: each call changes the last call's capacity."""
    calls = []

    def budgets(budget, layers, window):
        calls.append(0)
        first, *middle, last = kvcache.pyramid_budgets(budget, layers, window)
        return [first - len(calls), *middle, last + len(calls)]

    replace_policy(patch, "pyramidkv", layer_budgets=budgets)


def pyramid_of_the_whole_budget(patch):
    """The last layer gets a twentieth of the budget, the window included."""

    def budgets(budget, layers, window):
        spread = budget - max(budget // 20, window + 1)
        return [budget + round(spread * (1 - 2 * layer / (layers - 1))) for layer in range(layers)]

    patch.setattr(test_kvcache, "pyramid_budgets", budgets)


# -------------------------------------------------------------------------------------------------------- the sampler


def replace_sample(patch, faulty) -> None:
    """Put another sampler into rollout.py and under its tests."""
    patch.setattr(rollout, "sample", faulty)
    patch.setattr(test_rollout, "sample", faulty)


def replace_rollout(patch, faulty) -> None:
    """Put another rollout under its tests."""
    patch.setattr(test_rollout, "sparse", lambda *args, **settings: faulty(SPARSE, *args, **settings))


SAMPLE, SPARSE = rollout.sample, test_rollout.sparse


def log_prob_at_temperature_one(patch):
    """trl PR 3029, 4159."""

    def sample(logits, uniforms, temperature=1.0, top_p=1.0):
        tokens, _ = SAMPLE(logits, uniforms, temperature, top_p)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]

    replace_sample(patch, sample)


def log_prob_of_the_nucleus(patch):
    """trl 6789: renormalised after top-p."""

    def sample(logits, uniforms, temperature=1.0, top_p=1.0):
        tokens, logp = SAMPLE(logits, uniforms, temperature, top_p)
        return tokens, logp - torch.tensor(top_p).log()

    replace_sample(patch, sample)


def search_left(patch):
    """searchsorted without right=True, and no bound below the total: u = 0 and u near 1 fall on impossible tokens."""

    def sample(logits, uniforms, temperature=1.0, top_p=1.0):
        logp = (logits / (temperature or 1.0)).log_softmax(-1)
        tokens = torch.searchsorted(logp.exp().cumsum(-1), uniforms[:, None])[:, 0].clamp(max=logits.shape[-1] - 1)
        return tokens, logp.gather(-1, tokens[:, None])[:, 0]

    replace_sample(patch, sample)


def one_draw_for_the_group(patch):
    """nanochat PR 201: one number for all rows, so all samples of a prompt start alike."""
    replace_sample(patch, lambda logits, u, **how: SAMPLE(logits, u[:1].expand_as(u), **how))


def numbers_by_place_in_the_batch(patch):
    """Uniform numbers dealt out to whichever rows are active."""

    def sample(logits, u, **how):
        return SAMPLE(logits, torch.rand(len(u), generator=test_rollout.seeded(len(u))), **how)

    replace_sample(patch, sample)


def eos_dropped(patch):
    """rasbt PR 185, RAGEN 59."""

    def faulty(sparse, *args, **settings):
        r = sparse(*args, **settings)
        return dataclasses.replace(r, response_lengths=r.response_lengths - r.finished.long())

    replace_rollout(patch, faulty)


def first_eos_only(patch):
    """trl PR 7039."""
    replace_rollout(patch, lambda sparse, *args, eos_ids, **settings: sparse(*args, eos_ids=eos_ids[:1], **settings))


def pad_ends_the_response(patch):
    """GRPO-Zero: lengths by "is not pad"."""

    def faulty(sparse, *args, **settings):
        r = sparse(*args, **settings)
        body = torch.tensor([sum(token != 0 for token in r.response(i)) for i in range(len(r.tokens))])
        return dataclasses.replace(r, response_lengths=body)

    replace_rollout(patch, faulty)


def samples_tiled(patch):
    """nanoGRPO: ABAB where the rest expects AABB."""

    def faulty(sparse, model, prompts, *, group_size, **settings):
        return sparse(model, prompts * group_size, group_size=1, **settings)

    replace_rollout(patch, faulty)


def ids_re_encoded(patch):
    """rllm 816, slime PR 117: decode and encode again, and an id is another."""

    def faulty(sparse, *args, **settings):
        r = sparse(*args, **settings)
        return dataclasses.replace(r, tokens=torch.where(r.tokens == 7, 8, r.tokens))

    replace_rollout(patch, faulty)
