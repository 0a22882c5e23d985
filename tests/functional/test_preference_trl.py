"""Agreement with TRL: its trainers' own loss methods run on the same random numbers, values and
gradients compared.

The methods are called on a namespace that holds what they read, with a model that returns given
log-probabilities. TRL averages over the pairs of a batch, which is loss_weights = 1/N. Known
differences, none of them compared as equal:
  - TRL's NLL (`sft`, CPO, ORPO) is a mean over tokens, ours over completions; ORPO's there includes
    the prompt.
  - TRL computes the odds ratio of ORPO and the constants of EXO in float32 whatever comes in.
  - TRL's DiscoPOP is 0 * inf once exp(-x) overflows; ours is finite.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional import preference_losses as losses
from oxrl.functional.preference_statistics import (
    kto_baseline,
    length_desensitized_logprobs,
    rank_match,
    sequence_logprobs,
    wpo_weights,
)
from oxrl.functional.reward_model_losses import bradley_terry

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason='needs trl: pip install -e ".[bench]"'
    ),
]

PAIRS, TOKENS = 7, 12
Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def same(x: Tensor) -> Tensor:
    return x


ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)


class Case:
    """Random per-token log-probabilities of 2N completions (chosen first) under policy and
    reference.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = 2 * PAIRS
        starts = torch.randint(1, 4, (rows, 1), generator=generator)
        ends = starts + torch.randint(1, 8, (rows, 1), generator=generator)
        position = torch.arange(TOKENS)
        self.mask = (position >= starts) & (position < ends)
        draw = torch.rand(3, rows, TOKENS, dtype=torch.float64, generator=generator)
        self.logprobs = (-3 * draw[0] * self.mask).requires_grad_()
        self.ref_logprobs = -3 * draw[1] * self.mask
        self.sum_p_squared = 0.05 + 0.9 * draw[2]

    def tensors(self, sums: Tensor | None = None, ref_sums: Tensor | None = None) -> Seven:
        own, lengths = sequence_logprobs(self.logprobs, self.mask)
        ref, _ = sequence_logprobs(self.ref_logprobs, self.mask)
        own, ref = own if sums is None else sums, ref if ref_sums is None else ref_sums
        weights = torch.full((PAIRS,), 1 / PAIRS, dtype=torch.float64)
        (chosen, rejected), (ref_chosen, ref_rejected), (n_w, n_l) = (
            own.chunk(2),
            ref.chunk(2),
            lengths.chunk(2),
        )
        return chosen, rejected, ref_chosen, ref_rejected, n_w, n_l, weights

    def output(self, logprobs: Tensor) -> SimpleNamespace:
        shifted = torch.where(self.mask, logprobs, 0.0)[:, 1:]
        zeros = torch.zeros_like(shifted)
        return SimpleNamespace(
            log_probs=shifted,
            log_sum_sq_probs=self.sum_p_squared.log()[:, 1:],
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
        )

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logprobs, retain_graph=True)[0]


def trl_dpo(
    case: Case, loss_type: str, *, ref_sums: Tensor | None = None, **settings: Any
) -> Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(discopop_tau=settings.pop("discopop_tau", 0.05)),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        loss_types=[loss_type],
        loss_weights=[1.0],
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        **{
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "label_smoothing": 0.0,
            "use_weighting": False,
        }
        | settings,
    )
    ref = case.ref_logprobs.sum(1) if ref_sums is None else ref_sums
    inputs = {
        "input_ids": torch.ones(2 * PAIRS, TOKENS, dtype=torch.int64),
        "attention_mask": torch.ones(2 * PAIRS, TOKENS, dtype=torch.int64),
        "completion_mask": case.mask.long(),
        "ref_chosen_logps": ref[:PAIRS],
        "ref_rejected_logps": ref[PAIRS:],
    }
    return DPOTrainer._compute_loss(trainer, lambda **_: case.output(case.logprobs), inputs, False)  # pyright: ignore


def assert_agree(case: Case, ours: Tensor, theirs: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, check_dtype=False)
    torch.testing.assert_close(case.gradient(ours), case.gradient(theirs), rtol=0, atol=atol)


