"""The bytes of images that rows name, and whether they are images that can be learned from."""

from __future__ import annotations

import base64
import binascii
import hashlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import NoReturn
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from PIL import Image, ImageOps, UnidentifiedImageError

from oxrl.data.rows import Fields, Json, Record

EXPECTED = (
    "an image: a path, a data: or allowed URL, base64 text, or an object with one of path, url, "
    "base64, bytes"
)
# How base64 text of the usual formats begins: PNG, JPEG, GIF, WebP, BMP.
BASE64_STARTS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk")
# What is decoded. Others that Pillow knows start programs (EPS), or hide more than an image.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
REMOTE = ("http://", "https://")
# What is turned into RGB without a choice: grey, palettes without transparency, black and white.
PLAIN_MODES = ("RGB", "L", "P", "1")
HOW_TO_CONVERT = 'Image.open(path).convert("RGB").save(path)'
FETCH_S = 30.0
MOST_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class ImageRules:
    """The rules for images that rows may show: where their files may lie, and their size.

    Args:
        roots: folders beside the data file's own, and beginnings of URLs, that images may be in.
        min_side, max_side: of an image, in pixels.
    """

    roots: tuple[str, ...] = ()
    min_side: int = 8
    max_side: int = 8192


class Unusable(ValueError):
    """An image cannot be used; the message is the end of a sentence that says why."""


class _SameRoot(HTTPRedirectHandler):
    """Follows no redirect: it could lead out of what is allowed."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def decoded(content: bytes, rules: ImageRules) -> Image.Image:
    """Decode an image to RGB, turned as its camera says.

    Args:
        content: the bytes of a file.
        rules: which sizes are read.

    Raises:
        Unusable: why it cannot be used.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are looked at here
            image = Image.open(BytesIO(content), formats=FORMATS)
            _check(image, rules)
            image.load()
            turned = ImageOps.exif_transpose(image)
            return turned.convert("RGB")
    except Unusable:
        raise
    except UnidentifiedImageError:
        start = content[:12].hex(" ")
        problem = f"is no image that can be read {FORMATS}: it begins with {start}"
        raise Unusable(problem) from None
    except (OSError, SyntaxError, ValueError, OverflowError, Image.DecompressionBombError) as error:
        raise Unusable(f"is damaged or cut off: {error}") from None


def refuse(record: Record, reference: Json, problem: str) -> NoReturn:
    """Refuse a row for one of its images.

    Args:
        record: the row.
        reference: to the image as the row has it.
        problem: what is wrong, as the end of a sentence about the image.

    Raises:
        DataError: always.
    """
    record.fail(f"the image {described(reference)} {problem}", EXPECTED)


def described(reference: Json) -> str:
    """Describe a reference to an image, short enough for a message.

    Args:
        reference: as a row has it: text, bytes, or an object.

    Returns:
        To stand behind "the image"; long text is cut.
    """
    if isinstance(reference, bytes):
        return f"of {len(reference):,} bytes"
    if isinstance(reference, Mapping):
        given = {key: value for key, value in reference.items() if value is not None}
        named = given.get("path") or given.get("url")
        return described(named) if named else f"with {', '.join(given) or 'nothing'}"
    text = str(reference)
    return repr(text if len(text) <= 100 else f"{text[:60]}... ({len(text):,} characters)")


def content_name(content: bytes) -> str:
    """Return the name that an image has everywhere: the SHA-256 of its bytes.

    Args:
        content: the bytes of its file, as they are.

    Returns:
        64 hexadecimal digits.
    """
    return hashlib.sha256(content).hexdigest()


def local_path(reference: Json, folder: Path) -> Path | None:
    """Find the file that a reference stands for; None where it stands for none.

    Args:
        reference: as a row has it: text, bytes, or an object.
        folder: of the data file, where relative paths begin.

    Returns:
        A path, which need not be there; None too of bytes, base64, data: and http(s): URLs.
    """
    if isinstance(reference, Mapping):
        with suppress(Unusable):  # whoever reads it says so
            reference = _inside(reference)
    if not isinstance(reference, str) or not reference:
        return None
    # Paths are short, and hold a dot near their end.
    as_text = reference.startswith(BASE64_STARTS) and "." not in reference and len(reference) >= 64
    if as_text or reference.startswith(("data:", *REMOTE)):
        return None
    if reference.startswith("file://"):
        reference = unquote(urlsplit(reference).path)
    return folder / reference


