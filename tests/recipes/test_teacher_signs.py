"""Each sign of a teacher is told by a run that has its cause, and by no other.

Models are written by hand: what comes next follows from the position alone, so which tokens are
likely for policy and teacher is known of every place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from oxrl.commands.train import run
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.runs.health_checks import SIGNS
from support.small_runs import rl_config

Logits = Mapping[int, float]

VOCABULARY = 261
UNLIKELY = -60.0
TOKENS = 30
# Responses begin before this position and end behind it.
LATER = 24
OF_TEACHERS = {"unlike-teacher", "unseen-by-teacher", "lost-prefix", "clamped-teacher"}


def model(folder: Path, first: Logits, later: Logits | None = None) -> str:
    """A model that finds the tokens of `first` likely, and from LATER on those of `later`."""
    shape = {"n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 128, "vocab_size": VOCABULARY}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    made = GPT2LMHeadModel(GPT2Config(**shape, **ids, tie_word_embeddings=False))
    state = {name: torch.zeros_like(weight) for name, weight in made.state_dict().items()}
    # A normalised position is one of two vectors, of which the head reads one number each.
    state["transformer.wpe.weight"][:LATER, 0] = 1.0
    state["transformer.wpe.weight"][LATER:, 1] = 1.0
    state["transformer.ln_f.weight"][:] = 1.0
    normalised = torch.nn.functional.layer_norm(torch.eye(4)[:2], (4,))
    wanted = torch.full((2, VOCABULARY), UNLIKELY)
    for place, logits in enumerate((first, first if later is None else later)):
        for token, logit in logits.items():
            wanted[place, token] = logit
    solved = torch.linalg.lstsq(normalised.double(), wanted.double()).solution
    state["lm_head.weight"][:] = solved.T.float()
    made.load_state_dict(state)
    made.save_pretrained(folder)
    builtin_tokenizer().save_pretrained(folder)
    return str(folder)


def even(*tokens: int) -> Logits:
    """Tokens that are nearly as likely, the earlier ones a little more."""
    return {token: -0.001 * place for place, token in enumerate(tokens)}


FOUR = even(10, 11, 12, 13)
OTHERS = even(20, 21, 22, 23)
MANY = even(*range(5, 205))
# Row, candidates, policy, teacher, its later tokens -> what is told.
CASES: dict[str, tuple[str, Logits, Logits, Logits | None, set[str]]] = {
    "alike": ("opd_topk", FOUR, FOUR, None, set()),
    "alike, sampled token alone": ("opd", FOUR, FOUR, None, set()),
    "likely tokens differ, one is most of it": (
        "opd_topk",
        {10: 2.0, 11: 0.0, 12: 0.0, 13: 0.0},
        {10: 2.0, 20: 0.0, 21: 0.0, 22: 0.0, 11: -5.0, 12: -5.0, 13: -5.0},
        None,
        {"unlike-teacher"},
    ),
    "many tokens": ("opd_topk", MANY, MANY, None, {"unseen-by-teacher"}),
    "nothing in common": (
        "opd_topk",
        FOUR,
        OTHERS,
        None,
        {"unlike-teacher", "unseen-by-teacher"},
    ),
    "far apart": ("opd", FOUR, OTHERS, None, {"clamped-teacher"}),
    "apart in the end": (
        "opd",
        FOUR,
        FOUR,
        {10: -5.0, 11: -5.0, 12: -5.0, 13: -5.0, 20: 0.0},
        {"lost-prefix"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sign_is_told_by_the_run_that_has_its_cause(case: str, tmp_path: Path) -> None:
    algorithm, policy, teacher, later, told = CASES[case]
    big = {"name": model(tmp_path / "big", teacher, later)}
    asked = {"name": model(tmp_path / "policy", policy), "teachers": {"big": big}}
    # Nothing learned is what is seen: the models stay as they were written.
    train: dict[str, Any] = {"alg_name": algorithm, "lr": 1e-9}
    if algorithm == "opd_topk":
        train["teacher_candidates"] = 4
    cfg = rl_config(
        tmp_path,
        "run",
        ["~reward.name"],
        model=asked,
        train=train,
        rollout={"max_tokens": TOKENS, "n_samples": 2},
        run={"steps": 4, "checkpoint_every": 0},
    )
    run(cfg)
    said = (cfg.run.directory / "run.log").read_text()
    found = set(re.findall(r"oxrl\.runs\.health: ([a-z-]+), 3 steps in a row", said))
    assert found & OF_TEACHERS == told


def test_every_sign_of_a_teacher_has_its_run() -> None:
    of_teachers = {sign.name for sign in SIGNS if any("teacher/" in name for name in sign.reads)}
    assert of_teachers == OF_TEACHERS
    assert set().union(*(told for *_, told in CASES.values())) == OF_TEACHERS
