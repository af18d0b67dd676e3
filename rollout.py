"""Batched sampling with a compressed KV cache, and scoring of what was sampled.

`rollout` samples G responses to each prompt and records `logp_sparse`, the log-prob of each sampled token under the
policy that sampled it: the model's weights, attending to the compressed cache. `rescore` and `response_logprobs` give
the log-probs of the same tokens, at the same temperature, under dense attention: logp_old, logp_ref and logp. Or, for
the replay learner, under the recorded evictions.

Responses are rows N = prompts * G, in the order of the prompts (AABB). Row i's token t is drawn by inverse CDF with
its own uniform number u[i, t], drawn on the CPU before sampling starts. So, but for rounding, a response depends
neither on the rows that share its batch nor on the device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import ranks
from kvcache import KVCache, Replay, record_dtype
from model import Decoder, ModelConfig, wide


@dataclass(frozen=True)
class Rollout:
    """N sampled responses, on the CPU. Padding is told by the lengths, never by a token id."""

    tokens: Tensor  # (N, T) prompt and response, padded with 0 on the right
    prompt_lengths: Tensor  # (N,)
    response_lengths: Tensor  # (N,) the sampled EOS included
    logp_sparse: Tensor  # (N, R) log-prob of each sampled token under the sampler, 0 in the padding
    finished: Tensor  # (N,) bool: ended with an EOS; the others were truncated
    temperature: float  # of the sampler, and so of every log-prob of these tokens
    cached_tokens: float  # keys held per layer after each step's cut, summed over rows and steps
    cache_bytes: dict[str, int]  # allocated by part (KVCache.nbytes)
    dense_bytes: int  # keys and values that a dense cache of so many rows allocates
    seconds: float
    evicted_at: list[Tensor] | None = None  # per layer (N, K, T), see KVCache.record

    @property
    def mask(self) -> Tensor:
        """(N, R) bool: the entries that belong to a response."""
        return torch.arange(self.logp_sparse.shape[1]) < self.response_lengths[:, None]

    @property
    def lengths(self) -> Tensor:
        """(N,) tokens of prompt and response."""
        return self.prompt_lengths + self.response_lengths

    def response(self, i: int) -> list[int]:
        """The sampled token ids of row i."""
        return self.tokens[i, self.prompt_lengths[i] : self.lengths[i]].tolist()

    @property
    def statistics(self) -> dict[str, float]:
        """What is reported. kv_saved: the share of a dense cache's keys that was not held, over all rows and steps."""
        n = self.response_lengths
        dense_tokens = n * self.prompt_lengths + n * (n - 1) // 2  # (N,) as `cached_tokens`, without eviction
        return {
            "response_length": float(n.double().mean()),
            "truncated": 1 - float(self.finished.double().mean()),
            "kv_saved": 1 - self.cached_tokens / float(dense_tokens.sum()),
            "cache_bytes": sum(self.cache_bytes.values()),
            "dense_bytes": self.dense_bytes,
            "tokens_per_second": float(n.sum()) / self.seconds,  # sampled tokens; the time includes prefill
        }

    @staticmethod
    def side_by_side(parts: list[Rollout]) -> Rollout:
        """The responses of several ranks, which sampled at the same time, each into a cache of its own, as one."""

        def rows(tensors: Sequence[Tensor], padding: int = 0) -> Tensor:  # (rows, ...) each, of unequal last dimension
            width = max(t.shape[-1] for t in tensors)
            pads = [(0, width - t.shape[-1] if t.ndim > 1 else 0) for t in tensors]
            return torch.cat([F.pad(t, pad, value=padding) for t, pad in zip(tensors, pads, strict=True)])

        names = ("tokens", "prompt_lengths", "response_lengths", "logp_sparse", "finished")
        records = [part.evicted_at for part in parts if part.evicted_at is not None]
        dtype = max((record[0].dtype for record in records), key=lambda dtype: dtype.itemsize, default=torch.int16)
        records = [[layer.to(dtype) for layer in record] for record in records]
        return replace(
            parts[0],
            **{name: rows([getattr(part, name) for part in parts]) for name in names},
            cached_tokens=sum(part.cached_tokens for part in parts),
            cache_bytes={name: sum(part.cache_bytes[name] for part in parts) for name in parts[0].cache_bytes},
            dense_bytes=sum(part.dense_bytes for part in parts),
            seconds=max(part.seconds for part in parts),
            evicted_at=[rows(layer, torch.iinfo(dtype).max) for layer in zip(*records, strict=True)] or None,
        )


