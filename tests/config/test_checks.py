"""Checks across sections: the numbers, and the nearest numbers that would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxrl.config import load_config
from oxrl.errors import ConfigError
from oxrl.tables.policy import ROWS
from oxrl.tables.user_code import REWARD
from oxrl.usercode.locate import names_of

LEVEL = "train.correction_level"
LOOSE = "rollout.force_strict_on_policy=false"
FREE = ("rollout.max_staleness=1", LOOSE, "rollout.schedule=free")
TOOLS = ("environment.name=tools",)


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            ["train.minibatches=5"],
            "train.minibatches",
            ["prompts_per_step=12", "4 or 6", "10 or 15"],
        ),
        (["train.minibatches=24"], "train.minibatches", ["6 or 12", "data.prompts_per_step 24"]),
        (["train.epochs=5"], "run.steps", ["multiple of 5", "10 or 15"]),
        (["train.epochs=5", "run.steps=3"], "run.steps", ["nearest valid: 5"]),
        (
            ["train.epochs=2", "train.old_logprobs=current"],
            "train.old_logprobs",
            ["this run has 2", "recompute"],
        ),
        (["rollout.temperature=0"], "rollout.temperature", ["identical", "every advantage is 0"]),
        (["rollout.n_samples=1"], "rollout.n_samples", ["group_normalize", "2 or more"]),
        (
            ["train.alg_name=dapo", "train.mask_truncated=true"],
            "train.mask_truncated",
            ["dapo punishes"],
        ),
        (
            ["rollout.top_k=50", "train.loss=simko"],
            "rollout.top_k",
            ["top tokens", "left out", "rollout.top_k: 0"],
        ),
        (
            ["rollout.top_p=0.9", "rollout.min_p=0.1", "train.loss=dppo_topk_tv"],
            "rollout.top_p",
            ["top tokens", "set rollout.top_p: 1, rollout.min_p: 0"],
        ),
        (
            ["rollout.min_p=0.1", "train.loss=dppo_topk_kl"],
            "rollout.min_p",
            ["top tokens", "rollout.min_p: 0"],
        ),
        (
            ["rollout.top_k=5", "rollout.temperature=0"],
            "rollout.temperature",
            ["cannot sample greedily", "set it above 0"],
        ),
        (
            ["rollout.max_staleness=1"],
            "rollout.force_strict_on_policy",
            ["rollout.max_staleness", "false"],
        ),
        (
            ["rollout.max_staleness=1", "train.epochs=2"],
            "rollout.max_staleness",
            ["train.epochs x train.minibatches = 2", "set it to 0 or 2"],
        ),
        (
            ["rollout.max_staleness=7", LOOSE, "train.epochs=3"],
            "rollout.max_staleness",
            ["train.epochs x train.minibatches = 3", "set it to 6 or 9"],
        ),
        (
            ["rollout.swap=keep", *FREE],
            "rollout.swap",
            ["inference_engine.name vllm alone", "no proof of it exists", "set it to recompute"],
        ),
        (
            ["rollout.swap=keep", "rollout.max_staleness=1", LOOSE, "inference_engine.name=vllm"],
            "rollout.swap",
            ["rollout.schedule free alone", "no proof of it exists", "set it to recompute"],
        ),
        (["rollout.rounds=4", *FREE], "rollout.rounds", ["the clock decides", "one of the two"]),
        (["rollout.rounds=4"], "rollout.rounds", ["rollout.max_staleness"]),
        (["rollout.schedule=free"], "rollout.schedule", ["rollout.max_staleness"]),
        (["rollout.swap=keep"], "rollout.swap", ["rollout.max_staleness"]),
        (
            ["rollout.max_staleness=1", LOOSE, *TOOLS, "environment.overlap=true"],
            "environment.overlap",
            ["depends on the clock", "set it to false, or the schedule to free"],
        ),
        (
            ["rollout.max_staleness=1", LOOSE, *TOOLS, "environment.max_seconds=9"],
            "environment.max_seconds",
            ["depends on the clock", "set it to null, or the schedule to free"],
        ),
        (
            ["rollout.max_tokens=1500", "data.max_prompt_tokens=549"],
            "rollout.max_tokens",
            ["1500", "2049", "2048"],
        ),
        (["rollout.max_tokens=2048"], "rollout.max_tokens", ["no room for a prompt", "2048"]),
        (["model.max_length=256"], "rollout.max_tokens", ["model.max_length 256"]),
        (["model.max_length=4096"], "model.max_length", ["2048"]),
        (["run.training_gpus=2"], "run.training_gpus", ["one process", "fsdp"]),
        (
            ["inference_engine.name=vllm", "train.backend=fsdp", "run.training_gpus=2"],
            "inference_engine.actors",
            ["fsdp trains in Ray actors", "1 or more", "train.backend local"],
        ),
        (
            ["inference_engine.name=vllm", "model.name=builtin:tiny-vl"],
            "inference_engine.name",
            ["images in Ray actors alone", "inference_engine.actors", "local"],
        ),
        (
            ["inference_engine.processes=2", "inference_engine.actors=1"],
            "inference_engine.processes",
            ["inference_engine.actors is 1", "remove one of the two"],
        ),
        (
            ["inference_engine.processes=2", "run.device=cuda"],
            "inference_engine.processes",
            ["run.device is cuda", "remove it", "run.device to cpu", "inference_engine.actors"],
        ),
        (
            ["inference_engine.processes=-1"],
            "inference_engine.processes",
            ["must be greater", "of vllm"],
        ),
        (
            ["inference_engine.processes=2", "train.backend=fsdp", "run.training_gpus=2"],
            "inference_engine.processes",
            ["fsdp trains in Ray actors", "inference_engine.actors to 1 or more", "local"],
        ),
        (["data.train=data"], "data.train", [".jsonl or .parquet"]),
        (["data.eval=data/none.parquet"], "data.eval", ["no such file"]),
        (
            ["data.train=elsewhere/train.jsonl"],
            "data.train",
            ["the folder elsewhere does not exist"],
        ),
        (["model.name=./nothing"], "model.name", ["is no folder"]),
        (["model.name=./data"], "model.name", ["has no config.json"]),
        (
            ["model.chat_template=none.jinja"],
            "model.chat_template",
            ["no such file", "qwen3_training"],
        ),
        (["model.chat_template=qwen3_trainng"], "model.chat_template", ["mean 'qwen3_training'"]),
        (
            ["model.attention=flash_attention_2", "run.device=cpu"],
            "model.attention",
            [
                "pip install flash-attn --no-build-isolation",
                "needs a GPU",
                "model.dtype to bfloat16",
            ],
        ),
        (
            ["run.device=mps", "train.backend=fsdp"],
            "run.device",
            ["reduced on CPU and CUDA only", "train.backend to local"],
        ),
        (
            ["run.device=xpu", "inference_engine.name=vllm"],
            "run.device",
            ["samplers with weights of their own", "inference_engine.name to local"],
        ),
        (["reward.name=reward.py:score"], "reward.name", ["no such file"]),
        (
            ["train.correction=truncate", "train.old_logprobs=bypass"],
            "train.old_logprobs",
            ["twice", "recompute"],
        ),
        (["train.correction=truncate", "train.denominator=rollout"], "train.correction", ["twice"]),
        (
            ["train.centering=score", "train.alg_name=gspo"],
            "train.centering",
            ["train.ratio geometric", "looks at the whole response", "train.ratio none and token"],
        ),
        (
            ["train.centering=score", "train.ratio=sequence"],
            "train.centering",
            ["train.ratio sequence", "every token that could have been sampled"],
        ),
        *(
            (
                ["train.centering=score", f"train.alg_name={name}"],
                "train.centering",
                [f"train.loss {gate}: {why}", "dppo_kl, policy_gradient and"],
            )
            for name, gate, why in (
                ("gmpo", "gmpo", "it looks at the whole response"),
                ("kimi", "proximal", "it looks at the whole response"),
                ("clip_cov", "clip_cov", "it chooses tokens over the whole step"),
                ("kl_cov", "kl_cov", "it chooses tokens over the whole step"),
                ("simko", "simko", "it reads other tokens"),
                ("dppo_topk_tv", "dppo_topk_tv", "it reads other tokens"),
                ("dppo_topk_kl", "dppo_topk_kl", "it reads other tokens"),
            )
        ),
        (
            ["train.centering=score", "train.alg_name=fipo", "train.epochs=2", "run.steps=2"],
            "train.centering",
            ["train.loss fipo", "that follow a token"],
        ),
        (
            ["train.centering=score", "train.alg_name=dro", "train.epochs=2", "run.steps=2"],
            "train.centering",
            ["train.loss dro", "its pull to the old policy", "take it out"],
        ),
        *(
            (
                ["train.centering=score", f"train.correction={name}"],
                "train.centering",
                [f"train.correction {name}: {why}", "none, truncate, mask and reject"],
            )
            for name, why in (
                ("reject_k3", "it looks at the whole response"),
                ("veto", "it looks at the whole response"),
                ("drop_drifted_failures", "it looks at the whole response"),
                ("second_moment", "it chooses tokens over the whole step"),
            )
        ),
        *(
            (
                ["train.centering=score", "train.correction=truncate", f"{LEVEL}={level}"],
                LEVEL,
                ["by the whole response", "set it to token"],
            )
            for level in ("sequence", "geometric")
        ),
        (
            ["train.centering=score", "train.correction=reject"],
            LEVEL,
            ["by the whole response", "set it to token"],
        ),
        (
            ["train.centering=score", "train.center_top=257", "inference_engine.name=vllm"],
            "train.center_top",
            ["must be at most 256", "inference_engine.name: vllm tells"],
        ),
        (
            ["train.centering=score", "train.center_top=262", "model.name=builtin:tiny"],
            "train.center_top",
            ["at most the 261 tokens of the vocabulary"],
        ),
        (["train.centering=score", "train.center_top=0"], "train.center_top", ["greater than"]),
        (["train.centering=yes"], "train.centering", ["score"]),
        (["train.center_top=8"], "train.center_top", ["is not read"]),
        (["train.center_tail=token"], "train.center_tail", ["is not read"]),
        (["train.centering=score", "train.center_tail=both"], "train.center_tail", ["event"]),
        (["train.alg_name=fipo"], "train.epochs", ["whose ratio is 1", "fipo is ppo_clip", "to 2"]),
        (
            ["train.alg_name=dro", "rollout.max_staleness=1", LOOSE],
            "train.epochs",
            ["dro is policy_gradient", "train.loss: policy_gradient"],
        ),
        (["train.alg_name=drpo"], "train.epochs", ["drpo is importance_sampling"]),
        (
            ["train.alg_name=drpo", "train.epochs=2", "train.drpo_delta=12.5"],
            "train.drpo_delta",
            ["less than or equal to 1", "probabilities differ by no more", "write 0.15"],
        ),
        (["train.ratio=none"], "train.ratio", ["ppo_clip needs an importance ratio"]),
        (["train.loss=policy_gradient", "train.ratio=token"], "train.ratio", ["has no effect"]),
        (
            ["train.alg_name=reinforce", "train.denominator=old"],
            "train.denominator",
            ["has no effect"],
        ),
        (
            ["train.alg_name=rloo", "train.epochs=2"],
            "train.epochs",
            ["rloo has no importance ratio", "only the first", "older weights", "to 1"],
        ),
        (
            ["train.alg_name=reinforce", "train.minibatches=2"],
            "train.minibatches",
            ["reinforce has no importance ratio", "train.epochs 1 x train.minibatches 2"],
        ),
        (
            ["train.loss=policy_gradient", "train.epochs=2"],
            "train.epochs",
            ["sgrpo has no importance ratio", "train.loss: ppo_clip"],
        ),
        (
            ["train.alg_name=a3po", "train.correction=none"],
            "train.correction",
            ["a3po weighs its interpolated policy", "truncate"],
        ),
        (
            ["train.alg_name=m2po", "train.correction=truncate"],
            "train.correction",
            ["twice"],
        ),
        (
            ["train.alg_name=cispo", "train.weight_min=6"],
            "train.weight_min",
            ["below train.weight_max=5.0"],
        ),
        (
            ["train.correction=mask", "train.correction_min=3"],
            "train.correction_min",
            ["train.correction_max=2.0"],
        ),
        (["train.alg_name=ppo_rlhf", "train.kl_coeff=0"], "train.alg_name", ["needs a KL term"]),
        (["train.alg_name=prorl", "train.kl=none"], "train.alg_name", ["needs a KL term"]),
        (["train.alg_name=ppo_rlhf", "train.kl=loss_k2"], "train.kl", ["reward_k1"]),
        (
            ["train.alg_name=prorl", "lora.rank=4", "model.name=Qwen/Qwen2.5-0.5B"],
            "lora.rank",
            ["cannot be"],
        ),
        (
            ["train.alg_name=a3po", "train.old_logprobs=bypass"],
            "train.old_logprobs",
            ["interpolates", "auto"],
        ),
        (
            ["train.alg_name=dapo", "train.advantage=batch_center", "rollout.n_samples=1"],
            "rollout.n_samples",
            ["dapo"],
        ),
        (
            ["train.alg_name=maxrl", "train.maxrl_order=8"],
            "train.maxrl_order",
            ["below rollout.n_samples 8"],
        ),
        (["train.alg_name=pkpo", "train.pass_k=9"], "train.pass_k", ["rollout.n_samples 8"]),
    ],
)
def test_one_contradiction_is_one_problem_with_its_numbers(
    write: Callable[..., Path], overrides: list[str], field: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(), overrides)
    report = str(caught.value)
    assert report.startswith("1 problem in run.yaml")
    assert f": {field}" in report
    for word in words:
        assert word in report


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["deepspeed.zero_stage=2"], "deepspeed.zero_stage", "train.backend: deepspeed"),
        (
            ["train.backend=deepspeed", "deepspeed.zero_stage=0", "model.dtype=bfloat16"],
            "deepspeed.zero_stage",
            "AdamW",
        ),
        (
            ["train.backend=deepspeed", "deepspeed.zero_stage=2", "deepspeed.offload_param=true"],
            "deepspeed.offload_param",
            "zero_stage 3 or more, this is 2",
        ),
        (
            ["train.backend=deepspeed", "train.optimizer=muon"],
            "train.optimizer",
            "set it to adamw, or train.backend to local or fsdp",
        ),
        (
            ["train.backend=deepspeed", "model.dtype=bfloat16", "train.master_weights=none"],
            "train.master_weights",
            "set it to float32, or train.backend to local or fsdp",
        ),
        (
            ["train.master_weights=none"],
            "train.master_weights",
            "set it to float32, or model.dtype to bfloat16",
        ),
    ],
)
def test_a_distributed_backend_is_checked_before_anything_starts(
    write: Callable[..., Path], overrides: list[str], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^1 problem in run.yaml\n\n.*: {field}(?s:.*){words}"):
        load_config(write(train={"alg_name": "sft"}), overrides)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"alg_name": "exo", "label_noise": 0}, "exo takes its logarithm"),
        ({"alg_name": "f_dpo_alpha", "preference_alpha": 1}, "use dpo"),
    ],
)
def test_a_number_at_which_a_preference_loss_has_no_value_is_refused(
    write: Callable[..., Path], train: dict[str, Any], words: str
) -> None:
    (number,) = set(train) - {"alg_name"}
    with pytest.raises(ConfigError, match=rf"train\.{number}.*(\n.*)*{words}"):
        load_config(write(train=train))


SUCCESSES = "counts successes, which are 0 or 1"


@pytest.mark.parametrize("advantage", ["maxrl", "pkpo", "mean_normalize", "pass_at_k"])
@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["reward.normalize=running"], "reward.normalize = 'running'"),
        (["reward.normalize=batch"], "reward.normalize = 'batch'"),
        (["reward.clip=0.9"], "reward.clip = 0.9"),
        (["train.kl=reward_k1", "train.kl_coeff=0.01"], "train.kl = 'reward_k1'"),
    ],
)
def test_what_counts_successes_refuses_what_makes_other_numbers_of_them(
    write: Callable[..., Path], advantage: str, overrides: list[str], field: str
) -> None:
    chosen = {"alg_name": "sgrpo", "advantage": advantage}
    if advantage in ROWS:
        chosen = {"alg_name": advantage}
    # Successes stay what they are under a bound of 1, and under a KL in the loss.
    harmless = ["reward.clip=1", "train.kl=loss_k3", "train.kl_coeff=0.01"]
    load_config(write(train=chosen), harmless)
    with pytest.raises(ConfigError, match=f"(?s)^1 problem in .*{field}.*{SUCCESSES}"):
        load_config(write(train=chosen), overrides)


def test_what_counts_successes_refuses_a_penalty_of_the_row(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=f"(?s)overlong penalty of dapo.*{SUCCESSES}"):
        load_config(write(train={"alg_name": "dapo", "advantage": "mean_normalize"}))


def test_a_column_that_the_recipe_does_not_read_is_refused(write: Callable[..., Path]) -> None:
    path = write(train={"alg_name": "dpo"}, data={"columns": {"promt": "question"}})
    with pytest.raises(ConfigError, match=r"(?s)data\.columns.*no column that dpo reads.*'prompt'"):
        load_config(path)


def test_rejection_sampling_over_ranks_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"train.backend = 'fsdp'\n.*rft samples in one process"):
        load_config(write(train={"alg_name": "rft"}), ["train.backend=fsdp", "run.training_gpus=2"])


RAY = ["train.backend=fsdp", "run.training_gpus=2", "inference_engine.actors=2"]


@pytest.mark.parametrize(
    "overrides",
    [
        [
            *RAY,
            "run.ray_address=auto",
            "run.max_restarts=3",
            "inference_engine.placement=colocated",
        ],
        ["inference_engine.actors=1", "run.ray_address=10.0.0.1:6379"],
        ["train.backend=deepspeed", "run.max_restarts=1"],
    ],
)
def test_reinforcement_learning_over_ray_actors_is_accepted(
    write: Callable[..., Path], overrides: list[str]
) -> None:
    load_config(write(), overrides)


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["run.ray_address=auto"], "run.ray_address", "Ray actors"),
        (
            ["inference_engine.actors=2", "run.max_restarts=1"],
            "run.max_restarts",
            "training actors",
        ),
        (
            ["inference_engine.actors=2", "inference_engine.placement=colocated"],
            "inference_engine.placement",
            "needs the first two",
        ),
        (["inference_engine.tensor_parallel=2"], "inference_engine.tensor_parallel", "vllm"),
        (
            [
                *RAY,
                "inference_engine.name=vllm",
                "inference_engine.tensor_parallel=2",
                "inference_engine.placement=colocated",
            ],
            "inference_engine.tensor_parallel",
            "separate",
        ),
        (
            [*RAY, "inference_engine.actors=3", "inference_engine.placement=colocated"],
            "inference_engine.actors",
            "run.training_gpus is 2",
        ),
    ],
)
def test_what_nobody_would_read_of_ray_is_refused(
    write: Callable[..., Path], overrides: list[str], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{field}(?s:.*){words}"):
        load_config(write(), overrides)


def test_a_reference_section_is_refused_where_no_deepspeed_holds_a_reference(
    write: Callable[..., Path],
) -> None:
    with pytest.raises(ConfigError, match="read with train.backend: deepspeed"):
        load_config(write(deepspeed_ref={"zero_stage": 3}))
    with pytest.raises(ConfigError, match="dpo as configured has none"):
        load_config(
            write(
                train={"alg_name": "dpo", "backend": "deepspeed"}, deepspeed_ref={"zero_stage": 0}
            )
        )
    moving = write(
        train={"alg_name": "tr_dpo", "backend": "deepspeed"}, deepspeed_ref={"zero_stage": 0}
    )
    assert load_config(moving).deepspeed_ref.zero_stage == 0
    with pytest.raises(ConfigError, match=r"deepspeed_ref.zero_stage 3 or more, this is 0"):
        load_config(moving, ["deepspeed_ref.offload_param=true"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.minibatches=4", "train.epochs=3"],
        ["rollout.max_tokens=1500", "data.max_prompt_tokens=548"],
        ["rollout.eval_temperature=0", "data.eval=data/test.jsonl"],
        ["train.alg_name=ppo", "rollout.n_samples=1"],
        ["train.advantage=gae", "rollout.n_samples=1", "train.critic_lr=1e-4"],
        ["train.correction=truncate", "train.correction_max=3"],
        ["train.centering=score", "train.correction=truncate", "train.center_top=8"],
        ["train.centering=score", "train.correction=reject", f"{LEVEL}=token"],
        ["train.centering=score", "train.loss=dppo_kl", "train.denominator=rollout"],
        ["train.alg_name=a2c", "train.centering=score", "train.center_tail=token"],
        ["train.alg_name=a3po", "train.centering=score"],
        ["train.alg_name=cispo_centered", "train.centering=none"],
        ["train.alg_name=fipo", "train.minibatches=2", "run.steps=2"],
        ["train.alg_name=fipo", "train.old_logprobs=bypass", "rollout.max_staleness=1", LOOSE],
        ["train.alg_name=drpo", "rollout.max_staleness=1", LOOSE],
        ["train.alg_name=drpo", "inference_engine.name=vllm"],
        ["model.name=Qwen/Qwen2.5-0.5B-Instruct", "rollout.max_tokens=30000"],
        ["run.device=cuda", "model.dtype=bfloat16"],
    ],
)
def test_what_fits_together_loads(write: Callable[..., Path], overrides: list[str]) -> None:
    load_config(write(), overrides)


@pytest.mark.parametrize("algorithm", [name for name, row in ROWS.items() if not row.unsupported])
def test_every_row_of_the_table_loads_with_its_own_defaults(
    write: Callable[..., Path], algorithm: str
) -> None:
    cfg = load_config(write(train={"alg_name": algorithm}), ["run.steps=96"])
    assert cfg.train.row == ROWS[algorithm]


@pytest.mark.parametrize("algorithm", [name for name, row in ROWS.items() if row.unsupported])
def test_a_row_that_no_recipe_can_run_is_refused_with_what_is_missing(
    write: Callable[..., Path], algorithm: str
) -> None:
    with pytest.raises(ConfigError, match=f"{algorithm} needs .* not part of a recipe yet"):
        load_config(write(train={"alg_name": algorithm}), ["run.steps=96"])


def test_a_reward_file_must_define_the_function(write: Callable[..., Path]) -> None:
    Path("reward.py").write_text("def score(prompt, completion):\n    return 1.0\n")
    assert load_config(write(), ["reward.name=reward.py:score"]).reward.name == "reward.py:score"
    with pytest.raises(ConfigError, match="defines no 'scores'; did you mean 'score'"):
        load_config(write(), ["reward.name=reward.py:scores"])
    Path("reward.py").write_text("def score(prompt, completion)\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"reward.py:1 is not Python"):
        load_config(write(), ["reward.name=reward.py:score"])
    Path("reward.py").write_text("from somewhere import *\n")
    assert load_config(write(), ["reward.name=reward.py:score"]).reward.name == "reward.py:score"


@pytest.mark.parametrize("name", names_of(REWARD))
def test_every_built_in_reward_is_a_valid_name(write: Callable[..., Path], name: str) -> None:
    needed = {"judge": ["reward.options={url: 'http://localhost:8000/v1', model: m}"]}
    overrides = [f"reward.name={name}", *needed.get(name, [])]
    assert load_config(write(), overrides).reward.name == name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bert"}, "no next-token probability"),
        ({"model_type": "llama4_text"}, "no backbone"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, None),
        ({"model_type": "paligemma", "vision_config": {}}, "vision encoder"),
        ({"model_type": "qwen2_audio", "audio_config": {}}, "audio encoder"),
        ({"model_type": "gemma3", "vision_config": {}}, None),
        ({"model_type": "bert", "is_decoder": True}, None),
        ({"model_type": "mamba"}, None),
        ({"model_type": ["t5"]}, None),
    ],
)
def test_what_is_no_causal_language_model_is_refused_with_the_reason(
    write: Callable[..., Path], tmp_path: Path, values: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    override = f"model.name={tmp_path}"
    if words is None:
        assert load_config(write(), [override]).model.name == str(tmp_path)
        return
    with pytest.raises(ConfigError, match=rf"(?s)model\.name.*{words}"):
        load_config(write(), [override])
