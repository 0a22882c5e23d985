"""What docs/benchmarks.md tells of: `record.py` measures it, docs/make_benchmarks.py shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Benchmark:
    """One table of the page.

    Args:
        title: of its part of the page.
        question: what it answers, and how.
        command: in the root of the repository; `python` is the one that runs `record.py`.
        cases: of its rows, as the figures name them -> as the page does.
        columns: of the figures -> as the page heads them.
        reasons: case, column or "case/column" -> why there may be no figure.
    """

    title: str
    question: str
    command: str
    cases: Mapping[str, str]
    columns: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])


SIDES = {
    "oxrl_cpu_s": "oxRL, processor s",
    "trl_cpu_s": "TRL, processor s",
    "cpu_ratio": "TRL / oxRL",
    "oxrl_s": "oxRL, wall s",
    "trl_s": "TRL, wall s",
    "ratio": "TRL / oxRL",
}
WAITS = "the machine was too busy; needs the `bench` extra"
# The folder that `oxrl prepare gguf` makes of SmolLM2-135M-Instruct.
SMOLLM = "--model runs/smollm2/model"
NEEDS_TRL = dict.fromkeys(("equal", "heavy", "equal long", "heavy long", "sft", "dpo"), WAITS)
HEAVY = "lengths lognormal, median 32, at most 256"
SEEDS = {"all seeds": "all seeds"}

ENGINES = {"fsdp": "FSDP2", "zero3": "ZeRO-3", "zero2": "ZeRO-2"}
OF_OTHERS = "the machine was too busy with other work"
OF_SCALE = "needs Ray, vLLM and DeepSpeed: `make env-scale`"

PARTS = ("sampling", "update", "step")
EXACT = {
    "off_cpu_s": "without, processor s",
    "on_cpu_s": "with, processor s",
    "cpu_ratio": "with / without",
}

# The cases of benchmarks/plan_memory.py; a test compares.
PLANNED = (
    "sft",
    "sft, checkpointing",
    "sft, checkpointing, offloaded",
    "sft, bfloat16",
    "sft, bfloat16, checkpointing",
    "sft, bfloat16, no masters",
    "sft, muon",
    "sft, adamw_8bit",
    "sft, lora",
    "sft, lora, bfloat16",
    "sft, micro-batches of 128",
    "sft, micro-batches of 2048",
    "sft, vocabulary 8192",
    "sft, llama",
    "sft, llama, bfloat16",
    "dpo",
    "dpo, moving reference",
    "reward model",
    "rl",
    "rl, prompts read per row",
    "rl, reference",
    "rl, critic",
    "rl, lora, reference",
    "rl, bfloat16",
    "rl, several steps per rollout",
    "fsdp x 2",
    "fsdp x 2, checkpointing",
    "fsdp x 2, bfloat16",
    "fsdp x 2, bfloat16, no masters",
    "fsdp x 2, lora",
    "fsdp x 2, offloaded",
    "fsdp x 2, reference",
    "fsdp x 2, vocabulary 8192",
    "zero1 x 2",
    "zero2 x 2",
    "zero3 x 2",
    "zero3 x 2, bfloat16",
    "zero3 x 2, reference",
)

BENCHMARKS: dict[str, Benchmark] = {
    "rl_step": Benchmark(
        "Whole RL steps against TRL",
        "Rollout and update of 16 prompts x 8 samples with the 3.3M-parameter built-in model in "
        "float32, of oxRL's local engine and of TRL's GRPOTrainer in turns, a process and a thread "
        "each. oxRL does as it does by default. TRL has the micro-batches that are fastest for it "
        "in a trial (without --trl-rows; of 16, 32, 64 and 128 rows). Short prompts have 12 "
        "tokens, long ones, with worked examples before the question, 134.",
        "python benchmarks/rl_step.py --pairs 10 --warmup 1 --threads 1 --trl-rows 32 "
        "--settings equal heavy 'equal long' 'heavy long'",
        {
            "equal": "64 tokens each",
            "heavy": HEAVY,
            "equal long": "64 tokens each, long prompts",
            "heavy long": f"{HEAVY}, long prompts",
        },
        SIDES,
        NEEDS_TRL,
    ),
    "offline_step": Benchmark(
        "SFT and DPO steps against TRL",
        "The same rows and model (3.3M parameters, float32) in oxRL and in TRL's SFTTrainer and "
        "DPOTrainer in turns, a process and a thread each. Answers have 8 to 128 characters; both "
        "asked the reference of DPO beforehand. Each side has the settings that were fastest for "
        "it in a trial: tokens or rows of a micro-batch, packing, sorting. Ratios are of the sums "
        "over all steps.",
        "python benchmarks/offline_step.py --pairs 10 --warmup 1",
        {"sft": "SFT, 64 rows", "dpo": "DPO, 32 pairs"},
        SIDES,
        NEEDS_TRL,
    ),
    "rl_step_smollm2": Benchmark(
        "Whole RL steps of SmolLM2-135M against TRL",
        "The same with a pre-trained model of 134.5M parameters in float32: 4 prompts x 8 samples "
        "x 64 tokens, short prompts in the model's own chat template (about 40 tokens). TRL has "
        "micro-batches of 16 rows.",
        f"python benchmarks/rl_step.py --pairs 10 --warmup 1 --threads 1 --prompts 4 --trl-rows 16 "
        f"--settings equal {SMOLLM}",
        {"equal": "64 tokens each"},
        SIDES,
        NEEDS_TRL,
    ),
    "offline_step_smollm2": Benchmark(
        "SFT and DPO steps of SmolLM2-135M against TRL",
        "The same with a pre-trained model of 134.5M parameters in float32: 16 rows, or 8 pairs, "
        "a step.",
        f"python benchmarks/offline_step.py --pairs 10 --warmup 1 --rows 16 {SMOLLM}",
        {"sft": "SFT, 16 rows", "dpo": "DPO, 8 pairs"},
        SIDES,
        NEEDS_TRL,
    ),
    "seconds_to_accuracy": Benchmark(
        "Processor seconds to a skill, against TRL",
        "From the warm start of the quickstart, until 0.9 of 1,000 held-out sums are right when "
        "sampled at temperature 1; the same prompts, reward, groups and warm start, no reference "
        "model, in turns, a process and a thread each, at most 400 steps. Examinations are not "
        "counted. Of each seed a side counts with the better of two learning rates.",
        "python benchmarks/seconds_to_accuracy.py --seeds 3 --lrs 3e-4 1e-3",
        {f"seed {seed}": f"seed {seed}" for seed in range(3)} | SEEDS,
        {
            "oxrl_cpu_s": "oxRL, processor s",
            "trl_cpu_s": "TRL, processor s",
            "ratio": "TRL / oxRL",
            "oxrl_steps": "oxRL, steps",
            "trl_steps": "TRL, steps",
            "oxrl_accuracy": "oxRL, accuracy then",
            "trl_accuracy": "TRL, accuracy then",
            "oxrl_lr": "oxRL, learning rate",
            "trl_lr": "TRL, learning rate",
        },
        {
            f"all seeds/{side}_{key}": "of one seed"
            for side in ("oxrl", "trl")
            for key in ("steps", "accuracy", "lr")
        }
        | {"ratio": "a side never got there"},
    ),
    "decode_loop": Benchmark(
        "The sampler over a handwritten decode loop",
        "64 prompts of 32 tokens, the 3.3M-parameter built-in model in float32, one thread, in "
        "turns in one process. The loop is transformers' cache, softmax, multinomial and the "
        "log-probability of what was drawn.",
        "python benchmarks/decode_loop.py builtin:small 64 64 10",
        {"64 rows of 64 tokens": "64 rows of 64 tokens"},
        {
            "oxrl_cpu_s": "oxRL, processor s",
            "loop_cpu_s": "loop, processor s",
            "over_loop": "oxRL / loop",
        },
    ),
    "vllm_raw": Benchmark(
        "vLLM through oxRL against vLLM alone",
        "Tokens that vLLM's CPU build samples per second of processor time through oxRL's engine "
        "and through its own `LLM.generate`: 64 prompts, the same weights (3.3M parameters, "
        "float32), settings and lengths, in turns, a process and a thread each. oxRL has "
        "log-probabilities, which training needs, and so has vLLM but for the last column.",
        "python benchmarks/vllm_raw.py --rows 64 --pairs 10",
        {"equal": "64 tokens each", "heavy": HEAVY},
        {
            "oxrl_rate": "through oxRL",
            "raw_rate": "vLLM",
            "of_raw": "oxRL / vLLM",
            "of_raw_without": "oxRL / vLLM without log-probabilities",
        },
        dict.fromkeys(("equal", "heavy"), "needs vLLM: `make env-scale`"),
    ),
    "first_line": Benchmark(
        "From the start of a run to its first line of metrics",
        "Processor seconds of the process, in turns: two imports alone, the same with the classes "
        "that models of transformers are made of, and a default run of one step of a random model.",
        "python benchmarks/first_line.py 10",
        {"first line": "tiny model, 4 prompts x 4 samples"},
        {
            "torch_s": "`import torch, transformers`",
            "and_model_classes_s": "and model classes",
            "first_line_s": "first line",
            "over_torch_s": "line beyond the imports",
            "over_and_model_classes_s": "beyond the imports with model classes",
        },
    ),
    "share_prefix": Benchmark(
        "Prompts of a group read once, in the update",
        "Loss and gradient of one batch, prompts once per response against once per group, in "
        "turns on one thread; 3.3M parameters, float32. The bound is what counting tokens "
        "promises, G (P + R) / (P + G R). Short rows go beyond it where padding is saved too.",
        "python benchmarks/share_prefix.py --pairs 10",
        {
            "2 x 8, 200 + 50": "2 groups of 8, 200 + 50 tokens",
            "2 x 8, 100 + 100": "2 groups of 8, 100 + 100",
            "2 x 16, 400 + 100": "2 groups of 16, 400 + 100",
            "2 x 8, 50 + 200": "2 groups of 8, 50 + 200",
            "64 x 8, 6 + 4": "64 groups of 8, 6 + 4",
            "64 x 8, 1 + 8": "64 groups of 8, 1 + 8",
        },
        {
            "ratio": "times as fast",
            "bound": "bound",
            "of_bound": "share of the bound",
            "gradient_difference": "gradient differs by, of its largest",
        },
    ),
    "head_memory": Benchmark(
        "Memory of log-probabilities, entropy and their gradient",
        "Vocabulary 151,936, width 64, float32: most bytes of tensors alive at a time in forward "
        "and backward, beside the inputs and, in the middle columns, the gradients asked for.",
        "python benchmarks/head_memory.py",
        {f"{tokens} tokens": f"{tokens:,} tokens" for tokens in (1024, 2048, 4096, 8192)},
        {
            "logits_mb": "logits, MB",
            "beside_mb": "here, MB",
            "times_less": "times less",
            "of_first_row": "over the first row",
            "peak_mb": "with gradients, MB",
        },
    ),
    "quickstart": Benchmark(
        "The quickstart, before and now",
        "Whole quickstarts (data, warm start, evaluations, reinforcement) of this tree and of "
        "commit `3738989`, the last before speed was worked at, in turns on one thread.",
        "python benchmarks/quickstart_before.py --pairs 5",
        {f"seed {seed}": f"seed {seed}" for seed in range(5)} | SEEDS,
        {
            "before_cpu_s": "before, processor s",
            "now_cpu_s": "now, processor s",
            "cpu_ratio": "before / now",
            "before_gain": "gain of sampled accuracy before, points",
            "now_gain": "now",
        },
        {"all seeds/before_gain": "of one seed", "all seeds/now_gain": "of one seed"},
    ),
    "overhead": Benchmark(
        "Overhead over a bare loop",
        "The update of 128 rows by oxRL's local engine against a PyTorch loop written by hand over "
        "the same micro-batches, in turns in one process.",
        "python benchmarks/rl_step.py --pairs 15 --warmup 1 --threads 1 --settings overhead",
        {
            "overhead equal": "64 tokens each",
            "overhead heavy": "lengths lognormal, median 32, at most 256",
        },
        {
            "oxrl_cpu_s": "oxRL, processor s",
            "bare_cpu_s": "bare, processor s",
            "cpu_ratio": "oxRL / bare",
            "oxrl_s": "oxRL, wall s",
            "bare_s": "bare, wall s",
            "ratio": "oxRL / bare",
        },
    ),
    "exact": Benchmark(
        "Exact mode",
        "Sampling of 64 rows and an update on them, with `run.exact` and without, in turns in one "
        "process of one thread, float32.",
        "python benchmarks/same_numbers.py --models builtin:tiny builtin:small --tokens 2000 "
        "--pairs 10 --no-operations",
        {
            f"{part}, {name}": f"{part}, {size} parameters"
            for name, size in (("builtin:tiny", "0.15M"), ("builtin:small", "3.3M"))
            for part in PARTS
        },
        EXACT,
    ),
    "exact_smollm2": Benchmark(
        "Exact mode of SmolLM2-135M",
        "The same with a pre-trained model of 134.5M parameters, and 16 rows.",
        "python benchmarks/same_numbers.py --models runs/smollm2/model --rows 16 --tokens 200 "
        "--pairs 5 --no-operations",
        {f"{part}, runs/smollm2/model": part for part in PARTS},
        EXACT,
    ),
    "kept_and_centered_smollm2": Benchmark(
        "Kept sets and score centering of SmolLM2-135M",
        "Steps of 2 prompts x 8 samples x 64 tokens that sample from kept sets, or that center "
        "scores, in turns with plain ones, a process and a thread each, float32.",
        f"python benchmarks/kept_and_centered.py {SMOLLM} --prompts 2 --pairs 6",
        {"kept": "rollout.top_k: 50", "centered": "train.centering: score, 64 tokens"},
        {"cpu_ratio": "processor s, over plain", "memory_ratio": "most memory, over plain"},
    ),
    "sampler": Benchmark(
        "Sampling against `generate` and vLLM",
        "Tokens that the sampler of oxRL's own process, transformers' `generate` and vLLM's CPU "
        "build (not compiled, as oxRL runs it on a CPU) sample per second of processor time: the "
        "same 32 prompts, weights (3.3M parameters, float32) and lengths, in turns in one process "
        "of one thread.",
        "python benchmarks/sampler.py --rows 32 --pairs 10 --vllm",
        {
            "equal": "64 tokens each",
            "heavy": "lengths lognormal, median 32, at most 256",
        },
        {
            "oxrl_rate": "oxRL",
            "transformers_rate": "`generate`",
            "vllm_rate": "vLLM",
            "over_transformers": "oxRL / `generate`",
            "over_vllm": "oxRL / vLLM",
        },
        {"vllm_rate": "needs vLLM: `make env-scale`", "over_vllm": "needs vLLM"},
    ),
    "sampler_smollm2": Benchmark(
        "Sampling from SmolLM2-135M against `generate` and vLLM",
        "The same with a pre-trained model of 134.5M parameters in float32.",
        f"python benchmarks/sampler.py --rows 32 --pairs 4 --vllm {SMOLLM}",
        {"equal": "64 tokens each", "heavy": HEAVY},
        {
            "oxrl_rate": "oxRL",
            "transformers_rate": "`generate`",
            "vllm_rate": "vLLM",
            "over_transformers": "oxRL / `generate`",
            "over_vllm": "oxRL / vLLM",
        },
        {"vllm_rate": "needs vLLM: `make env-scale`", "over_vllm": "needs vLLM"},
    ),
    "memory": Benchmark(
        "Memory against model size",
        "Most resident memory of a process that takes two RL steps (4 prompts x 4 samples x 32 "
        "tokens, float32, AdamW). Of it, what grows with the model: weights, gradients and the two "
        "moments are 16 bytes per parameter.",
        "python benchmarks/memory.py --widths 64 256 512 1024",
        {
            "width 64": "width 64",
            "width 256": "width 256",
            "width 512": "width 512",
            "width 1024": "width 1024",
        },
        {
            "parameters": "parameters",
            "peak_mb": "most memory, MB",
            "bytes_per_parameter": "bytes per parameter above the first row",
        },
        {
            "width 64/bytes_per_parameter": "it is the first row",
            "width 1024": "takes minutes: a model of 101M parameters on one thread",
        },
    ),
    "ranks": Benchmark(
        "Scaling over ranks",
        "Supervised steps of 96 rows with the 3.3M-parameter built-in model in float32, in one "
        "process (local engine) and with model and rows shared by two and three (FSDP2 over gloo), "
        "a thread each. Processor time is that of all ranks: what of it grows is the price of "
        "sharing; three ranks take turns on two cores, which their wall time shows.",
        "python benchmarks/ranks.py --ranks 1 2 3 --steps 12",
        {"ranks 1": "one process", "ranks 2": "two ranks", "ranks 3": "three ranks"},
        {
            "step_cpu_s": "processor s per step",
            "cpu_of_first": "over one process",
            "tokens_per_s": "tokens per s of wall time",
        },
    ),
    "pieces": Benchmark(
        "What each training rank holds, reads and writes",
        "A random model of 59 million parameters, float32, gloo ranks; most of any rank, in MB. "
        "The peak is resident memory while a reference is built, over what the process had before; "
        "its bound is (1 / ranks + 0.1) of the model and one bucket (ZeRO-2 has the whole model on "
        "every rank, so 1.1 of it). A checkpoint has the weights and two moments. Nothing of it "
        "goes through the process that runs the loop.",
        "python benchmarks/pieces.py --engines fsdp zero3 zero2 --ranks 2 4 8",
        {
            f"{engine} {ranks}": f"{title} x {ranks}"
            for engine, title in ENGINES.items()
            for ranks in (2, 4, 8)
        },
        {
            "model_mb": "model",
            "load_peak_mb": "peak of loading",
            "bound_mb": "its bound",
            "load_read_mb": "read by it",
            "written_mb": "written of a checkpoint",
            "written_mb_of_ranks": "by all ranks",
            "resume_read_mb": "read to resume",
            "resume_read_mb_of_ranks": "by all ranks",
        },
        {"zero3 2": OF_SCALE},
    ),
    "weight_sync": Benchmark(
        "Weight syncs from training ranks to rollout actors",
        "Two FSDP2 ranks send a random model of 213 MB in float32 to an actor with vLLM's CPU "
        "build over gloo, proved. Medians, in turns with a bare gloo broadcast of the same bytes "
        "from rank 0 to the same process; seconds of the clock and of all processors. Multiples of "
        "it are multiples of bytes over bandwidth. The probe's are not: either side computes two "
        "operations per weight and scored token, 512 tokens here, so its multiple is "
        "`probe_tokens` times how slowly the machine computes for how fast it moves bytes, "
        "whatever the size of the model.",
        "python benchmarks/weight_sync_ranks.py",
        {
            "bare": "bare broadcast",
            "moved": "gather, fingerprint, send, load",
            "gathered": "of it, gather and cast alone",
            "masters": "fingerprints of the masters",
            "read": "read back, before and after",
            "probe ranks": "probe, ranks",
            "probe samplers": "probe, samplers",
            "bytes": "all but the probe",
            "whole": "whole proved sync",
        },
        {
            "clock_s": "clock, s",
            "over_bare": "x bare",
            "processors_s": "processors, s",
            "processors_over_bare": "x bare",
            "driver_bytes": "bytes of weights through the driver",
        },
        {"driver_bytes": "of the whole sync alone"},
    ),
    "micro_batches": Benchmark(
        "How rows are cut into micro-batches",
        "Tokens of rows per second of processor time in loss and gradient, 128 rows of 16 + 64 "
        "tokens, or 16 and a lognormal number of them, median 32, at most 240; float32, 3.3M "
        "parameters, the ways in turns. Filled: up to train.micro_batch_tokens with the longest "
        "rows first, as it was with 16,384; cut: more micro-batches where they save more padding "
        "than they cost; shared: prompts of 8 responses once, without padding.",
        "python benchmarks/micro_batches.py --models small --ways filled cut shared "
        "--sizes 4096 16384 --rounds 2",
        {
            f"small {kind} {way}": f"{lengths}, {way}"
            for kind, lengths in (("equal", "64 tokens each"), ("heavy", "lognormal lengths"))
            for way in ("filled", "cut", "shared")
        },
        {
            "rate_4096": "4,096 tokens: tokens per s",
            "over_4096": "over 16,384 filled",
            "rate_16384": "16,384 tokens: tokens per s",
            "over_16384": "over 16,384 filled",
        },
    ),
    "growth": Benchmark(
        "How a step grows",
        "Slopes of time and memory when one size is doubled twice, in logarithms (1: linear), "
        "beside those of what the model itself has to do: least time of a rollout on this machine, "
        "operations of an update, activations and gradients. From 8 prompts x 4 samples x 32 "
        "tokens at width 128; one thread, processor time, medians of 3 rounds.",
        "python benchmarks/growth.py --rounds 3",
        {
            "prompts": "prompts: 8, 16, 32",
            "samples": "samples of a prompt: 4, 8, 16",
            "response": "tokens of a response: 32, 64, 128",
            "width": "width: 128, 256, 512",
        },
        {
            "rollout_slope": "rollout",
            "rollout_model": "of the model",
            "update_slope": "update",
            "update_model": "of the model",
            "memory_slope": "memory",
            "memory_model": "of the model",
        },
    ),
    "cluster_faults": Benchmark(
        "Faults of a Ray cluster",
        "Whole runs of `builtin:tiny` whose cluster, of one or two nodes on this machine, fails: "
        "how they end, and the seconds from the fault (or the start, where it is there from the "
        "beginning) until the run has taken a whole step, and until it has ended; processes that "
        "it left behind after ten seconds. What is said is in experiments/cluster/README.md. Much "
        "of the time is imports of new processes. GPUs that nobody has, the raylet killed alone "
        "and the node of a rank lost were run again at commit 576323d, after a mend.",
        "python benchmarks/cluster_faults.py",
        {
            "nobody": "nobody listens at `run.ray_address`",
            "silent": "who listens there says nothing",
            "gpus asked": "`run.device: cuda`, and no node has a GPU",
            "fake gpus": "GPUs on another node than the driver's: every actor has its own",
            "no room": "more actors than there is room for",
            "bare": "a node without oxRL",
            "shipped": "the same with `run.ray_working_dir: ship`",
            "slow disk": "a disk of 40 kB/s under the ranks' checkpoints",
            "sampler killed": "kill -9 of a rollout actor",
            "sampler memory": "Ray's memory monitor kills a rollout actor",
            "no memory": "it kills every one that starts",
            "rank killed": "kill -9 of a training rank",
            "rank restarted": "the same with `run.max_restarts: 1`",
            "rank stopped": "SIGSTOP of one (deadline 15 s), `max_restarts: 1`",
            "rank memory": "Ray's memory monitor kills one, `max_restarts: 1`",
            "store full": "object store and the disk behind it are full",
            "gcs": "the head's GCS killed",
            "own gcs": "the same of a cluster that the run started",
            "raylet": "the raylet of the driver's machine killed",
            "own raylet": "the same of a cluster that the run started",
            "node": "the node of a rollout actor lost, another has room",
            "placement": "the same, none has room (deadline 60 s)",
            "rank node": "the node of a rank lost, another has room, `max_restarts: 1`",
            "rank placement": "the same, none has room",
            "slurm": "slurm.sh on two made-up nodes of two GPUs each",
            "rayjob": "rayjob.yaml's entrypoint on the nodes it asks for",
            "SIGTERM": "SIGTERM to the run",
            "SIGKILL": "SIGKILL to the run, with a cluster of its own",
            "SIGKILL joined": "the same on a cluster that it joined",
        },
        {
            "exit_code": "exit code",
            "answer_s": "s to a new step, or the end",
            "end_s": "s to the end",
            "left": "processes left",
        },
    ),
    "plan_memory": Benchmark(
        "What `oxrl plan` says of memory against what tensors take",
        "Two optimizer steps of random models (width 128, four layers, micro-batches of 512 "
        "tokens): bytes behind every tensor that is alive at their peak, in MB, and what the plan "
        "said from the configuration and config.json alone; stored: files of tensors of the last "
        "checkpoint. On two ranks (gloo) the most that one of them held. Where the optimizer's "
        "state is offloaded, what the plan counts of CPU memory has gradients in it, which are "
        "gone between steps.",
        "python benchmarks/plan_memory.py --widths 128",
        {f"{case}, width 128": case for case in PLANNED},
        {
            "predicted_peak": "planned peak",
            "measured_peak": "peak",
            "peak_off": "off by",
            "state_off": "state off by",
            "stored_off": "checkpoint off by",
        },
        {
            "sft, adamw_8bit, width 128": "needs bitsandbytes: the `8bit` extra",
            "sft, adamw_8bit, width 128/stored_off": "needs bitsandbytes: the `8bit` extra",
            "stored_off": "ranks write what one process does: see the table of pieces",
        }
        | {f"{case}, width 128": OF_SCALE for case in PLANNED if case.startswith("zero")},
    ),
    "real_memory": Benchmark(
        "What `oxrl plan` says of memory against what runs of a real model take",
        "SmolLM2-135M-Instruct in float32, a run of two steps each, once over the data: RL on sums "
        "in words (8 prompts x 8 samples x at most 24 tokens), the same with an adapter of rank "
        "16, SFT on 16 conversations of GSM8K a step, DPO on 4 pairs of Open Assistant a step. "
        "Peak: resident memory, in GB, as `/usr/bin/time -v` tells it. Planned by the rows of the "
        "data, and by rows as long as the model reads (8,192 tokens). The plan says what a run "
        "takes at its most; one that draws shorter rows takes less.",
        "python benchmarks/real_memory.py build/smollm2 --conversations build/gsm8k/train.jsonl "
        "--pairs build/pairs/trees.jsonl",
        {
            "rl": "RL, all weights",
            "lora": "RL, adapter",
            "sft": "SFT, all weights",
            "dpo": "DPO, all weights",
        },
        {
            "longest": "longest row",
            "planned": "planned",
            "resident": "peak",
            "off": "off by",
            "planned_limit": "planned at the limit",
        },
        {"dpo": OF_OTHERS, "sft": OF_OTHERS},
    ),
}