NOISE = {"label_noise": 0.1}
SMOOTH = {"label_smoothing": 0.1}
DPO_ROWS = [
    ("dpo", {}, "sigmoid", {}),
    ("ipo", {}, "ipo", {}),
    ("hinge", {}, "hinge", {}),
    ("robust_dpo", NOISE, "robust", SMOOTH),
    ("exo", NOISE, "exo_pair", SMOOTH),
    ("nca", {}, "nca_pair", {}),
    ("sppo", {}, "sppo_hard", {}),
    ("apo_zero", {}, "apo_zero", {}),
    ("apo_down", {}, "apo_down", {}),
    ("discopop", {"tau": 0.3}, "discopop", {"discopop_tau": 0.3}),
    ("sigmoid_norm", {}, "sigmoid_norm", {}),
    ("f_dpo_forward_kl", {}, "sigmoid", {"f_divergence_type": "forward_kl"}),
    ("f_dpo_jensen_shannon", {}, "sigmoid", {"f_divergence_type": "js_divergence"}),
]


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize(("name", "numbers", "loss_type", "settings"), DPO_ROWS)
def test_a_pair_loss_agrees_with_the_dpo_trainer(
    name: str, numbers: dict[str, float], loss_type: str, settings: dict[str, Any], beta: float
) -> None:
    case = Case()
    ours, _ = getattr(losses, name)(*case.tensors(), beta=beta, **numbers)
    # TRL holds EXO's label noise, and so its logarithms, in float32.
    assert_agree(
        case,
        ours,
        trl_dpo(case, loss_type, beta=beta, **settings),
        atol=1e-7 if name == "exo" else 1e-12,
    )


def test_alpha_divergence_agrees_in_float32_the_only_precision_trl_allows() -> None:
    case = Case()
    case.logprobs = case.logprobs.detach().float().requires_grad_()
    case.ref_logprobs = case.ref_logprobs.float()
    ours, _ = losses.f_dpo_alpha(*case.tensors(), beta=0.1, alpha=0.5)
    theirs = trl_dpo(
        case, "sigmoid", beta=0.1, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.5
    )
    assert_agree(case, ours, theirs, atol=1e-6)


def test_bco_without_a_shift_agrees_with_the_pair_form() -> None:
    case = Case()
    ours, _ = losses.bco(*case.tensors(), torch.tensor(0.0), beta=0.3)
    assert_agree(case, ours, trl_dpo(case, "bco_pair", beta=0.3))


def test_optimal_transport_agrees_paired_and_unpaired() -> None:
    case = Case()
    chosen, rejected, ref_chosen, ref_rejected, *_ = tensors = case.tensors()
    paired, _ = losses.aot(
        *tensors, rank_match(chosen - rejected, ref_chosen - ref_rejected), beta=0.3
    )
    assert_agree(case, paired, trl_dpo(case, "aot", beta=0.3))
    u, v = chosen - ref_chosen, rejected - ref_rejected
    unpaired, _ = losses.aot_unpaired(*tensors, rank_match(u, v), rank_match(v, u), beta=0.3)
    assert_agree(case, unpaired, trl_dpo(case, "aot_unpaired", beta=0.3))


def test_wpo_weights_agree() -> None:
    case = Case()
    weights = wpo_weights(case.logprobs, case.sum_p_squared, case.mask)
    ours, _ = losses.wpo(*case.tensors(), weights[:PAIRS] * weights[PAIRS:], beta=0.3)
    assert_agree(case, ours, trl_dpo(case, "sigmoid", beta=0.3, use_weighting=True))


def test_length_desensitized_sums_agree() -> None:
    case = Case()
    lengths = case.mask.sum(1)
    shared = torch.minimum(lengths[:PAIRS], lengths[PAIRS:]).repeat(2)
    sums = length_desensitized_logprobs(case.logprobs, case.mask, shared, tail_coeff=0.3)
    ref_sums = length_desensitized_logprobs(case.ref_logprobs, case.mask, shared, tail_coeff=0.3)
    ours, _ = losses.dpo(*case.tensors(sums, ref_sums), beta=0.3)
    assert_agree(case, ours, trl_dpo(case, "sigmoid", beta=0.3, ld_alpha=0.3, ref_sums=ref_sums))


def test_the_supervised_anchor_differs_by_what_it_averages_over() -> None:
    """TRL: over tokens. Ours: over completions; with weights n_i / sum n it is TRL's."""
    case = Case()
    chosen, rejected, _, _, n_w, n_l, _ = case.tensors()
    ours, _ = losses.nll(chosen, rejected, None, None, n_w, n_l, n_w.double() / n_w.sum())
    assert_agree(case, ours, trl_dpo(case, "sft", beta=0.1))


