"""What fields of other libraries are called here, for errors about names that nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Meant(NamedTuple):
    """The fields that a name of another library stands for, and what is different about them."""

    fields: tuple[str, ...]
    note: str = ""


LR = Meant(("train.lr",))
STEPS = Meant(("run.steps",), "a run counts optimizer steps, not passes over the data")
ROWS = Meant(
    ("data.prompts_per_step", "data.rows_per_step"),
    "of a whole optimizer step: prompts in reinforcement learning, rows otherwise; memory is "
    "bounded by train.micro_batch_tokens",
)
PASSES = Meant(
    ("train.micro_batch_tokens",),
    "batches are cut into passes by tokens, which never changes the gradient",
)
SAMPLES = Meant(("rollout.n_samples",))
RESPONSE = Meant(("rollout.max_tokens",))
PROMPT = Meant(("data.max_prompt_tokens",))
LONGEST = Meant(("model.max_length",))
KL = Meant(("train.kl_coeff",))
CLIPS = Meant(("train.clip_low", "train.clip_high"))
EPOCHS = Meant(("train.epochs",), "passes over each rollout batch")
MINIBATCHES = Meant(("train.minibatches",), "how many a rollout batch is cut into, not their size")
MODEL = Meant(("model.name",))
TRAIN = Meant(("data.train",))
EVAL = Meant(("data.eval",))
REWARD = Meant(("reward.name",))
DIRECTORY = Meant(("run.dir",))
SAVE = Meant(("run.checkpoint_every",))
EVALUATE = Meant(("run.eval_every",))
KEEP = Meant(("run.keep_checkpoints",))
WARMUP = Meant(("train.warmup_steps",), "in steps")
SCHEDULE = Meant(("train.lr_schedule",))
DTYPE = Meant(("model.dtype",))
VLLM = Meant(("inference_engine.name",), "vllm")
MEMORY = Meant(("inference_engine.gpu_memory_fraction",))
PARALLEL = Meant(("inference_engine.tensor_parallel",))
QLORA = Meant(("model.load_in_4bit",), "with lora.rank; NF4, doubly quantised, computing in dtype")
RANK = Meant(("lora.rank",))
TARGETS = Meant(("lora.targets",))
ALGORITHM = Meant(("train.alg_name",))
NORM = Meant(("train.max_grad_norm",))
GPUS = Meant(("run.training_gpus",))
DECAY = Meant(("train.weight_decay",))
COLUMNS = Meant(("data.columns",))
EVERY_STEP = Meant((), "every step is recorded: there is nothing to set")

# TRL, verl, OpenRLHF, LLaMA-Factory and their relatives.
OTHER_NAMES: Mapping[str, Meant] = {
    "learning_rate": LR,
    "actor_learning_rate": LR,
    "actor_lr": LR,
    "num_train_epochs": STEPS,
    "num_epochs": STEPS,
    "max_epochs": STEPS,
    "total_epochs": STEPS,
    "max_steps": STEPS,
    "num_steps": STEPS,
    "total_training_steps": STEPS,
    "total_episodes": STEPS,
    "per_device_train_batch_size": ROWS,
    "per_device_eval_batch_size": PASSES,
    "train_batch_size": ROWS,
    "rollout_batch_size": ROWS,
    "batch_size": ROWS,
    "generation_batch_size": ROWS,
    "gradient_accumulation_steps": PASSES,
    "micro_train_batch_size": PASSES,
    "micro_batch_size": PASSES,
    "micro_batch_size_per_gpu": PASSES,
    "ppo_micro_batch_size_per_gpu": PASSES,
    "ppo_max_token_len_per_gpu": PASSES,
    "num_generations": SAMPLES,
    "n": SAMPLES,
    "n_samples_per_prompt": SAMPLES,
    "num_return_sequences": SAMPLES,
    "group_size": SAMPLES,
    "rloo_k": SAMPLES,
    "max_completion_length": RESPONSE,
    "max_new_tokens": RESPONSE,
    "max_response_length": RESPONSE,
    "response_length": RESPONSE,
    "generate_max_len": RESPONSE,
    "max_prompt_length": PROMPT,
    "prompt_max_len": PROMPT,
    "max_seq_length": LONGEST,
    "max_seq_len": LONGEST,
    "max_len": LONGEST,
    "max_model_len": LONGEST,
    "cutoff_len": LONGEST,
    "kl_coef": KL,
    "init_kl_coef": KL,
    "kl_loss_coef": KL,
    "kl_ctrl": KL,
    "epsilon": CLIPS,
    "eps_clip": CLIPS,
    "clip_ratio": CLIPS,
    "cliprange": CLIPS,
    "clip_range": CLIPS,
    "epsilon_high": Meant(("train.clip_high",)),
    "clip_ratio_high": Meant(("train.clip_high",)),
    "clip_ratio_low": Meant(("train.clip_low",)),
    "num_iterations": EPOCHS,
    "ppo_epochs": EPOCHS,
    "num_ppo_epochs": EPOCHS,
    "ppo_mini_batch_size": MINIBATCHES,
    "num_mini_batches": MINIBATCHES,
    "mini_batch_size": MINIBATCHES,
    "model_name_or_path": MODEL,
    "model_name": MODEL,
    "model_path": MODEL,
    "pretrain": MODEL,
    "base_model": MODEL,
    "dataset": TRAIN,
    "dataset_name": TRAIN,
    "train_dataset": TRAIN,
    "train_file": TRAIN,
    "train_files": TRAIN,
    "prompt_data": TRAIN,
    "eval_dataset": EVAL,
    "eval_file": EVAL,
    "val_files": EVAL,
    "val_file": EVAL,
    "test_files": EVAL,
    "prompt_key": COLUMNS,
    "input_key": COLUMNS,
    "reward_func": REWARD,
    "reward_funcs": REWARD,
    "reward_fn": REWARD,
    "reward_function": REWARD,
    "custom_reward_function": REWARD,
    "remote_rm_url": REWARD,
    "output_dir": DIRECTORY,
    "default_local_dir": DIRECTORY,
    "save_path": DIRECTORY,
    "save_steps": SAVE,
    "save_freq": SAVE,
    "eval_steps": EVALUATE,
    "test_freq": EVALUATE,
    "save_total_limit": KEEP,
    "warmup_ratio": WARMUP,
    "num_warmup_steps": WARMUP,
    "lr_warmup_steps": WARMUP,
    "lr_warmup_ratio": WARMUP,
    "lr_scheduler": SCHEDULE,
    "lr_scheduler_type": SCHEDULE,
    "bf16": DTYPE,
    "fp16": DTYPE,
    "torch_dtype": DTYPE,
    "param_dtype": DTYPE,
    "use_vllm": VLLM,
    "gpu_memory_utilization": MEMORY,
    "vllm_gpu_memory_utilization": MEMORY,
    "tensor_parallel_size": PARALLEL,
    "tensor_model_parallel_size": PARALLEL,
    "vllm_tensor_parallel_size": PARALLEL,
    "use_4bit": QLORA,
    "bnb_4bit_quant_type": QLORA,
    "bnb_4bit_use_double_quant": QLORA,
    "bnb_4bit_compute_dtype": QLORA,
    "use_bnb_nested_quant": QLORA,
    "quantization_bit": QLORA,
    "lora_r": RANK,
    "lora_rank": RANK,
    "lora_alpha": Meant(("lora.alpha",)),
    "use_rslora": Meant(("lora.rslora",)),
    "use_dora": Meant(("lora.dora",)),
    "lora_target": TARGETS,
    "lora_target_modules": TARGETS,
    "target_modules": TARGETS,
    "algorithm": ALGORITHM,
    "algo": ALGORITHM,
    "adv_estimator": Meant(("train.alg_name", "train.advantage")),
    "scale_rewards": Meant(("train.advantage",), "such as group_center"),
    "loss_type": Meant(("train.alg_name", "train.loss", "train.weights")),
    "loss_agg_mode": Meant(("train.weights",)),
    "entropy_coef": Meant(("train.entropy_coeff",)),
    "ent_coef": Meant(("train.entropy_coeff",)),
    "lam": Meant(("train.gae_lambda",)),
    "grad_clip": NORM,
    "clip_grad": NORM,
    "max_norm": NORM,
    "n_gpus_per_node": GPUS,
    "num_gpus": GPUS,
    "num_processes": GPUS,
    "weight_decay_rate": DECAY,
    "packing": Meant(("data.pack_tokens",)),
    "report_to": Meant(("run.trackers", "run.mlflow")),
    "logger": Meant(("run.trackers", "run.mlflow")),
    "use_wandb": Meant(("run.trackers",), "wandb"),
    "run_name": Meant(("run.name",)),
    "experiment_name": Meant(("run.name",)),
    "logging_steps": EVERY_STEP,
    "mask_truncated_completions": Meant(("train.mask_truncated",)),
    "ref_model_sync_steps": Meant(("train.reference_sync_steps",)),
}


def meant_by(name: str) -> str:
    """What a name of another library is here, to be added to an error; empty where none is known.

    Args:
        name: a field's own, without its section.
    """
    meant = OTHER_NAMES.get(name.rpartition(".")[2].lower())
    if meant is None:
        return ""
    fields = " or ".join(meant.fields)
    parts = [f"that is {fields} here"] if fields else []
    if meant.note:
        parts.append(meant.note)
    return f"; {': '.join(parts)}"
