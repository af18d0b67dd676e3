"""The Sparse-RL objective (arXiv 2601.10079) as pure functions on tensors.

Three policies, never mixed, each with its log-prob of every sampled token:

    logp_sparse   pi_sparse   the sampler: weights theta_old, attention over the compressed cache
    logp_old      pi_old      the same weights, dense attention, no gradient
    logp          pi_theta    the learner, dense, with gradient

    pi_theta / pi_sparse = (pi_old / pi_sparse) * (pi_theta / pi_old) = xi_t * w_t

    J = 1/N sum_i M_i 1/|o_i| sum_t [ xi_t min(w_t A_i, clip(w_t, 1 - e_lo, 1 + e_hi) A_i) - beta KL_t ]

    symbol       name here      meaning
    A_i          advantages     reward less its group's mean, over the group's std           `group_advantages`
    xi_t         weights        sparsity consistency ratio, a constant (no gradient)         `consistency_ratio`
    M_i          accepted       1 if xi_t >= epsilon for every token of response i, else 0   `rejection_mask`
    N |o_i|      denominators   N: all responses of an update, rejected ones included        `correct`
    w_t          w              staleness ratio exp(logp - logp_old)                         `surrogate_loss`
    KL_t, beta   kl, kl_coef    exp(ref - new) - (ref - new) - 1 against the step-0 weights  `kl_to_reference`

Rejection drops responses that the dense policy could hardly have produced; the weights xi_t move the other tokens from
the sampler's distribution to the dense one. Per token that is exact: E_sparse[sum_t xi_t f] is the sum over t of E[f]
with the prefix from pi_sparse, token t from pi_old and the continuation from pi_sparse. It is not the full product of
ratios, and does not always lower the bias.

`correction` names what is used: "sparse-rl" (both), "reject", "reweight", "none" (the naive baseline), or "released",
what the paper's code does: it vetoes responses as above, also drops single tokens with raw xi outside [0.5, 1.5],
truncates xi at 1.5, then divides the weights by their mean over all tokens, dropped and vetoed ones included (of the
whole update here, of a micro-batch there), and a response by its kept tokens. So a truncated weight may end above 1.5.

Shapes: N responses, R response tokens, G group size. Everything is computed in at least fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from model import wide

CORRECTIONS = ("sparse-rl", "released", "reject", "reweight", "none")
AGGREGATIONS = ("response", "token", "constant")  # GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783
MAX_LOG_RATIO = 20.0  # of the ratios that enter the loss: exp(20) is large and still far from overflow
KEEP_TOKENS = (0.5, 1.5)  # "released": tokens with xi outside are dropped, and weights truncated above


def group_advantages(rewards: Tensor, group_size: int, *, normalize_std: bool = True) -> Tensor:
    """A (N,) of rewards (N,): row i belongs to group i // group_size, by position, whatever its prompt.

    (r - mean) / (unbiased std + 1e-6), or r - mean without normalize_std (Dr. GRPO). Exactly 0 in a group of equal
    rewards. Rejected responses count in mean and std. Raises ValueError if N is not a multiple of group_size.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not divide into groups of {group_size}")
    groups = wide(rewards).view(-1, group_size)  # (N/G, G)
    centred = groups - groups.mean(1, keepdim=True)
    if normalize_std and group_size > 1:
        centred = centred / (groups.std(1, keepdim=True) + 1e-6)
    return centred.masked_fill((groups == groups[:, :1]).all(1, keepdim=True), 0).flatten()


def log_ratio(top: Tensor, bottom: Tensor, mask: Tensor) -> Tensor:
    """top - bottom (N, R) in at least fp32, 0 outside the mask (bool), whatever stands there (NaN included)."""
    return torch.where(mask, wide(top), 0) - torch.where(mask, wide(bottom), 0)