@pytest.mark.parametrize("seed", [0, 1])
def test_kto_agrees_with_the_kto_trainer(seed: int) -> None:
    from trl.trainer.kto_trainer import KTOTrainer  # pyright: ignore

    case, other = Case(seed), Case(seed + 10)
    sums, _ = sequence_logprobs(case.logprobs, case.mask)
    ref_sums = case.ref_logprobs.sum(1)
    other_sums, other_ref_sums = other.logprobs.detach().sum(1), other.ref_logprobs.sum(1)
    desirable = torch.rand(2 * PAIRS, generator=torch.Generator().manual_seed(seed)) < 0.6
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        _compute_kl_logps=lambda *_: other_sums,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    inputs = {
        "input_ids": torch.ones(2 * PAIRS, TOKENS, dtype=torch.int64),
        "attention_mask": torch.ones(2 * PAIRS, TOKENS, dtype=torch.int64),
        "completion_mask": case.mask.long(),
        "label": desirable,
        "ref_logps": ref_sums,
        "ref_KL_logps": other_ref_sums,
    }
    theirs = KTOTrainer._compute_loss(
        trainer, lambda **_: case.output(case.logprobs), inputs, False
    )  # pyright: ignore
    weights = torch.full((2 * PAIRS,), 0.5 / PAIRS, dtype=torch.float64)
    z = kto_baseline(other_sums, other_ref_sums)
    ours, metrics = losses.kto(
        sums, ref_sums, desirable, weights, z, beta=0.3, desirable_coeff=1.2, undesirable_coeff=0.7
    )
    assert_agree(case, ours, theirs)
    for label in ("chosen", "rejected"):
        name = {
            "chosen": "preference/desirable_reward",
            "rejected": "preference/undesirable_reward",
        }[label]
        assert float(metrics[name]) == pytest.approx(
            trainer._metrics["eval"][f"rewards/{label}"][0], abs=1e-12
        )


@pytest.mark.parametrize(
    ("name", "loss_type", "alpha"),
    [("cpo", "sigmoid", 0), ("simpo", "simpo", 0), ("alpha_po", "simpo", 0.25)],
)
def test_the_reference_free_pair_terms_agree_with_the_cpo_trainer(
    name: str, loss_type: str, alpha: float
) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer  # pyright: ignore

    case = Case()
    chosen, rejected, _, _, n_w, n_l, weights = case.tensors()
    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        alpha=alpha,
        beta=0.8,
        simpo_gamma=0.5,
        label_smoothing=0.0,
        loss_type=loss_type,
    )
    means = (chosen, rejected) if name == "cpo" else (chosen / n_w, rejected / n_l)
    theirs = CPOTrainer.cpo_loss(trainer, *means)[0].mean()  # pyright: ignore
    numbers = {
        "cpo": {"nll_coeff": 0.0},
        "simpo": {"gamma": 0.5},
        "alpha_po": {"gamma": 0.5, "alpha": alpha},
    }[name]
    ours, _ = getattr(losses, name)(
        chosen, rejected, None, None, n_w, n_l, weights, beta=0.8, **numbers
    )
    assert_agree(case, ours, theirs)


def test_the_odds_ratio_agrees_with_the_orpo_trainer_to_its_float32() -> None:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer  # pyright: ignore

    case = Case()
    chosen, rejected, _, _, n_w, n_l, weights = case.tensors()
    trainer = SimpleNamespace(accelerator=ACCELERATOR, beta=0.1)
    ratio = ORPOTrainer.odds_ratio_loss(trainer, chosen / n_w, rejected / n_l)[0]  # pyright: ignore
    anchor = -(chosen / n_w).mean()
    ours, _ = losses.orpo(chosen, rejected, None, None, n_w, n_l, weights, odds_coeff=0.1)
    assert_agree(case, ours, anchor - ratio.mean(), atol=1e-7)


def test_bradley_terry_agrees_with_the_reward_trainer() -> None:
    from trl.trainer.reward_trainer import RewardTrainer  # pyright: ignore

    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2 * PAIRS, dtype=torch.float64, generator=generator).requires_grad_()
    margins = torch.rand(PAIRS, dtype=torch.float64, generator=generator)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(center_rewards_coefficient=0.01),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    theirs = RewardTrainer.compute_loss(
        trainer,  # pyright: ignore
        lambda **_: SimpleNamespace(logits=scores[:, None]),
        {"margin": margins},
    )
    weights = torch.full((PAIRS,), 1 / PAIRS, dtype=torch.float64)
    ours, metrics = bradley_terry(
        scores[:PAIRS], scores[PAIRS:], weights, margins, center_coeff=0.01
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    (own,), (other,) = (
        torch.autograd.grad(loss, scores, retain_graph=True) for loss in (ours, theirs)
    )
    torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
    assert float(metrics["reward_model/accuracy"]) == pytest.approx(
        trainer._metrics["eval"]["accuracy"][0]
    )
