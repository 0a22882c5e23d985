"""VllmEngine of a policy that acts: tokens of actions alone are sampled and scored. Runs where vLLM is
installed (`make test-scale`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.data.batching import to_rollout_batch
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import load_policy
from oxrl.models.token_mask import sample_only
from oxrl.models.weights import buckets
from support.vision_families import write_family
from support.vision_runs import asked, config, parts_of, rollouts, write_rows

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
    ),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
ACTIONS = (40, 41, 42, 43, 200)


def test_tokens_of_actions_share_all_probability_in_samples_and_scores(tmp_path: Path) -> None:
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    write_rows(tmp_path)
    cfg = config(tmp_path, str(write_family("idefics3", tmp_path / "idefics3", heads=2)))
    images = parts_of(cfg).images  # `asked` finds them there
    options = VllmOptions(max_model_len=512, max_rows=16, log_file=str(tmp_path / "vllm.log"))
    engine = VllmEngine(cfg.model.name, options, images=images, only=ACTIONS)
    model = load_policy(cfg.model.name)
    sample_only(model, ACTIONS)
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    engine.update_weights(buckets(model.named_parameters()), 0)
    for temperature in (1.0, 0.0):
        requests = asked(cfg, temperature=temperature, stop_token_ids=())
        done = generate(engine, requests, deadline_s=120)
        assert {token for answer in done for token in answer.token_ids} <= set(ACTIONS)
        batch = to_rollout_batch(rollouts(requests, done), pad_id=0, images=images)
        said: Any = trainer.forward(batch.inputs, frozenset({"logprobs"})).logprobs
        mask = batch.inputs.response_mask
        if temperature:
            assert float((said - batch.rollout_logprobs)[mask].abs().max()) < 1e-4
    row = [3, 70, *ACTIONS, 41]
    [scored] = engine.logprobs([row])
    tokens = torch.tensor([row])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0, :-1, list(ACTIONS)].log_softmax(-1)
    for place in range(2, len(row)):
        expected = float(logits[place - 1, ACTIONS.index(row[place])])
        assert scored[place] == pytest.approx(expected, abs=1e-4)
    engine.close()
