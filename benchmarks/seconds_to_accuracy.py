"""Processor seconds until the quickstart's task is solved: oxRL against TRL's GRPOTrainer.

    python benchmarks/seconds_to_accuracy.py [--seeds 3] [--lrs 3e-4 1e-3] [--trl-rows 512]

Per seed one warm start, as of experiments/quickstart, that sums without the carry half of the time.
From its weights both train with the same prompts, reward, group size (8), prompts per step (64),
temperature and limit of tokens, without a reference model, checkpoints or trackers, one thread
each, in turns. After every five steps 1,000 held-out sums are sampled once by the same sampler at
temperature 1, which is not counted, and neither are imports, models and data. Of every seed each
side counts with the learning rate of `--lrs` that gets it there first. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from oxrl_stats import medians

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import problem
from rl_step import Side

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "experiments" / "quickstart"
TASK = {"low": 10, "high": 99, "slips": 0.5, "sft_rows": 40_000, "rl_rows": 8_000}
TASK["eval_rows"] = 1_000
GOAL = 0.9
EVERY = 5
MOST_STEPS = 400
PROMPTS, SAMPLES, TOKENS = 64, 8, 6
LEARNING_RATE = 3e-4
RL = """
run: {{name: side, dir: {folder}/run, steps: 100000, device: cpu, threads: 1, seed: {seed},
      checkpoint_every: 0, mlflow: false}}
model: {{name: {model}}}
data: {{train: {data}/rl.jsonl, prompts_per_step: 64}}
reward: {{name: exact}}
rollout: {{n_samples: 8, max_tokens: 6, temperature: 1.0}}
inference_engine: {{max_rows: 512}}
train: {{alg_name: sgrpo, lr: {lr}}}
"""


class Examination:
    """Held-out sums, sampled once each at temperature 1.

    Args:
        data: the folder of the task.
        tokenizer: of the model.
    """

    def __init__(self, data: Path, tokenizer: Any) -> None:
        from oxrl.data.chat import ChatEncoder

        chat = ChatEncoder(tokenizer)
        self._tokenizer = tokenizer
        self._asked: list[tuple[list[int], str]] = []
        for line in (data / "eval.jsonl").read_text().splitlines():
            row = json.loads(line)
            said = row["prompt"]
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            self._asked.append((list(chat.encode_prompt(messages)), str(row["answer"])))

    def accuracy(self, model: Any) -> float:
        """Of a model in this process; its mode is what it was."""
        from oxrl.engines.sample.local import module_sampler
        from oxrl.engines.sample.sampler import generate
        from oxrl.types import Prompt, Request, Sampling

        end = int(self._tokenizer.eos_token_id)
        sampling = Sampling(max_tokens=TOKENS, stop_token_ids=(end,))
        requests: list[Request] = []
        for place, (ids, _) in enumerate(self._asked):
            prompt = Prompt(uid=str(place), messages=(), token_ids=tuple(ids))
            request = Request(
                id=str(place), prompt=prompt, sampling=sampling, seed=place, draw=place, sample=0
            )
            requests.append(request)
        trains = model.training
        model.eval()
        sampler = module_sampler(model, self._tokenizer, max_rows=512)
        done = generate(sampler, requests, deadline_s=3600)
        model.train(trains)
        pairs = zip(done, self._asked, strict=True)
        right = sum(one.text.strip() == answer for one, (_, answer) in pairs)
        return right / len(self._asked)


class Pace:
    """Processor seconds of training; after some steps an examination, and a word to the parent."""

    def __init__(self, channel: problem.Channel, examination: Examination) -> None:
        self._channel = channel
        self._examination = examination
        self._spent = 0.0
        self._steps = 0
        self._since = 0.0

    def begin(self, model: Any) -> None:
        accuracy = self._examination.accuracy(model)
        self._channel.send(ready=True, accuracy=accuracy)
        self._channel.wait()
        self._since = time.process_time()

    def stepped(self, model: Any) -> None:
        self._steps += 1
        if self._steps % EVERY:
            return
        self._spent += time.process_time() - self._since
        accuracy = self._examination.accuracy(model)
        self._channel.send(accuracy=accuracy, cpu=self._spent, steps=self._steps)
        self._channel.wait()
        self._since = time.process_time()


def oxrl_side(channel: problem.Channel, folder: Path, given: dict[str, Any]) -> None:
    """The steps of the recipe, as `oxrl train` takes them."""
    from oxrl.assembly.opening import session_options
    from oxrl.commands.loop import begin
    from oxrl.config import load_config
    from oxrl.models.load import load_tokenizer
    from oxrl.recipes.session import Session

    pace = Pace(channel, Examination(Path(given["data"]), load_tokenizer(given["model"])))

    class PacedSession(Session):
        """Examines the policy after some steps."""

        def restore(self, engines: Any, fresh: Any) -> Any:
            progress = super().restore(engines, fresh)
            pace.begin(engines["."].model)
            return progress

        def boundary(self, engines: Any, progress: Any) -> None:
            super().boundary(engines, progress)
            pace.stepped(engines["."].model)

    (folder / "config.yaml").write_text(RL.format(folder=folder, **given))
    cfg = load_config(folder / "config.yaml")
    with PacedSession(session_options(cfg)) as session:
        begin(cfg, session)


def right_sums(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """TRL's form of the reward `exact`."""
    said = [completion[0]["content"].strip() for completion in completions]
    return [float(one == str(right)) for one, right in zip(said, answer, strict=True)]