# ----------------------------------------------------------------------------------------------------- sampling


def log_softmax_at(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) over the last dimension, in at least fp32: no NaN from finite logits."""
    logits = wide(logits)
    if temperature != 1:  # a large logit overflows when divided, and inf - inf is NaN: so the largest becomes 0 first
        logits = (logits - logits.detach().amax(-1, keepdim=True)).div_(temperature)
    return logits.log_softmax(-1)


def sample(logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw one token per row from logits (B, V) with uniforms (B,) in [0, 1): (tokens (B,), log-probs (B,)).

    The log-prob is that of the full softmax at this temperature, in at least fp32, whatever top_p leaves out.
    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    logp = log_softmax_at(logits, temperature or 1.0)  # (B, V)
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        p = logp.exp()
        if top_p < 1:  # nucleus (1904.09751): the fewest tokens that hold top_p of the probability
            ranked, order = p.sort(-1, descending=True)
            beyond = ranked.cumsum(-1) - ranked >= top_p  # never the first
            p = p.scatter(-1, order, ranked.masked_fill(beyond, 0))
        cdf = p.cumsum(-1).mul_(p.sign_())  # 0 where p is 0: such a token is never drawn
        total = cdf.amax(-1, keepdim=True)  # (B, 1); u * total < total also when rounded, as u is at most 1 - 2^-24
        # the first above; no binary search, as a running sum that is taken in parallel may fall by a rounding
        tokens = (cdf > uniforms[:, None] * total).byte().argmax(-1)
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def cache_for(config: ModelConfig, rows: int, max_length: int, **settings) -> KVCache:
    """An empty cache for `rows` sequences of this model; settings as for KVCache."""
    sizes = {name: getattr(config, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
    return KVCache(rows=rows, max_length=max_length, **sizes, **settings)


def prefill(model: Decoder, prompts: list[list[int]], cache: KVCache) -> Tensor:
    """Put each prompt into its row of the cache. Returns the logits (P, V) that follow it.

    Neighbours of one length at a time, as padding to another length would round a prompt's numbers otherwise (in bf16).
    """
    device, first, last = model.embed_tokens.weight.device, 0, []  # last: the hidden states of the last tokens
    for _, same in itertools.groupby(prompts, key=len):
        tokens = torch.tensor(list(same), device=device)  # (b, length)
        last.append(model.hidden(tokens, cache=cache.rows(first, first + len(tokens)))[:, -1])
        first += len(tokens)
    return model.head(torch.cat(last))


def admit(model: Decoder, cache: KVCache, prompts: list[list[int]], group_size: int, **settings) -> Tensor:
    """Give each prompt group_size free rows of the cache, prefilled once. Returns the logits (P * G, V) that follow."""
    each = cache_for(model.config, len(prompts), **settings)
    if cache[0].evicted_at is not None:
        each.record(len(prompts), settings["max_length"])
    logits = prefill(model, prompts, each)  # (P, V)
    cache.take(each, group_size)
    return logits.repeat_interleave(group_size, dim=0)


def decode(
    model: Decoder, cache: KVCache, begin: Callable, seen: Tensor, u: Tensor, eos: Tensor, draw: Callable, bar: tqdm
) -> tuple[Tensor, Tensor, float]:
    """Sample a token a step in each row of the cache. A row leaves with one of eos, or R tokens. All on one device.

    begin(first): puts the prompts from this response on, as many as find room, into the cache, and gives the logits
    (rows, V) that follow them, None without room. seen (N,): tokens of the prompts; u (N, R): uniform numbers; draw:
    `sample` at its temperature. Returns tokens (N, R), 0 after an EOS, their log-probs (N, R), and the keys held per
    layer, over rows and steps.
    """
    (N, R), dtype, cached_tokens = u.shape, torch.promote_types(model.embed_tokens.weight.dtype, torch.float32), 0.0
    tokens, logp_sparse = torch.zeros_like(u, dtype=torch.long), torch.zeros_like(u, dtype=dtype)  # (N, R) each
    drawn, begun = torch.zeros_like(seen), 0  # (N,) tokens of each response so far; responses so far
    rows = token = seen[:0]  # (B,) the response in each row of the cache, and its newest token
    while len(rows) or begun < N:
        logits = []
        if len(rows):
            positions = (seen + drawn - 1)[rows, None]  # (B, 1) of the newest tokens, whatever was evicted
            logits.append(model.head(model.hidden(token[:, None], positions, cache))[:, 0])  # (B, V)
        if (new := begin(begun)) is not None:
            rows = torch.cat([rows, torch.arange(begun, begun + len(new), device=rows.device)])
            logits, begun = [*logits, new], begun + len(new)
        cached_tokens, t = cached_tokens + cache.tokens, drawn[rows]  # (B,)
        token, logp = draw(torch.cat(logits) if len(logits) > 1 else logits[0], u[rows, t])  # (B,), (B,)
        tokens[rows, t], logp_sparse[rows, t], drawn[rows] = token, logp, t + 1
        ends = torch.isin(token, eos) | (t + 1 == R)
        left = torch.where(ends, R - 1 - t, -1).cpu()  # (B,) what a response that ends leaves; a step's one wait
        bar.update(len(left) + int(left.clamp(min=0).sum()))
        if (left >= 0).any():
            order = cache.compact(left < 0).to(rows.device)
            rows, token = rows[order], token[order]
    return tokens, logp_sparse, cached_tokens


@torch.no_grad()
def rollout(
    model: Decoder,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    rows: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    record: bool = False,
    progress: bool = False,
    **settings,
) -> Rollout:
    """Sample group_size responses to each prompt (a list of token ids), of at most max_new_tokens tokens.

    A row ends at any of eos_ids; the EOS belongs to the response. generator: a CPU generator for the uniform numbers.
    rows: responses at a time (at least a group; by default all); as they end, the next prompts take their places in the
    cache. record: also return when each key was evicted. settings: compressor, budget and so on, as for KVCache.
    Raises ValueError for an empty prompt, or settings out of bounds; FloatingPointError if a log-prob is not finite.
    """
    if not prompts or not all(prompts):
        raise ValueError("rollout needs at least one prompt, and at least one token in each")
    if min(group_size, max_new_tokens) < 1 or not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        bounds = f"temperature {temperature} 0 (greedy) or above, top_p {top_p} in (0, 1]"
        raise ValueError(f"group_size {group_size} and max_new_tokens {max_new_tokens} must be at least 1, {bounds}")
    began, c, weight = time.perf_counter(), model.config, model.embed_tokens.weight
    P, N, longest = len(prompts), len(prompts) * group_size, max(map(len, prompts)) + max_new_tokens
    B = min(P, max(1, (rows or N) // group_size)) * group_size  # rows of the cache
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(group_size)  # (N,)
    noise = torch.rand(N, 1 + max_new_tokens, generator=generator)  # a row's numbers follow each other
    seeds, eos = (noise[::group_size, 0] * (1 << 24)).long(), torch.tensor(list(eos_ids))  # (P,), (E,)
    settings |= {"max_length": longest, "dtype": weight.dtype, "device": weight.device}
    cache = cache_for(c, B, **settings)
    cache.active = 0  # all of its rows are free
    if record:
        cache.record(N, longest)

    def begin(first: int) -> Tensor | None:
        some = slice(first // group_size, (first + cache.free) // group_size)
        return admit(model, cache, prompts[some], group_size, seeds=seeds[some], **settings) if prompts[some] else None

    given = (x.to(weight.device) for x in (prompt_lengths, noise[:, 1:], eos))
    draw = partial(sample, temperature=temperature, top_p=top_p)
    form = "{l_bar}{bar}| {elapsed}<{remaining}"
    how = {"bar_format": form, "leave": False, "mininterval": 0.5, "disable": not progress}
    with tqdm(total=N * max_new_tokens, desc="rollout", **how) as bar:
        tokens, logp_sparse, cached_tokens = decode(model, cache, begin, *given, draw, bar)  # (N, R), (N, R)
    if not logp_sparse.isfinite().all():
        raise FloatingPointError(
            "the model's log-probs are not finite: its weights are too large for its dtype, or training drove them "
            "apart (take an older checkpoint, a lower learning rate or less weight decay)"
        )
    tokens = tokens.cpu()
    ends = torch.isin(tokens, eos)  # (N, R)
    finished = ends.any(1)
    lengths = torch.where(finished, ends.byte().argmax(1) + 1, max_new_tokens)  # (N,) up to the first EOS
    texts = [torch.tensor(prompts[i // group_size] + tokens[i, :n].tolist()) for i, n in enumerate(lengths)]
    return Rollout(
        tokens=pad_sequence(texts, batch_first=True),
        prompt_lengths=prompt_lengths,
        response_lengths=lengths,
        logp_sparse=logp_sparse[:, : lengths.max()].cpu(),
        finished=finished,
        temperature=temperature or 1.0,  # greedy log-probs are those of temperature 1
        cached_tokens=cached_tokens,
        cache_bytes=cache.nbytes,
        dense_bytes=2 * c.layers * c.kv_heads * c.head_dim * B * longest * weight.element_size(),
        seconds=time.perf_counter() - began,
        evicted_at=[layer.evicted_at.cpu() for layer in cache.layers] if record else None,
    )


def rollout_shared(
    model: Decoder,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    generator: torch.Generator | None = None,
    **settings,
) -> Rollout:
    """`rollout` by all ranks: each samples its share of the prompts, and gets the responses to all of them."""
    first, last = ranks.share(len(prompts))
    torch.rand(first * group_size, 1 + max_new_tokens, generator=generator)  # the numbers of the rows before
    settings |= {"group_size": group_size, "max_new_tokens": max_new_tokens, "generator": generator}
    with ranks.whole(model) as decoder:
        part = rollout(decoder, prompts[first:last], **settings) if first < last else None
    return Rollout.side_by_side([part for part in ranks.gather(part) if part])


# ------------------------------------------------------------------------------------------------ dense scoring


def entropies(logp: Tensor, few: int = 64) -> Tensor:
    """Entropy (n,) in nats of each row of log-probs (n, V); a few at a time, so that a processor's cache holds them."""
    least = torch.finfo(logp.dtype).min  # 0 log 0 is 0
    return torch.cat([-(some.exp() * some.clamp(min=least)).sum(-1) for some in logp.split(few)])


