"""Batched sampling with a compressed KV cache.

`rollout` samples G responses to each prompt and records `logp_sparse`, the log-prob that each sampled token had
under the policy that sampled it: the model's weights, attending to the compressed cache.

Responses are rows N = prompts * G, in the order of the prompts (AABB). Row i's token t is drawn by inverse CDF with
its own uniform number u[i, t], drawn on the CPU before sampling starts. So a response depends neither on the rows
that share its batch nor on the device.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from kvcache import KVCache
from model import Decoder, ModelConfig


@dataclass(frozen=True)
class Rollout:
    """N sampled responses, on the CPU. Padding is told by the lengths, never by a token id."""

    tokens: Tensor  # (N, T) prompt and response, padded with 0 on the right
    prompt_lengths: Tensor  # (N,)
    response_lengths: Tensor  # (N,) the sampled EOS included
    logp_sparse: Tensor  # (N, R) log-prob of each sampled token under the sampler, 0 in the padding
    finished: Tensor  # (N,) bool: ended with an EOS; the others were truncated
    cached_tokens: float  # keys held per layer after each step's cut, summed over rows and steps
    dense_tokens: float  # the same for a cache that never evicts
    cache_bytes: dict[str, int]  # allocated by part (KVCache.nbytes), the largest of all calls
    dense_bytes: int  # keys and values that a dense cache of the same rows allocates
    seconds: float
    evicted_at: list[Tensor] | None = None  # per layer (N, K, T), see KVCache.record

    @property
    def mask(self) -> Tensor:
        """(N, R) bool: the entries that belong to a response."""
        return torch.arange(self.logp_sparse.shape[1]) < self.response_lengths[:, None]

    @property
    def kv_saved(self) -> float:
        """Share of key-value tokens that a dense cache would have held and this one did not."""
        return 1 - self.cached_tokens / max(1, self.dense_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second, prefill included."""
        return float(self.response_lengths.sum()) / self.seconds

    def response(self, i: int) -> list[int]:
        """The sampled token ids of row i."""
        first = int(self.prompt_lengths[i])
        return self.tokens[i, first : first + int(self.response_lengths[i])].tolist()

    @staticmethod
    def cat(parts: list[Rollout]) -> Rollout:
        """The responses of several calls, one after the other, as if they were one."""

        def rows(name: str) -> Tensor:
            tensors = [getattr(part, name) for part in parts]
            width = max(t.shape[-1] for t in tensors)
            return torch.cat(
                [t if t.ndim == 1 else torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tensors]
            )

        largest = max(parts, key=lambda part: sum(part.cache_bytes.values()))
        return Rollout(
            **{
                name: rows(name) for name in ("tokens", "prompt_lengths", "response_lengths", "logp_sparse", "finished")
            },
            cached_tokens=sum(part.cached_tokens for part in parts),
            dense_tokens=sum(part.dense_tokens for part in parts),
            cache_bytes=largest.cache_bytes,
            dense_bytes=largest.dense_bytes,
            seconds=sum(part.seconds for part in parts),
        )


