"""The objective of grpo.py as an executable specification: one test, one fact.

The theorems come first: what the objective becomes in its limits, and what its weights correct, by enumerating every
sequence of a small example. The others compare with numbers worked out by hand or with a slow path in plain Python
floats that never calls grpo. A test that guards against a fault reported in public names the thread. Functions are
called as `grpo.name`, so that test_faulty.py can put a wrong one in their place and see the test fail.
"""

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import grpo

ALL_SETTINGS = list(itertools.product(grpo.CORRECTIONS, grpo.AGGREGATIONS))
NAN, INF = math.nan, math.inf


# ------------------------------------------------------------------------------------------------------ helpers


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def ragged(rows, fill=NAN):
    """Lists of unequal length as (N, R), and their mask; `fill` stands in the padding."""
    R = max(map(len, rows))
    mask = torch.tensor([[t < len(row) for t in range(R)] for row in rows], dtype=torch.bool)
    return f64([row + [fill] * (R - len(row)) for row in rows]), mask


def sampled(log_xi, advantages, log_w=0.0):
    """Inputs of policy_loss for responses with these log-ratios, and one log_w for all tokens."""
    logp_old, mask = ragged(log_xi)
    return logp_old + log_w, logp_old, torch.zeros_like(logp_old), f64(advantages), mask


def random_batch(seed, N=6, R=5, dtype=torch.float64, spread=0.4):
    """Inputs of policy_loss, NaN in the padding: response 0 is empty, response 1 is rejected. And logp_ref."""
    g = torch.Generator().manual_seed(seed)

    def noise():
        return spread * torch.randn(N, R, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, R + 1, (N,), generator=g)
    lengths[0] = 0
    mask = torch.arange(R) < lengths[:, None]
    logp_old = -1 - noise().abs()
    logp_sparse = logp_old - noise()
    logp_sparse[1, 0] = logp_old[1, 0] + 10
    logps = [logp_old + noise(), logp_old, logp_sparse, logp_old + noise()]
    logp, logp_old, logp_sparse, logp_ref = (x.masked_fill(~mask, NAN).to(dtype) for x in logps)
    advantages = torch.randn(N, generator=g, dtype=torch.float64).to(dtype)
    return (logp, logp_old, logp_sparse, advantages, mask), logp_ref


def value_and_gradient(loss_of, logp, *rest, **settings):
    """The loss, and its gradient with respect to logp."""
    logp = logp.clone().requires_grad_()
    loss = loss_of(logp, *rest, **settings)[0]
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


def same(a, b):
    """Equal bit for bit."""
    return torch.equal(torch.as_tensor(a), torch.as_tensor(b))


# ------------------------------------------------------------------------------------------------------ identities


