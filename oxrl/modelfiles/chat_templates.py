"""The chat templates for training that ship with oxRL, by name; see `oxrl.data.templates`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "jinja"


@dataclass(frozen=True)
class TrainingTemplate:
    """A template of FOLDER.

    Args:
        file: its name there.
        tokens: that the model's tokenizer must have, each one token.
        models: that it is for, in words.
        settings: Jinja in front of the file.
    """

    file: str
    tokens: tuple[str, ...]
    models: str
    settings: str = ""

    @property
    def path(self) -> Path:
        """The path of the file."""
        return FOLDER / self.file

    def text(self) -> str:
        """Read the template."""
        return self.settings + self.path.read_text(encoding="utf-8")


CHATML = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
TRAINING_TEMPLATES = {
    "qwen3_training": TrainingTemplate("qwen3.jinja", CHATML, "Qwen3 (thinking)"),
    "qwen3_5_training": TrainingTemplate("qwen3_5.jinja", CHATML, "Qwen3.5 and 3.6 that think"),
    "qwen3_5_direct_training": TrainingTemplate(
        "qwen3_5.jinja",
        CHATML,
        "Qwen3.5 that answer at once (2B and smaller)",
        "{%- set enable_thinking = false -%}",
    ),
    "phi3_training": TrainingTemplate(
        "phi3.jinja", ("<|user|>", "<|assistant|>", "<|end|>"), "Phi-3 and Phi-3.5"
    ),
    "gpt_oss_training": TrainingTemplate(
        "gpt_oss.jinja", ("<|start|>", "<|channel|>", "<|message|>", "<|return|>"), "gpt-oss"
    ),
    "deepseek_r1_training": TrainingTemplate(
        "deepseek_r1.jinja", DEEPSEEK, "DeepSeek-R1 and its distillations"
    ),
}


def template_file(name: str) -> Path:
    """Find the file that `model.chat_template` stands for: a training template's, or its own.

    Args:
        name: the name of a training template, or a path.

    Returns:
        A path, which need not be there.
    """
    known = TRAINING_TEMPLATES.get(name)
    return Path(name) if known is None else known.path
