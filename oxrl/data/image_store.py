"""The images of a run: read once per row, kept once per run, turned into pixels when they are used.

An image is called by the SHA-256 of its bytes, everywhere. What is trained on or sampled from is
kept in the run directory, `images/<name>`; until then only the place that it came from is known.
"""

from __future__ import annotations

import base64
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.image_files import (
    ImageRules,
    Unusable,
    content_name,
    decoded,
    image_bytes,
    local_path,
    refuse,
)
from oxrl.data.image_rows import with_images
from oxrl.data.messages import Message, MessageList, MessageSequence, Tools, images_of
from oxrl.data.rows import Json, Record
from oxrl.errors import DataError, InvariantError
from oxrl.runs.files import make_folder, write_atomically
from oxrl.tables.vision import PATCHES
from oxrl.types import IMAGE_NAME, Named, Ragged, TensorMap, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oxrl.tables.vision import VisionFamily

FOLDER = "images"
# Bytes of pixels that are held in memory, ready to be used again.
HELD_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class Features:
    """One image as the model reads it.

    tensors: input of the model -> [n, ...]; n differs from image to image.
    patches: squares that the vision tower reads.
    text: what stands for the image in a rendered prompt.
    tokens: how many of its tokens an image feature takes the place of.
    """

    tensors: TensorMap
    patches: int
    text: str
    tokens: int


class Reader(Protocol):
    """Turns images into inputs of a model; see `oxrl.models.image_features.ImageReader`.

    family: the kind of model that it is for. image_id: the token id that stands where the model
    puts the image. processor: that of transformers, which does the work. placeholder: the text
    that the chat template writes for an image.
    """

    family: VisionFamily
    image_id: int
    processor: Any
    placeholder: str

    def features(self, image: Image) -> Features:
        """Turn an image into inputs of the model.

        Args:
            image: in RGB, of any size.

        Returns:
            What the model reads; the size of it follows from the size of the image.
        """
        ...


