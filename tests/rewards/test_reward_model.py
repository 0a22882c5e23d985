"""A trained reward model by its folder: same scores as the engine that trained it, in a worker
process too.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oxrl.assembly.pins import inputs_of
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.config.conditions import is_model_folder
from oxrl.data.preferences import PreferenceDataset, to_preference_batch
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import DeadlineError, RewardDefinitionError, Stopped
from oxrl.models.load import LoadOptions, load_critic, load_tokenizer
from oxrl.rewards.builtin import option_problem
from oxrl.rewards.model_pool import ModelPool
from oxrl.rewards.reward_model import RewardModel
from oxrl.rewards.reward_model_actors import ModelActorPool
from oxrl.rewards.workers import RewardPool
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Prompt
from support.loaded_rewards import load_reward
from support.small_runs import rl_config
from support.thread_cluster import Ray, ThreadCluster

PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "1+1"},), token_ids=(2, 54, 3))


def completion(text: str) -> Completion:
    return Completion(segments=(), text=text, finish_reason="stop")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = load_critic("builtin:tiny", LoadOptions(seed=3))
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    LocalTrainer(model, TrainerOptions(lr=0.0, tokenizer=load_tokenizer("builtin:tiny"))).save(
        tmp_path / "rm"
    )
    return tmp_path / "rm"


def test_a_folder_scores_as_the_training_engine_does(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(
        json.dumps({"prompt": "1+1", "chosen": "2", "rejected": "a long wrong answer"}) + "\n"
    )
    batch = to_preference_batch(
        PreferenceDataset.load(rows, load_tokenizer(str(folder))).in_order(), 0
    )
    engine = LocalTrainer(load_critic(str(folder)), TrainerOptions(lr=0.0))
    expected = engine.forward(batch.inputs, frozenset({"values"})).bootstrap
    assert expected is not None and float(expected[0]) != float(expected[1])
    completions = [completion("2"), completion("a long wrong answer")]
    scores = [score.value for score in load_reward(str(folder))(PROMPT, completions)]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    pool = RewardPool(str(folder), timeout_s=30)
    assert [s.value for s in pool.score([(PROMPT, completions)])[0]] == pytest.approx(
        scores, abs=1e-6
    )
    pool.close()


def test_the_config_takes_a_folder_of_a_reward_model_and_no_other(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run: {{name: x, steps: 1}}\nmodel: {{name: 'builtin:tiny'}}\n"
        f"data: {{train: {tmp_path / 'p.jsonl'}}}\n"
        f"reward: {{name: {folder}}}\ntrain: {{alg_name: sgrpo}}\n"
    )
    assert load_config(config).reward.name == str(folder)
    with pytest.raises(ValueError, match="must be"):
        load_config(config, [f"reward.name={tmp_path}"])


def beside(folder: Path, *, budget: int = 4096, timeout_s: float = 60.0) -> ModelPool:
    build = partial(RewardModel, folder, budget=budget)
    return ModelPool(str(folder), build, timeout_s=timeout_s, field="reward")


def made(folder: Path, kind: str) -> Path:
    """A reward model with random weights."""
    model = load_critic("builtin:tiny", LoadOptions(seed=3))
    model.kind = kind
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    tokenizer = load_tokenizer("builtin:tiny")
    LocalTrainer(model, TrainerOptions(lr=0.0, tokenizer=tokenizer)).save(folder)
    return folder


@pytest.mark.parametrize("kind", ["outcome", "process"])
@pytest.mark.parametrize("budget", [1, 30, 100_000])
def test_beside_the_policy_it_scores_as_in_a_worker_however_many_tokens_are_read_at_a_time(
    tmp_path: Path, kind: str, budget: int
) -> None:
    made(tmp_path / "rm", kind)
    texts = ("2", "a long wrong answer\nof two lines", "", "1+1\n\n= 2")
    members = [completion(text) for text in texts]
    alone = [load_reward(str(tmp_path / "rm"))(PROMPT, [one])[0].value for one in members]
    (scores,) = beside(tmp_path / "rm", budget=budget).score([(PROMPT, members)])
    assert [score.value for score in scores] == pytest.approx(alone, abs=1e-5)
    assert kind == "outcome" or alone[2] == 0.0


def test_a_group_has_the_same_scores_to_the_last_bit_whatever_is_scored_with_it(
    folder: Path,
) -> None:
    pool = beside(folder)
    group = (PROMPT, [completion("2"), completion("a long wrong answer")])
    (alone,) = pool.score([group])
    assert pool.score([(PROMPT, [completion("9" * 50)]), group])[1] == alone


def test_failures_beside_the_policy_are_statuses_and_signals_are_seen(
    folder: Path, tmp_path: Path
) -> None:
    group = (PROMPT, [completion("2"), completion("3")])
    (late,) = beside(folder, timeout_s=1e-9).score([group])
    assert {(score.value, score.status) for score in late} == {(None, "timeout")}
    pool = beside(folder)
    pool.start()
    assert pool._model is not None
    pool._model._model.value_head.weight.data.fill_(float("nan"))
    (broken,) = pool.score([group])
    assert {(score.value, score.status) for score in broken} == {(None, "invalid")}
    with pytest.raises(Stopped):
        pool.score([group], Patience(lambda: True))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RewardDefinitionError, match="reward.name"):
        beside(tmp_path / "empty").start()


def test_a_reward_model_is_loaded_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    config = tmp_path / "c.yaml"
    config.write_text(
        f"run: {{name: x, steps: 1}}\nmodel: {{name: 'builtin:tiny'}}\n"
        f"data: {{train: {tmp_path / 'p.jsonl'}}}\n"
        f"reward: {{name: {folder}, workers: 2}}\ntrain: {{alg_name: sgrpo}}\n"
    )
    with pytest.raises(ValueError, match="loaded once"):
        load_config(config)


@pytest.mark.parametrize("rule", ["mean", "worst"])
def test_steps_reach_the_advantages_of_rows_that_read_rewards_of_tokens(
    tmp_path: Path, rule: str
) -> None:
    folder = made(tmp_path / "rm", "process")
    cfg = rl_config(
        tmp_path,
        "run",
        run={"steps": 1, "record": "tokens"},
        reward={"name": str(folder), "options": {"steps": rule}},
        rollout={"max_tokens": 60, "n_samples": 4, "temperature": 1.5},
        train={"alg_name": "reinforce", "advantage": "returns", "lr": 1e-3},
    )
    run(cfg)
    lines = (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    path = min((cfg.run.directory / "rollouts").glob("*.safetensors"))
    tensors = load_file(path)
    seen = 0
    for row, sample in enumerate(samples):
        mask = tensors["response_mask"][row]
        returns = tensors["advantages"][row][mask]
        assert float(returns[0]) == pytest.approx(sample["reward"], abs=1e-5)
        steps = [line for line in sample["response"].split("\n") if line.strip()]
        values = {round(float(value), 6) for value in returns}
        # As many as there are steps, each of which ends one; with the worst at the end but one.
        assert len(values) == (max(1, len(steps)) if rule == "mean" else 1)
        seen = max(seen, len(steps))
    assert seen >= 2


@pytest.mark.parametrize("name", ["math", "exact"])
def test_a_name_of_oxrls_means_no_folder_whatever_lies_in_the_working_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cfg = rl_config(tmp_path, "run", reward={"name": name})
    read = [given.name for given in inputs_of(cfg, {})]
    folder.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert option_problem(name, {"steps": "min"}).startswith(f"{name} has no option 'steps'")
    assert is_model_folder(f"./{name}") and not is_model_folder(name)
    assert [given.name for given in inputs_of(cfg, {})] == read


def test_what_changes_in_a_folder_of_its_name_is_no_change_of_a_reward(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(tmp_path / "math")
    monkeypatch.chdir(tmp_path)
    asked = [(replace(PROMPT, answer="2"), [completion("#### 2")])]
    pool = RewardPool("math", timeout_s=30)
    try:
        for note in ("before", "after"):
            (tmp_path / "math" / note).touch()
            assert [score.value for score in pool.score(asked)[0]] == [1.0]
            pool.close()  # the next score is of a fresh worker
    finally:
        pool.close()


def actors_of(model: Any, actors: int) -> ModelActorPool:
    """A pool whose actors are threads; nothing of the reward model is loaded from its folder."""
    cluster: Any = ThreadCluster(Ray())
    return ModelActorPool(
        "rm",
        lambda: model,
        cluster=lambda: cluster,
        actors=actors,
        gpus=lambda _: 0,
        timeout_s=60.0,
        field="reward",
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("actors", "groups"), [(1, 3), (2, 9)])
@pytest.mark.parametrize(
    ("open_patience", "error"),
    [
        (partial(Patience, lambda: True), Stopped),
        (partial(Patience, deadline_s=0.3), DeadlineError),
    ],
    ids=["signal", "deadline"],
)
def test_a_stop_and_a_deadline_end_the_wait_for_actors_while_groups_are_left(
    open_patience: partial[Patience], error: type[Exception], actors: int, groups: int
) -> None:
    def slow(prompt: Prompt, completions: list[Completion]) -> None:
        time.sleep(1.0)

    pool = actors_of(slow, actors)
    began = time.monotonic()
    with pytest.raises(error):
        pool.score([(PROMPT, [completion("2")])] * groups, open_patience())
    assert time.monotonic() - began < 10
    pool.close()
