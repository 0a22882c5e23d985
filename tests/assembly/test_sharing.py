"""`train.share_prefix: auto`: decided when a run begins, noted, and done so ever after."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from oxrl.assembly.settle import decide_sharing
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.sample.local import FAST
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import ConfigError, RunDirectoryError
from oxrl.models import self_checks
from oxrl.models.self_checks import remembered_trial, try_sharing
from oxrl.models.shared_prefix import SharingRefused
from oxrl.runs.pins import CHOICES_FILE
from oxrl.types import Output, TokenBatch, Want
from support.architectures import FAMILIES, tiny
from support.small_runs import metric_lines, preference_config, rl_config

FIELD = "train.share_prefix"


def weights_of(cfg: Config, step: int = 6) -> bytes:
    checkpoint = cfg.run.directory / "checkpoints" / f"step_{step:08d}"
    return (checkpoint / "model.safetensors").read_bytes()


def choice_of(cfg: Config) -> dict[str, object]:
    return json.loads((cfg.run.directory / CHOICES_FILE).read_text())[FIELD]


def tokens_read(cfg: Config, *, resume: bool = False) -> int:
    """Run, and count the tokens that engines which train sent through their models."""
    seen: list[int] = []
    read = Trainer._read

    def counted(engine: Trainer, inputs: TokenBatch, want: Want) -> Output:
        def count(_: object, given: tuple[torch.Tensor], *__: object) -> None:
            seen.append(given[0].numel())

        embedding: Any = engine.model.get_input_embeddings()  # pyright: ignore
        with embedding.register_forward_hook(count):
            return read(engine, inputs, want)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_read", counted)
        run(cfg, resume=resume)
    return sum(seen)


class Trained(NamedTuple):
    """Whole runs, and the tokens that they read, by what `train.share_prefix` says."""

    runs: dict[str, Config]
    tokens: dict[str, int]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("sharing")
    found = Trained({}, {})
    for value in ("auto", "true", "false"):
        cfg = rl_config(folder, value, [f"{FIELD}={value}", "train.epochs=2"])
        found.runs[value] = cfg
        found.tokens[value] = tokens_read(cfg)
    return found


@pytest.fixture
def trained(both: Trained) -> dict[str, Config]:
    """The runs alone."""
    return both.runs


def test_auto_reads_prompts_once_says_so_and_is_replayed(both: Trained) -> None:
    trained, tokens = both
    auto = trained["auto"]
    assert weights_of(auto) == weights_of(trained["true"])
    # However many tokens answers have: four prompts are longer than what four answers may add.
    assert tokens["auto"] == tokens["true"] < tokens["false"]
    choice = choice_of(auto)
    assert choice["value"] is True and "on a tiny copy of this model gradients differ" in str(
        choice["why"]
    )
    assert all(finding.equal for finding in replay(auto.run.directory, 6, tolerance=0.0))
    noted = json.loads((trained["true"].run.directory / CHOICES_FILE).read_text())
    assert FIELD not in noted


def test_pairs_share_their_prompts_and_a_run_that_began_without_goes_on_without(
    tmp_path: Path,
) -> None:
    runs: dict[str, Config] = {}
    tokens: dict[str, int] = {}
    for value in ("auto", "true", "false"):
        runs[value] = preference_config(tmp_path / value, value, [f"{FIELD}={value}"])
        tokens[value] = tokens_read(runs[value])
    assert weights_of(runs["auto"]) == weights_of(runs["true"])
    assert tokens["auto"] == tokens["true"] < tokens["false"]
    choice = choice_of(runs["auto"])
    assert choice["value"] is True and "on a tiny copy of this model gradients differ" in str(
        choice["why"]
    )
    plain = [line["update/loss"] for line in metric_lines(runs["false"].run.directory)]
    shared = [line["update/loss"] for line in metric_lines(runs["auto"].run.directory)]
    assert shared == pytest.approx(plain, rel=1e-3)
    cut = halfway(runs["false"], tmp_path)
    run(cut, resume=True)
    assert weights_of(cut) == weights_of(runs["false"])
    assert choice_of(cut) == {"value": False, "why": "so it was when the run began"}


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["train.alg_name=kto"], "single completions"),
        (["train.backend=fsdp", "run.training_gpus=2", "run.device=cpu"], "several ranks"),
    ],
)
def test_what_learns_from_no_pairs_in_one_process_reads_row_by_row(
    overrides: list[str], why: str, tmp_path: Path
) -> None:
    auto = preference_config(tmp_path, "auto", overrides)
    assert decide_sharing(auto).value is False
    assert why in decide_sharing(auto).why
    with pytest.raises(ConfigError, match=rf"(?s)train\.share_prefix = true.*{why}.*false"):
        preference_config(tmp_path, "asked", [*overrides, f"{FIELD}=true"])


@pytest.mark.parametrize(("began", "older"), [("auto", False), ("false", False), ("false", True)])
def test_a_run_goes_on_with_what_it_had(
    trained: dict[str, Config],
    began: str,
    older: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later start does not decide anew; a run that has noted nothing had what config.yaml says,
    and one that is older than the field read every prompt anew.
    """

    def never(cfg: Config) -> object:
        raise AssertionError("decided again")

    monkeypatch.setattr("oxrl.assembly.settle.decide_sharing", never)
    again = halfway(trained[began], tmp_path)
    if older:
        recorded = again.run.directory / "config.yaml"
        recorded.write_text(recorded.read_text().replace("  share_prefix: false\n", ""))
    run(again, resume=True)
    assert weights_of(again) == weights_of(trained[began])
    assert choice_of(again)["value"] is (began == "auto")


