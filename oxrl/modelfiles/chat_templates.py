"""Chat templates for training that ship with oxRL, for models whose own rewrites earlier turns.

Many templates drop what the model thought in earlier turns, or end the last turn otherwise than the
others. A model that learns from a conversation of several turns has to read the same text that it
will have read when it writes the next one. A training template writes every reply as the model's
own writes the last one, so that a longer conversation only adds text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "jinja"
# Attribute of a tokenizer that was given another template: its file.
TEMPLATE_FILE = "oxrl_template_file"
# Attribute of a tokenizer whose template is told this day, as 2026-11-28, whatever the clock says.
DAY = "oxrl_day"
# A run has to read the same tokens tomorrow, so training templates write no date.
DATE = re.compile(r"Current date: [^\n]*\n")
PROBE = [{"role": "user", "content": "Is it late?"}]


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


def template_text(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Read the template that `model.chat_template` names.

    Args:
        name: of a training template, or a path.
        tokenizer: of the model that is to read what it writes.

    Returns:
        Jinja.

    Raises:
        DataError: no such file, or the tokenizer is that of another family of models.
    """
    known = TRAINING_TEMPLATES.get(name)
    if known is None:
        if not Path(name).is_file():
            listed = ", ".join(TRAINING_TEMPLATES)
            raise DataError(f"model.chat_template: no file {name!r}, nor one of {listed}")
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"model.chat_template: {name!r} cannot be read: {error}") from error
    missing = [token for token in known.tokens if token not in added_tokens(tokenizer)]
    if missing:
        raise DataError(
            f"model.chat_template: {name} is for {known.models}; this model's tokenizer has no "
            f"{missing[0]}"
        )
    return known.text()


def suggestion(tokenizer: PreTrainedTokenizerBase) -> str:
    """Suggest a value of `model.chat_template`, in words, where the tokenizer's own cannot be used.

    Args:
        tokenizer: with a template that cannot be used.

    Returns:
        A phrase that follows "set model.chat_template".
    """
    found = fitting_template(tokenizer)
    if found is None:
        return "to a Jinja file that keeps it (docs/data.md says what one has to hold)"
    return f"to {found}, oxRL's training template for {TRAINING_TEMPLATES[found].models}"


def fitting_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Find the training template that asks a first question exactly as the tokenizer's own does.

    Args:
        tokenizer: with a chat template, which may be broken.

    Returns:
        Its name; None: there is none, or the tokenizer has it already.
    """
    known = added_tokens(tokenizer)
    own = _question(tokenizer, str(tokenizer.chat_template))
    for name, template in TRAINING_TEMPLATES.items():
        if own is None or template.text() == tokenizer.chat_template:
            return None
        fits = all(token in known for token in template.tokens)
        if fits and _question(tokenizer, template.text()) == own:
            return name
    return None


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the texts that are one token wherever they stand.

    Args:
        tokenizer: of the model.

    Returns:
        The texts, special or not.
    """
    return {token.content for token in tokenizer.added_tokens_decoder.values()}


def _question(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Render a question by a template, without today's date; None where it cannot."""
    # Imported here: a start that needs no template does not pay for it.
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            PROBE, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None  # only an addition to an error that is raised anyway
    return DATE.sub("", str(text))
