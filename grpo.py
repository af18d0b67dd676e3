"""The Sparse-RL objective (arXiv 2601.10079) as pure functions on tensors.

Three policies, never mixed:

    logp_sparse   pi_sparse   the sampler: weights theta_old, attention over the compressed cache
    logp_old      pi_old      the same weights, dense attention, no gradient
    logp          pi_theta    the learner, dense, with gradient

    pi_theta / pi_sparse = (pi_old / pi_sparse) * (pi_theta / pi_old) = xi_t * w_t

    J = 1/N sum_i M_i 1/|o_i| sum_t [ xi_t min(w_t A_i, clip(w_t, 1 - e_lo, 1 + e_hi) A_i) - beta KL_t ]

    symbol   name here      meaning
    N        total          responses of one optimizer update, rejected ones included
    A_i      advantages     reward less its group's mean, over the group's std           `group_advantages`
    xi_t     xi             sparsity consistency ratio, a constant (no gradient)         `consistency_ratio`
    M_i      accepted       1 if xi_t >= epsilon for every token of response i, else 0   `rejection_mask`
    w_t      staleness      exp(logp - logp_old)                                         `policy_loss`
    KL_t     k3             exp(ref - new) - (ref - new) - 1 against the step-0 weights  `kl_to_reference`
    beta     kl_coef

Rejection drops responses that the dense policy could hardly have produced; the weights xi_t move the other tokens
from the sampler's distribution to the dense one. Per token that is exact: E_sparse[sum_t xi_t f] is the sum over t
of E[f] with the prefix from pi_sparse, token t from pi_old and the continuation from pi_sparse. It is not the full
product of ratios, and does not always lower the bias.

`correction` names which parts are used: "sparse-rl" (both), "reject", "reweight", "none" (the naive baseline), and
"released", what the paper's code does: it vetoes responses as above, also drops single tokens with raw xi outside
[0.5, 1.5], truncates xi at 1.5, then divides the weights by their mean over the kept tokens (of the whole update
here, of a micro-batch there; so a truncated weight may end above 1.5), and divides a response by its kept tokens.

The k3 term's value estimates KL(new || ref) under samples of `new`, its gradient is that of KL(ref || new); under
sparse samples it is neither exactly.

Shapes: N responses, R response tokens, G group size, V vocabulary. Everything is computed in at least fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model import wide

CORRECTIONS = ("sparse-rl", "released", "reject", "reweight", "none")
AGGREGATIONS = ("response", "token", "constant")  # GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783
MAX_LOG_RATIO = 20.0  # of the ratios that enter the loss: exp(20) is large and still far from overflow
KEEP_TOKENS = (0.5, 1.5)  # "released": tokens with xi outside are dropped, and weights truncated above


# --------------------------------------------------------------------------------------------------- advantages


def group_advantages(rewards: Tensor, group_size: int, *, normalize_std: bool = True) -> Tensor:
    """A (N,) of rewards (N,): row i belongs to group i // group_size, by position, whatever its prompt.

    (r - mean) / (unbiased std + 1e-6), or r - mean without normalize_std (Dr. GRPO). Exactly 0 in a group whose
    rewards are all equal. Rejected responses count in mean and std, as in the paper. Raises ValueError if N is not
    a multiple of group_size.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size}")
    groups = wide(rewards).view(-1, group_size)  # (N/G, G)
    centred = groups - groups.mean(1, keepdim=True)
    if normalize_std and group_size > 1:
        centred = centred / (groups.std(1, keepdim=True) + 1e-6)
    return centred.masked_fill((groups == groups[:, :1]).all(1, keepdim=True), 0).flatten()


# ---------------------------------------------------------------------------------------------- dense log-probs


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
        logp = (wide(head(h)) / temperature).log_softmax(-1)  # (chunk, V)
        found = logp.gather(-1, target[:, None])[:, 0]
        if not entropy:
            return (found,)
        every = logp.detach().clamp(min=torch.finfo(logp.dtype).min)  # 0 log 0 is 0
        return found, -every.exp().mul_(every).sum(-1)

    pieces = zip(hidden.flatten(0, -2).split(chunk), targets.flatten().split(chunk), strict=True)
    apply = partial(checkpoint, piece, use_reentrant=False) if torch.is_grad_enabled() else piece
    outputs = [apply(h, t) for h, t in pieces]
    return tuple(torch.cat(parts).view(targets.shape) for parts in zip(*outputs, strict=True))


def response_logprobs(decoder, tokens: Tensor, prompt_lengths: Tensor, mask: Tensor, **settings) -> tuple[Tensor, ...]:
    """Dense log-probs (N, R) of the responses in tokens (N, T), logp_old, logp or logp_ref, and entropy if asked for.

    mask (N, R) marks each response's tokens; entries outside it are 0. Settings as for `token_logprobs`; the
    temperature is that of the sampler.
    """
    hidden = decoder.hidden(tokens)  # (N, T, hidden)
    row, step = mask.nonzero(as_tuple=True)  # (M,) each
    before = prompt_lengths[row] + step - 1  # the place whose logits predict the token
    picked = token_logprobs(hidden[row, before], decoder.head, tokens[row, before + 1], **settings)
    return tuple(torch.zeros(mask.shape, dtype=x.dtype, device=x.device).index_put((row, step), x) for x in picked)