def token_logprobs(
    hidden: Tensor, head: Callable, targets: Tensor, *, temperature: float = 1, chunk: int = 1024, entropy: bool = False
) -> tuple[Tensor, ...]:
    """Log-prob of targets (...) and, if asked for, entropy (...), in nats, of softmax(head(hidden) / temperature).

    hidden (..., hidden). The head is applied to `chunk` tokens at a time, and but for the last of them again in the
    backward pass, so that never more than chunk x V logits exist. The entropy carries no gradient.
    """

    def piece(h: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logp = log_softmax_at(head(h), temperature)  # (chunk, V)
        found = logp.gather(-1, target[:, None])[:, 0]
        return (found, entropies(logp.detach())) if entropy else (found,)

    apply = partial(checkpoint, piece, use_reentrant=False) if torch.is_grad_enabled() else piece
    *others, last = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True)
    outputs = [*(apply(*some) for some in others), piece(*last)]  # with the last the backward pass begins
    return tuple(torch.cat(parts).view(targets.shape) for parts in zip(*outputs, strict=True))


def response_logprobs(
    decoder: Decoder, r: Rollout, rows: Tensor, *, replay: bool = False, entropy: bool = False
) -> tuple[Tensor, ...]:
    """`token_logprobs` of these responses, (rows, R) each, on the decoder's device: dense, or under their evictions.

    At the temperature of the rollout, with gradient where it is enabled; 0 in the padding. replay: each query attends
    to what it saw while sampling, which takes a rollout with a record.
    """
    device = decoder.embed_tokens.weight.device
    mask = r.mask[rows].to(device)  # (rows, R)
    tokens = r.tokens[rows, : int(r.lengths[rows].max())].to(device)  # (rows, T)
    record = [Replay(evicted_at[rows].to(device)) for evicted_at in r.evicted_at] if replay else None
    hidden = decoder.hidden(tokens, cache=record)  # (rows, T, hidden)
    row, step = mask.nonzero(as_tuple=True)  # (M,) each
    before = r.prompt_lengths[rows].to(device)[row] + step - 1  # the place whose logits predict the token
    how = {"temperature": r.temperature, "entropy": entropy}
    picked = token_logprobs(hidden[row, before], decoder.head, tokens[row, before + 1], **how)
    return tuple(torch.zeros(mask.shape, dtype=x.dtype, device=device).index_put((row, step), x) for x in picked)