def right_pad(sequences: list[list[int]]) -> Tensor:
    """Token ids of unequal length as one (B, T) tensor, 0 in the padding."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in sequences], batch_first=True)


def sample(logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw one token per row from logits (B, V) with uniforms (B,) in [0, 1): (tokens (B,), log-probs (B,)).

    The log-prob is that of the full softmax at this temperature, in at least fp32, whatever top_p leaves out.
    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.
    """
    logp = (logits / (temperature or 1.0)).log_softmax(-1)  # (B, V)
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        p = logp.exp()
        if top_p < 1:  # nucleus (1904.09751): the fewest tokens that hold top_p of the probability
            ranked, order = p.sort(-1, descending=True)
            beyond = ranked.cumsum(-1) - ranked >= top_p  # never the first
            p = p.scatter(-1, order, ranked.masked_fill(beyond, 0))
        cdf = p.cumsum(-1)
        total = cdf[:, -1:]
        # Below the total even after rounding: the token found then has a probability above 0.
        threshold = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cdf, threshold, right=True)[:, 0].clamp(max=p.shape[-1] - 1)  # V where p is NaN
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def cache_for(config: ModelConfig, rows: int, max_length: int, **settings) -> KVCache:
    """An empty cache for `rows` sequences of this model; settings as for KVCache."""
    sizes = {name: getattr(config, name) for name in ("layers", "heads", "kv_heads", "head_dim")}
    return KVCache(rows=rows, max_length=max_length, **sizes, **settings)


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
    began = time.perf_counter()
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    N = len(prompts) * group_size
    noise = torch.rand(N, 1 + max_new_tokens, generator=generator)  # a row's numbers follow each other
    seeds, uniforms = (noise[:, 0] * (1 << 24)).long(), noise[:, 1:].to(device)

    # Prefill: each prompt once.
    lengths = torch.tensor([len(prompt) for prompt in prompts])  # (P,)
    tokens = right_pad(prompts).to(device)  # (P, T)
    places = torch.arange(tokens.shape[1])
    positions = places.expand(tokens.shape).masked_fill(places >= lengths[:, None], -1).to(device)
    cache = cache_for(
        model.config,
        len(prompts),
        max_length=tokens.shape[1] + max_new_tokens,
        compressor=compressor,
        budget=budget,
        buffer=buffer,
        window=window,
        seeds=seeds[::group_size],
        dtype=dtype,
        device=device,
    )
    if record:
        cache.record(tokens.shape[1] + max_new_tokens)
    hidden = model.hidden(tokens, positions, cache)  # (P, T, hidden)
    last = hidden[torch.arange(len(prompts), device=device), lengths.to(device) - 1]  # (P, hidden)
    logits = model.head(last).repeat_interleave(group_size, dim=0)  # (N, V)
    cache.expand(group_size)

    responses = torch.zeros(N, max_new_tokens, dtype=torch.long, device=device)
    logp_sparse = torch.zeros(N, max_new_tokens, dtype=logits.dtype, device=device)
    prompt_lengths = lengths.repeat_interleave(group_size)  # (N,)
    response_lengths = torch.full((N,), max_new_tokens)
    finished = torch.zeros(N, dtype=torch.bool)
    eos = torch.tensor(list(eos_ids), device=device)
    cached_tokens = dense_tokens = 0.0
    rows = torch.arange(N)  # the response that each active row of the cache belongs to
    for t in tqdm(
        range(max_new_tokens), desc="rollout", unit="step", leave=False, mininterval=0.5, disable=not progress
    ):
        cached_tokens += cache.tokens
        dense_tokens += float((prompt_lengths[rows] + t).sum())
        here = rows.to(device)
        token, logp = sample(logits, uniforms[here, t], temperature, top_p)  # (B,), (B,)
        responses[here, t], logp_sparse[here, t] = token, logp
        ended = torch.isin(token, eos).cpu()
        if ended.any():
            finished[rows[ended]], response_lengths[rows[ended]] = True, t + 1
            order = cache.compact(~ended)
            rows, token = rows[order], token[order.to(device)]
        if len(rows) == 0 or t + 1 == max_new_tokens:
            break
        positions = (prompt_lengths[rows] + t)[:, None].to(device)  # the number of tokens seen
        logits = model.head(model.hidden(token[:, None], positions, cache))[:, 0]  # (B, V)

    if not logp_sparse.isfinite().all():
        raise FloatingPointError(
            "the model's log-probs are not finite: its weights are too large for --dtype, or training drove them apart "
            "(take an older checkpoint, and lower --lr or --weight-decay)"
        )
    R = int(response_lengths.max())
    sequences = [
        prompt + ids[:n]
        for prompt, ids, n in zip(
            [p for p in prompts for _ in range(group_size)], responses.tolist(), response_lengths.tolist(), strict=True
        )
    ]
    item = torch.empty(0, dtype=dtype).element_size()
    dense_slots = N * int(tokens.shape[1] + max_new_tokens)
    return Rollout(
        tokens=right_pad(sequences),
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        logp_sparse=logp_sparse[:, :R].cpu(),
        finished=finished,
        cached_tokens=cached_tokens,
        dense_tokens=dense_tokens,
        cache_bytes=cache.nbytes,
        dense_bytes=2 * model.config.layers * model.config.kv_heads * dense_slots * model.config.head_dim * item,
        seconds=time.perf_counter() - began,
        evicted_at=[layer.evicted_at.cpu() for layer in cache.layers] if record else None,
    )
