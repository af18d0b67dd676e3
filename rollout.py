"""Batched sampling with a compressed KV cache, and dense scoring of what was sampled.

`rollout` samples G responses to each prompt and records `logp_sparse`, the log-prob that each sampled token had
under the policy that sampled it: the model's weights, attending to the compressed cache. `rescore` and
`dense_logprobs` give the log-probs of the same tokens under dense attention: logp_old, logp_ref and, with gradient,
logp. Both take the temperature of the rollout.

Responses are rows N = prompts * G, in the order of the prompts (AABB). Row i's token t is drawn by inverse CDF with
its own uniform number u[i, t], drawn on the CPU before sampling starts. So, but for rounding, a response depends
neither on the rows that share its batch nor on the device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from kvcache import EMPTY, KVCache
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
    dense_tokens: float  # the same for a cache that never evicts
    cache_bytes: dict[str, int]  # allocated by part (KVCache.nbytes), the largest of all batches
    dense_bytes: int  # keys and values that a dense cache of that batch allocates
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

    @property
    def kv_saved(self) -> float:
        """Share of key-value tokens that a dense cache would have held and this one did not."""
        return 1 - self.cached_tokens / max(1, self.dense_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second, prefill included."""
        return float(self.response_lengths.sum()) / self.seconds

    @property
    def statistics(self) -> dict[str, float]:
        """What is reported of a rollout."""
        return {
            "response_length": float(self.response_lengths.double().mean()),
            "truncated": 1 - float(self.finished.double().mean()),
            "kv_saved": self.kv_saved,
            "cache_bytes": sum(self.cache_bytes.values()),
            "dense_bytes": self.dense_bytes,
            "tokens_per_second": self.tokens_per_second,
        }

    def response(self, i: int) -> list[int]:
        """The sampled token ids of row i."""
        return self.tokens[i, self.prompt_lengths[i] : self.lengths[i]].tolist()

    @staticmethod
    def cat(parts: list[Rollout]) -> Rollout:
        """The responses of several batches, one after the other, as if they were one."""
        largest = max(parts, key=lambda part: sum(part.cache_bytes.values()))
        records = [part.evicted_at for part in parts if part.evicted_at is not None]
        rows = ("tokens", "prompt_lengths", "response_lengths", "logp_sparse", "finished")
        return Rollout(
            **{name: cat_rows([getattr(part, name) for part in parts]) for name in rows},
            temperature=parts[0].temperature,
            cached_tokens=sum(part.cached_tokens for part in parts),
            dense_tokens=sum(part.dense_tokens for part in parts),
            cache_bytes=largest.cache_bytes,
            dense_bytes=largest.dense_bytes,
            seconds=sum(part.seconds for part in parts),
            evicted_at=[cat_rows(list(layer), EMPTY) for layer in zip(*records, strict=True)] if records else None,
        )


def cat_rows(tensors: list[Tensor], padding: int = 0) -> Tensor:
    """Join tensors (rows, ...) of unequal last dimension, padded on its right."""
    width = max(t.shape[-1] for t in tensors)
    return torch.cat([t if t.ndim == 1 else F.pad(t, (0, width - t.shape[-1]), value=padding) for t in tensors])


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
        tokens = first_above(p.cumsum(-1).mul_(p.sign_()), uniforms)  # 0 where p is 0: such a token is never drawn
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def first_above(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """(B,) the first place in each row of cdf (B, V) above uniforms (B,) times the row's largest value; 0 if none is.

    Not a binary search: a running sum that is taken in parallel may fall by a rounding.
    """
    total = cdf.amax(-1, keepdim=True)  # (B, 1)
    # u * total < total also when rounded, as no u of its precision is nearer to 1 than half a unit in the last place
    return (cdf > uniforms[:, None] * total).byte().argmax(-1)


def right_pad(sequences: list[list[int]]) -> Tensor:
    """Token ids of unequal length as one (B, T) tensor, 0 in the padding."""
    return pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in sequences], batch_first=True)


