"""Write docs/architectures.md: what was trained, sampled from and loaded again, by architecture.

Every tiny checkpoint of tests/support/architectures.py goes through whole runs: two steps of SGRPO,
of PPO and of supervised fine-tuning, and each run's last checkpoint is loaded and sampled from. It
takes some minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from oxrl.checkpoint.model_files import save_model  # noqa: E402
from oxrl.commands.evaluate import run_generate  # noqa: E402
from oxrl.commands.train import run  # noqa: E402
from oxrl.config import Config  # noqa: E402
from oxrl.engines.sample.local import attends_to_everything  # noqa: E402
from oxrl.types import Sampling  # noqa: E402
from support.architectures import FAMILIES, UNPACKABLE, tiny  # noqa: E402
from support.samplers import TOKENIZER  # noqa: E402
from support.small_runs import rl_config, sft_config  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
HEAD = """# Architectures

Any causal language model that transformers builds can be trained. Those with full attention in
every layer are sampled from with oxRL's own key-value cache (`fast`), the others over the cache
that the model itself keeps (`cached`: slower, the same samples from the same logits). A window
counts where it is shorter than the rows: the tiny Mistral below has one of 8 tokens.

The table is written by `docs/make_architectures.py` from whole runs on tiny random checkpoints: two
steps of SGRPO (rl), of PPO with its critic (ppo) and of supervised fine-tuning (sft), each with its
last checkpoint loaded again and sampled from. tests/models/test_architectures.py compares the
samples' log-probabilities of all of them with the trainer's. `data.pack_tokens` is refused where
one example of a packed row would see the one before it.

| `model_type` | sampler | rl | ppo | sft | packing |
|---|---|---|---|---|---|
"""
TAIL = """
Models that read images (Qwen2.5-VL, Qwen3-VL, Idefics3, SmolVLM, Gemma 3, LLaVA) have a page of
their own: [vision](vision.md). Gemma 3 in the table above is trained on text.

Refused before anything is loaded, with the reason: encoders (BERT), encoder-decoders (T5), Llama 4
(transformers keeps no backbone apart from its head), and other models with a vision or audio
encoder.

## Models out of GGUF files

`oxrl prepare gguf --source FILE --out FOLDER` has transformers read the weights and settings, and
refuses what it would leave out without a word: a file that lacks weights of its model or holds more
of them, scaled positions (`rope.scaling`, `rope_freqs`), one of several parts, weights that are
NaN, and rules for cutting text (`tokenizer.ggml.pre`) that are not known here, whose tokens would
be others. Rules under which every digit stands alone, SmolLM2's for one, are put right:
transformers takes them for GPT-2's. A thousand texts of GSM8K, most with numbers, have the tokens
of a plain byte-pair encoder made from SmolLM2's own file (`tests/packages/test_gguf.py`, which does
the same for small files of three rules). Special tokens that the file does not have are taken out,
and generation ends at the end of a turn where that is another token than the end of a text.
"""


def runs(folder: Path, model: Path) -> dict[str, Config]:
    """A run of two steps of each recipe."""
    short = [f"model.name={model}", "run.steps=2"]
    few = [*short, "data.prompts_per_step=2", "rollout.n_samples=2", "rollout.max_tokens=4"]
    ppo = {"alg_name": "ppo", "critic_lr": 1e-3}
    return {
        "rl": rl_config(folder, "rl", few),
        "ppo": rl_config(folder, "ppo", few, train=ppo),
        "sft": sft_config(folder, "sft", short),
    }


def passes(cfg: Config) -> bool:
    """Whether the run ends well and its last checkpoint answers."""
    run(cfg)
    last = max((cfg.run.directory / "checkpoints").glob("step_*"))
    answers = run_generate(str(last), ["1+1="], samples=2, sampling=Sampling(max_tokens=4))
    return last.name == "step_00000002" and len(answers) == 2


def row(family: str, folder: Path) -> str:
    """The line of one family; whatever goes wrong in it is raised."""
    model = tiny(family)
    path = folder / "model"
    save_model(model, path)
    TOKENIZER.save_pretrained(path)
    sampler = "fast" if attends_to_everything(model.config, None) else "cached"
    found = [passes(cfg) for cfg in runs(folder, path).values()]
    marks = " | ".join("yes" if passed else "no" for passed in found)
    packing = "refused" if family in UNPACKABLE else "yes"
    return f"| {family} | {sampler} | {marks} | {packing} |\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = [row(family, Path(folder) / family) for family in FAMILIES]
    PAGE.write_text(HEAD + "".join(lines) + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()