def trl_side(channel: problem.Channel, folder: Path, given: dict[str, Any]) -> None:
    """The steps of TRL's trainer."""
    import logging
    import warnings

    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
    pace = Pace(channel, Examination(Path(given["data"]), tokenizer))

    class Paced(TrainerCallback):
        """Examines the policy after some steps."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            pace.begin(kwargs["model"])

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            pace.stepped(kwargs["model"])

    rows: list[dict[str, Any]] = []
    for line in (Path(given["data"]) / "rl.jsonl").read_text().splitlines():
        row = json.loads(line)
        said = row["prompt"]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        rows.append({"prompt": messages, "answer": str(row["answer"])})
    every = PROMPTS * SAMPLES
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=given["rows"],
        gradient_accumulation_steps=every // given["rows"],
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        learning_rate=given["lr"],
        lr_scheduler_type="constant",
        max_steps=100000,
        temperature=1.0,
        beta=0.0,
        seed=given["seed"],
        use_cpu=True,
        bf16=False,
        fp16=False,
        use_vllm=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        reward_funcs=right_sums,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Paced()],
    )
    trainer.train()


def warm_start(folder: Path, seed: int) -> dict[str, Any]:
    """Data of the task, and the model that has seen half of it wrong."""
    from oxrl.commands.train import run
    from oxrl.config import load_config
    from oxrl_datasets.prepare import PREPARERS

    data = folder / "data"
    PREPARERS["arithmetic"](None, data, seed=seed, **TASK)
    own = [f"run.seed={seed}", f"run.dir={folder / 'sft'}", f"data.train={data / 'sft.jsonl'}"]
    with redirect_stdout(StringIO()):
        run(load_config(QUICKSTART / "sft.yaml", own))
    model = max((folder / "sft" / "checkpoints").glob("step_*"))
    return {"model": str(model), "data": str(data), "seed": seed}


def started(folder: Path, side: str, given: dict[str, Any]) -> Side:
    folder.mkdir(parents=True)
    (folder / "given.json").write_text(json.dumps(given))
    return Side(Path(__file__).name, folder, 1, side)


def race(sides: dict[str, Side]) -> dict[str, dict[str, Any]]:
    """Some steps of each in turns, until all are there: what each said then."""
    done: dict[str, dict[str, Any]] = {}
    while len(done) < len(sides):
        for name, side in sides.items():
            if name in done:
                continue
            said = side.step()
            if said["accuracy"] >= GOAL or said["steps"] >= MOST_STEPS:
                done[name] = said
    return done


def fastest(tried: dict[float, dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """The learning rate that got a side to the goal first, and what the side said then.

    Where none did, the rate that came closest.
    """
    reached = {rate: said for rate, said in tried.items() if said["accuracy"] >= GOAL}
    if not reached:
        return max(tried.items(), key=lambda item: item[1]["accuracy"])
    return min(reached.items(), key=lambda item: item[1]["cpu"])


def compare(given: dict[str, Any], folder: Path, rates: list[float]) -> dict[str, Any]:
    """The figure of one seed: each side with every rate, in turns, of which its best counts."""
    tried: dict[str, dict[float, dict[str, Any]]] = {"oxrl": {}, "trl": {}}
    for rate in rates:
        told = {**given, "lr": rate}
        with (
            started(folder / f"oxrl_{rate}", "oxrl", told) as oxrl,
            started(folder / f"trl_{rate}", "trl", told) as trl,
        ):
            for side, said in race({"oxrl": oxrl, "trl": trl}).items():
                tried[side][rate] = said
                reached = f"{said['accuracy']:.3f} after {said['steps']} steps"
                print(f"{side}, learning rate {rate:g}: {reached}, {said['cpu']:.1f} s", flush=True)
    figure: dict[str, Any] = {}
    for side, found in tried.items():
        rate, said = fastest(found)
        figure[f"{side}_lr"] = rate
        figure[f"{side}_cpu_s"] = round(said["cpu"], 2)
        figure[f"{side}_steps"] = said["steps"]
        figure[f"{side}_accuracy"] = said["accuracy"]
    if min(figure["oxrl_accuracy"], figure["trl_accuracy"]) >= GOAL:
        figure["ratio"] = round(figure["trl_cpu_s"] / figure["oxrl_cpu_s"], 3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lrs", type=float, nargs="+", default=[LEARNING_RATE])
    parser.add_argument("--trl-rows", type=int, default=512)
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(options.seeds):
            folder = Path(name) / str(seed)
            given = warm_start(folder, seed) | {"rows": options.trl_rows}
            figure = compare(given, folder, options.lrs)
            print(json.dumps({"case": f"seed {seed}", **figure}), flush=True)
            figures.append(figure)
    # Of seeds on which a side never got there, nothing can be said but that.
    whole = [figure for figure in figures if "ratio" in figure]
    together: dict[str, Any] = {"case": "all seeds", "seeds": len(whole)}
    for column in ("ratio", "oxrl_cpu_s", "trl_cpu_s") if whole else ():
        together[column] = medians.median([figure[column] for figure in whole])
    print(json.dumps(together), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("oxrl", "trl"):
        told = json.loads((Path(sys.argv[2]) / "given.json").read_text())
        side = {"oxrl": oxrl_side, "trl": trl_side}[sys.argv[1]]
        side(problem.Channel(), Path(sys.argv[2]), told)
    else:
        main()
