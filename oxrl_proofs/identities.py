"""Worked numbers and limiting relations of the table's cells: small data, five kinds of check.

Numbers are hand arithmetic or come from the papers' formulas, never from running the functions they
check. A key is (cell kind, cell name); a row inherits the checks of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oxrl.functional.advantages import ADVANTAGES, AdvantageInputs
from oxrl.functional.corrections import CORRECTIONS
from oxrl.functional.kl import KLS
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS
from oxrl.functional.weights import WEIGHTS

Cell = tuple[str, str]
NAN = float("nan")
NO_CLIP = {"clip_low": 1e9, "clip_high": 1e9}


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(found: Tensor, expected: Any, what: str, tolerance: float = 2e-6) -> None:
    """Raise AssertionError unless equal within an absolute `tolerance`; NaN only equals NaN."""
    expected = expected if isinstance(expected, Tensor) else f64(expected)
    ok = torch.allclose(
        found.double(),
        expected.double().reshape(found.shape),
        rtol=0,
        atol=tolerance,
        equal_nan=True,
    )
    assert ok, f"{what}: {found.tolist()} instead of {expected.tolist()}"


# --- gates ---


def gate_weights(
    name: str, ratios: list[float], sign: float, further: dict[str, Any], **numbers: Any
) -> Tensor:
    """Effective weights -gradient / A of single-token rows with these ratios and A = sign, loss
    weights 1.
    """
    old = f64([[-2.0]] * len(ratios))
    return weights_at(name, old, old + f64(ratios).log()[:, None], sign, further, **numbers)


def weights_at(
    name: str, old: Tensor, logprobs: Tensor, sign: float, further: dict[str, Any], **numbers: Any
) -> Tensor:
    logprobs = logprobs.clone().requires_grad_()
    ones = torch.ones_like(logprobs)
    loss, _ = GATES[name](
        logprobs, old, sign * ones, ones.bool(), ones.detach(), **further, **numbers
    )
    return -torch.autograd.grad(loss, logprobs)[0] / sign


RATIO_ROW = [0.5, 1.0, 1.5, 2.0, 4.0]
# gate -> (sign of A, numbers, effective weight at the ratios of RATIO_ROW).
GATE_WEIGHTS: dict[str, list[tuple[float, dict[str, Any], list[float]]]] = {
    "policy_gradient": [(1, {}, [1.0] * 5), (-1, {}, [1.0] * 5)],
    "importance_sampling": [(1, {}, RATIO_ROW), (-1, {}, RATIO_ROW)],
    "ppo_clip": [
        (1, {}, [0.5, 1, 0, 0, 0]),
        (-1, {}, [0, 1, 1.5, 2, 4]),
        (-1, {"clip_dual": 3.0}, [0, 1, 1.5, 2, 0]),
        (1, {"clip_high": 0.6}, [0.5, 1, 1.5, 0, 0]),
    ],
    "cispo": [
        (1, {}, RATIO_ROW),
        (-1, {"weight_min": 0.8, "weight_max": 1.28}, [0.8, 1, 1.28, 1.28, 1.28]),
    ],
    "sapo": [
        (1, {}, [0.470007, 1, 1.410022, 1.572895, 0.722827]),
        (-1, {}, [0.467070, 1, 1.401210, 1.536220, 0.630445]),
    ],
    "rgpo_like": [(-1, {}, [0.470007, 1, 1.410022, 1.572895, 0.722827])],
    "vespo": [
        (1, {}, [1.120422, 1, NAN, 0.199148, NAN]),
        (-1, {}, [0.339785, 1, 1.241593, NAN, 0.158640]),
    ],
    "proximal": [(1, {"proximal_coeff": 0.5}, [1 - 0.5 * math.log(r) for r in RATIO_ROW])],
    "gmpo": [(1, {}, [0.5, 1, 0, 0, 0]), (-1, {}, [0, 1, 1.5, 2, 4])],
    "dro": [(-1, {"proximal_coeff": 0.5}, [1 + 0.5 * math.log(r) for r in RATIO_ROW])],
    # 1 - (r - 1) of r where delta is 1 and mu left out; mu = exp(-2) and half of it as delta leave
    # 1 + 2 (r - 1) of r where A < 0
    "drpo": [
        (1, {"drpo_delta": 1.0, "spo": True}, [0.75, 1, 0.75, 0, -8]),
        (-1, {"drpo_delta": 0.5 * math.exp(-2)}, [0, 1, 3, 6, 28]),
    ],
    # rows of one token: F = log r, f = clip(r, 1, 1.2), and 1 for the last where A < 0
    "fipo": [
        (1, {"clip_high": 9.0}, [0.5, 1, 1.8, 2.4, 4.8]),
        (-1, {"influence_range": 0.3, "influence_ratio_max": 3.0}, [0, 1, 1.95, 2.6, 4]),
        (-1, {"clip_dual": 1.9}, [0, 1, 1.8, 0, 0]),
    ],
}
# (probability when sampled, now, sign of A) and whether DPPO with bound .2 keeps it, by total
# variation and by KL.
DPPO_CASES = [
    (0.01, 0.03, 1, 1, 1),
    (0.5, 0.75, 1, 0, 1),
    (0.99, 0.70, -1, 0, 0),
    (0.99, 0.70, 1, 1, 1),
]


def check_gate(name: str) -> None:
    for sign, numbers, expected in GATE_WEIGHTS[name]:
        found = gate_weights(name, RATIO_ROW, sign, {}, **numbers)[:, 0]
        listed = ~f64(expected).isnan()
        same(
            found[listed],
            f64(expected)[listed],
            f"weights of {name} {numbers} for A of sign {sign}",
        )


def check_dppo(name: str, column: int) -> None:
    for mu, p, sign, *kept in DPPO_CASES:
        further = {}
        if (
            "topk" in name
        ):  # one top token, which is the sampled one: the two buckets of the plain form
            tops = {"top_logprobs": p, "old_top_logprobs": mu}
            further = {key: f64([[[math.log(value)]]]) for key, value in tops.items()}
            further["sampled_in_top"] = torch.ones(1, 1, dtype=torch.bool)
        bounds = {"dppo_low": 0.2, "dppo_high": 0.2}
        logprobs = f64([[math.log(mu)]]), f64([[math.log(p)]])
        found = weights_at(name, *logprobs, sign, further, **bounds)
        same(found, [[kept[column] * p / mu]], f"{name} from {mu} to {p}, A of sign {sign}")


def check_simko() -> None:
    """r = 1.1, alpha = .01, K = 3: the sampled token, among the top 3, gets 1.092667 in all, the
    others .003667.
    """
    top = f64([[[-2.0, -3.0, -4.0]]]) + f64([1.1, 0.7, 1.3]).log()
    top.requires_grad_()
    logprobs, ones = (
        top.detach()[..., 0].clone().requires_grad_(),
        torch.ones(1, 1, dtype=torch.float64),
    )
    yes = ones.bool()
    loss, _ = GATES["simko"](
        logprobs,
        f64([[-2.0]]),
        ones,
        yes,
        ones,
        top_logprobs=top,
        old_top_logprobs=f64([[[-2.0, -3.0, -4.0]]]),
        explore=yes,
        sampled_is_top=yes,
    )
    own, others = torch.autograd.grad(loss, [logprobs, top])
    same(-loss.detach(), 1.1, "value of the smoothed ratio")
    same(-(own[0, 0] + others[0, 0, 0]), 1.092667, "gradient of the sampled token")
    same(-others[0, 0, 1:], [0.003667, 0.003667], "gradient of the other candidates")


def check_selected(name: str) -> None:
    further = {"selected": torch.tensor([[True], [False], [True], [True], [False]])}
    expected = {"clip_cov": [0, 1, 0, 0, 4], "kl_cov": [0.5 - 1, 1, 1.5 + 1, 2 + 1, 4]}[name]
    same(gate_weights(name, RATIO_ROW, -1, further)[:, 0], expected, f"weights of {name}")


def check_proximal() -> None:
    """Log-ratios .1 and .3 of one row: X = .4, so both tokens have weight 1 - .5 * .4 for A = 1;
    a row of one token has 1 - .5 log r.
    """
    check_gate("proximal")
    old = f64([[-1.0, -2.0]])
    found = weights_at("proximal", old, old + f64([[0.1, 0.3]]), 1, {}, proximal_coeff=0.5)
    same(found, [[0.8, 0.8]], "weights of a row's tokens")


def check_rspo() -> None:
    """Layer deviations .05 and .30: gamma = exp(-.175) = .839457 scales the ratio before the
    clip.
    """
    gamma = math.exp(-0.175)
    further = {"router_shift": torch.full((5, 1), gamma, dtype=torch.float64)}
    expected = [0.5 * gamma, gamma, 1.5 * gamma, 0, 0]
    same(gate_weights("rspo", RATIO_ROW, 1, further)[:, 0], expected, "weights of rspo")


# The policy, and the teacher, of three tokens.
POLICY, TEACHER = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
# alpha -> g and S w of the first two tokens.
DIVERGENCES: dict[float, tuple[list[float], list[float]]] = {
    1.0: ([0.235531, -0.081093], [0.235531, -0.081093]),
    0.0: ([-0.168236, 0.121640], [0.2, -0.1]),
    # M = [.6, .25]
    0.5: ([0.008372, 0.005034], [0.053953, -0.022314]),
}


def divergence_gradients(
    alpha: float, known: list[int], sampled: int, teacher: list[float]
) -> tuple[Tensor, Tensor]:
    """Value, and the gradient by the log-probability of each of three tokens, one of which was
    sampled, with probability .25.
    """
    logprobs = f64([[POLICY]]).log().requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.float64)
    loss, _ = GATES["teacher_divergence"](
        logprobs[..., sampled],
        ones * math.log(0.25),
        ones,
        ones.bool(),
        ones,
        top_logprobs=logprobs[..., known],
        teacher_top_logprobs=f64([[teacher]]).log()[..., known],
        teacher_logprobs=ones * math.log(teacher[sampled]),
        sampled_in_top=torch.tensor([[sampled in known]]),
        divergence_alpha=alpha,
    )
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0][0, 0]


def check_divergence() -> None:
    """The first token is a candidate; the second one was sampled, and counts four times."""
    for alpha, (values, pushes) in DIVERGENCES.items():
        value, gradient = divergence_gradients(alpha, [0], 1, TEACHER)
        same(value, values[0] + 4 * values[1], f"value of alpha {alpha}", 6e-6)
        same(gradient, [pushes[0], 4 * pushes[1], 0], f"gradient of alpha {alpha}", 6e-6)
        value, gradient = divergence_gradients(alpha, [0], 0, TEACHER)
        same(value, values[0], f"value of alpha {alpha}, of the candidate alone")
        same(gradient, [pushes[0], 0, 0], f"gradient of alpha {alpha}, of the candidate alone")


# --- advantages ---

ROW_OF_FOUR = {"rewards": [1, 0, 0, 0], "lengths": [1, 1, 1, 1], "group_ids": [3, 3, 3, 3]}
# advantage -> (inputs, numbers, advantage of every row's first token).
ROW_ADVANTAGES: dict[str, list[tuple[dict[str, Any], dict[str, Any], list[float]]]] = {
    "group_normalize": [(ROW_OF_FOUR, {}, [1.5, -0.5, -0.5, -0.5])],
    "group_normalize_parts": [
        # z-scores (3, -1, -1, -1) / 2 and (1, 1, -1, -1) * sqrt(3) / 2, the second twice; then
        # their sum, whose mean is 0, over its standard deviation 2.703591
        (
            {
                **ROW_OF_FOUR,
                "part_rewards": [[1, 10], [0, 10], [0, 6], [0, 6]],
                "part_weights": [1, 2],
            },
            {},
            [1.195466, 0.455709, -0.825588, -0.825588],
        ),
        # equal sums of parts that differ teach; a part that one response lacks compares the others
        (
            {
                "rewards": [1, 1, 0, 0],
                "lengths": [1, 1, 1, 1],
                "group_ids": [1, 1, 2, 2],
                "part_rewards": [[1, 0], [0, 1], [0, 5], [0, NAN]],
                "part_weights": [1, 3],
            },
            {},
            [-1.224745, 1.224745, 0, 0],
        ),
    ],
    # of one turn each: a z-score
    "turn_normalize": [(ROW_OF_FOUR, {"turn_gamma": 1.0}, [1.5, -0.5, -0.5, -0.5])],
    "group_center": [(ROW_OF_FOUR, {}, [0.75, -0.25, -0.25, -0.25])],
    "group_center_batch_std": [
        (ROW_OF_FOUR, {}, [1.5, -0.5, -0.5, -0.5]),
        # two groups of one success in two: batch std of (1, 0, 1, 0) is sqrt(1/3)
        (
            {**ROW_OF_FOUR, "rewards": [1, 0, 1, 0], "group_ids": [1, 1, 2, 2]},
            {},
            [0.866025, -0.866025] * 2,
        ),
    ],
    "group_center_centered_std": [
        (ROW_OF_FOUR, {}, [1.5, -0.5, -0.5, -0.5]),
        # centered (1/2, -1/2, 0, 0): their std is sqrt(1/6); that of the rewards would be 1/2
        ({**ROW_OF_FOUR, "group_ids": [1, 1, 2, 2]}, {}, [1.224745, -1.224745, 0, 0]),
    ],
    "group_center_rescaled": [
        (ROW_OF_FOUR, {}, [0.75, -0.25, -0.25, -0.25]),
        (
            {**ROW_OF_FOUR, "group_ids": [1, 1, 2, 2]},
            {},
            [1, -1, 0, 0],
        ),  # half of the rows teach: times two
    ],
    "group_center_whitened": [(ROW_OF_FOUR, {}, [1.5, -0.5, -0.5, -0.5])],
    "leave_one_out": [(ROW_OF_FOUR, {}, [1, -1 / 3, -1 / 3, -1 / 3])],
    "batch_center": [({**ROW_OF_FOUR, "group_ids": [1, 2, 3, 4]}, {}, [0.75, -0.25, -0.25, -0.25])],
    "mean_normalize": [
        (ROW_OF_FOUR, {}, [2.999988, -0.999996, -0.999996, -0.999996]),
        # two draws of the others: the right row has nothing to lose by them, 1 + 1 - 0; the others
        # miss with chance 1/3
        (ROW_OF_FOUR, {"maxrl_order": 2}, [2, -2 / 3, -2 / 3, -2 / 3]),
    ],
    "iqr_normalize": [
        # median 0, quartiles 0 and 1/4
        (ROW_OF_FOUR, {}, [2, 0, 0, 0]),
        (ROW_OF_FOUR, {"iqr_floor": 0.1}, [4, 0, 0, 0]),
        # median 1.5, quartiles .75 and 2.5
        (
            {**ROW_OF_FOUR, "rewards": [4, 2, 1, 0]},
            {},
            [1.428571, 0.285714, -0.285714, -0.857143],
        ),
    ],
    "top_gap": [
        (ROW_OF_FOUR, {}, [1.999996, 0, 0, 0]),
        ({**ROW_OF_FOUR, "rewards": [1, 1, 0, 0]}, {}, [0, 0, 0, 0]),  # a tie for the best
    ],
    # n s = [2, 2/3, 2/3, 2/3] for k = 2; without row i the others' mean is 0 for i = 1, else (2 + 2
    # * 1) / 3
    "pass_at_k": [(ROW_OF_FOUR, {"pass_k": 2}, [2, -2 / 3, -2 / 3, -2 / 3])],
    # b = 2 * 1 / 5
    "length_weighted_center": [
        ({**ROW_OF_FOUR, "lengths": [2, 1, 1, 1]}, {}, [0.6, -0.4, -0.4, -0.4])
    ],
    "greedy_baseline": [({**ROW_OF_FOUR, "greedy_rewards": [1, 1, 0, 0]}, {}, [0, -1, 0, 0])],
}


def row_inputs(
    rewards: Sequence[float], lengths: list[int], group_ids: list[int], **further: Any
) -> AdvantageInputs:
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    given: dict[str, Any] = {name: f64(value) for name, value in further.items()}
    return AdvantageInputs(
        rewards=f64(rewards),
        token_rewards=torch.where(mask, f64(rewards)[:, None] / mask.sum(1, keepdim=True), 0.0),
        response_mask=mask,
        group_ids=torch.tensor(group_ids),
        **given,
    )


def check_rows(name: str) -> None:
    for inputs, numbers, expected in ROW_ADVANTAGES[name]:
        found, _ = ADVANTAGES[name](row_inputs(**inputs), **numbers)
        same(found[:, 0], expected, f"{name} of {inputs}")


TOKENS = AdvantageInputs(
    rewards=f64([1]),
    token_rewards=f64([[0, 0, 0, 1]]),
    response_mask=torch.ones(1, 4, dtype=torch.bool),
    group_ids=torch.tensor([0]),
    values=f64([[0.5, 0.6, 0.4, 0.8]]),
    old_logprobs=f64([[0.7, 0.2, 0.1, 0.5]]).log(),
    teacher_logprobs=f64([[0.5, 0.3, 0.2, 0.5]]).log(),
    done=0.25,
)


def check_otb() -> None:
    """Squared norms .5 .02 .3, .08 and .5 .5: the first response has B = .5 / 1.08, then
    .52 / 1.52, then none, being alone.
    """
    inputs = row_inputs(
        rewards=[1, 0, 0],
        lengths=[3, 1, 2],
        group_ids=[6, 6, 6],
        policy_logprobs=f64([[0.5, 0.9, 0.6], [0.8, 1, 1], [0.5, 0.5, 1]]).log().tolist(),
        sum_p_squared=[[0.5, 0.82, 0.5], [0.68, NAN, NAN], [0.5, 0.5, NAN]],
    )
    late = replace(inputs, token_rewards=f64([[0, 0, 1], [0, 0, 0], [0, 0, 0]]))
    expected = [[0.537037, 0.657895, 1], [-0.462963, 0, 0], [-0.462963, -0.342105, 0]]
    same(ADVANTAGES["otb"](late)[0], expected, "otb")


_GAE = {"whiten": False, "bootstrap_on_truncation": False}
# advantage -> (numbers, advantages of TOKENS, returns or None).
TOKEN_ADVANTAGES: dict[str, list[tuple[dict[str, Any], list[float], list[float] | None]]] = {
    "gae": [
        (
            {"gamma": 1, "gae_lambda": 0.95, **_GAE},
            [0.442475, 0.3605, 0.59, 0.2],
            [0.942475, 0.9605, 0.99, 1],
        ),
        (
            {"gamma": 0.9, "gae_lambda": 0.95, **_GAE},
            [0.193733, 0.179805, 0.491, 0.2],
            [0.693733, 0.779805, 0.891, 1],
        ),
        (
            {"gamma": 1, "gae_lambda": 0.95, **_GAE, "whiten": True},
            [0.271792, -0.231928, 1.178305, -1.218169],
            [0.942475, 0.9605, 0.99, 1],
        ),
    ],
    # alpha * length = .2, so lambda = 0 for the policy; the critic's lambda is 1
    "gae_length_adaptive": [
        ({"gamma": 1, "length_alpha": 0.05, **_GAE}, [0.1, -0.2, 0.4, 0.2], [1, 1, 1, 1])
    ],
    "returns": [({"gamma": 0.5}, [0.125, 0.25, 0.5, 1], None)],
    # (1, 2, 4, 8) / 8: mean 15/32, unbiased variance 115/768
    "whitened_returns": [({"gamma": 0.5}, [-0.888330, -0.565301, 0.080757, 1.372874], None)],
    "none": [({}, [0, 0, 0, 0], None)],
    "teacher_gap": [
        ({}, [-0.336472, 0.405465, 0.693147, 0], None),
        ({"teacher_coeff": 2.0}, [-0.672944, 0.810930, 1.386294, 0], None),
    ],
    "teacher_return": [
        ({}, [0.762140, 1.098612, 0.693147, 0], None),
        ({"teacher_gamma": 0.5}, [0.039547, 0.752039, 0.693147, 0], None),
        # over 4, 3, 2, 1 tokens, and over 1.875, 1.75, 1.5, 1
        ({"teacher_mean": True}, [0.190535, 0.366204, 0.346574, 0], None),
        (
            {"teacher_gamma": 0.5, "teacher_mean": True},
            [0.021092, 0.429737, 0.462098, 0],
            None,
        ),
    ],
    # of sizes that add up to 1.435084, shares 0, .234461, .516998 and 1 come before
    "teacher_prefix_gap": [
        ({"prefix_coeff": 0.5}, [-0.504708, 0.560665, 0.860542, 0], None),
        ({"prefix_coeff": 2.0}, [-1.009416, 1.026262, 1.362730, 0], None),
    ],
    "group_normalize_teacher": [
        ({"teacher_coeff": 2.0}, [-0.672944, 0.810930, 1.386294, 0], None),
        # a quarter of the way from 2 to .4
        (
            {"teacher_coeff": 2.0, "teacher_coeff_end": 0.4},
            [-0.538356, 0.648744, 1.109035, 0],
            None,
        ),
    ],
}


def check_tokens(name: str) -> None:
    for numbers, expected, returns in TOKEN_ADVANTAGES[name]:
        found, targets = ADVANTAGES[name](TOKENS, **numbers)
        same(found, [expected], f"{name} with {numbers}")
        assert (targets is None) == (returns is None)
        if targets is not None:
            same(targets, [returns], f"returns of {name} with {numbers}")


# --- ratios, corrections, KL, weights ---

LOG_RHO = [[0.1, -0.2, 0.3, 1.2], [0, 0.05, -0.1, NAN]]
CORRECTION_MASK = torch.tensor([[True] * 4, [True] * 3 + [False]])
_FIRST, _BOTH = [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]
_SECOND = [0, 0, 0, 0, 1, 1, 1]
# correction -> (numbers, weights of the seven tokens of LOG_RHO).
CORRECTED: dict[str, list[tuple[dict[str, Any], Sequence[float]]]] = {
    "truncate": [
        ({}, [1.105171, 0.818731, 1.349859, 2, 1, 1.051271, 0.904837]),
        ({"correction_level": "sequence", "correction_max": 2.0}, [2, 2, 2, 2, *[0.951229] * 3]),
        ({"correction_level": "geometric"}, [1.419068] * 4 + [0.983471] * 3),
    ],
    "mask": [
        (
            {"correction_min": 0.5, "correction_max": 2.0},
            [1.105171, 0.818731, 1.349859, 0, 1, 1.051271, 0.904837],
        )
    ],
    "reject": [({"correction_min": 0.98, "correction_max": 1.0}, _SECOND)],
    "reject_k3": [({}, _SECOND), ({"correction_k3_max": 0.3}, _BOTH)],
    "veto": [({"correction_veto": 0.9}, [0, 0, 0, 0, 1, 1, 1]), ({}, _BOTH)],
    "drop_drifted_failures": [({"advantages": -torch.ones(2, 4), "drift_max": 0.01}, _FIRST)],
    "second_moment": [({"second_moment_max": 0.04}, [1, 1, 1, 0, 1, 1, 1])],
}


def check_correction(name: str) -> None:
    rollout = torch.full((2, 4), -1.0, dtype=torch.float64)
    for numbers, expected in CORRECTED[name]:
        found = CORRECTIONS[name](rollout + f64(LOG_RHO), rollout, CORRECTION_MASK, **numbers)
        same(found[CORRECTION_MASK], expected, f"{name} with {numbers}")


KL_VALUES = {
    "reward_k1": [0.336472, -0.405465, -0.693147],
    "loss_k2": [0.056607, 0.082201, 0.240227],
    **{
        name: [0.050758, 0.094535, 0.306853]
        for name in ("loss_k3", "loss_k3_plus", "loss_k3_ratio")
    },
}
_EXACT, _REVERSED = [0.175945, -0.098118, -0.077827], [0.2, -0.1, -0.1]
KL_GRADIENTS = {
    "loss_k2": _EXACT,
    "loss_k3": _REVERSED,
    "loss_k3_plus": _EXACT,
    "loss_k3_ratio": _EXACT,
}


def check_kl(name: str) -> None:
    """A vocabulary of three, policy [.7, .2, .1], reference [.5, .3, .2]: values, and the expected
    gradient.
    """
    policy, reference = f64([0.7, 0.2, 0.1]), f64([[0.5, 0.3, 0.2]]).log()
    logits = policy.log().requires_grad_()
    kl = KLS[name](logits.log_softmax(0)[None], reference, torch.ones(1, 3, dtype=torch.bool))
    same(kl.detach(), [KL_VALUES[name]], f"values of {name}")
    if name in KL_GRADIENTS:
        gradient = torch.autograd.grad((policy * kl).sum(), logits)[0]
        same(gradient, KL_GRADIENTS[name], f"expected gradient of {name}")


# Row losses [4], [1, 2], [2, 2, 5]; rows 1 and 2 belong to one prompt. weights -> (numbers, total).
TOTALS: dict[str, tuple[dict[str, Any], float]] = {
    "token_mean": ({}, 16 / 6),
    "sequence_mean": ({}, 8.5 / 3),
    "sequence_sum": ({}, 16 / 3),
    "fixed_length": ({"weights_length": 4}, 16 / 12),
    "prompt_mean": ({}, (7 / 3 + 9 / 3) / 2),
    # lengths 1 and 2: z = -1, 1, h = 8/9, 10/9, f = 2 softmax(h) = .889344, 1.110656; a prompt of
    # one row has f = 1
    "lambda_group": ({"length_power": 1.0}, ((4 * 0.889344 + 3 * 1.110656) / 3 + 3) / 2),
}


def check_weights(name: str) -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    numbers, total = TOTALS[name]
    weights = WEIGHTS[name](mask, torch.tensor([5, 5, 2]), **numbers)
    same((f64([[4, 0, 0], [1, 2, 0], [2, 2, 5]]) * weights).sum(), total, f"total under {name}")


def check_ratio(name: str) -> None:
    """log r = [.1, -.2, .6]: token 1.105171 .818731 1.822119, product 1.648721, geometric mean
    1.181360.
    """
    expected = {
        "none": [1, 1, 1],
        "token": [1.105171, 0.818731, 1.822119],
        "sequence": [1.648721] * 3,
        "geometric": [1.181360] * 3,
    }
    logprobs, old = f64([[-0.9, -0.7, -1.4]]), f64([[-1, -0.5, -2]])
    anchor = RATIOS[name](logprobs, old, torch.ones(1, 3, dtype=torch.bool))
    same((logprobs - anchor).exp(), [expected[name]], f"ratios at level {name}")


WORKED: dict[Cell, Callable[[], None]] = {
    **{("gate", name): (lambda name=name: check_gate(name)) for name in GATE_WEIGHTS},
    **{
        ("gate", f"dppo_{kind}tv"): (lambda kind=kind: check_dppo(f"dppo_{kind}tv", 0))
        for kind in ("", "topk_")
    },
    **{
        ("gate", f"dppo_{kind}kl"): (lambda kind=kind: check_dppo(f"dppo_{kind}kl", 1))
        for kind in ("", "topk_")
    },
    **{("gate", name): (lambda name=name: check_selected(name)) for name in ("clip_cov", "kl_cov")},
    ("gate", "simko"): check_simko,
    ("gate", "proximal"): check_proximal,
    ("gate", "rspo"): check_rspo,
    ("gate", "teacher_divergence"): check_divergence,
    ("advantage", "otb"): check_otb,
    **{("advantage", name): (lambda name=name: check_rows(name)) for name in ROW_ADVANTAGES},
    **{("advantage", name): (lambda name=name: check_tokens(name)) for name in TOKEN_ADVANTAGES},
    **{("correction", name): (lambda name=name: check_correction(name)) for name in CORRECTED},
    **{("kl", name): (lambda name=name: check_kl(name)) for name in KL_VALUES},
    **{("weights", name): (lambda name=name: check_weights(name)) for name in TOTALS},
    **{("ratio", name): (lambda name=name: check_ratio(name)) for name in RATIOS},
}

# --- limiting relations ---

_SELECT_NONE = {"selected": torch.zeros(5, 1, dtype=torch.bool)}
_NO_SHIFT = {"router_shift": torch.ones(5, 1, dtype=torch.float64)}
_TOPS = {
    name: torch.full((5, 1, 2), -3.0, dtype=torch.float64)
    for name in ("top_logprobs", "old_top_logprobs")
}
_APART = {**_TOPS, "sampled_in_top": torch.zeros(5, 1, dtype=torch.bool)}
_SIMKO = {
    **_TOPS,
    "explore": torch.ones(5, 1, dtype=torch.bool),
    "sampled_is_top": torch.ones(5, 1, dtype=torch.bool),
}
_UNBOUND = {"dppo_low": math.inf, "dppo_high": math.inf, "weight_max": 1.7}
_SOFT = 1e-4
# gate -> (its further tensors, its numbers, the gate it becomes, that gate's numbers, tolerance).
GATE_LIMITS: dict[str, tuple[dict[str, Tensor], dict[str, float], str, dict[str, float], float]] = {
    "ppo_clip": ({}, NO_CLIP, "cispo", {"weight_max": 1e9}, 1e-12),
    "importance_sampling": ({}, {}, "ppo_clip", NO_CLIP, 1e-12),
    "cispo": ({}, {"weight_min": 1.0, "weight_max": 1.0}, "policy_gradient", {}, 1e-12),
    "sapo": ({}, {"sapo_positive": _SOFT, "sapo_negative": _SOFT}, "ppo_clip", NO_CLIP, 1e-6),
    "rgpo_like": ({}, {"gate_sharpness": _SOFT}, "ppo_clip", NO_CLIP, 1e-6),
    "dppo_tv": ({}, _UNBOUND, "cispo", {"weight_max": 1.7}, 1e-12),
    "dppo_kl": ({}, _UNBOUND, "cispo", {"weight_max": 1.7}, 1e-12),
    "dppo_topk_tv": (_APART, _UNBOUND, "cispo", {"weight_max": 1.7}, 1e-12),
    "dppo_topk_kl": (_APART, _UNBOUND, "cispo", {"weight_max": 1.7}, 1e-12),
    "proximal": ({}, {"proximal_coeff": 0.0}, "policy_gradient", {}, 1e-12),
    "dro": ({}, {"proximal_coeff": 0.0}, "policy_gradient", {}, 1e-12),
    "drpo": ({}, {"drpo_delta": 1e15}, "importance_sampling", {}, 1e-12),
    "fipo": ({}, {"influence_range": 0.0}, "ppo_clip", {}, 1e-12),
    "gmpo": ({}, NO_CLIP, "ppo_clip", NO_CLIP, 1e-12),  # rows of one token
    "rspo": (_NO_SHIFT, {}, "gmpo", {}, 1e-12),
    "simko": (_SIMKO, {"simko_alpha": 0.0, "simko_boost": 1.0}, "ppo_clip", {}, 1e-12),
    "clip_cov": (_SELECT_NONE, {}, "ppo_clip", {}, 1e-12),
    "kl_cov": (_SELECT_NONE, {}, "ppo_clip", NO_CLIP, 1e-12),
}


def limit_gate(name: str) -> None:
    further, numbers, other, other_numbers, tolerance = GATE_LIMITS[name]
    for sign in (1.0, -1.0):
        expected = gate_weights(other, RATIO_ROW, sign, {}, **other_numbers)
        found = gate_weights(name, RATIO_ROW, sign, further, **numbers)
        same(found, expected, f"{name} {numbers} against {other} {other_numbers}", tolerance * 10)


def limit_vespo() -> None:
    """phi(1) = 1, and phi is largest at k / l."""
    for sign, peak in ((1.0, 2 / 3), (-1.0, 1.5)):
        below, top, above = gate_weights("vespo", [peak - 0.01, peak, peak + 0.01], sign, {})[
            :, 0
        ].tolist()
        assert top > below and top > above, f"the weight is not largest at {peak}"


RANDOM = row_inputs(
    rewards=[1, 0, 0, 1, 1, 0, 1, 0],
    lengths=[2, 3, 1, 2, 4, 1, 3, 2],
    group_ids=[1, 1, 1, 1, 0, 0, 0, 0],
)


def of_random(name: str, **numbers: Any) -> Tensor:
    return ADVANTAGES[name](RANDOM, **numbers)[0]


def limit_group_normalize() -> None:
    """Times the group's standard deviation it is group_center: both groups here have two of four
    right.
    """
    same(
        of_random("group_normalize") * math.sqrt(1 / 3),
        of_random("group_center"),
        "z-score times std",
        1e-7,
    )


def limit_group_normalize_parts() -> None:
    """One part: times the batch's standard deviation it is group_normalize. Two opposite parts of
    any scale cancel.
    """
    one = replace(RANDOM, part_rewards=RANDOM.rewards[:, None], part_weights=torch.ones(1).double())
    found = ADVANTAGES["group_normalize_parts"](one)[0]
    alone = of_random("group_normalize")
    same(found * float(alone[:, 0].std()), alone, "one part", 1e-6)
    opposite = torch.stack([RANDOM.rewards, -100 * RANDOM.rewards], dim=1)
    two = replace(RANDOM, part_rewards=opposite, part_weights=torch.ones(2).double())
    same(ADVANTAGES["group_normalize_parts"](two)[0], torch.zeros_like(found), "opposite", 1e-6)


def limit_leave_one_out() -> None:
    same(
        of_random("leave_one_out"),
        of_random("group_center") * 4 / 3,
        "G / (G - 1) times centered",
        1e-12,
    )


def limit_pass_at_k() -> None:
    """k = 1 is the plain reward with a leave-one-out baseline."""
    same(of_random("pass_at_k", pass_k=1), of_random("leave_one_out"), "pass@1", 1e-12)


def limit_mean_normalize() -> None:
    """Its expected gradient, p = .2, by its logit, grows from pass@1's .16 towards that of log p, 1
    - p = .8.
    """
    for size, expected in ((2, 0.16), (4, 0.3904), (8, 0.632228)):
        total = 0.0
        for right in range(1, size + 1):
            chance = math.comb(size, right) * 0.2**right * 0.8 ** (size - right)
            rewards = [1] * right + [0] * (size - right)
            inputs = row_inputs(rewards=rewards, lengths=[1] * size, group_ids=[0] * size)
            advantages = ADVANTAGES["mean_normalize"](inputs)[0][:, 0]
            total += chance * float((advantages * (f64(rewards) - 0.2)).mean())
        same(f64(total), expected, f"expected gradient with {size} samples", 1e-5)
    first, most = (of_random("mean_normalize", maxrl_order=order) for order in (1, 3))
    same(first, of_random("leave_one_out"), "one term", 1e-12)
    same(most, of_random("mean_normalize"), "as many terms as other samples", 1e-5)


def limit_iqr_normalize() -> None:
    """Two of four right: the median is the mean, and the range is 1."""
    same(of_random("iqr_normalize"), of_random("group_center"), "halves", 1e-12)


def limit_otb() -> None:
    """Responses of one length whose tokens all weigh alike have the mean as their baseline."""
    even = row_inputs(
        rewards=[1, 0, 0, 4, 1, 0],
        lengths=[2] * 6,
        group_ids=[3, 3, 3, 3, 8, 8],
        policy_logprobs=[[-0.7, -0.2]] * 6,
        sum_p_squared=[[0.5, 0.7]] * 6,
    )
    late = torch.stack([torch.zeros_like(even.rewards), even.rewards], dim=1)
    found, expected = (
        ADVANTAGES[name](replace(even, token_rewards=late))[0] for name in ("otb", "group_center")
    )
    same(found, expected, "equal weights", 1e-7)


def limit_length_weighted() -> None:
    equal = row_inputs(**{**ROW_OF_FOUR, "lengths": [3, 3, 3, 3]})
    found, expected = (
        ADVANTAGES[name](equal)[0] for name in ("length_weighted_center", "group_center")
    )
    same(found, expected, "equal lengths", 1e-12)


def limit_teacher(name: str, number: str, other: str) -> None:
    """What is `other` where a number is 0."""
    generator = torch.Generator().manual_seed(2)
    old, teacher = torch.randn(2, *RANDOM.response_mask.shape, generator=generator).double()
    given = replace(RANDOM, old_logprobs=old, teacher_logprobs=teacher)
    found = ADVANTAGES[name](given, **{number: 0.0})[0]
    same(found, ADVANTAGES[other](given)[0], f"{number} 0", 1e-12)


def limit_divergence() -> None:
    """With all tokens as candidates it is the divergence, whichever was sampled; and nothing moves
    a policy that is its teacher.
    """
    kls = {
        1.0: sum(s * math.log(s / t) for s, t in zip(POLICY, TEACHER, strict=True)),
        0.0: sum(t * math.log(t / s) for s, t in zip(POLICY, TEACHER, strict=True)),
    }
    for alpha, kl in kls.items():
        for sampled in range(3):
            value, _ = divergence_gradients(alpha, [0, 1, 2], sampled, TEACHER)
            same(value, kl, f"value of alpha {alpha} over all tokens", 1e-12)
    for alpha in DIVERGENCES:
        for known in ([], [0], [2, 1]):
            value, gradient = divergence_gradients(alpha, known, 1, POLICY)
            same(value, 0, f"value of alpha {alpha} where teacher and policy agree", 1e-12)
            same(gradient, [0, 0, 0], f"gradient of alpha {alpha} where they agree", 1e-12)


def limit_gae() -> None:
    """lambda = gamma = 1: return minus value. lambda = 0: the one-step error."""
    numbers = {"gamma": 1.0, "whiten": False, "bootstrap_on_truncation": False}
    same(
        ADVANTAGES["gae"](TOKENS, gae_lambda=1.0, **numbers)[0],
        1 - TOKENS.need("values"),
        "lambda 1",
        1e-12,
    )
    same(
        ADVANTAGES["gae"](TOKENS, gae_lambda=0.0, **numbers)[0],
        [[0.1, -0.2, 0.4, 0.2]],
        "lambda 0",
        1e-12,
    )


def limit_weights(name: str) -> None:
    """Rows of equal length and prompts of equal size: all means agree, sums are means times the
    length.
    """
    mask, ids = torch.ones(4, 3, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    numbers = (
        {"weights_length": 3}
        if name == "fixed_length"
        else {"length_power": 0.0}
        if name == "lambda_group"
        else {}
    )
    factor = 3 if name == "sequence_sum" else 1
    same(WEIGHTS[name](mask, ids, **numbers), WEIGHTS["token_mean"](mask, ids) * factor, name, 1e-7)


def limit_ratio(name: str) -> None:
    """A row of one token has one ratio whatever the level: GSPO of single tokens is GRPO."""
    old = f64([[-1.0]] * 5)
    logprobs, mask = old + f64(RATIO_ROW).log()[:, None], torch.ones(5, 1, dtype=torch.bool)
    same(RATIOS[name](logprobs, old, mask), RATIOS["token"](logprobs, old, mask), name, 1e-12)


LIMITS: dict[Cell, Callable[[], None]] = {
    **{("gate", name): (lambda name=name: limit_gate(name)) for name in GATE_LIMITS},
    ("gate", "vespo"): limit_vespo,
    ("gate", "teacher_divergence"): limit_divergence,
    **{
        ("advantage", name): (lambda given=(name, *rest): limit_teacher(*given))
        for name, *rest in (
            ("teacher_return", "teacher_gamma", "teacher_gap"),
            ("teacher_prefix_gap", "prefix_coeff", "teacher_gap"),
            ("group_normalize_teacher", "teacher_coeff", "group_normalize"),
        )
    },
    ("advantage", "group_normalize"): limit_group_normalize,
    ("advantage", "group_normalize_parts"): limit_group_normalize_parts,
    ("advantage", "leave_one_out"): limit_leave_one_out,
    ("advantage", "pass_at_k"): limit_pass_at_k,
    ("advantage", "mean_normalize"): limit_mean_normalize,
    ("advantage", "iqr_normalize"): limit_iqr_normalize,
    ("advantage", "otb"): limit_otb,
    ("advantage", "length_weighted_center"): limit_length_weighted,
    ("advantage", "gae"): limit_gae,
    **{("weights", name): (lambda name=name: limit_weights(name)) for name in WEIGHTS},
    **{
        ("ratio", name): (lambda name=name: limit_ratio(name)) for name in ("sequence", "geometric")
    },
}