def plain_grpo(logp, logp_old, advantages, mask, clip=(0.2, 0.2)):
    """GRPO (2402.03300) with a mean per response and no KL, without any correction."""
    A = advantages[:, None]
    w = torch.where(mask, logp - logp_old, 0).exp()
    term = torch.where(mask, torch.minimum(w * A, w.clamp(1 - clip[0], 1 + clip[1]) * A), 0)
    return (-term / (len(mask) * mask.sum(1, keepdim=True).clamp(min=1))).sum(), {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("correction", grpo.CORRECTIONS)
def test_dense_sampler_gives_plain_grpo_bit_for_bit(correction, dtype):
    """logp_sparse = logp_old: value and gradient of every correction are those of GRPO."""
    for seed in range(5):
        (logp, logp_old, _, advantages, mask), _ = random_batch(seed, dtype=dtype)
        got = value_and_gradient(grpo.policy_loss, logp, logp_old, logp_old, advantages, mask, correction=correction)
        expected = value_and_gradient(plain_grpo, logp.nan_to_num(0), logp_old.nan_to_num(0), advantages, mask)
        assert same(got[0], expected[0]) and same(got[1], expected[1])


def test_tiny_epsilon_turns_sparse_rl_into_reweight_bit_for_bit():
    """Without rejection only the weights are left."""
    inputs, _ = random_batch(0)
    one = value_and_gradient(grpo.policy_loss, *inputs, epsilon=5e-324)
    other = value_and_gradient(grpo.policy_loss, *inputs, correction="reweight")
    assert same(one[0], other[0]) and same(one[1], other[1])


def test_one_update_gives_the_plain_policy_gradient():
    """logp = logp_old: w = 1, no clip matters, and dL/dlogp = -M xi A / (N |o|), REINFORCE on weighted tokens."""
    (_, logp_old, logp_sparse, advantages, mask), _ = random_batch(3)
    expected = torch.zeros_like(logp_old)
    for i, A in enumerate(advantages.tolist()):
        n = int(mask[i].sum())
        for t in range(n if i != 1 else 0):  # response 1 is the rejected one
            expected[i, t] = -math.exp(logp_old[i, t] - logp_sparse[i, t]) * A / (len(mask) * n)
    for clip in ((0.2, 0.2), (0.0, 0.0), (0.9, 5.0)):
        _, gradient = value_and_gradient(grpo.policy_loss, logp_old, logp_old, logp_sparse, advantages, mask, clip=clip)
        assert_close(gradient, expected)


def test_reject_and_reweight_compose_to_sparse_rl():
    """The weights of sparse-rl are the product of those of its two parts, bit for bit."""
    (_, logp_old, logp_sparse, _, mask), _ = random_batch(4)
    both, reject, reweight = (
        grpo.correct(logp_old, logp_sparse, mask, name) for name in ("sparse-rl", "reject", "reweight")
    )
    assert same(both.weights, reject.weights * reweight.weights)
    assert same(both.accepted, reject.accepted) and bool(reweight.accepted.all())


# --------------------------------------------------------------------------------- unbiasedness by enumeration

# Two policies over 3 tokens and 3 steps: the dense one sees the whole prefix, the sparse one the last token only.
PREFIXES = [prefix for n in range(3) for prefix in itertools.product(range(3), repeat=n)]
DENSE = {p: [random.Random(f"{p} {k}").gauss(0, 1) for k in range(3)] for p in PREFIXES}  # logits
SPARSE = {p: [x + random.Random(f"{p[-1:]} {k}").gauss(0, 1) for k, x in enumerate(DENSE[p[-1:]])] for p in PREFIXES}


def softmax(logits):
    total = sum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def probabilities(sequence, dense_steps):
    """Each token's probability, from the dense policy at dense_steps and from the sparse one elsewhere."""
    return [softmax((DENSE if t in dense_steps else SPARSE)[sequence[:t]])[token] for t, token in enumerate(sequence)]


def score_gradient(sequence, t):
    """d log pi_dense(token t) / d logits (13, 3): one-hot less softmax, in the row of its prefix."""
    gradient = torch.zeros(len(PREFIXES), 3, dtype=torch.float64)
    p = softmax(DENSE[sequence[:t]])
    gradient[PREFIXES.index(sequence[:t])] = f64([(k == sequence[t]) - p[k] for k in range(3)])
    return gradient


def mixed_gradient(f, R):
    """sum_t E[f grad log pi_dense(token t)] with the prefix sparse, token t dense, the continuation sparse."""
    return sum(
        math.prod(probabilities(s, {t})) * f(s) * score_gradient(s, t)
        for s in itertools.product(range(3), repeat=R)
        for t in range(R)
    )


def dense_gradient(f, R):
    """The true gradient of E_dense[f]."""
    return sum(
        math.prod(probabilities(s, set(range(R)))) * f(s) * score_gradient(s, t)
        for s in itertools.product(range(3), repeat=R)
        for t in range(R)
    )


def expected_step(f, R, correction, product=False):
    """E_sparse of J and of its gradient at w = 1, without 1/length: policy_loss over all sequences, each as often as
    the sparse policy samples it. product: each also times its whole product of ratios."""
    sequences = list(itertools.product(range(3), repeat=R))
    logits = f64([DENSE[p] for p in PREFIXES]).requires_grad_()
    places = torch.tensor([[PREFIXES.index(s[:t]) for t in range(R)] for s in sequences])  # (N, R)
    logp = logits.log_softmax(-1)[places, torch.tensor(sequences)]  # (N, R)
    sparse = f64([probabilities(s, set()) for s in sequences])  # (N, R)
    chance = logp.detach().exp().prod(1) if product else sparse.prod(1)
    advantages = chance * f64([f(s) for s in sequences])
    mask = torch.ones(len(sequences), R, dtype=torch.bool)
    settings = {"correction": correction, "aggregation": "constant", "max_length": 1}
    loss, _ = grpo.policy_loss(logp, logp.detach(), sparse.log(), advantages, mask, **settings)
    loss = loss * len(sequences)  # the mean over N becomes the sum over all sequences
    return -loss.detach(), -torch.autograd.grad(loss, logits)[0]


def fixed_function(sequence):
    """Some number for each sequence."""
    return random.Random(str(sequence)).gauss(0, 1)


def test_reweighting_moves_exactly_the_token_to_the_dense_policy():
    """E_sparse[sum_t xi_t f] = sum_t E[f], prefix sparse, token t dense, continuation sparse; so for the gradient."""
    value, gradient = expected_step(fixed_function, 3, "reweight")
    expected = sum(
        math.prod(probabilities(s, {t})) * fixed_function(s)
        for s in itertools.product(range(3), repeat=3)
        for t in range(3)
    )
    assert float(value) == pytest.approx(expected, rel=1e-12)
    assert_close(gradient, mixed_gradient(fixed_function, 3), rtol=1e-12, atol=1e-14)


def remaining_bias(f, R, correction, product=False):
    """|E_sparse[estimate] - true dense gradient| / |true dense gradient|."""
    truth = dense_gradient(f, R)
    return float((expected_step(f, R, correction, product)[1] - truth).norm() / truth.norm())


def test_reweighting_is_unbiased_for_one_step():
    """With a single token the mixed law is the dense one: the true gradient comes out; without weights it does not."""
    assert remaining_bias(fixed_function, 1, "reweight") < 1e-12
    assert remaining_bias(fixed_function, 1, "none") > 0.1


def test_full_product_is_unbiased_for_any_length():
    """The whole product of ratios recovers the true dense gradient; that is not this method."""
    assert remaining_bias(fixed_function, 3, "none", product=True) < 1e-12


@pytest.mark.parametrize("R, weighted, plain", [(2, 0.4741, 0.6495), (3, 1.1354, 0.8803)])
def test_a_bias_remains_for_longer_responses(R, weighted, plain):
    """Relative to the true dense gradient; here the weights lower it at two steps and raise it at three."""
    assert remaining_bias(fixed_function, R, "reweight") == pytest.approx(weighted, abs=1e-4)
    assert remaining_bias(fixed_function, R, "none") == pytest.approx(plain, abs=1e-4)


def test_weights_lower_the_bias_for_most_answers_and_raise_it_for_some():
    """One right answer of 27, three steps: the bias never vanishes, and falls with the weights for 20."""
    biases = [
        [remaining_bias(answer.__eq__, 3, name) for name in ("reweight", "none")]
        for answer in itertools.product(range(3), repeat=3)
    ]
    assert min(map(min, biases)) > 0.1
    assert sum(weighted < plain for weighted, plain in biases) == 20


# --------------------------------------------------------------------------------------------------- advantages


def test_advantage_is_reward_less_mean_over_unbiased_std():
    """A = (r - mean of the group) / (std with n - 1 below + 1e-6)."""
    r = random.Random(0)
    groups = [[r.random() for _ in range(4)] for _ in range(50)]
    expected = [(x - statistics.mean(g)) / (statistics.stdev(g) + 1e-6) for g in groups for x in g]
    assert_close(grpo.group_advantages(f64(groups).flatten(), 4), f64(expected))


def test_advantage_without_std_is_reward_less_mean():
    """Dr. GRPO (2503.20783) leaves the std out."""
    assert_close(grpo.group_advantages(f64([3, 1, 5, 6]), 2, normalize_std=False), f64([1, -1, -0.5, 0.5]))


def test_equal_rewards_give_exactly_zero():
    """Not the rounding error of their mean over 1e-6: the test is for equality."""
    for reward, G in itertools.product([0.0, 1.0, 0.1, 0.7, 1 / 3, 1e6 / 7], range(1, 12)):
        assert same(grpo.group_advantages(torch.full((2 * G,), reward), G), torch.zeros(2 * G))


def test_groups_are_positions_whatever_the_prompts():
    """Rows 0..G-1 are one group, even when the next group has the same prompt (Search-R1 88, GRPO-Zero)."""
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert_close(grpo.group_advantages(f64([1, 0, 0, 0]), 2), f64([a, -a, 0, 0]))


def objective(rewards, group_size, logp, logp_old, logp_sparse, mask):
    """Advantages first, rejection after them: one update's loss."""
    return grpo.policy_loss(logp, logp_old, logp_sparse, grpo.group_advantages(rewards, group_size), mask)[0]


def test_rejected_response_stays_in_its_groups_baseline():
    """Rewards [100, 1], the first rejected: the second keeps -0.7071, over N = 2 (verl PR 6375, 6452)."""
    logp, logp_old, logp_sparse, _, mask = sampled([[-10.0], [0.0]], [0, 0])
    loss = objective(f64([100, 1]), 2, logp, logp_old, logp_sparse, mask)
    assert float(loss) == pytest.approx(49.5 / math.sqrt(99**2 / 2) / 2, rel=1e-6)


# ------------------------------------------------------------------------------------------- ratio and rejection


def test_xi_is_dense_over_sparse_without_gradient():
    """xi = exp(logp_old - logp_sparse), a constant; 1 outside the mask; log-ratios clamped to 20."""
    logp_old, mask = ragged([[-1.0, -3.0, -30.0], [-2.0]])
    logp_sparse, _ = ragged([[-2.0, -1.0, -1.0], [-2.0]], fill=INF)
    xi = grpo.consistency_ratio(logp_old.requires_grad_(), logp_sparse.requires_grad_(), mask)
    assert not xi.requires_grad
    assert_close(xi, f64([[math.e, math.exp(-2), math.exp(-20)], [1, 1, 1]]))


def veto(rows, epsilon, dtype=torch.float64):
    """rejection_mask of responses with these log-ratios."""
    log_xi, mask = ragged(rows)
    return grpo.rejection_mask(log_xi.to(dtype), torch.zeros_like(log_xi, dtype=dtype), mask, epsilon).tolist()


def test_smallest_single_ratio_decides():
    """Log-ratios [3, -3, 2, -2] cancel, but the smallest ratio is 0.0498 (slime PR 1568, trl 4772)."""
    assert veto([[3.0, -3.0, 2.0, -2.0]], 0.0499) == [False]
    assert veto([[3.0, -3.0, 2.0, -2.0]], 0.0497) == [True]


def test_long_harmless_drift_is_accepted():
    """1,000 tokens each off by 1 % have a product of 4e-5 and are accepted at 1e-4 (slime PR 1568)."""
    assert veto([[math.log(0.99)] * 1000], 1e-4) == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratio_of_exactly_log_epsilon_is_accepted(dtype):
    """The comparison is made in log space: exp(log 1e-4) >= 1e-4 is false in floating point."""
    for epsilon in (1e-4, 1e-3, 0.1, 0.3, 0.9):
        edge = torch.tensor(math.log(epsilon), dtype=dtype)
        below = torch.nextafter(edge, torch.tensor(-INF, dtype=dtype))
        assert veto([[0.0, float(edge)], [0.0, float(below)]], epsilon, dtype) == [True, False]


def test_rejection_looks_at_the_raw_ratio():
    """An epsilon below the clamp of exp(-20) still rejects what lies below it."""
    assert veto([[-22.0], [-24.0]], 1e-10) == [True, False]


def test_epsilon_towards_zero_rejects_nothing():
    """At the smallest positive float64 even a ratio of exp(-744) is accepted."""
    assert veto([[0.0, -744.0], [-300.0], [5.0]], 5e-324) == [True] * 3


def test_ratio_that_is_not_a_number_rejects():
    """NaN inside the mask never trains; nor does a token of dense probability 0."""
    assert veto([[0.0, NAN], [-INF], [INF]], 1e-4) == [False, False, True]


def test_padding_never_rejects():
    """Entries outside the mask may hold anything, and an empty response is accepted."""
    mask = torch.tensor([[True, False], [False, False]])
    for junk in (NAN, INF, -INF, -1e4):
        log_xi = f64([[0, junk], [junk, junk]])
        assert grpo.rejection_mask(log_xi, torch.zeros_like(log_xi), mask, 1e-4).tolist() == [True, True]
        assert grpo.rejection_mask(torch.zeros_like(log_xi), log_xi, mask, 1e-4).tolist() == [True, True]
    assert veto([[1.0, 1.0], [1.0], []], 2.0) == [True] * 3  # a ratio of 1 would not do here


@pytest.mark.parametrize("epsilon", [0.0, -1e-4, NAN])
def test_epsilon_must_be_positive(epsilon):
    """log of 0 or less is no threshold (verl PR 3694)."""
    with pytest.raises(ValueError, match="epsilon"):
        veto([[0.0]], epsilon)


# ------------------------------------------------------------------------------------------------ the loss by hand


def test_rejected_responses_count_below_the_line():
    """Two of four rejected: the other two are still divided by N = 4 (slime PR 657, verl PR 3915)."""
    loss = grpo.policy_loss(*sampled([[0.0], [-10.0], [0.0], [-10.0]], [1, 1, 3, 1]))[0]
    assert float(loss) == -1.0


def test_rejected_tokens_count_below_the_line_of_a_token_mean():
    """With token aggregation the 3 tokens of the rejected response stay among the 4 below."""
    loss = grpo.policy_loss(*sampled([[0.0], [-10.0, 0.0, 0.0]], [2, 1]), aggregation="token")[0]
    assert float(loss) == -0.5


def test_response_divides_by_its_own_length():
    """Lengths 1 and 4 weigh the same: neither padding nor the other's length enters (slime PR 657)."""
    loss, gradient = value_and_gradient(grpo.policy_loss, *sampled([[0.0], [0.0] * 4], [1, 2]))
    assert float(loss) == -1.5
    assert same(gradient, f64([[-0.5, 0, 0, 0], [-0.25] * 4]))


def test_aggregations_differ_in_what_stands_below():
    """GRPO: own length; DAPO: all tokens; Dr. GRPO: the maximum length."""
    batch = sampled([[0.0], [0.0] * 4], [1, 2])
    assert float(grpo.policy_loss(*batch, aggregation="response")[0]) == pytest.approx(-(1 + 2) / 2)
    assert float(grpo.policy_loss(*batch, aggregation="token")[0]) == pytest.approx(-(1 + 8) / 5)
    assert float(grpo.policy_loss(*batch, aggregation="constant", max_length=10)[0]) == pytest.approx(-(1 + 8) / 20)


def test_empty_response_contributes_nothing():
    """A response of zero tokens gives 0, not NaN, its padding no gradient, and still counts in N (verl PR 6310)."""
    logp, logp_old, logp_sparse, advantages, mask = sampled([[0.0, 0.0], []], [1, 100])
    loss, gradient = value_and_gradient(
        grpo.policy_loss, *(x.nan_to_num(0) for x in (logp, logp_old, logp_sparse)), advantages, mask
    )
    assert float(loss) == -0.5
    assert same(gradient, f64([[-0.25, -0.25], [0, 0]]))


def test_nothing_left_gives_exact_zeros():
    """All masked or all rejected: loss and gradient exactly 0, every metric a number (trl PR 3248, verl 5859)."""
    for log_xi, masked in ((0.0, True), (-10.0, False)):
        logp, logp_old, logp_sparse, advantages, mask = sampled([[log_xi] * 2, [log_xi]], [1, -1])
        inputs = logp_old, logp_sparse, advantages, mask & (not masked)
        for correction, aggregation in itertools.product(("sparse-rl", "released", "reject"), grpo.AGGREGATIONS):
            settings = {"correction": correction, "aggregation": aggregation, "max_length": 2}
            settings |= {"kl_coef": 0.1, "logp_ref": logp - 1}
            loss, gradient = value_and_gradient(grpo.policy_loss, logp, *inputs, **settings)
            assert float(loss) == 0 and same(gradient, torch.zeros_like(logp))
            assert all(math.isfinite(value) for value in grpo.policy_loss(logp, *inputs, **settings)[1].values())


def test_update_without_signal_is_told_apart():
    """No response teaches where no kept token has an advantage: AdamW would move at gradient 0."""
    accepted, rejected, empty = [0.0, 0.0], [-10.0, 0.0], []
    for rows, advantages, expected in [
        ([accepted, accepted], [0, 0], False),
        ([rejected, accepted], [1, 0], False),
        ([empty, accepted], [1, 0], False),
        ([accepted, rejected], [1, 1], True),
    ]:
        _, logp_old, logp_sparse, A, mask = sampled(rows, advantages)
        assert bool(grpo.teaches(A, grpo.correct(logp_old, logp_sparse, mask)).any()) is expected


def test_responses_that_do_not_teach_have_no_policy_gradient_but_one_of_the_kl():
    """Rejected, empty, or without advantage; of these only the last, which keeps its tokens, pays for its KL."""
    rows, advantages = [[0.1, 0.2], [-10.0, 0.0], [], [0.1], [0.3]], [1, 1, 1, 0, -2]
    logp, logp_old, logp_sparse, A, mask = sampled(rows, advantages)
    logp, logp_ref = logp_old + 0.1, logp_old - 0.5
    teaching = grpo.teaches(A, grpo.correct(logp_old, logp_sparse, mask))
    assert teaching.tolist() == [True, False, False, False, True]
    for kl_coef, moved in ((0.0, teaching.tolist()), (0.1, [True, False, False, True, True])):
        how = {"logp_ref": logp_ref, "kl_coef": kl_coef}
        _, gradient = value_and_gradient(grpo.policy_loss, logp, logp_old, logp_sparse, A, mask, **how)
        assert (gradient != 0).any(1).tolist() == moved


def test_loss_of_the_first_update_is_zero_and_its_gradient_is_not():
    """On policy the loss is minus the mean advantage, 0 by construction; what learns is the gradient (trl 3857)."""
    rewards = [1, 0, 0, 1, 1, 0, 0, 0]
    advantages = [(r - statistics.mean(g)) / statistics.stdev(g) for g in (rewards[:4], rewards[4:]) for r in g]
    loss, gradient = value_and_gradient(grpo.policy_loss, *sampled([[0.0] * n for n in range(1, 9)], advantages))
    assert abs(float(loss)) < 1e-12
    assert_close(gradient[:, 0], -f64(advantages) / 8 / torch.arange(1, 9))


def test_gradient_reaches_the_logits():
    """Logits [0, 0], token 0 sampled, A = 1: dJ/dlogits = [0.5, -0.5], attached inputs or not (mlx-lm-lora 55)."""
    for attached in itertools.product([False, True], repeat=2):
        logits = f64([0, 0]).requires_grad_()
        logp = logits.log_softmax(-1)[:1, None]  # (1, 1)
        others = [logp if a else logp.detach() for a in attached]
        grpo.policy_loss(logp, *others, f64([1]), torch.tensor([[True]]))[0].backward()
        assert_close(-logits.grad, f64([0.5, -0.5]))


def test_one_step_raises_what_was_rewarded():
    """Gradient descent on the loss makes a token with A > 0 more likely, one with A < 0 less (flash-linear-attention
    1073)."""
    for A in (1.0, -1.0):
        logits = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        logp = logits.log_softmax(-1)[:, :1]
        grpo.policy_loss(logp, logp.detach(), logp.detach(), f64([A]), torch.tensor([[True]]))[0].backward()
        after = (logits - 0.1 * logits.grad).log_softmax(-1)[0, 0]
        assert float((after - logp).detach()) * A > 0


def test_clip_bounds_the_staleness_ratio_alone():
    """At w = 1 xi = 2 gives 2 A and xi = 0.5 gives 0.5 A: xi stands outside the clip."""
    assert float(grpo.policy_loss(*sampled([[math.log(2)]], [1]))[0]) == pytest.approx(-2)
    assert float(grpo.policy_loss(*sampled([[math.log(0.5)]], [-1]))[0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "w, A, term", [(1.5, 1, 1.2), (0.5, 1, 0.5), (1.5, -1, -1.5), (0.5, -1, -0.8), (1.1, 1, 1.1), (0.9, -1, -0.9)]
)
def test_clip_only_ever_lowers_the_objective(w, A, term):
    """min(w A, clip(w) A): the far side stays unclipped; a clipped token has no gradient."""
    loss, gradient = value_and_gradient(grpo.policy_loss, *sampled([[0.0]], [A], log_w=math.log(w)))
    assert float(loss) == pytest.approx(-term)
    assert float(gradient) == pytest.approx(-w * A if term == pytest.approx(w * A) else 0)


def test_three_hundred_small_ratios_stay_finite():
    """300 tokens at xi = 0.7 weigh 0.7 each; a product of 3e-47 occurs nowhere, in fp32 (trl PR 7120)."""
    *logps, advantages, mask = sampled([[math.log(0.7)] * 300], [1])
    loss, gradient = value_and_gradient(grpo.policy_loss, *(x.float() for x in logps), advantages.float(), mask)
    assert float(loss) == pytest.approx(-0.7, rel=1e-5)
    assert_close(gradient, torch.full((1, 300), -0.7 / 300))


def test_released_weights_are_truncated_first_and_normalised_second():
    """xi [1.4, 0.6] truncated at 1.2 has mean 0.9, so the truncated weight ends at 1.333 (released mis.py)."""
    batch = sampled([[math.log(1.4), math.log(0.6)]], [1])
    _, gradient = value_and_gradient(grpo.policy_loss, *batch, correction="released", xi_cap=1.2)
    assert_close(-2 * gradient, f64([[1.2 / 0.9, 0.6 / 0.9]]))


def released_weights(xi, **settings):
    """The weights of "released" for responses with these ratios."""
    _, logp_old, logp_sparse, _, mask = sampled([[math.log(x) for x in row] for row in xi], [0] * len(xi))
    return grpo.correct(logp_old, logp_sparse, mask, "released", **settings).weights


def test_released_divides_by_the_mean_over_all_tokens():
    """Tokens that are dropped and responses that are vetoed stay in the mean: 0.8625 of xi [1, 1, 0.4, 3 -> 1.5] and
    [1, 1e-5, 1, 1], so a kept weight of 1 becomes 1.159 (released mis.py)."""
    w = 8 / (1 + 1 + 0.4 + 1.5 + 1 + 1e-5 + 1 + 1)
    assert w == pytest.approx(1.159, abs=5e-4)
    weights = released_weights([[1, 1, 0.4, 3], [1, 1e-5, 1, 1]])
    assert_close(weights, f64([[w, w, 0, 0], [0, 0, 0, 0]]))


def test_the_mean_of_released_is_taken_after_clamp_and_cap():
    """xi of 1e12 enters it as the cap of 1.2, xi of 1e-12 as exp(-20), padding not at all."""
    w = 4 / (1 + 1.2 + math.exp(-20) + 1)
    assert_close(released_weights([[1, 1e12], [1e-12], [1]], xi_cap=1.2), f64([[w, 0], [0, 0], [w, 0]]))


def test_a_ratio_that_is_not_a_number_counts_zero_in_the_mean():
    """Its response is rejected, and the others' weights stay finite: 4 tokens with a sum of 3."""
    weights = released_weights([[1, 1], [NAN, 1]])
    assert_close(weights, f64([[4 / 3, 4 / 3], [0, 0]]))
    assert not released_weights([[NAN], [NAN]]).any()


def test_released_divides_a_response_by_its_kept_tokens():
    """Tokens with xi outside [0.5, 1.5] are dropped, above and below the line; the mean weight here is 3.9 / 4."""
    batch = sampled([[math.log(x) for x in (0.4, 0.8, 1.6, 1.2)]], [1])
    _, gradient = value_and_gradient(grpo.policy_loss, *batch, correction="released")
    assert_close(gradient * 3.9 / 4, f64([[0, -0.4, 0, -0.6]]))


def test_xi_cap_truncates_from_above():
    """xi_cap = 2 turns xi [3, 1.5] into [2, 1.5], and leaves who is rejected alone."""
    batch = sampled([[math.log(3), math.log(1.5)], [math.log(3), -10.0]], [1, 1])
    _, gradient = value_and_gradient(grpo.policy_loss, *batch, xi_cap=2.0)
    assert_close(gradient, f64([[-0.5, -0.375], [0, 0]]))


def test_log_ratios_are_clamped_and_counted():
    """xi of exp(25) weighs exp(20), w of exp(25) is worth exp(20), and both are counted."""
    loss, metrics = grpo.policy_loss(*sampled([[25.0], [0.0]], [1, 1]))
    assert float(loss) == pytest.approx(-(math.exp(20) + 1) / 2) and int(metrics["clamped"]) == 1
    loss, metrics = grpo.policy_loss(*sampled([[0.0], [0.0]], [-1, -1], log_w=25.0))
    assert float(loss) == pytest.approx(math.exp(20)) and int(metrics["clamped"]) == 2


# ------------------------------------------------------------------------------------------------ the KL penalty


def test_k3_value_and_gradient():
    """k3 = exp(ref - new) - (ref - new) - 1 with gradient 1 - exp(ref - new), 0 outside the mask."""
    difference, mask = ragged([[math.log(2), -1.0], [0.0]])
    logp = torch.full_like(difference, -2.0).requires_grad_()
    kl = grpo.kl_to_reference(logp, logp.detach() + difference, mask)
    assert_close(kl, f64([[1 - math.log(2), math.exp(-1)], [0, 0]]))
    assert_close(torch.autograd.grad(kl.sum(), logp)[0], f64([[-1, 1 - math.exp(-1)], [0, 0]]))


def test_k3_estimates_one_divergence_and_descends_the_other():
    """Under samples of new its mean is KL(new || ref), its mean gradient that of KL(ref || new)."""
    logits, ref = f64([0.3, -0.5, 1.0]).requires_grad_(), f64([0.2, 0.5, 0.3])
    logp = logits.log_softmax(-1)
    new = logp.exp().detach()
    k3 = grpo.kl_to_reference(logp[None], ref.log()[None], torch.ones(1, 3, dtype=torch.bool))[0]
    mean = (new * k3).sum()
    assert_close(mean.detach(), (new * (new / ref).log()).sum())
    got = torch.autograd.grad(mean, logits, retain_graph=True)[0]
    assert_close(got, new - ref)  # softmax: the gradient of KL(ref || new) with respect to new's logits


def test_k3_keeps_its_digits_near_zero():
    """In fp32 a difference d of 1e-4 to 1e-2 still gives d^2 / 2, and never less than 0."""
    d = torch.linspace(1e-4, 1e-2, 200)
    d = torch.cat([d, -d])[None]
    kl = grpo.kl_to_reference(torch.zeros_like(d), d, torch.ones_like(d, dtype=torch.bool))
    exact = d.double().expm1() - d.double()
    assert float(kl.min()) >= 0
    assert_close(kl.double(), exact, rtol=2e-3, atol=0)


def test_kl_is_averaged_like_the_policy_term_inside_the_rejection():
    """beta times mean-per-response k3; a rejected response pays none."""
    logp, *rest = sampled([[0.0, 0.0], [-10.0], [1.0]], [0, 0, 0])
    loss, metrics = grpo.policy_loss(logp, *rest, logp_ref=logp + math.log(2), kl_coef=0.1)
    k3 = 1 - math.log(2)
    assert float(metrics["kl_ref"]) == pytest.approx(2 * k3 / 3)
    assert float(loss) == pytest.approx(0.1 * 2 * k3 / 3)


@pytest.mark.parametrize("correction, aggregation", ALL_SETTINGS)
def test_kl_has_the_denominators_of_the_policy_term_and_no_xi(correction, aggregation):
    """The same tokens over the same denominators, each with weight 1: xi corrects what was rewarded alone."""
    (_, logp_old, logp_sparse, advantages, mask), _ = random_batch(10)
    settings = {"correction": correction, "aggregation": aggregation, "max_length": 9}
    k3 = 1 - math.log(2)
    batch = logp_old, logp_old, logp_sparse, advantages, mask
    got = grpo.policy_loss(*batch, logp_ref=logp_old + math.log(2), kl_coef=0.1, **settings)[1]["kl_ref"]
    c = grpo.correct(logp_old, logp_sparse, mask, **settings)
    unweighted = replace(c, weights=c.kept.double())
    per_token = grpo.surrogate_loss(logp_old, unweighted, logp_old, torch.full_like(advantages, -1))[0]  # w = 1
    assert_close(got, k3 * per_token)


def test_a_token_of_weight_zero_is_still_kept():
    """A weight may underflow (here it is capped at 0): its token pays for its KL and counts in the denominators."""
    logp, *rest = sampled([[0.3, -0.2], [0.1]], [1, 1])
    c = grpo.correct(*rest[:2], rest[3], xi_cap=0.0)
    assert not c.weights.any() and c.kept.tolist() == [[True, True], [True, False]]
    assert c.denominators.tolist() == [[4], [2]] and grpo.teaches(rest[2], c).all()
    loss, metrics = grpo.policy_loss(logp, *rest, logp_ref=logp + math.log(2), kl_coef=0.1, xi_cap=0.0)
    assert float(metrics["kl_ref"]) == pytest.approx(1 - math.log(2))
    assert float(loss) == pytest.approx(0.1 * (1 - math.log(2)))


# --------------------------------------------------------------------------------------- the loss by the formula


def slow_loss(
    logp,
    logp_old,
    logp_sparse,
    advantages,
    mask,
    *,
    logp_ref=None,
    correction="sparse-rl",
    epsilon=1e-4,
    clip=(0.2, 0.2),
    kl_coef=0.0,
    xi_cap=INF,
    aggregation="response",
    max_length=None,
):
    """-J of the objective in Python floats, token by token."""
    columns = [logp, logp_old, logp_sparse, logp if logp_ref is None else logp_ref]
    rows = [
        [values for *values, inside in zip(*row, strict=True) if inside]
        for row in zip(*(x.tolist() for x in columns), mask.tolist(), strict=True)
    ]
    vetoes = correction in ("sparse-rl", "reject", "released")
    released = correction == "released"
    kept = []  # per response: (w, xi, log(ref / new)) of each token that counts
    for row in rows:
        accepted = not vetoes or all(old - sparse >= math.log(epsilon) for _, old, sparse, _ in row)
        tokens = [(math.exp(new - old), math.exp(old - sparse), ref - new) for new, old, sparse, ref in row]
        kept.append([t for t in tokens if accepted and (not released or 0.5 <= t[1] <= 1.5)])
    cap = 1.5 if released and xi_cap == INF else xi_cap
    weigh = (lambda xi: min(1, cap)) if correction in ("reject", "none") else (lambda xi: min(xi, cap))
    weights = [weigh(math.exp(old - sparse)) for row in rows for _, old, sparse, _ in row]
    mean = sum(weights) / len(weights) if released else 1  # over all tokens, dropped and vetoed ones included
    J = 0.0
    for row, used, A in zip(rows, kept, advantages.tolist(), strict=True):
        below = {
            "response": len(rows) * len(used if released else row),
            "token": sum(map(len, rows)),
            "constant": len(rows) * (max_length or 0),
        }[aggregation]
        for w, xi, r in used:
            clipped = min(max(w, 1 - clip[0]), 1 + clip[1])
            J += (weigh(xi) / mean * min(w * A, clipped * A) - kl_coef * (math.exp(r) - r - 1)) / below
    return -J


def central_differences(function, x, h=1e-6):
    """The gradient of a float function of x, entry by entry."""
    gradient = torch.zeros_like(x)
    for place in itertools.product(*map(range, x.shape)):
        up, down = x.clone(), x.clone()
        up[place] += h
        down[place] -= h
        gradient[place] = (function(up) - function(down)) / (2 * h)
    return gradient


@pytest.mark.parametrize("correction, aggregation", ALL_SETTINGS)
def test_loss_and_gradient_equal_the_formula(correction, aggregation):
    """Random cases, clipped and not, A of both signs, with and without KL and cap: the value equals the formula and the
    gradient its central differences."""
    for seed in range(6):
        inputs, logp_ref = random_batch(seed)
        settings = {"correction": correction, "aggregation": aggregation, "max_length": 9, "clip": (0.2, 0.3)}
        settings |= {"logp_ref": logp_ref, "kl_coef": 0.1 * (seed % 2)}
        settings |= {"xi_cap": 1.1} if seed % 3 == 2 else {}
        logp, *rest = inputs
        loss, gradient = value_and_gradient(grpo.policy_loss, logp, *rest, **settings)
        expected = central_differences(lambda x, rest=rest, s=settings: slow_loss(x, *rest, **s), logp)
        assert float(loss) == pytest.approx(slow_loss(logp, *rest, **settings), rel=1e-9)
        assert_close(gradient, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("correction, aggregation", ALL_SETTINGS)
def test_fp32_agrees_with_the_formula(correction, aggregation):
    """fp32 inputs give the value of the formula on those numbers to 1e-5."""
    for seed in range(6):
        inputs, logp_ref = random_batch(seed, N=16, R=12, dtype=torch.float32)
        settings = {"correction": correction, "aggregation": aggregation, "max_length": 12}
        settings |= {"logp_ref": logp_ref, "kl_coef": 0.1}
        loss = float(grpo.policy_loss(*inputs, **settings)[0])
        assert loss == pytest.approx(slow_loss(*inputs, **settings), abs=1e-5 * float(inputs[3].abs().mean()))


# ------------------------------------------------------------------------------------------------------ invariance


def split_loss(parts, logp, logp_old, logp_sparse, advantages, mask, *, logp_ref=None, kl_coef=0.0, **settings):
    """One correction for the update, and (loss, metrics) of each part, a tensor of rows."""
    c = grpo.correct(logp_old, logp_sparse, mask, **settings)
    ref = [None if logp_ref is None else logp_ref[rows] for rows in parts]
    return [
        grpo.surrogate_loss(logp[rows], c[rows], logp_old[rows], advantages[rows], r, kl_coef=kl_coef)
        for rows, r in zip(parts, ref, strict=True)
    ]


def test_one_quarter_for_every_split():
    """One response with loss 1 and three with loss 0: 0.25, however they are split (verl PR 906, 7321; trl 3021;
    prime-rl PR 583)."""
    batch = sampled([[0.0], [0.0], [0.0], [0.0]], [-1, 0, 0, 0])
    for sizes in ([4], [1, 3], [3, 1], [2, 2], [1, 2, 1], [1, 1, 1, 1]):
        for order in itertools.permutations(range(4)):
            assert sum(float(loss) for loss, _ in split_loss(torch.tensor(order).split(sizes), *batch)) == 0.25


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("correction, aggregation", ALL_SETTINGS)
def test_micro_batches_add_up(correction, aggregation, kl_coef):
    """Losses, gradients and metrics of any split, in any order, add up to those of the whole update (verl PR 906,
    7321)."""
    inputs, logp_ref = random_batch(5, N=8)
    settings = {"correction": correction, "aggregation": aggregation, "max_length": 5, "kl_coef": kl_coef}
    settings["logp_ref"] = logp_ref
    loss, gradient = value_and_gradient(grpo.policy_loss, *inputs, **settings)
    metrics = grpo.policy_loss(*inputs, **settings)[1]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    for sizes in ([8], [1, 7], [3, 5], [2, 2, 2, 2], [1] * 8):

        def summed(*args, sizes=sizes, **settings):
            losses, parts = zip(*split_loss(order.split(sizes), *args, **settings), strict=True)
            return sum(losses), {name: sum(part[name] for part in parts) for name in parts[0]}

        got = value_and_gradient(summed, *inputs, **settings)
        assert_close(got[0], loss)
        assert_close(got[1], gradient, atol=1e-12, rtol=1e-9)
        assert_close(summed(*inputs, **settings)[1], metrics)


@pytest.mark.parametrize("correction, aggregation", ALL_SETTINGS)
def test_order_of_responses_does_not_matter(correction, aggregation):
    """A permutation of the rows permutes the gradient and leaves the loss."""
    inputs, _ = random_batch(6)
    settings = {"correction": correction, "aggregation": aggregation, "max_length": 5}
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    loss, gradient = value_and_gradient(grpo.policy_loss, *inputs, **settings)
    permuted = value_and_gradient(grpo.policy_loss, *(x[order] for x in inputs), **settings)
    assert_close(permuted[0], loss)
    assert_close(permuted[1], gradient[order])


@pytest.mark.parametrize("junk", [0.0, -1e4, NAN, INF, -INF])
@pytest.mark.parametrize("correction, aggregation", ALL_SETTINGS)
def test_padding_does_not_matter(correction, aggregation, junk):
    """Neither its length nor what it holds reaches loss, gradient or metrics."""
    inputs, logp_ref = random_batch(7)
    inputs, logp_ref = [x.nan_to_num(0) for x in inputs], logp_ref.nan_to_num(0)
    settings = {"correction": correction, "aggregation": aggregation, "max_length": 5, "kl_coef": 0.1}
    mask = torch.nn.functional.pad(inputs[4], (0, 3))

    def longer(x):
        return torch.nn.functional.pad(x, (0, 3)).masked_fill(~mask, junk)

    loss, gradient = value_and_gradient(grpo.policy_loss, *inputs, logp_ref=logp_ref, **settings)
    padded = (*map(longer, inputs[:3]), inputs[3], mask)
    got = value_and_gradient(grpo.policy_loss, *padded, logp_ref=longer(logp_ref), **settings)
    assert_close(got[0], loss)
    assert_close(got[1], torch.nn.functional.pad(gradient, (0, 3)))
    metrics = [
        grpo.policy_loss(*x, logp_ref=r, **settings)[1] for x, r in ((inputs, logp_ref), (padded, longer(logp_ref)))
    ]
    assert_close(*metrics)
    assert grpo.mismatch_metrics(*padded[1:3], mask) == grpo.mismatch_metrics(*inputs[1:3], inputs[4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_thousand_extreme_responses(dtype):
    """Log-probs to -1e4, lengths 0 and 1, all rejected: everything is finite, and what is masked, rejected or without
    advantage has a gradient of exactly 0."""
    g, r = torch.Generator().manual_seed(0), random.Random(0)
    N, R = 100, 6
    for _ in range(100):
        correction, aggregation = r.choice(ALL_SETTINGS)
        junk, longest, kl_coef = r.choice([NAN, INF, -INF, 0.0]), r.choice([0, 1, R]), r.choice([0.0, 0.1])
        logps = -r.choice([0.1, 3.0, 100.0, 1e4]) * torch.rand(4, N, R, generator=g, dtype=dtype)
        mask = torch.arange(R) < torch.randint(longest + 1, (N, 1), generator=g)
        if r.random() < 0.2:
            logps[1] = logps[2] - 10  # every token below epsilon
        logp, logp_old, logp_sparse, logp_ref = logps.masked_fill(~mask, junk)
        advantages = torch.randn(N, generator=g, dtype=dtype) * torch.randint(2, (N,), generator=g)
        inputs = logp, logp_old, logp_sparse, advantages, mask
        settings = {"correction": correction, "aggregation": aggregation, "max_length": R}
        settings |= {"logp_ref": logp_ref, "kl_coef": kl_coef}

        loss, gradient = value_and_gradient(grpo.policy_loss, *inputs, **settings)
        metrics = grpo.policy_loss(*inputs, **settings)[1] | grpo.mismatch_metrics(logp_old, logp_sparse, mask)
        assert loss.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, metrics.values()))
        vetoed = ((logp_old - logp_sparse < math.log(1e-4)) & mask).any(1) & (correction not in ("reweight", "none"))
        silent = ~mask | vetoed[:, None] | ((advantages == 0)[:, None] & (kl_coef == 0))
        assert not gradient[silent].any()
        assert loss == 0 or not silent.all()


# ------------------------------------------------------------------------------------------------------ good manners


def test_inputs_are_left_untouched():
    """No function writes into what it is given (nano-aha)."""
    inputs, logp_ref = random_batch(8)
    _, logp_old, logp_sparse, _, mask = inputs
    given = [*inputs, logp_ref]
    before = [x.clone() for x in given]
    for correction in grpo.CORRECTIONS:
        grpo.policy_loss(*inputs, logp_ref=logp_ref, correction=correction, kl_coef=0.1, xi_cap=1.1)
    grpo.mismatch_metrics(logp_old, logp_sparse, mask)
    grpo.group_advantages(inputs[3], 2)
    for x, copy in zip(given, before, strict=True):
        assert_close(x, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "dtype, computed",
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_at_least_fp32_and_float64_stays(dtype, computed):
    """Half precision is widened, float64 kept."""
    inputs, logp_ref = random_batch(9, dtype=dtype)
    logp, logp_old, logp_sparse, advantages, mask = inputs
    for correction, aggregation in ALL_SETTINGS:
        settings = {"correction": correction, "aggregation": aggregation, "max_length": 5, "kl_coef": 0.1}
        assert grpo.policy_loss(*inputs, logp_ref=logp_ref, **settings)[0].dtype == computed
    assert grpo.consistency_ratio(logp_old, logp_sparse, mask).dtype == computed
    assert grpo.kl_to_reference(logp, logp_ref, mask).dtype == computed
    assert grpo.group_advantages(advantages, 2).dtype == computed


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"correction": "sparse"}, "unknown correction"),
        ({"aggregation": "mean"}, "unknown aggregation"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"aggregation": "constant"}, "max_length"),
        ({"kl_coef": 0.1}, "logp_ref"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    """What cannot be meant is an error that names the argument."""
    with pytest.raises(ValueError, match=message):
        grpo.policy_loss(*random_batch(0)[0], **settings)


def test_a_penalty_needs_a_reference_in_a_micro_batch_too():
    """kl_coef without logp_ref would silently be no penalty."""
    (logp, logp_old, logp_sparse, advantages, mask), _ = random_batch(0)
    with pytest.raises(ValueError, match="logp_ref"):
        grpo.surrogate_loss(logp, grpo.correct(logp_old, logp_sparse, mask), logp_old, advantages, kl_coef=0.1)


@pytest.mark.parametrize("group_size", [0, -2, 4])
def test_groups_must_divide_the_batch(group_size):
    """No reward is dropped silently (nanochat chat_rl)."""
    with pytest.raises(ValueError, match="groups"):
        grpo.group_advantages(torch.zeros(6), group_size)


# ---------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_those_of_all_sampled_tokens():
    """Every mismatch metric equals its definition over all tokens, rejected ones included (released mis.py)."""
    (_, logp_old, logp_sparse, _, mask), _ = random_batch(2, N=40, R=12)
    log_xi = sorted((logp_old - logp_sparse)[mask].tolist())
    xi, n = [math.exp(x) for x in log_xi], len(log_xi)
    expected = {
        "rejected": 1 / 40,
        "xi_mean": sum(xi) / n,
        "xi_min": min(xi),
        **{f"xi_p{q:02d}": xi[round(q / 100 * (n - 1))] for q in (1, 5, 50, 95, 99)},
        "log_xi_abs": sum(map(abs, log_xi)) / n,
        "sampler_kl": sum(x - 1 - log_x for x, log_x in zip(xi, log_xi, strict=True)) / n,
        "ess": sum(xi) ** 2 / (n * sum(x * x for x in xi)),
    }
    assert grpo.mismatch_metrics(logp_old, logp_sparse, mask) == pytest.approx(expected)


def test_rejected_share_is_taken_before_anything_is_dropped():
    """One of three responses rejected: 0.333, not the 0.000 of what is left (released mis.py)."""
    _, logp_old, logp_sparse, _, mask = sampled([[0.0], [0.0, -10.0], [0.0]], [0, 0, 0])
    assert grpo.mismatch_metrics(logp_old, logp_sparse, mask)["rejected"] == pytest.approx(1 / 3)
    assert grpo.mismatch_metrics(logp_old, logp_sparse, mask, epsilon=1e-5)["rejected"] == 0


def test_opposite_mismatches_do_not_cancel():
    """Log-ratios 1 and -1 have a signed mean of 0; |log xi|, k3 and quantiles see them (slime PR 596)."""
    _, logp_old, logp_sparse, _, mask = sampled([[1.0, -1.0]], [0])
    metrics = grpo.mismatch_metrics(logp_old, logp_sparse, mask)
    assert metrics["log_xi_abs"] == 1
    assert metrics["sampler_kl"] == pytest.approx(math.cosh(1) - 1)
    assert (metrics["xi_p01"], metrics["xi_p99"]) == pytest.approx((math.exp(-1), math.e))


def test_sampler_kl_estimates_the_divergence_of_sampler_and_dense_policy():
    """Tokens in the proportions of pi_sparse give KL(pi_sparse || pi_old) exactly."""
    sparse, old, tokens = f64([0.5, 0.25, 0.25]), f64([0.2, 0.5, 0.3]), torch.tensor([[0, 0, 1, 2]])
    kl = float((sparse * (sparse / old).log()).sum())
    got = grpo.mismatch_metrics(old.log()[tokens], sparse.log()[tokens], torch.ones(1, 4, dtype=torch.bool))
    assert got["sampler_kl"] == pytest.approx(kl)


def test_mismatch_of_equal_policies_is_nothing():
    """Identical log-probs: xi = 1, no rejection, no divergence, a full effective sample; so without tokens (verl
    6280)."""
    for rows in ([[-1.0, -2.0], [-3.0]], [[], []]):
        logp, mask = ragged(rows)
        metrics = grpo.mismatch_metrics(logp, logp, mask)
        ones = ("xi_mean", "xi_min", "xi_p01", "xi_p05", "xi_p50", "xi_p95", "xi_p99", "ess")
        assert metrics == {**dict.fromkeys(ones, 1.0), "rejected": 0, "log_xi_abs": 0, "sampler_kl": 0}


def test_a_token_that_is_not_a_number_leaves_the_metrics_finite():
    """Its response counts as rejected, its ratio as exp(-20)."""
    _, logp_old, logp_sparse, _, mask = sampled([[0.0, NAN], [0.0]], [0, 0])
    metrics = grpo.mismatch_metrics(logp_old, logp_sparse, mask)
    assert (metrics["rejected"], metrics["xi_min"]) == pytest.approx((0.5, math.exp(-20)))
    assert all(map(math.isfinite, metrics.values()))


def test_sampler_kl_of_rounding_noise_is_not_negative():
    """fp32 noise of 1e-4 between sampler and dense policy, a dense rollout's floor, gives d^2 / 2 (verl 6280)."""
    d = 1e-4 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    got = grpo.mismatch_metrics(d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool))["sampler_kl"]
    assert got == pytest.approx(float((d.double() ** 2).mean() / 2), rel=1e-2)


@pytest.mark.parametrize("junk", [0.0, 5.0, -1e4, NAN, INF, -INF])
def test_padding_is_no_extreme(junk):
    """Smallest and largest xi and the smallest dense log-prob of each response, over its own tokens alone."""
    logp_old, mask = ragged([[-1.0, -3.0], [-2.0]], fill=junk)
    logp_sparse, _ = ragged([[-2.0, -1.0], [-2.5]], fill=0.0)
    got = grpo.extremes(logp_old, logp_sparse, mask)
    assert_close(got["xi_min"], f64([math.exp(-2), math.exp(0.5)]))
    assert_close(got["xi_max"], f64([math.e, math.exp(0.5)]))
    assert_close(got["logp_min"], f64([-3, -2]))


def test_extremes_are_raw_and_show_what_is_not_finite():
    """No clamp: exp(25) stays, exp(1e4) is infinite, and NaN inside the mask is NaN."""
    _, logp_old, logp_sparse, _, mask = sampled([[25.0, -25.0], [1e4], [0.0, NAN]], [0, 0, 0])
    got = grpo.extremes(logp_old, logp_sparse, mask)
    assert_close(got["xi_min"], f64([math.exp(-25), INF, NAN]), equal_nan=True)
    assert_close(got["xi_max"], f64([math.exp(25), INF, NAN]), equal_nan=True)
    assert_close(got["logp_min"], f64([-25, 1e4, NAN]), equal_nan=True)


@pytest.mark.parametrize(
    "w, clip, low, high",
    [(0.5, (0.2, 0.2), 2 / 5, 0), (0.7, (0.4, 0.2), 0, 0), (1.5, (0.2, 0.2), 0, 1 / 5), (1.3, (0.2, 0.4), 0, 0)],
)
def test_clip_shares_count_tokens_without_gradient(w, clip, low, high):
    """clip_low: w < 1 - e_lo at A < 0; clip_high: w > 1 + e_hi at A > 0; as shares of all tokens, those of rejected
    responses included."""
    batch = sampled([[0.0], [0.0], [0.0, -10.0], [0.0]], [1, -1, 2, -1], log_w=math.log(w))
    metrics = grpo.policy_loss(*batch, clip=clip)[1]
    assert (float(metrics["clip_low"]), float(metrics["clip_high"])) == pytest.approx((low, high))


def test_policy_loss_metric_leaves_the_kl_out():
    """loss = policy_loss + beta kl_ref."""
    inputs, logp_ref = random_batch(1)
    loss, metrics = grpo.policy_loss(*inputs, logp_ref=logp_ref, kl_coef=0.3)
    assert_close(metrics["policy_loss"] + 0.3 * metrics["kl_ref"], loss)
    assert float(metrics["policy_loss"]) == pytest.approx(slow_loss(*inputs))


def test_groups_without_signal_are_counted():
    """All right and all wrong both teach nothing, and are reported (CoursIA 10603)."""
    rewards = [1, 1, 0, 0, 1, 0, 0.5, 0.5]
    assert grpo.reward_metrics(f64(rewards), 2) == pytest.approx(
        {
            "reward_mean": statistics.mean(rewards),
            "reward_std": statistics.stdev(rewards),
            "groups_without_signal": 3 / 4,
        }
    )