def cache_for(config: ModelConfig, rows: int, max_length: int, **settings) -> KVCache:
    """An empty cache for `rows` sequences of this model; settings as for KVCache."""
    sizes = {name: getattr(config, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
    return KVCache(rows=rows, max_length=max_length, **sizes, **settings)


def prefill(model: Decoder, prompts: list[list[int]], cache: KVCache) -> Tensor:
    """Put each prompt into its row of the cache. Returns the logits (P, V) that follow it.

    Neighbours of one length at a time: where there is no padding, a prompt's numbers do not depend on its batch-mates
    (in bf16 they would: attention rounds otherwise at another padded length).
    """
    device = model.embed_tokens.weight.device
    last, first = [], 0  # the hidden states of the last tokens
    for length, same in itertools.groupby(prompts, key=len):
        tokens = torch.tensor(list(same), device=device)  # (b, length)
        last.append(model.hidden(tokens, cache=cache.rows(first, first + len(tokens)))[:, length - 1])
        first += len(tokens)
    return model.head(torch.cat(last))


def decode(
    model: Decoder,
    cache: KVCache,
    logits: Tensor,
    prompt_lengths: Tensor,
    uniforms: Tensor,
    eos_ids: list[int] | tuple[int, ...],
    temperature: float,
    top_p: float,
    progress: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Sample until each row ends, from the logits (N, V) after its prompt, with uniforms (N, R). Finished rows leave.

    Returns the sampled tokens (N, R) and their log-probs (N, R) on the device, the responses' lengths (N,) and which
    are finished (N,) on the CPU, and the keys held per layer, summed over rows and steps.
    """
    (N, R), device = uniforms.shape, logits.device
    tokens = torch.zeros(N, R, dtype=torch.long, device=device)
    logp_sparse = torch.zeros(N, R, dtype=logits.dtype, device=device)
    lengths, finished = torch.full((N,), R), torch.zeros(N, dtype=torch.bool)
    eos = torch.tensor(list(eos_ids), device=device)
    positions = prompt_lengths.to(device)[:, None]  # (B, 1) of the next token: the number of tokens seen
    rows = torch.arange(N)  # (B,) the response that each row of the cache belongs to
    at, cached = rows.to(device), 0.0
    for t in tqdm(range(R), desc="rollout", unit="step", leave=False, mininterval=0.5, disable=not progress):
        cached += cache.tokens
        token, logp = sample(logits, uniforms[at, t], temperature, top_p)  # (B,), (B,)
        tokens[at, t], logp_sparse[at, t] = token, logp
        ended = torch.isin(token, eos).cpu()  # the one wait for the device in a step
        if ended.any():
            finished[rows[ended]], lengths[rows[ended]] = True, t + 1
            order = cache.compact(~ended)
            rows, order = rows[order], order.to(device)
            at, token, positions = at[order], token[order], positions[order]
        if len(rows) == 0 or t + 1 == R:
            break
        logits = model.head(model.hidden(token[:, None], positions, cache))[:, 0]  # (B, V)
        positions = positions + 1
    return tokens, logp_sparse, lengths, finished, cached


@torch.no_grad()
def rollout(
    model: Decoder,
    prompts: list[list[int]],
    *,
    group_size: int,
    max_new_tokens: int,
    eos_ids: list[int] | tuple[int, ...],
    temperature: float = 1.0,
    top_p: float = 1.0,
    compressor: str = "snapkv",
    budget: int = 512,
    buffer: int = 128,
    window: int = 8,
    generator: torch.Generator | None = None,
    record: bool = False,
    progress: bool = False,
) -> Rollout:
    """Sample group_size responses to each prompt (a list of token ids), of at most max_new_tokens tokens.

    A row ends at any of eos_ids; the EOS belongs to the response. generator: a CPU generator for the uniform
    numbers. record: also return when each key was evicted. progress: show a bar.
    Raises ValueError for an empty prompt, or settings that a cache cannot have; FloatingPointError if a sampled
    token's log-prob is not finite.
    """
    prompts = [list(prompt) for prompt in prompts]
    if not prompts or not all(prompts):
        raise ValueError("rollout needs at least one prompt, and at least one token in each")
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size {group_size} and max_new_tokens {max_new_tokens} must be at least 1")
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} must be 0 (greedy) or above, and top_p {top_p} in (0, 1]")
    began, c, weight = time.perf_counter(), model.config, model.embed_tokens.weight
    N, longest = len(prompts) * group_size, max(map(len, prompts)) + max_new_tokens
    noise = torch.rand(N, 1 + max_new_tokens, generator=generator)  # a row's numbers follow each other
    seeds, uniforms = (noise[:, 0] * (1 << 24)).long(), noise[:, 1:].to(weight.device)  # (N,), (N, max_new_tokens)
    settings = {"compressor": compressor, "budget": budget, "buffer": buffer, "window": window}
    where = {"dtype": weight.dtype, "device": weight.device}
    cache = cache_for(c, len(prompts), longest, seeds=seeds[::group_size], **settings, **where)
    if record:
        cache.record(longest)
    logits = prefill(model, prompts, cache).repeat_interleave(group_size, dim=0)  # (N, V)
    cache.expand(group_size)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(group_size)  # (N,)
    sampled, logp_sparse, lengths, finished, cached = decode(
        model, cache, logits, prompt_lengths, uniforms, eos_ids, temperature, top_p, progress
    )
    if not logp_sparse.isfinite().all():
        raise FloatingPointError(
            "the model's log-probs are not finite: its weights are too large for its dtype, or training drove them "
            "apart (take an older checkpoint, a lower learning rate or less weight decay)"
        )
    responses = [ids[:n] for ids, n in zip(sampled.tolist(), lengths.tolist(), strict=True)]
    return Rollout(
        tokens=right_pad([prompts[i // group_size] + ids for i, ids in enumerate(responses)]),
        prompt_lengths=prompt_lengths,
        response_lengths=lengths,
        logp_sparse=logp_sparse[:, : int(lengths.max())].cpu(),
        finished=finished,
        temperature=temperature or 1.0,  # greedy log-probs are those of temperature 1
        cached_tokens=cached,
        dense_tokens=float((lengths * prompt_lengths + lengths * (lengths - 1) // 2).sum()),
        cache_bytes=cache.nbytes,
        dense_bytes=2 * c.layers * c.kv_heads * c.head_dim * N * longest * weight.element_size(),
        seconds=time.perf_counter() - began,
        evicted_at=[layer.evicted_at.cpu() for layer in cache.layers] if record else None,
    )


def rollout_batches(
    model: Decoder, prompts: list[list[int]], *, group_size: int, rows: int, progress: bool = False, **settings
) -> Rollout:
    """`rollout` of at most `rows` responses (at least a group) at a time: less memory, the same but for rounding."""
    size = max(1, rows // group_size)
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    bar = tqdm(batches, desc="batches", leave=False, disable=not progress or len(batches) == 1)
    return Rollout.cat([rollout(model, batch, group_size=group_size, progress=progress, **settings) for batch in bar])


# ------------------------------------------------------------------------------------------------ dense scoring


def token_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
) -> tuple[Tensor, ...]:
    """Log-prob of targets (...) and, if asked for, entropy (...), in nats, of softmax(head(hidden) / temperature).

    hidden (..., hidden). The head is applied to `chunk` tokens at a time, and again in the backward pass, so that
    never more than chunk x V logits exist. The entropy carries no gradient.
    """

    def piece(h: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logp = log_softmax_at(head(h), temperature)  # (chunk, V)
        found = logp.gather(-1, target[:, None])[:, 0]
        if not entropy:
            return (found,)
        every = logp.detach().clamp(min=torch.finfo(logp.dtype).min)  # 0 log 0 is 0
        return found, -every.exp().mul_(every).sum(-1)

    pieces = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True)
    apply = partial(checkpoint, piece, use_reentrant=False) if torch.is_grad_enabled() else piece
    outputs = [apply(h, t) for h, t in pieces]
    return tuple(torch.cat(parts).view(targets.shape) for parts in zip(*outputs, strict=True))


def dense_logprobs(decoder: Decoder, r: Rollout, rows: Tensor, *, entropy: bool = False) -> tuple[Tensor, ...]:
    """Dense log-probs and, if asked for, entropies of these responses, (rows, R) each, on the decoder's device.

    At the temperature of the rollout, with gradient where it is enabled; 0 in the padding.
    """
    device = decoder.embed_tokens.weight.device
    mask = r.mask[rows].to(device)  # (rows, R)
    tokens = r.tokens[rows, : int(r.lengths[rows].max())].to(device)  # (rows, T)
    hidden = decoder.hidden(tokens)  # (rows, T, hidden)
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
    yield torch.tensor(batch)


@torch.no_grad()
def rescore(decoder: Decoder, r: Rollout, micro_tokens: int) -> tuple[Tensor, Tensor]:
    """Dense log-probs (logp_old or logp_ref) and entropies (N, R) of a rollout, on the CPU, without gradient."""
    logp, entropy = torch.zeros_like(r.logp_sparse), torch.zeros_like(r.logp_sparse)
    for rows in tqdm(list(micro_batches(torch.arange(len(r.tokens)), r.lengths, micro_tokens)), "scoring", leave=False):
        logp[rows], entropy[rows] = (x.cpu() for x in dense_logprobs(decoder, r, rows, entropy=True))
    return logp, entropy


# ------------------------------------------------------------------------------------------------------- memory


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
) -> dict[str, int]:
    """Bytes that training on sequences of at most `longest` tokens needs at its peaks, by part. Nothing is allocated.

    weights, gradients, optimizer: 4, 4 and 8 bytes a parameter in fp32, and those of the copy in another dtype.
    cache, dense cache: for the rows sampled at a time, 2 L B K (budget + buffer) D itemsize and a little.
    activations: estimated within a tenth. With e bytes an item and M tokens of a micro-batch, each layer keeps
    M (8 hidden + e (4 hidden + 3 H D + 2 K D + 4 intermediate)), with checkpointing M e hidden. To that comes the
    larger of two backward passes: the head's, 3 copies of 1,024 tokens' fp32 logits and a gradient of e V hidden, and
    a layer's, 3 M e intermediate and, with checkpointing, what the layer keeps otherwise.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(c).parameters())
    sizes = {"rows": rows, "max_length": longest, "device": "meta", "dtype": dtype}
    sparse, dense = (cache_for(c, **settings, **sizes) for settings in (cache, {"compressor": "full"}))
    M, e = min(max(micro_tokens, longest), rows * longest), dtype.itemsize
    attention = 3 * c.heads * c.head_dim + 2 * c.kv_heads * c.head_dim
    layer = 8 * c.hidden_size + e * (4 * c.hidden_size + attention + 4 * c.intermediate_size)
    kept, again = (e * c.hidden_size, layer) if gradient_checkpointing else (layer, 0)
    head = 3 * 4 * min(1024, M) * c.vocab_size + e * c.vocab_size * c.hidden_size
    return {
        "parameters": parameters,
        "weights": (4 if dtype == torch.float32 else 4 + e) * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters,
        "reference": e * parameters if kl_coef else 0,
        "activations": M * c.layers * kept + max(head, M * (3 * e * c.intermediate_size + again)),
        "cache": sum(sparse.nbytes.values()),
        "dense cache": sum(dense.nbytes.values()),
    }