def image_bytes(reference: Json, folder: Path, rules: ImageRules) -> bytes:
    """Read the bytes of an image that a row names or holds.

    Args:
        reference: EXPECTED says in which forms.
        folder: of the data file, where relative paths begin.
        rules: where images may be.

    Raises:
        Unusable: it is not there, or not where images may be.
    """
    if isinstance(reference, Mapping):
        told = _inside(reference)
        if told is None:
            raise Unusable("has neither path, url, base64 nor bytes")
        return image_bytes(told, folder, rules)
    if isinstance(reference, bytes | bytearray):
        return bytes(reference)
    if not isinstance(reference, str) or not reference:
        raise Unusable(f"is {type(reference).__name__}")
    if reference.startswith("data:"):
        return _from_base64(reference.partition(",")[2])
    if reference.startswith(REMOTE):
        return _fetched(reference, rules)
    path = local_path(reference, folder)
    return _from_base64(reference) if path is None else _from_file(path, folder, rules)


def _inside(reference: Fields) -> Json:
    """Return what an object tells of its image, or None; bytes go before what they came from."""
    for name in ("bytes", "base64", "path", "url"):
        value = reference.get(name)
        if value is not None:
            if isinstance(value, Mapping):
                raise Unusable(f"has an object as its {name}")
            encoded = name in ("bytes", "base64") and isinstance(value, str)
            return f"data:,{value}" if encoded else value
    return None


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unusable(f"is no base64: {error}") from None


def _from_file(path: Path, folder: Path, rules: ImageRules) -> bytes:
    """Read a file, if it is inside of a folder that images may be in."""
    try:
        whole = path.resolve()
        folders = [Path(root).resolve() for root in rules.roots if "://" not in root]
        if not any(whole.is_relative_to(root) for root in (folder.resolve(), *folders)):
            raise Unusable(
                f"is at {whole}, outside of the data file's folder: name a folder above it in "
                "data.image_roots"
            )
        if not whole.is_file():
            state = "a folder" if whole.is_dir() else "no file"
            raise Unusable(f"is {state} at {whole}")
        if whole.stat().st_size > MOST_BYTES:
            raise Unusable(f"has {whole.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
        return whole.read_bytes()
    except Unusable:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # a link in a circle is a RuntimeError
        raise Unusable(f"cannot be read: {error}") from None


def _fetched(url: str, rules: ImageRules) -> bytes:
    """Fetch a URL, if it begins as one of those that are allowed."""
    allowed = [root for root in rules.roots if root.startswith(REMOTE)]
    if not any(url.startswith(root.rstrip("/") + "/") for root in allowed):
        raise Unusable(
            "is on the network, which is only asked for URLs that begin as one of data.image_roots"
        )
    try:
        with build_opener(_SameRoot).open(url, timeout=FETCH_S) as answer:
            content = answer.read(MOST_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()  # a refusal is an open reply
        raise Unusable(f"cannot be fetched: {error}") from None
    if len(content) > MOST_BYTES:
        raise Unusable(f"has more than {MOST_BYTES:,} bytes")
    return content


def _check(image: Image.Image, rules: ImageRules) -> None:
    """Look at what the header of an image says, before anything is decoded."""
    width, height = image.size
    size = f"{width} x {height} pixels"
    if min(width, height) < rules.min_side:
        raise Unusable(
            f"has {size}; a side of fewer than {rules.min_side} shows nothing (data.image_min_side)"
        )
    if max(width, height) > rules.max_side:
        raise Unusable(
            f"has {size}, a side of more than {rules.max_side}: make it smaller, or raise "
            "data.image_max_side"
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise Unusable(f"has {frames} frames; a model sees one: store the one that is meant")
    if image.mode not in PLAIN_MODES or "transparency" in image.info:
        what = "with transparency" if image.mode in PLAIN_MODES else image.mode
        raise Unusable(
            f"is {what}, of which there is more than one way to make RGB: convert it where you "
            f"see what becomes of it, such as {HOW_TO_CONVERT}"
        )