# --------------------------------------------------------------------------------------------- the correction


def log_ratio(top: Tensor, bottom: Tensor, mask: Tensor) -> Tensor:
    """top - bottom (N, R) in at least fp32, 0 outside the mask, whatever stands there (NaN included)."""
    mask = mask.bool()
    return torch.where(mask, wide(top), 0) - torch.where(mask, wide(bottom), 0)


def consistency_ratio(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor) -> Tensor:
    """xi (N, R) = pi_old / pi_sparse of each token, without gradient; 1 outside the mask.

    Taken in log space and clamped to exp(+-20).
    """
    return log_ratio(logp_old, logp_sparse, mask).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def rejection_mask(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor, epsilon: float = 1e-4) -> Tensor:
    """M (N,) bool, Sparsity-Aware Rejection Sampling: True if every token of the response has xi >= epsilon.

    The smallest single ratio decides, raw and in log space (exp(log 1e-4) >= 1e-4 is false in floating point). A
    ratio that is not a number rejects. Raises ValueError if epsilon is not above 0.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, not {epsilon}: use correction 'reweight' to reject nothing")
    return (log_ratio(logp_old, logp_sparse, mask) >= math.log(epsilon)).logical_or(~mask.bool()).all(1)


@dataclass(frozen=True)
class Correction:
    """What a correction makes of a batch: accepted (N,) bool, kept (N, R) bool, weights (N, R), 0 where not kept."""

    accepted: Tensor
    kept: Tensor
    weights: Tensor

    @property
    def weight_mean(self) -> Tensor:
        """Mean weight of the kept tokens (1 if there is none): what "released" divides by, once per update."""
        count = self.kept.sum()
        return torch.where(count > 0, self.weights.sum() / count.clamp(min=1), 1.0)


def correct(
    logp_old: Tensor,
    logp_sparse: Tensor,
    mask: Tensor,
    correction: str = "sparse-rl",
    *,
    epsilon: float = 1e-4,
    xi_cap: float | None = None,
) -> Correction:
    """Which responses and tokens count, and with which weight. xi_cap truncates the weights (off by default)."""
    if correction not in CORRECTIONS:
        raise ValueError(f"unknown correction {correction!r}: choose from {', '.join(CORRECTIONS)}")
    mask = mask.bool()
    accepted = mask.new_ones(len(mask))
    if correction in ("sparse-rl", "released", "reject"):
        accepted = rejection_mask(logp_old, logp_sparse, mask, epsilon)
    kept = mask & accepted[:, None]
    xi = consistency_ratio(logp_old, logp_sparse, kept)
    if correction == "released":
        kept = kept & (xi >= KEEP_TOKENS[0]) & (xi <= KEEP_TOKENS[1])
        xi_cap = KEEP_TOKENS[1] if xi_cap is None else xi_cap
    if correction in ("reject", "none"):
        xi = torch.ones_like(xi)
    if xi_cap is not None:
        xi = xi.clamp(max=xi_cap)
    return Correction(accepted, kept, xi.masked_fill(~kept, 0))


def teaches(advantages: Tensor, correction: Correction) -> Tensor:
    """(N,) bool: the response has a kept token and an advantage other than 0. The gradient of all others is 0.

    An update without such a response is skipped whole: AdamW would move the weights at zero gradient, by momentum
    and weight decay.
    """
    return (advantages != 0) & correction.kept.any(1)


# --------------------------------------------------------------------------------------------------- the loss


def kl_to_reference(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
    """k3 (N, R) = exp(ref - new) - (ref - new) - 1, never negative, 0 outside the mask (Schulman 2020)."""
    difference = log_ratio(logp_ref, logp, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.expm1() - difference  # expm1: exp(d) - 1 without losing the digits of a small d


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    logp_sparse: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    logp_ref: Tensor | None = None,
    correction: str = "sparse-rl",
    epsilon: float = 1e-4,
    clip: tuple[float, float] = (0.2, 0.2),
    kl_coef: float = 0.0,
    xi_cap: float | None = None,
    aggregation: str = "response",
    max_length: int | None = None,
    total: int | None = None,
    total_tokens: int | None = None,
    weight_mean: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J, to be minimised, and metrics, of logp, logp_old, logp_sparse, mask (N, R) and advantages (N,).

    A micro-batch of an update passes the update's own `total` (responses), and `total_tokens` and `weight_mean`
    where they matter (aggregation "token"; correction "released"): then losses, gradients and metrics of the
    micro-batches add up to those of the update. aggregation: "response" divides a response by its own length and
    the sum by `total`; "token" divides by all tokens; "constant" by total * max_length.

    Metrics (0-dim, detached): policy_loss; kl_ref, aggregated like it; clip_low and clip_high, the share of tokens
    whose ratio is clipped and whose gradient is therefore 0; clamped, the number of log-ratios beyond +-20.
    Raises ValueError for unknown names and missing totals.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}: choose from {', '.join(AGGREGATIONS)}")
    part = total is not None and total != len(mask)
    if part and aggregation == "token" and total_tokens is None:
        raise ValueError("a micro-batch needs the update's total_tokens for aggregation 'token'")
    if part and correction == "released" and weight_mean is None:
        raise ValueError("a micro-batch needs the update's weight_mean for correction 'released'")
    if aggregation == "constant" and max_length is None:
        raise ValueError("aggregation 'constant' needs max_length, the tokens a response may have")
    if kl_coef and logp_ref is None:
        raise ValueError("kl_coef needs logp_ref, the reference model's log-probs")

    mask = mask.bool()
    c = correct(logp_old, logp_sparse, mask, correction, epsilon=epsilon, xi_cap=xi_cap)
    xi = c.weights
    if correction == "released":
        xi = xi / (c.weight_mean if weight_mean is None else weight_mean)

    raw = log_ratio(logp, logp_old.detach(), c.kept)
    w = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # (N, R), 1 where not kept
    A = wide(advantages)[:, None]  # (N, 1)
    policy = xi * torch.minimum(w * A, w.clamp(1 - clip[0], 1 + clip[1]) * A)  # (N, R), 0 where not kept
    kl = torch.zeros_like(policy) if logp_ref is None else kl_to_reference(logp, logp_ref.detach(), c.kept)

    all_tokens = mask.sum() if total_tokens is None else total_tokens
    responses = len(mask) if total is None else total
    lengths = c.kept.sum(1, keepdim=True).clamp(min=1)  # (N, 1); a rejected response is 0 over 1
    scale = {
        "response": lambda: responses * lengths,
        "token": lambda: max(1, int(all_tokens)),
        "constant": lambda: responses * max_length,
    }[aggregation]()

    loss = ((kl_coef * kl - policy) / scale).sum()
    with torch.no_grad():
        tokens = max(1, int(all_tokens))
        log_xi = log_ratio(logp_old, logp_sparse, c.kept)
        metrics = {
            "policy_loss": -(policy / scale).sum(),
            "kl_ref": (kl / scale).sum(),
            "clip_low": (c.kept & (w < 1 - clip[0]) & (A < 0)).sum() / tokens,
            "clip_high": (c.kept & (w > 1 + clip[1]) & (A > 0)).sum() / tokens,
            "clamped": (raw.abs() > MAX_LOG_RATIO).sum() + (log_xi.abs() > MAX_LOG_RATIO).sum(),
        }
    return loss, {name: value.detach() for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------- metrics


def mismatch_metrics(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor, epsilon: float = 1e-4) -> dict[str, float]:
    """How far the sampler is from the dense policy, over all sampled tokens, before anything is dropped.

    rejected      share of responses with some xi < epsilon (the veto of "sparse-rl", applied or not)
    xi_mean, xi_min, xi_p01, xi_p05, xi_p50, xi_p95, xi_p99   of xi = pi_old / pi_sparse over tokens
    log_xi_abs    mean |log xi|, nats
    sampler_kl    mean(xi - 1 - log xi), nats: estimates KL(pi_sparse || pi_old)
    ess           effective sample size of the weights xi, as a share of the tokens: (sum xi)^2 / (n sum xi^2)

    For a dense rollout these are the noise floor of the arithmetic.
    """
    mask = mask.bool()
    accepted = rejection_mask(logp_old, logp_sparse, mask, epsilon)
    log_xi = (
        log_ratio(logp_old, logp_sparse, mask)[mask].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).nan_to_num(-MAX_LOG_RATIO)
    )
    if not len(log_xi):
        log_xi = log_xi.new_zeros(1)
    ranked, xi = log_xi.sort().values, log_xi.exp()
    quantile = {f"xi_p{q:02d}": ranked[round(q / 100 * (len(ranked) - 1))].exp() for q in (1, 5, 50, 95, 99)}
    values = {
        "rejected": (~accepted).float().mean(),
        "xi_mean": xi.mean(),
        "xi_min": xi.min(),
        **quantile,
        "log_xi_abs": log_xi.abs().mean(),
        "sampler_kl": (log_xi.expm1() - log_xi).mean(),
        "ess": xi.sum() ** 2 / (len(xi) * (xi**2).sum()),
    }
    return {name: float(value) for name, value in values.items()}


def reward_metrics(rewards: Tensor, group_size: int) -> dict[str, float]:
    """reward_mean and reward_std over the step's responses; groups_without_signal, the share with equal rewards."""
    groups = wide(rewards).view(-1, group_size)
    return {
        "reward_mean": float(groups.mean()),
        "reward_std": float(groups.std()) if groups.numel() > 1 else 0.0,
        "groups_without_signal": float((groups == groups[:, :1]).all(1).float().mean()),
    }