def micro_batches(rows: Tensor, lengths: Tensor, micro_tokens: int) -> Iterator[Tensor]:
    """Split rows into batches of similar length with at most micro_tokens padded tokens (or a single row)."""
    batch: list[int] = []
    for row in rows[lengths[rows].argsort(descending=True, stable=True)].tolist():
        if batch and (len(batch) + 1) * int(lengths[batch[0]]) > micro_tokens:
            yield torch.tensor(batch)
            batch = []
        batch.append(row)
    if batch:
        yield torch.tensor(batch)


@torch.no_grad()
def rescore(decoder: Decoder, r: Rollout, micro_tokens: int, *, replay: bool = False) -> tuple[Tensor, Tensor]:
    """`response_logprobs` (logp_old or logp_ref) and entropies (N, R) of all, on the CPU, without gradient."""
    logp, entropy = torch.zeros_like(r.logp_sparse), torch.zeros_like(r.logp_sparse)
    mine = ranks.deal(torch.arange(len(r.tokens)), r.lengths)[ranks.rank()]
    with ranks.whole(decoder) as whole:
        for rows in tqdm(list(micro_batches(mine, r.lengths, micro_tokens)), "scoring", leave=False):
            scores = response_logprobs(whole, r, rows, replay=replay, entropy=True)
            logp[rows], entropy[rows] = (x.cpu() for x in scores)
    return ranks.total(logp), ranks.total(entropy)  # each row is 0 but on one rank