def consistency_ratio(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor) -> Tensor:
    """xi (N, R) = pi_old / pi_sparse of each token, clamped to exp(+-20), without gradient; 1 outside the mask."""
    return log_ratio(logp_old, logp_sparse, mask).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def rejection_mask(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor, epsilon: float = 1e-4) -> Tensor:
    """M (N,) bool, Sparsity-Aware Rejection Sampling: True if every token of the response has xi >= epsilon.

    The smallest single ratio decides, raw and in log space (exp(log 1e-4) >= 1e-4 is false in floating point); one that
    is not a number rejects. Raises ValueError if epsilon is not above 0.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, not {epsilon}: use correction 'reweight' to reject nothing")
    return (log_ratio(logp_old, logp_sparse, mask) >= math.log(epsilon)).logical_or(~mask).all(1)


@dataclass(frozen=True)
class Correction:
    """All of J that does not depend on the learner, for the N responses of an update; index it with rows for theirs."""

    accepted: Tensor  # (N,) bool: M
    kept: Tensor  # (N, R) bool: the tokens that enter the sums
    weights: Tensor  # (N, R): xi as it is used, 0 where not kept
    denominators: Tensor  # (N, 1): what each of a response's terms is divided by
    tokens: Tensor  # (N, 1): the sampled tokens of the whole update, the same number in every row
    clamped: Tensor  # (N,): log-ratios of kept tokens beyond +-20

    def __getitem__(self, rows: Tensor) -> Correction:
        return Correction(*(getattr(self, f.name)[rows] for f in fields(self)))

    def to(self, device: torch.device) -> Correction:
        """The same on another device."""
        return Correction(*(getattr(self, f.name).to(device) for f in fields(self)))


def correct(
    logp_old: Tensor,
    logp_sparse: Tensor,
    mask: Tensor,
    correction: str = "sparse-rl",
    *,
    epsilon: float = 1e-4,
    xi_cap: float | None = None,
    aggregation: str = "response",
    max_length: int | None = None,
) -> Correction:
    """The correction of a whole update from logp_old, logp_sparse and mask (N, R).

    xi_cap truncates the weights. aggregation: "response" divides a response by its own kept tokens and by N, "token" by
    all tokens of the update, "constant" by N * max_length. Raises ValueError for unknown names, "constant" without
    max_length, or an epsilon that `rejection_mask` refuses.
    """
    for what, name, known in (("correction", correction, CORRECTIONS), ("aggregation", aggregation, AGGREGATIONS)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: choose from {', '.join(known)}")
    if aggregation == "constant" and max_length is None:
        raise ValueError("aggregation 'constant' needs max_length, the tokens a response may have")
    N, released = len(mask), correction == "released"
    rejects = correction in ("sparse-rl", "released", "reject")
    accepted = rejection_mask(logp_old, logp_sparse, mask, epsilon) if rejects else mask.new_ones(N)  # (N,)
    kept, xi = mask & accepted[:, None], consistency_ratio(logp_old, logp_sparse, mask)  # (N, R) each
    weights = torch.ones_like(xi) if correction in ("reject", "none") else xi
    if xi_cap is None:
        xi_cap = KEEP_TOKENS[1] if released else math.inf
    weights = weights.clamp(max=xi_cap)
    if released:
        kept = kept & (xi >= KEEP_TOKENS[0]) & (xi <= KEEP_TOKENS[1])
        weights = weights / (weights.masked_fill(~mask, 0).nansum() / mask.sum())
    denominators = tokens = mask.sum().clamp(min=1).expand(N, 1)  # (N, 1)
    if aggregation == "response":
        denominators = N * kept.sum(1, keepdim=True).clamp(min=1)  # a response without kept tokens is 0 over 1
    elif aggregation == "constant":
        denominators = torch.full_like(tokens, N * max_length)
    weights = weights.masked_fill(~kept, 0)  # without a kept token, whatever their mean is
    clamped = (log_ratio(logp_old, logp_sparse, kept).abs() > MAX_LOG_RATIO).sum(1)  # (N,)
    return Correction(accepted, kept, weights, denominators, tokens, clamped)


def teaches(advantages: Tensor, c: Correction) -> Tensor:
    """(N,) bool: the response has a kept token and an advantage other than 0; the policy term of others has gradient 0.

    An update without one is skipped whole, its KL term included: AdamW would move the weights by momentum and decay.
    """
    return (advantages != 0) & c.kept.any(1)


# --------------------------------------------------------------------------------------------------- the loss


def kl_to_reference(logp: Tensor, logp_ref: Tensor, mask: Tensor) -> Tensor:
    """k3 (N, R) = exp(ref - new) - (ref - new) - 1, never negative, 0 outside the mask (Schulman 2020).

    Under samples of `new` its value estimates KL(new || ref), its gradient is that of KL(ref || new); under sparse
    samples it is neither exactly.
    """
    difference = log_ratio(logp_ref, logp, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.expm1() - difference  # expm1: exp(d) - 1 without losing the digits of a small d


def surrogate_loss(
    logp: Tensor,
    c: Correction,
    logp_old: Tensor,
    advantages: Tensor,
    logp_ref: Tensor | None = None,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of these responses in -J, to be minimised, and in its metrics: sums, so micro-batches add up.

    logp, logp_old, logp_ref (N, R), advantages (N,), and the correction of the same rows. Metrics (0-dim, detached):
    policy_loss; kl_ref, divided like it; clip_low and clip_high, the share of the sampled tokens whose ratio is clipped
    and whose gradient is therefore 0; clamped, the number of log-ratios (of w and xi) beyond +-20. Raises ValueError
    for kl_coef without logp_ref.
    """
    if kl_coef and logp_ref is None:
        raise ValueError("kl_coef needs logp_ref, the reference model's log-probs")
    log_w = log_ratio(logp, logp_old.detach(), c.kept)  # (N, R), 0 where not kept
    w = log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    A = wide(advantages)[:, None]  # (N, 1)
    policy = -c.weights * torch.minimum(w * A, w.clamp(1 - clip[0], 1 + clip[1]) * A)  # (N, R)
    kl = torch.zeros_like(policy) if logp_ref is None else kl_to_reference(logp, logp_ref.detach(), c.kept)
    loss = ((policy + kl_coef * kl) / c.denominators).sum()
    metrics = {
        "policy_loss": (policy / c.denominators).sum(),
        "kl_ref": (kl / c.denominators).sum(),
        "clip_low": ((c.kept & (w < 1 - clip[0]) & (A < 0)) / c.tokens).sum(),
        "clip_high": ((c.kept & (w > 1 + clip[1]) & (A > 0)) / c.tokens).sum(),
        "clamped": (log_w.abs() > MAX_LOG_RATIO).sum() + c.clamped.sum(),
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    logp_sparse: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    logp_ref: Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    kl_coef: float = 0.0,
    **settings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-J of a whole update, and its metrics: `surrogate_loss` of `correct`, which takes the settings that it names."""
    c = correct(logp_old, logp_sparse, mask, **settings)
    return surrogate_loss(logp, c, logp_old, advantages, logp_ref, clip=clip, kl_coef=kl_coef)


# ---------------------------------------------------------------------------------------------------- metrics


def mismatch_metrics(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor, epsilon: float = 1e-4) -> dict[str, float]:
    """How far the sampler is from the dense policy, over all sampled tokens, before anything is dropped.

    rejected: share of responses with some xi < epsilon, vetoed or not; xi_*: mean, minimum and percentiles of xi over
    tokens; log_xi_abs: mean |log xi|, nats; sampler_kl: mean(xi - 1 - log xi), nats, estimates KL(pi_sparse || pi_old);
    ess: effective sample size of the weights xi, (sum xi)^2 / (n sum xi^2). For a dense rollout, the noise of rounding.
    """
    accepted = rejection_mask(logp_old, logp_sparse, mask, epsilon)  # (N,)
    log_xi = log_ratio(logp_old, logp_sparse, mask)[mask]  # (tokens,)
    log_xi = log_xi.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).nan_to_num(-MAX_LOG_RATIO)
    if not len(log_xi):
        log_xi = log_xi.new_zeros(1)
    ranked, xi = log_xi.sort().values, log_xi.exp()
    quantiles = {f"xi_p{q:02d}": ranked[round(q / 100 * (len(ranked) - 1))].exp() for q in (1, 5, 50, 95, 99)}
    values = {
        "rejected": (~accepted).float().mean(),
        "xi_mean": xi.mean(),
        "xi_min": xi.min(),
        **quantiles,
        "log_xi_abs": log_xi.abs().mean(),
        "sampler_kl": (log_xi.expm1() - log_xi).mean(),
        "ess": xi.sum() ** 2 / (len(xi) * (xi**2).sum()),
    }
    return {name: float(value) for name, value in values.items()}


def extremes(logp_old: Tensor, logp_sparse: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Each response's xi_min, xi_max and logp_min (smallest logp_old), (N,) each; padding is no extreme."""
    log_xi, padding = log_ratio(logp_old, logp_sparse, mask), ~mask  # (N, R) each
    return {
        "xi_min": log_xi.masked_fill(padding, math.inf).amin(1).exp(),
        "xi_max": log_xi.masked_fill(padding, -math.inf).amax(1).exp(),
        "logp_min": wide(logp_old).masked_fill(padding, math.inf).amin(1),
    }


def reward_metrics(rewards: Tensor, group_size: int) -> dict[str, float]:
    """reward_mean and reward_std over the step's responses; groups_without_signal, the share with equal rewards."""
    groups = wide(rewards).view(-1, group_size)
    return {
        "reward_mean": float(groups.mean()),
        "reward_std": float(groups.std()) if groups.numel() > 1 else 0.0,
        "groups_without_signal": float((groups == groups[:, :1]).all(1).float().mean()),
    }
