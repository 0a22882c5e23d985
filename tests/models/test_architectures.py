"""Every causal architecture is sampled from, trained and loaded again; docs/architectures.md."""

from __future__ import annotations

import runpy
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.sample.cached import CachedSampler, VisionSampler
from oxrl.engines.sample.local import FAST, LocalSampler, module_sampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import ConfigError
from oxrl.models.self_checks import check_packing
from support.architectures import FAMILIES, UNPACKABLE, tiny
from support.samplers import TOKENIZER, largest, make_requests, trainer_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parent.parent.parent
MAKER: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_architectures.py"))
# One of each kind of memory; the rest is for `make test-full`.
KINDS = ("bloom", "deepseek_v3", "gemma3", "mamba", "qwen3_next")
RUNS = [pytest.param(name, marks=[] if name in KINDS else pytest.mark.full) for name in FAMILIES]


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def made(family: str) -> PreTrainedModel:
    return tiny(family)


@pytest.fixture
def model(made: PreTrainedModel) -> PreTrainedModel:
    """One for each test: what samples and trains changes it."""
    return deepcopy(made)


def test_the_samples_of_every_family_have_the_trainers_logprobs(
    family: str, model: PreTrainedModel
) -> None:
    sampler = module_sampler(model, TOKENIZER, max_rows=8)
    fast = family in FAST and family != "mistral"  # the tiny one has a window
    other = VisionSampler if family == "gemma3" else CachedSampler
    assert type(sampler) is (LocalSampler if fast else other)
    requests = make_requests(3, 2, max_tokens=9, stop_token_ids=())
    done = generate(sampler, requests, deadline_s=60)
    assert largest(done, trainer_logprobs(model, requests, done, 1.0)) < 2e-4
    texts = {completion.token_ids for completion in done}
    assert len(texts) == len(done)


def test_a_sample_of_any_family_does_not_depend_on_what_else_is_sampled(
    model: PreTrainedModel,
) -> None:
    sampler = module_sampler(model, TOKENIZER, max_rows=3)
    requests = make_requests(4, max_tokens=5)
    together = generate(sampler, requests, deadline_s=60)
    for request, expected in zip(requests, together, strict=True):
        [alone] = generate(sampler, [request], deadline_s=60)
        assert alone.token_ids == expected.token_ids


def test_packing_is_refused_where_examples_would_see_each_other(
    family: str, model: PreTrainedModel
) -> None:
    if family not in UNPACKABLE:
        check_packing(model)
        return
    with pytest.raises(ConfigError, match=r"data\.pack_tokens"):
        check_packing(model)


def test_a_saved_model_of_every_family_says_the_same(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    save_model(model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("name", RUNS)
def test_whole_runs_of_a_family_say_what_its_line_of_the_page_says(
    name: str, tmp_path: Path
) -> None:
    line: str = MAKER["row"](name, tmp_path)
    page = MAKER["PAGE"].read_text(encoding="utf-8")
    assert line in page
    assert " no " not in line


def test_the_page_has_one_line_for_every_family() -> None:
    page: str = MAKER["PAGE"].read_text(encoding="utf-8")
    for name in FAMILIES:
        assert page.count(f"| {name} | ") == 1
