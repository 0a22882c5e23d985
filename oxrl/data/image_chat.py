"""Messages with images to token ids: the template says where, each image says how many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.messages import Message, MessageSequence, Tools, images_of
from oxrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "Is it late?"


class ImageEncoder(ChatEncoder):
    """A ChatEncoder whose messages may hold images.

    Args:
        tokenizer: of the model that reads the ids.
        placeholder: what the chat template writes for an image.
        text_for: name of an image -> what stands there instead.

    Raises:
        DataError: as of ChatEncoder, or the template shows no images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        placeholder: str,
        text_for: Callable[[str], str],
    ) -> None:
        super().__init__(tokenizer)
        self._placeholder = placeholder
        self._text_for = text_for
        # Some templates read parts alone, and write nothing of a message that is one text.
        self._in_parts = False
        try:
            plain = super().render([{"role": "user", "content": PROBE}], generation_prompt=True)
        except TemplateError:
            plain = ""
        self._in_parts = PROBE not in plain
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": PROBE}]}
        rendered = super().render([asked], generation_prompt=True)
        if rendered.count(placeholder) != 1:
            raise DataError(
                f"the chat template writes no {placeholder} for an image, so the model would not "
                f"see it; set model.chat_template to one that does\n  rendered: {rendered[:200]!r}"
            )

    def render(
        self, messages: MessageSequence, *, generation_prompt: bool, tools: Tools = ()
    ) -> str:
        """See ChatEncoder; every image is written as the tokens that it takes."""
        shown = [self._for_template(message) for message in messages]
        text = super().render(shown, generation_prompt=generation_prompt, tools=tools)
        names = images_of(messages)
        first, *others = text.split(self._placeholder)
        if len(others) != len(names):
            raise TemplateError(
                f"the chat template shows {len(others)} of {len(names)} images; set "
                f"model.chat_template to one that shows all\n  rendered: {text[:200]!r}"
            )
        pieces = [first]
        for name, other in zip(names, others, strict=True):
            pieces += [self._text_for(name), other]
        return "".join(pieces)

    def _for_template(self, message: Message) -> Message:
        """Return a message as templates expect it: images as parts without their names."""
        content = message["content"]
        if isinstance(content, str):
            if not self._in_parts:
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        parts = [{"type": "image"} if part["type"] == "image" else part for part in content]
        return {**message, "content": parts}