class ImageStore:
    """Images by name: where rows name them, and as pixels for the model.

    Args:
        new_reader: makes what turns images into inputs of the model; called when there is a first
            image.
        rules: which images are read.
        folder: where those that are used are kept; None: nowhere.

    `writes`: whether this process is the one that keeps them.
    """

    def __init__(
        self, new_reader: Callable[[], Reader], rules: ImageRules, folder: Path | None = None
    ) -> None:
        self._new_reader = new_reader
        self._rules = rules
        self.folder = folder
        self.writes = True
        self._reader: Reader | None = None
        # Of every image that is known, its text in a prompt, and where its bytes are.
        self._texts: dict[str, str] = {}
        self._sources: dict[str, Path | bytes] = {}
        self._held: OrderedDict[str, Features] = OrderedDict()
        self._held_bytes = 0

    def keep_in(self, run: Path, *, write: bool, samples: str | None) -> None:
        """Keep the images that are used from now on in a run directory, or look for them there.

        Args:
            run: the directory.
            write: of several ranks only the first does.
            samples: directory of another run, whose samples are trained on; None: there is none.
        """
        self.folder = run / FOLDER
        self.writes = write
        if write and samples is not None:
            _take_over(Path(samples) / FOLDER, self.folder)

    @property
    def reader(self) -> Reader:
        """The object that turns images into inputs of the model."""
        if self._reader is None:
            self._reader = self._new_reader()
        return self._reader

    def prepared(self, record: Record) -> Record:
        """Read the images of a record, and name them in the messages where they are shown.

        Args:
            record: one row, in our words.

        Raises:
            DataError: an image cannot be used, or is shown nowhere; names the row.
        """
        return with_images(record, partial(self._take, record))

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
        """Make an encoder of such messages.

        Args:
            tokenizer: of the model.
        """
        return ImageEncoder(
            tokenizer,
            placeholder=self.reader.placeholder,
            text_for=self._texts.__getitem__,
        )

    def adopted(self, messages: Iterable[Message]) -> MessageList:
        """Take in an environment's messages: images get names instead of their bytes.

        Args:
            messages: with parts as `oxrl.usercode.environment_answers.as_parts` gives them.

        Returns:
            Other messages; the images are known here from now on.

        Raises:
            ValueError: an image cannot be used, or is not known; says why.
        """
        found: MessageList = []
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                message = {**message, "content": [self._adopted(part) for part in content]}
            found.append(message)
        return found

    def _adopted(self, part: Named) -> Named:
        if part["type"] != "image":
            return part
        if "base64" not in part:
            name = part["image"]
            if name not in self._texts:
                raise ValueError(f"the image {name} is none that a row or an environment showed")
            return part
        content = base64.b64decode(part["base64"], validate=True)
        name = content_name(content)
        if name not in self._texts:
            try:
                read = self.reader.features(decoded(content, self._rules))
            except ValueError as error:
                raise ValueError(f"an image of the environment {error}") from error
            self._know(name, read, content)
        return {"type": "image", "image": name}

    def _take(self, record: Record, reference: Json) -> str:
        """Read an image of a row; returns its name."""
        folder = record.folder or Path()
        try:
            content = self._named(reference) or image_bytes(reference, folder, self._rules)
            name = content_name(content)
            if name in self._texts:
                return name
            image = decoded(content, self._rules)
        except Unusable as problem:
            refuse(record, reference, str(problem))
        try:
            read = self.reader.features(image)
        except ValueError as error:
            refuse(record, reference, f"cannot be shown to the model: {error}")
        path = local_path(reference, folder)
        self._know(name, read, content if path is None else path)
        return name

    def _named(self, reference: Json) -> bytes | None:
        """Find the bytes of an image that a row calls by its name, as rows of an earlier run do."""
        if not isinstance(reference, str) or not IMAGE_NAME.fullmatch(reference):
            return None
        kept = self.folder is not None and (self.folder / reference).is_file()
        return self._content(reference) if kept or reference in self._texts else None

    def features(self, name: str) -> Features:
        """Return an image as the model reads it; it is kept from now on.

        Args:
            name: of an image that a row has named.

        Returns:
            Its inputs of the model; the last used ones are held in memory.

        Raises:
            DataError: its file changed since its row was read.
        """
        self._keep(name)
        if name in self._held:
            self._held.move_to_end(name)
            return self._held[name]
        read = self.reader.features(decoded(self._content(name), self._rules))
        self._hold(name, read)
        return read

    def contents(self, names: Collection[str]) -> dict[str, bytes]:
        """Return the bytes of images by name, for another process; they are kept from now on.

        Args:
            names: of images that rows have named.

        Returns:
            Name -> the bytes of its file.

        Raises:
            DataError: the file of one changed since its row was read.
        """
        for name in names:
            self._keep(name)
        return {name: self._content(name) for name in names}

    def hold_only(self, contents: Mapping[str, bytes], names: Collection[str]) -> None:
        """Take images over from another process, and let go of others that came in this way.

        Args:
            contents: name -> bytes.
            names: of those that are still needed.
        """
        for name in self._texts.keys() - set(names):
            del self._texts[name]
            del self._sources[name]
            if name in self._held:
                self._held_bytes -= _size(self._held.pop(name))
        for name, content in contents.items():
            if name not in self._texts:
                self._know(name, self.reader.features(decoded(content, self._rules)), content)

    def attach(self, inputs: TokenBatch, rows: Sequence[tuple[str, Sequence[str]]]) -> TokenBatch:
        """Attach the pixels of its rows to a batch, in `extras`.

        Args:
            inputs: [B, T].
            rows: of each row its uid and the names of its images, in their order.

        Raises:
            InvariantError: a row has not as many image tokens as its images take: names it.
        """
        shown = [[self.features(name) for name in names] for _, names in rows]
        is_image = (inputs.tokens == self.reader.image_id) & inputs.attention_mask
        found = is_image.sum(1).tolist()
        for (uid, _), images, count in zip(rows, shown, found, strict=True):
            needed = sum(image.tokens for image in images)
            if needed != count:
                raise InvariantError(
                    f"row {uid!r} has {count} tokens of images, and its {len(images)} images take "
                    f"{needed}: a token of an image was sampled, or a part of the row is missing"
                )
        extras = dict(inputs.extras)
        names = dict.fromkeys(name for images in shown for read in images for name in read.tensors)
        for name in names:
            extras[name] = _ragged([[read.tensors[name] for read in images] for images in shown])
        if names:
            counts = [[torch.tensor([read.patches]) for read in images] for images in shown]
            extras[PATCHES] = _ragged(counts)
        return replace(inputs, extras=extras)

    def _know(self, name: str, read: Features, source: Path | bytes) -> None:
        """Remember an image that is new here."""
        # One text for all frames of a size: there may be very many.
        self._texts[name] = sys.intern(read.text)
        self._sources[name] = source
        self._hold(name, read)

    def _hold(self, name: str, read: Features) -> None:
        """Hold the pixels of an image, and let go of those that were used longest ago."""
        self._held[name] = read
        self._held_bytes += _size(read)
        while self._held_bytes > HELD_BYTES and len(self._held) > 1:
            _, gone = self._held.popitem(last=False)
            self._held_bytes -= _size(gone)

    def _keep(self, name: str) -> None:
        """Write an image into the run directory, if it is not there."""
        if self.folder is None or not self.writes or (self.folder / name).is_file():
            return
        make_folder(self.folder)
        write_atomically(self.folder / name, self._content(name))
        # Frames of environments are many: what is kept there need not be held here.
        self._sources[name] = self.folder / name

    def _content(self, name: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            DataError: they are no longer those of that name.
        """
        kept = None if self.folder is None else self.folder / name
        source = self._sources.get(name)
        if kept is not None and kept.is_file():
            source = kept
        if source is None:
            raise DataError(f"no image {name}: neither a row nor the run directory holds it")
        content = source.read_bytes() if isinstance(source, Path) else source
        if content_name(content) != name:
            raise DataError(f"the image {source} changed since its row was read")
        return content


def _ragged(rows: Sequence[Sequence[Tensor]]) -> Ragged:
    """Return the tensors of all rows one after the other."""
    pieces = [piece for row in rows for piece in row]
    lengths = [0] + [sum(map(len, row)) for row in rows]
    sizes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(sizes) > 1:
        raise DataError(
            f"images come out of the image processor in several sizes, such as {sorted(sizes)[:2]}:"
            " let preprocessor_config.json make them equally large"
        )
    return Ragged(values=torch.cat(pieces), row_offsets=torch.tensor(lengths).cumsum(0))


def _size(read: Features) -> int:
    return sum(tensor.nbytes for tensor in read.tensors.values())


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


def _take_over(theirs: Path, ours: Path) -> None:
    """Copy what another run was shown: no row has the images of its environments."""
    if not theirs.is_dir():
        return
    make_folder(ours)
    for path in theirs.iterdir():
        if not (ours / path.name).is_file():
            write_atomically(ours / path.name, path.read_bytes())
