"""A trained reward model by its folder: same scores as the engine that trained it, in a worker
process too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oxrl.config import load_config
from oxrl.data.preferences import PreferenceDataset, to_preference_batch
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import LoadOptions, load_critic, load_tokenizer
from oxrl.rewards.trial import load_reward
from oxrl.rewards.workers import RewardPool
from oxrl.types import Completion, Prompt

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
