"""Every proof of every policy-gradient row of the table; what they are stands in `oxrl_proofs`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.advantages import ADVANTAGES
from oxrl.functional.corrections import CORRECTIONS
from oxrl.functional.gates import LossAndMetrics
from oxrl.functional.kl import KLS
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS
from oxrl.functional.selections import SELECTIONS
from oxrl.functional.weights import WEIGHTS
from oxrl.tables.cells import CELLS, FEATURES
from oxrl.tables.policy import ROWS
from oxrl_proofs import literal, literal_batch
from oxrl_proofs.identities import LIMITS, WORKED
from oxrl_proofs.literal import PAPERS
from oxrl_proofs.rows import ROW_PROOFS, effective_weight, proofs_of, prove, two_rank_errors
from support.command_line import WARM, forked

RL = {name: row for name, row in ROWS.items() if row.recipe == "rl"}
CASES = [(name, proof) for name, row in RL.items() for proof in proofs_of(row)]


@pytest.mark.parametrize(("name", "proof"), CASES)
def test_proof(name: str, proof: str) -> None:
    proofs_of(RL[name])[proof]()


def test_two_data_parallel_ranks_sum_to_the_gradient_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two ranks that are forked, and have torch: what they compute is the same.
    forked(print)
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: WARM)
    errors = two_rank_errors()
    assert errors.keys() == RL.keys()
    assert max(errors.values()) <= 1e-10


@pytest.mark.parametrize("name", RL)
def test_a_row_has_every_proof_or_an_exemption_with_a_reason(name: str) -> None:
    row, proofs = RL[name], proofs_of(RL[name])
    assert set(ROW_PROOFS) - set(proofs) == set(row.exempt)
    assert all(len(reason) > 20 for reason in row.exempt.values())
    assert any(proof.startswith("limit of") for proof in proofs)
    for kind in ("advantage", "gate", "correction", "kl", "weights"):
        cell = (kind, getattr(row, kind))
        assert cell[1] == "none" or cell in WORKED, f"no worked numbers for {cell}"


def test_at_most_seven_rows_are_not_token_local_but_for_those_that_are_centered() -> None:
    shared = [name for name, row in RL.items() if row.shared_weight and row.centering == "none"]
    assert len(shared) <= 7, shared


def test_a_broken_gate_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs must be able to fail: a PPO that clips both directions alike is reported by
    name.
    """
    original = GATES["ppo_clip"]

    def both_ways(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        loss_weights: Tensor,
        **numbers: Any,
    ) -> LossAndMetrics:
        ratio = (logprobs - old_logprobs).exp()
        inside = (ratio > 0.8) & (ratio < 1.2)
        return original(logprobs, old_logprobs, advantages, mask & inside, loss_weights, **numbers)

    monkeypatch.setitem(GATES, "ppo_clip", both_ways)
    report = prove(ROWS["sgrpo"])
    assert "effective_weight" in report.failed and "worked numbers of ppo_clip" in report.failed


# What was once wrong in a row, or might be: each must be noticed by the second implementation.
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "kl_cov under PPO's clip": ("kl_cov", {"gate": "clip_cov"}),
    "m2po under PPO's clip": ("m2po", {"gate": "ppo_clip"}),
    "m2po around the old policy": ("m2po", {"denominator": "old"}),
    "scale_rl by the rewards' deviation": ("scale_rl", {"advantage": "group_center_batch_std"}),
    "scale_rl around the old policy": ("scale_rl", {"denominator": "old"}),
    "maxrl by tokens": ("maxrl", {"weights": "token_mean"}),
    "pkpo by tokens": ("pkpo", {"weights": "token_mean"}),
    "kimi by tokens": ("kimi", {"weights": "token_mean"}),
    "a3po without a cap": ("a3po", {"correction": "none"}),
    "gspo by tokens": ("gspo", {"ratio": "token"}),
    "luspo by responses": ("luspo", {"weights": "sequence_mean"}),
    "grpo with the other KL": ("grpo", {"kl": "loss_k3_plus"}),
    "opsm with a k3 of its own": ("opsm", {"kl": "loss_k3"}),
    "ppo_rlhf without its KL": ("ppo_rlhf", {"kl": "none"}),
    "dr_grpo with a deviation": ("dr_grpo", {"advantage": "group_normalize"}),
    "cispo around the sampler": ("cispo", {"denominator": "rollout"}),
    "opd_topk around the old policy": ("opd_topk", {"denominator": "old"}),
    "sdpo by responses": ("sdpo", {"weights": "sequence_mean"}),
    "minillm without what follows": ("minillm", {"advantage": "teacher_gap"}),
    "iw_opd without its weights": ("iw_opd", {"advantage": "teacher_gap"}),
    "kdrl without its teacher": ("kdrl", {"advantage": "group_normalize"}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_row_with_another_cell_disagrees_with_its_source(what: str) -> None:
    name, cells = BROKEN[what]
    with pytest.raises(AssertionError, match="against the formula"):
        effective_weight(dataclasses.replace(RL[name], **cells))


def test_every_row_has_a_second_implementation_that_names_its_source() -> None:
    assert set(PAPERS) == set(RL)
    for name, paper in PAPERS.items():
        assert len(paper.source) > 9, name
        for function in (paper.advantage, paper.surrogate, paper.average):
            assert function.__doc__ or function.__qualname__.startswith("_dppo"), name


@pytest.mark.parametrize("module", [literal, literal_batch])
def test_the_second_implementation_shares_nothing_with_the_first(module: ModuleType) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert not [name for name in imported if name.split(".")[0] == "oxrl"]


REGISTRIES = {
    "advantage": ADVANTAGES,
    "gate": GATES,
    "correction": CORRECTIONS,
    "kl": KLS,
    "weights": WEIGHTS,
    "selection": SELECTIONS,
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_table_and_the_functions_name_the_same_cells(kind: str) -> None:
    listed = {name for found, name in CELLS if found == kind} - {"none"}
    assert listed == set(REGISTRIES[kind]) - {"none"}
    if kind != "selection":
        assert {getattr(row, kind) for row in RL.values()} - {"none"} <= listed


def test_every_ratio_level_and_every_need_is_known() -> None:
    assert {row.ratio for row in RL.values()} == set(RATIOS)
    assert {name for kind, name in CELLS if kind == "ratio"} == set(RATIOS)
    needs = {feature.name for cell in CELLS.values() for feature in cell.needs}
    assert needs | {need for row in RL.values() for need in row.needs} <= set(FEATURES)


def test_limits_and_worked_numbers_belong_to_cells_of_the_table() -> None:
    assert set(LIMITS) | set(WORKED) <= set(CELLS)


def test_a_row_that_needs_an_unbuilt_feature_says_what_is_missing() -> None:
    assert ROWS["sgrpo"].unsupported == ""
    assert ROWS["rspo"].unsupported.startswith("rspo needs routing (the router's choices")