def memory(
    c: ModelConfig,
    cache: dict,
    rows: int,
    longest: int,
    *,
    dtype: torch.dtype,
    micro_tokens: int,
    gradient_checkpointing: bool = False,
    kl_coef: float = 0.0,
    replay: bool = False,
    devices: int = 1,
) -> dict[str, int]:
    """Bytes that training on sequences of at most `longest` tokens needs at its peaks, by part. Nothing is allocated.

    rows: sampled at a time; cache: its settings. The activations are an estimate within a tenth. Of several devices,
    what each needs: its part of all that belongs to a weight, and a whole copy to sample with.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(c).parameters())
    M, e = min(max(micro_tokens, longest), rows * longest), dtype.itemsize  # tokens of a micro-batch; bytes a number
    attention = (3 * c.heads + 2 * c.kv_heads) * c.head_dim
    layer = M * (8 * c.hidden_size + e * (4 * c.hidden_size + attention + 4 * c.intermediate_size))
    kept, again = (M * e * c.hidden_size, layer) if gradient_checkpointing else (layer, 0)  # until the backward pass
    # That of the head needs 3 copies of a chunk's fp32 logits and a gradient; that of a layer comes when they are gone.
    head = 3 * 4 * min(1024, M) * c.vocab_size + e * c.vocab_size * c.hidden_size
    mlp = 3 * M * e * c.intermediate_size
    how = {"dtype": dtype, "device": "meta"}
    return {
        "parameters": parameters,
        "weights": 4 * parameters // devices + (0 if dtype == torch.float32 and devices == 1 else e * parameters),
        "gradients": 4 * parameters // devices,
        "optimizer": 8 * parameters // devices,
        "reference": e * parameters // devices if kl_coef else 0,
        "activations": c.layers * kept + max(head, mlp + again),
        "record": c.layers * c.kv_heads * rows * longest * record_dtype(longest).itemsize if replay else 0,
        "cache": sum(cache_for(c, rows, longest, **cache, **how).nbytes.values()),
        "dense cache": sum(cache_for(c, rows, longest, compressor="full", **how).nbytes.values()),
    }
