"""Chat templates for training that ship with oxRL, for models whose own rewrites earlier turns.

Many templates drop what the model thought in earlier turns, or end the last turn otherwise than the
others. A model that learns from a conversation of several turns has to read the same text that it
will have read when it writes the next one. A training template writes every reply as the model's
own writes the last one, so that a longer conversation only adds text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.errors import DataError
from oxrl.modelfiles.chat_templates import TRAINING_TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Attribute of a tokenizer that was given another template: its file.
TEMPLATE_FILE = "oxrl_template_file"
# A run has to read the same tokens tomorrow, so training templates write no date.
DATE = re.compile(r"Current date: [^\n]*\n")
PROBE = [{"role": "user", "content": "Is it late?"}]


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
