"""Every config field changes something that can be seen from outside: runs with and without the
change differ.

The numbers that cells of the table read are many; that each of them moves its cell is tested in
tests/functional.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.commands.train import run
from oxrl.config.schema import FIELDS
from oxrl.errors import OxrlError
from oxrl.tables.numbers import NUMBERS
from support.small_runs import final_files, metric_lines, rl_config, sft_config, write_inputs

Sections = dict[str, dict[str, Any]]
REWARDS = """
import time

def flaky(prompt, completion):
    if prompt.uid[0] in "01234567":
        raise ValueError("this prompt cannot be scored")
    return len(set(completion)) / 10

def letters(prompt, completion):
    return sum(map(ord, completion)) / 1000

def slow(prompt, completion):
    time.sleep(0.2)
    return len(set(completion)) / 10

def infinite(logprobs, old_logprobs, advantages, mask, loss_weights, *, correction=None):
    surprised = logprobs.min() < -4  # as no ordinary numbers are that it is tried on
    return (logprobs * mask).sum() * (float("inf") if surprised else 1.0), {}
"""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>Q {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FLAKY = {"name": "{folder}/rewards.py:flaky", "max_error_rate": 1.0}
EVAL: Sections = {"data": {"eval": "{folder}/held_out.jsonl"}}
PPO: Sections = {"train": {"alg_name": "ppo", "lr": 1e-3, "critic_lr": 1e-3}}
# The coefficient is changed behind every step: another speed is seen in the second.
STEERED: Sections = {"train": {"alg_name": "ppo_rlhf"}, "run": {"steps": 2}}
DAPO: Sections = {"train": {"alg_name": "dapo"}, "rollout": {"n_samples": 2, "max_tokens": 2}}
# Two updates on the same samples move the ratio away from 1, so that gates and corrections have
# something to do.
TWICE: Sections = {"run": {"steps": 2}}
MOVED: Sections = {"train": {"alg_name": "sgrpo", "lr": 0.02, "epochs": 2}, **TWICE}


def _moved(algorithm: str, **train: Any) -> Sections:
    return {"train": {"alg_name": algorithm, "lr": 0.02, "epochs": 2, **train}, **TWICE}


def _taught(algorithm: str, steps: int = 1) -> Sections:
    return {
        "model": {"name": "builtin:tiny", "teachers": {"big": {"name": "builtin:tiny"}}},
        "train": {"alg_name": algorithm, "lr": 0.02},
        "run": {"steps": steps},
    }


COVARIANCE = _moved("clip_cov", cov_fraction=0.5, cov_low=-9.0, cov_high=9.0)

# field -> what the base run needs, and the other value. "{folder}" is the test's own.
CHANGES: dict[str, tuple[Sections, Any]] = {
    "run.seed": ({}, 1),
    "run.steps": ({}, 2),
    "run.threads": ({}, 2),
    "run.exact": ({}, True),
    "run.checkpoint_every": ({"run": {"steps": 3}}, 3),
    "run.keep_checkpoints": ({"run": {"steps": 3}}, 1),
    "run.eval_every": ({**EVAL, "run": {"steps": 2}}, 1),
    "run.record": ({}, "tokens"),
    "run.mlflow": ({}, True),
    "run.day": (
        {"model": {"name": "builtin:tiny", "chat_template": "{folder}/clock.jinja"}},
        "2001-02-03",
    ),
    "run.dir": ({}, "{folder}/elsewhere"),
    "run.deadline_s": ({}, 1e-9),
    "run.deadlines": ({}, {"rollout": 1e-9}),
    "model.name": ({}, "builtin:small"),
    "model.dtype": ({}, "bfloat16"),
    "model.attention": ({}, "eager"),
    "model.chat_template": ({}, "{folder}/template.jinja"),
    "model.max_length": ({}, 12),
    "data.train": ({}, "{folder}/held_out.jsonl"),
    "data.eval": ({}, "{folder}/held_out.jsonl"),
    "data.columns": ({}, {"prompt": "answer"}),
    "data.prompts_per_step": ({}, 3),
    "data.max_prompt_tokens": ({}, 6),
    "data.overlong": (
        {"data": {"train": "{folder}/held_out.jsonl", "max_prompt_tokens": 8}},
        "error",
    ),
    "data.eval_rows": (EVAL, 2),
    "reward.name": ({}, "exact"),
    "reward.max_error_rate": ({"reward": FLAKY}, 0.0),
    "reward.timeout_s": (
        {"reward": {"name": "{folder}/rewards.py:slow", "max_error_rate": 1.0}},
        0.05,
    ),
    "reward.normalize": ({"train": {"alg_name": "reinforce", "lr": 1e-3}}, "batch"),
    "reward.clip": ({"train": {"alg_name": "reinforce", "lr": 1e-3}}, 0.1),
    "rollout.temperature": ({}, 0.5),
    "rollout.max_staleness": (
        {"rollout": {"force_strict_on_policy": False}, "run": {"steps": 2}},
        1,
    ),
    "rollout.rounds": (
        {
            "rollout": {"force_strict_on_policy": False, "max_staleness": 2, "rounds": 1},
            "run": {"steps": 5},
            "inference_engine": {"max_rows": 3},
        },
        9,
    ),
    "rollout.max_tokens": ({}, 5),
    "rollout.n_samples": ({}, 3),
    "rollout.top_p": ({}, 0.5),
    "rollout.top_k": ({}, 5),
    "rollout.min_p": ({}, 0.9),
    "rollout.eval_samples": (EVAL, 2),
    "rollout.eval_temperature": (EVAL | {"reward": {"name": "{folder}/rewards.py:letters"}}, 0.0),
    "inference_engine.max_rows": ({}, 3),
    "inference_engine.weights": ({}, "int8"),
    # Without vLLM that is an error before a model is loaded; with it tests/engines/test_vllm_host_process.py.
    "inference_engine.name": ({}, "vllm"),
    # One value works today; any other is an error before a model is loaded.
    "run.training_gpus": ({}, 2),
    "train.alg_name": (MOVED, "cispo"),
    "train.optimizer": ({}, "muon"),
    "train.master_weights": ({"model": {"dtype": "bfloat16"}}, "none"),
    "train.lr": ({}, 2e-3),
    "train.lr_schedule": ({"run": {"steps": 2}}, "linear"),
    "train.warmup_steps": ({"run": {"steps": 2}}, 2),
    "train.weight_decay": ({}, 0.1),
    "train.decay": ({"train": {"alg_name": "sgrpo", "lr": 1e-3, "weight_decay": 0.1}}, "all"),
    "train.adam_beta1": ({"run": {"steps": 2}}, 0.5),
    "train.adam_beta2": ({"run": {"steps": 2}}, 0.5),
    "train.adam_eps": ({}, 1e-2),
    "train.max_grad_norm": ({"run": {"steps": 2}}, 1e-7),
    "train.epochs": ({"run": {"steps": 2}}, 2),
    "train.minibatches": ({"run": {"steps": 2}}, 2),
    "train.micro_batch_tokens": ({}, 30),
    "train.entropy_coeff": ({}, 0.1),
    "train.mask_truncated": ({}, True),
    "train.old_logprobs": (MOVED, "bypass"),
    "train.max_skipped_steps": (
        {
            "run": {"steps": 2},
            "train": {"alg_name": "sgrpo", "loss": "{folder}/rewards.py:infinite"},
        },
        0,
    ),
    "train.advantage": ({}, "group_center"),
    "train.ratio": (MOVED, "geometric"),
    "train.denominator": (MOVED, "rollout"),
    "train.loss": (MOVED, "sapo"),
    "train.correction": (MOVED, "truncate"),
    "train.centering": (MOVED, "score"),
    "train.kl": (
        {"train": {"kl_coeff": 0.5, "alg_name": "sgrpo", "lr": 1e-3}, "run": {"steps": 2}},
        "loss_k3",
    ),
    "train.weights": ({}, "sequence_sum"),
    "train.clip_low": (MOVED, 0.001),
    "train.clip_high": (MOVED, 0.001),
    "train.clip_dual": (MOVED, 1.0001),
    "train.weight_min": (
        {"train": MOVED["train"] | {"alg_name": "cispo"}, **TWICE},
        0.9999,
    ),
    "train.weight_max": (
        {"train": MOVED["train"] | {"alg_name": "cispo"}, **TWICE},
        1.0001,
    ),
    "train.kl_coeff": ({"run": {"steps": 2}}, 0.5),
    "train.gamma": (PPO, 0.9),
    "train.critic_lr": (PPO, 1e-2),
    "train.whiten": (PPO, False),
    "train.critic_warmup_steps": (PPO, 1),
    "train.kl_horizon": (STEERED, 100),
    "train.reference_sync_steps": (
        {"train": {"alg_name": "prorl", "lr": 1e-3}, "run": {"steps": 2}},
        1,
    ),
    "train.nll_coeff": (
        {"train": {"alg_name": "vapo", "critic_warmup_steps": 0}, "reward": FLAKY},
        1.0,
    ),
    "train.drift_max": (_moved("opsm"), -9.0),
    "train.second_moment_max": (_moved("m2po"), 1e-30),
    "train.simko_alpha": (_moved("simko"), 0.5),
    "train.simko_boost": (
        _moved("simko", explore_quantile=0.0) | {"reward": FLAKY, "rollout": {"temperature": 0.08}},
        2.0,
    ),
    "train.top_candidates": (_moved("simko"), 1),
    "train.explore_quantile": (_moved("simko"), 0.0),
    "train.proximal_coeff": (_moved("dro"), 5.0),
    "train.drpo_delta": (_moved("drpo"), 1e-3),
    "train.spo": (_moved("drpo"), True),
    "train.influence_range": (_moved("fipo"), 0.0),
    "train.influence_half_life": (_moved("fipo"), 0.5),
    "train.influence_ratio_max": (_moved("fipo", clip_high=9.0, influence_range=9.0), 1.0001),
    "train.iqr_floor": ({"train": {"alg_name": "iqr_grpo", "lr": 1e-3}}, 50.0),
    "train.cov_fraction": (_moved("kl_cov"), 0.5),
    "train.cov_low": (COVARIANCE, 0.0),
    "train.cov_high": (COVARIANCE, 0.0),
    "train.kl_cov_coeff": (_moved("kl_cov", cov_fraction=0.5), 5.0),
    "model.teachers": (
        _taught("opd"),
        {"big": {"name": "builtin:tiny", "dtype": "bfloat16"}},
    ),
    "train.teacher_coeff": (_taught("opd"), 0.1),
    "train.teacher_coeff_end": (_taught("kdrl", steps=2), 0.5),
    "train.teacher_gamma": (_taught("minillm"), 0.5),
    "train.teacher_mean": (_taught("minillm"), True),
    "train.prefix_coeff": (_taught("iw_opd"), 2.0),
    "train.teacher_candidates": (_taught("opd_topk"), 3),
    "train.divergence_alpha": (_taught("opd_topk"), 0.3),
    "train.candidates_rest": (_taught("opd_topk"), "truncated"),
    "train.sampling_rounds": (DAPO, 1),
    # Of the penalty something can be seen where a response ends before the longest may.
    "train.overlong_buffer": ({"train": {"alg_name": "dapo"}, "rollout": {"max_tokens": 60}}, 50),
}
SUPERVISED: dict[str, tuple[Sections, Any]] = {
    "data.rows_per_step": ({}, 5),
    "data.pack_tokens": ({}, 40),
    "train.alg_name": ({}, "dft"),
}

# Seen elsewhere: the test that shows it.
ELSEWHERE = {
    "data.given_rows": "what is learned: tests/packages/test_given_rows.py",
    "data.image_roots": "where images may lie: tests/data/test_images.py",
    "data.image_max_pixels": "what the model is shown: the same file",
    "data.image_max_side": "which images are refused: the same file",
    "data.image_min_side": "the same",
    "action.choices": "what is sampled: tests/recipes/test_action_runs.py",
    "action.size": "the same file",
    "action.bins": "the same file",
    "action.chunk": "the same file",
    "action.code": "what tokens stand for: tests/data/test_fast.py",
    "action.fast": "the same file",
    "action.ids": "which tokens: tests/data/test_actions.py",
    "action.statistics": "what tokens stand for: tests/recipes/test_action_runs.py",
    "model.freeze": "what stays as it is: tests/models/test_vision.py",
    "train.tower_lr": "tests/models/test_vision.py",
    "run.ray_working_dir": "a node without the package: tests/engines/test_ray_cluster.py",
    "train.kl_target": "the sign of a KL decides: tests/recipes/test_objective.py",
    "train.share_prefix": "what is computed twice: tests/engines/test_share_prefix.py",
    "rollout.schedule": "what it writes: tests/recipes/test_free_runs.py",
    "rollout.swap": "what new requests find in a cache: tests/engines/test_vllm_engine.py",
    "run.deterministic": "kernels of a GPU: tests/engines/test_determinism.py",
    "model.offload_activations": "where they wait: tests/engines/test_local_trainer.py",
    "run.first_checkpoint": "what a folder holds: tests/checkpoint/test_first_checkpoint.py",
    "run.async_checkpoints": "when files are written: tests/checkpoint/test_async_checkpoints.py",
    "run.console": "what is said: tests/runs/test_console.py",
    "run.trackers": "where it is shown: tests/packages/test_trackers.py",
    "run.seconds_per_gb": "how long others are waited for: tests/runs/test_deadlines.py",
    "run.health": "tests/runs/test_health.py: a run stops at a sign",
    "reward.options": "tests/packages/test_formats.py",
    "reward.actors": "who scores: tests/engines/test_ray_reward_models.py",
    "reward.parts": "what is scored: tests/rewards/test_reward_parts.py",
    "reward.sandbox": "the layers that are there: tests/packages/test_hostile_programs.py",
    "reward.sandbox_url": "who judges: tests/packages/test_sandbox.py",
    "reward.partial": "the score: tests/packages/test_code_reward.py",
    "reward.program_s": "what ends a program: tests/packages/test_code_reward.py",
    "reward.program_mb": "the same file",
    "train.backend": "which engine trains: tests/engines/test_ranks.py",
    "fsdp.offload_optimizer": "where pieces are, never a number: tests/engines/test_optimizers.py",
    "deepspeed.zero_stage": "every stage: tests/engines/test_conformance.py, tests/engines/test_deepspeed_config.py",
    "deepspeed.offload_optimizer": "the same two",
    "deepspeed.offload_param": "the same two",
    "deepspeed_ref.zero_stage": "a reference at stage 0 and 3: the same two",
    "deepspeed_ref.offload_param": "the same two",
    "data.stream": "memory, never a number: tests/data/test_stream.py",
    "lora.rank": "what is trained and stored: tests/models/test_lora.py",
    "lora.alpha": "the merged weights: the same file",
    "lora.targets": "the layers with an adapter: the same file",
    "lora.rslora": "how the term is scaled: the same file",
    "lora.dora": "what is trained and merged: the same file",
    "model.load_in_4bit": "how frozen weights are held: tests/models/test_four_bit.py",
    "lora.delivery": "what samplers are sent: tests/engines/test_adapter_delivery.py",
    "run.ray_address": "joins a cluster: tests/engines/test_ray_cluster.py",
    "run.max_restarts": "goes on after the loss of a training actor: tests/engines/test_ray_recipe.py",
    "inference_engine.actors": "rollout actors: tests/engines/test_ray_recipe.py",
    "inference_engine.processes": "who samples: tests/engines/test_sampling_processes.py",
    "inference_engine.tensor_parallel": "tests/engines/test_vllm_engine.py",
    "inference_engine.gpu_memory_fraction": "a CUDA device's memory: handed to vLLM",
    "inference_engine.kv_cache_gb": "tests/engines/test_vllm_engine.py",
    "inference_engine.probe_every": "deliveries with a perturbed copy: tests/engines/test_weight_sync.py",
    "inference_engine.probe_tokens": "how much is scored: the same file",
    "inference_engine.probe_limit": "what is refused: the same file",
    "inference_engine.placement": "who shares a device: tests/engines/test_ray_rollouts.py",
    "rollout.from_samples": "what is trained on: tests/rollouts/test_stored_samples.py",
    "run.only": "what is done: the same file",
    "run.name": "the console's title and the default directory: tests/runs, tests/config",
    "run.stop_at": "where a run ends: tests/recipes/test_generated_evaluation.py",
    "run.keep_best": "the folder best/: tests/recipes/test_preference.py",
    "train.mix": "the loss of a sum: tests/recipes/test_preference.py",
    "train.loss_numbers": "tests/usercode/test_extension.py",
    "train.features": "the same file",
    "model.gradient_checkpointing": "memory, never a number: tests/engines/test_local_trainer.py",
    "model.revision": "which commit of the hub is loaded: tests/assembly/test_changed_inputs.py",
    "model.trust_remote_code": "what is handed to transformers: tests/models/test_load.py",
    "reward.workers": "processes that score at the same time: tests/rewards/test_workers.py",
    "rollout.force_strict_on_policy": "refuses stale tokens: tests/data/test_batching.py",
    "environment.name": "who answers: tests/recipes/test_episode_runs.py",
    "environment.options": "what its class is called with: tests/environments/test_pool.py",
    "environment.max_turns": "how episodes end: tests/rollouts/test_episodes.py",
    "environment.max_seconds": "the same file",
    "rollout.max_episode_tokens": "the same file",
    "environment.overlap": "who waits for whom: the same file",
    "environment.alive": "processes, never a number: the same file",
    "rollout.context": "what a turn reads: tests/rollouts/test_episode_contexts.py",
    "rollout.rewritten_history": "the same file",
    "environment.timeout_s": "when a step is given up: tests/environments/test_pool.py",
    "environment.memory_mb": "what an episode may allocate: the same file",
    "environment.tool_role": "what the template gets: tests/data/test_turns.py",
    "run.device": "tests/runs/test_pretend_device.py; refused where it is not: below",
}


def _fill(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, folder) for key, item in value.items()}
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


_SEEN: dict[str, str] = {}


def _observe_once(folder: Path, recipe: str, sections: Sections) -> str:
    """`_observe`, remembered: many fields share a base run."""
    key = json.dumps([recipe, sections], sort_keys=True)
    if key not in _SEEN:
        _SEEN[key] = _observe(folder, recipe, sections).replace(str(folder), "")
    return _SEEN[key]


def _observe(folder: Path, recipe: str, sections: Sections) -> str:
    """Everything a run leaves behind, or the error it ends with, as one text."""
    write_inputs(folder)
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in (1, 22, 333, 4444)]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "template.jinja").write_text(TEMPLATE)
    clock = TEMPLATE.replace("Q ", "{{ strftime_now('%d') }} ")
    (folder / "clock.jinja").write_text(clock)
    threads = torch.get_num_threads()
    build = rl_config if recipe == "rl" else sft_config
    defaults: Sections = {"run": {"steps": 1, "threads": 1}}
    sections = {key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults | sections}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a tiny run is full of advice
            cfg = build(folder, "run", **_fill(sections, folder))
        run(cfg)
    except OxrlError as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    finally:
        seen_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
    home = cfg.run.directory
    facts = [
        metric_lines(home),
        sorted(p.name for p in (home / "checkpoints").iterdir()),
        sorted(p.name for p in home.iterdir() if not p.name.startswith("mlflow.db-")),
        sorted(p.name for p in (home / "rollouts").iterdir()),
        home.name,
        seen_threads,
        {
            name: hashlib.sha256(data).hexdigest()
            for name, data in sorted(final_files(home).items())
        },
    ]
    samples = (home / "samples.jsonl").read_text() if (home / "samples.jsonl").exists() else ""
    return json.dumps([facts, samples])


@pytest.mark.parametrize(
    ("recipe", "field"),
    [*(("rl", name) for name in CHANGES), *(("supervised", name) for name in SUPERVISED)],
)
def test_changing_the_field_changes_what_the_run_leaves_behind(
    recipe: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MLflow keeps what it is told in files here: to make its database takes two seconds.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    base, value = (CHANGES if recipe == "rl" else SUPERVISED)[field]
    changed = copy.deepcopy(base)
    section, _, name = field.partition(".")
    if section == "train":
        changed.setdefault("train", {"alg_name": "sgrpo" if recipe == "rl" else "sft", "lr": 1e-3})
    changed.setdefault(section, {})[name] = value
    one, other = (
        _observe_once(tmp_path / "base", recipe, base),
        _observe_once(tmp_path / "changed", recipe, changed),
    )
    assert one != other


def test_every_field_of_the_schema_is_in_the_walk_or_named_with_the_test_that_shows_it() -> None:
    numbers = {f"train.{name}" for name in NUMBERS}
    assert sorted(set(FIELDS) - set(CHANGES) - set(SUPERVISED) - set(ELSEWHERE) - numbers) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_asking_for_cuda_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OxrlError, match="run.device is cuda"):
        run(rl_config(tmp_path, "run", run={"device": "cuda"}))