def halfway(whole: Config, folder: Path) -> Config:
    """A copy of a run that was stopped after step 4, and what it is resumed with."""
    copy = folder / "run"
    shutil.copytree(whole.run.directory, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000006")
    (copy / "result.json").unlink()
    settings = whole.model_dump(exclude_unset=True)
    settings["train"]["share_prefix"] = "auto"
    settings["run"]["dir"] = str(copy)
    return Config.model_validate(settings)


def test_weights_that_are_no_good_for_it_are_trained_without(
    trained: dict[str, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: PreTrainedModel) -> None:
        raise SharingRefused("train.share_prefix: hidden states differ; set it to false")

    monkeypatch.setattr(self_checks, "check_sharing", refuse)
    cfg = rl_config(tmp_path, "refused", ["train.epochs=2"])
    run(cfg)
    assert choice_of(cfg) == {"value": False, "why": "hidden states differ"}
    plain = (trained["false"].run.directory / "metrics.jsonl").read_text().splitlines()
    now = (cfg.run.directory / "metrics.jsonl").read_text().splitlines()
    key = "update/grad_norm"
    assert [json.loads(line)[key] for line in now] == [json.loads(line)[key] for line in plain]
    asked = rl_config(tmp_path, "asked", [f"{FIELD}=true"])
    with pytest.raises(SharingRefused, match="hidden states differ; set it to false"):
        run(asked)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.attention=eager", "sharing needs model.attention sdpa, and it is eager"),
        ("rollout.n_samples=1", "each prompt has one response (rollout.n_samples)"),
    ],
)
def test_a_configuration_that_rules_it_out_is_told(tmp_path: Path, override: str, why: str) -> None:
    cfg = rl_config(tmp_path, "run", ["train.alg_name=reinforce", override])
    choice = decide_sharing(cfg)
    assert choice.value is False and choice.why == why


@pytest.mark.parametrize("name", ["falcon", "gemma2", "mamba", "mistral"])
def test_a_model_of_another_kind_is_left_alone(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    tiny(name).save_pretrained(folder)
    choice = decide_sharing(
        rl_config(tmp_path, "run", [f"model.name={folder}", "model.max_length=8"])
    )
    assert choice.value is False and choice.why
    assert "set it to false" not in choice.why and not choice.why.startswith(FIELD)


NAMES = [
    pytest.param(name, marks=[] if name in ("qwen3", "mixtral") else pytest.mark.full)
    for name in sorted(FAST & set(FAMILIES) - {"falcon", "stablelm", "mistral"})
]


@pytest.mark.parametrize("name", NAMES)
def test_known_families_pass_the_trial(name: str) -> None:
    config = tiny(name).config
    assert try_sharing(config, torch.float32) < 1e-5
    assert try_sharing(config, torch.bfloat16) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_seen_wrongly_is_found(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Responses that see one token too few, and then a rounding worse than that of plain rows."""
    right = self_checks._gradient

    def off(model: PreTrainedModel, *, share: bool) -> torch.Tensor:
        found = right(model, share=share)
        low = next(model.parameters()).dtype != torch.float32
        if share and low == (dtype != torch.float32):
            found *= 1 + (0.05 if low else 1e-4)
        return found

    monkeypatch.setattr(self_checks, "_gradient", off)
    with pytest.raises(SharingRefused, match="above"):
        try_sharing(tiny("qwen3").config, dtype)


def test_a_damaged_choice_is_named(trained: dict[str, Config], tmp_path: Path) -> None:
    cfg = halfway(trained["auto"], tmp_path)
    for content in ("[]", '{"train.share_prefix": true}', "{"):
        (cfg.run.directory / CHOICES_FILE).write_text(content)
        with pytest.raises(RunDirectoryError, match="choices.json is not the JSON written there"):
            run(cfg, resume=True)


def test_a_trial_is_kept_in_the_users_cache_by_kind_and_precision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A number that no trial says shows who answered; what is no difference is written anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tiny("qwen3").config
    found = remembered_trial(config, torch.float32)
    assert found == pytest.approx(try_sharing(config, torch.float32), abs=1e-6)
    (file,) = (tmp_path / "cache" / "oxrl" / "sharing_trials").iterdir()
    file.write_text('{"difference": 1.25e-09}')
    renamed = copy.deepcopy(config)
    renamed.name_or_path = "elsewhere"
    assert remembered_trial(renamed, torch.float32) == 1.25e-09
    assert remembered_trial(config, torch.bfloat16) != 1.25e-09
    wider = copy.deepcopy(config)
    wider.rms_norm_eps = 1e-4
    assert remembered_trial(wider, torch.float32) != 1.25e-09
    values = ("NaN", "-1.0", "0.5", '"x"', "null", "[]", "true")
    foreign = ["", "{", "[" * 100_000, "[1]", '"x"', "null", "\xff", "{}"]
    for text in [*foreign, *(f'{{"difference": {value}}}' for value in values)]:
        file.write_bytes(text.encode("latin-1"))
        assert remembered_trial(config, torch.float32) == found, text[:20]
        assert json.loads(file.read_text()) == {"difference": found}


def test_a_cache_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert remembered_trial(tiny("qwen3").config, torch.float32) < 1e-5


def test_a_refusal_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = copy.deepcopy(tiny("qwen3").config)
    config._attn_implementation = "eager"
    with pytest.raises(SharingRefused):
        remembered_trial(config, torch.float32)
    assert not list(tmp_path.rglob("*.json"))
