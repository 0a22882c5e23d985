"""Images of rows: in every form that they are given in, and every reason to refuse one."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import EpsImagePlugin, Image

from oxrl.data.conversations import ConversationDataset, Example
from oxrl.data.dataset import ReadOptions
from oxrl.data.image_files import ImageRules
from oxrl.data.image_rows import references
from oxrl.data.image_store import ImageStore
from oxrl.data.preferences import PreferenceDataset
from oxrl.data.prompts import PromptDataset
from oxrl.data.rows import Record
from oxrl.errors import DataError
from oxrl.modelfiles.builtin_vision import IMAGE_IDS
from oxrl.models.image_features import ImageReader
from oxrl.models.load import load_tokenizer
from oxrl.types import Prompt

NAME = "builtin:tiny-vl"
TOKENIZER = load_tokenizer(NAME)
PAD = IMAGE_IDS["image_token_id"]


def store(**rules: Any) -> ImageStore:
    return ImageStore(lambda: ImageReader(NAME, TOKENIZER), ImageRules(**rules))


def png(width: int = 32, height: int = 16, color: Any = "red", mode: str = "RGB") -> bytes:
    found = BytesIO()
    Image.new(mode, (width, height), color).save(found, "PNG")
    return found.getvalue()


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **rules: Any) -> list[Prompt]:
    options = ReadOptions(images=store(**rules))
    return PromptDataset.load(path, TOKENIZER, options).in_order()


def shown(prompt: Prompt) -> str:
    """A prompt's tokens, every image as one star."""
    text = str(TOKENIZER.decode(list(prompt.token_ids)))
    while "<|image_pad|><|image_pad|>" in text:
        text = text.replace("<|image_pad|><|image_pad|>", "<|image_pad|>")
    return text.replace("<|vision_start|><|image_pad|><|vision_end|>", "*")


USER = "<|user|>{}<|end|><|assistant|>"


def test_images_are_shown_where_rows_say(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(64, 64, "blue"))
    part = {"type": "image"}
    text = {"type": "text", "text": "what?"}
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"prompt": "what?", "images": ["a.png"]}, USER.format("*what?"), 2),
        ({"prompt": "what?", "image": "a.png"}, USER.format("*what?"), 2),
        ({"prompt": "<image>what?", "images": ["a.png"]}, USER.format("*what?"), 2),
        ({"prompt": "is <image> it?", "images": "a.png"}, USER.format("is * it?"), 2),
        ({"prompt": "<image>or<image>", "images": ["a.png", "b.png"]}, USER.format("*or*"), 18),
        ({"prompt": "two", "images": ["a.png", "b.png"]}, USER.format("**two"), 18),
        ({"prompt": "none"}, USER.format("none"), 0),
        ({"prompt": "none", "images": []}, USER.format("none"), 0),
        ({"prompt": "typed <image>"}, USER.format("typed <image>"), 0),
        (
            {"prompt": [{"role": "user", "content": [text, part]}], "images": ["a.png"]},
            USER.format("what?*"),
            2,
        ),
        (
            {"prompt": [{"role": "user", "content": [{**part, "image": "a.png"}, text]}]},
            USER.format("*what?"),
            2,
        ),
        (
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, text],
                    }
                ]
            },
            USER.format("*what?"),
            2,
        ),
        (
            {
                "prompt": [
                    {"role": "system", "content": "short"},
                    {"role": "user", "content": "see"},
                ],
                "images": ["a.png"],
            },
            "<|system|>short<|end|>" + USER.format("*see"),
            2,
        ),
        (
            {
                "conversations": [{"from": "human", "value": "<image>\nhm"}],
                "prompt": [{"from": "human", "value": "<image>\nhm"}],
                "images": ["b.png"],
            },
            USER.format("*\nhm"),
            16,
        ),
    ]
    for row, expected, tokens in cases:
        [prompt] = read(write(tmp_path, row))
        assert shown(prompt) == expected, row
        assert prompt.token_ids.count(PAD) == tokens
        assert "images" not in prompt.metadata and "image" not in prompt.metadata
        json.dumps([dict(message) for message in prompt.messages])


def test_an_image_is_one_thing_in_every_form(tmp_path: Path) -> None:
    content = png(color="green")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(content)
    coded = base64.b64encode(content).decode()
    forms: list[Any] = [
        "in/a.png",
        "./in/../in/a.png",
        str(tmp_path / "in" / "a.png"),
        f"file://{tmp_path}/in/a.png",
        {"path": "in/a.png"},
        {"path": "in/a.png", "bytes": None},
        f"data:image/png;base64,{coded}",
        coded,
        {"base64": coded},
        {"bytes": coded},
    ]
    prompts = read(write(tmp_path, *[{"prompt": "what?", "images": [form]} for form in forms]))
    assert len({(prompt.token_ids, prompt.images, prompt.uid) for prompt in prompts}) == 1
    [other] = read(
        write(
            tmp_path, {"prompt": "what?", "images": [{"base64": base64.b64encode(png()).decode()}]}
        )
    )
    assert other.token_ids == prompts[0].token_ids
    assert other.uid != prompts[0].uid


def test_parquet_rows_hold_bytes_and_rows_without_images(tmp_path: Path) -> None:
    rows = [
        {"prompt": "what?", "answer": "a", "images": [{"bytes": png(), "path": None}]},
        {"prompt": "hm", "answer": "b", "images": None},
        {"prompt": "two", "answer": "c", "images": [{"bytes": png(), "path": "x.png"}] * 2},
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = read(path)
    assert [len(prompt.images) for prompt in prompts] == [1, 0, 2]
    assert shown(prompts[2]) == USER.format("**two")


def test_a_streamed_row_shows_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path, {"prompt": "what?", "images": ["a.png"]})
    options = ReadOptions(images=store(), stream=True)
    assert PromptDataset.load(path, TOKENIZER, options).in_order() == read(path)


def test_columns_of_other_names_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path, {"prompt": "what?", "pictures": ["a.png"]})
    options = ReadOptions(images=store(), columns={"images": "pictures"})
    [prompt] = PromptDataset.load(path, TOKENIZER, options).in_order()
    assert shown(prompt) == USER.format("*what?")
    assert not prompt.metadata


def test_conversations_and_pairs_hold_images_in_their_questions(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(color="blue"))
    turns = [
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "and <image>"},
        {"role": "assistant", "content": "blue"},
        {"role": "user", "content": "thanks"},
    ]
    path = write(tmp_path, {"messages": turns, "images": ["a.png", "b.png"]})
    options = ReadOptions(images=store())
    [example] = ConversationDataset.load(path, TOKENIZER, options).in_order()
    assert isinstance(example, Example)
    assert len(example.images) == 2 and example.token_ids.count(PAD) == 4
    trained = [token for token, on in zip(example.token_ids, example.trained, strict=True) if on]
    assert TOKENIZER.decode(trained) == "red<|end|>blue<|end|>"
    asked = {"prompt": "<image>?", "chosen": "red", "rejected": "green", "images": ["a.png"]}
    [pair] = PreferenceDataset.load(write(tmp_path, asked), TOKENIZER, options).in_order()
    assert [row.images for row in pair.rows] == [example.images[:1]] * 2
    whole = {
        "chosen": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "red"}],
        "rejected": [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "no"}],
        "images": ["a.png"],
    }
    [pair] = PreferenceDataset.load(write(tmp_path, whole), TOKENIZER, options).in_order()
    assert [row.token_ids.count(PAD) for row in pair.rows] == [2, 2]


def test_text_that_looks_like_a_token_of_images_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    typed = "what is <|image_pad|>?"
    [prompt] = read(write(tmp_path, {"prompt": typed, "images": ["a.png"]}))
    assert prompt.token_ids.count(PAD) == 2
    assert "<|image_pad|>?" in shown(prompt)


def animated() -> bytes:
    found = BytesIO()
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    frames[0].save(found, "GIF", save_all=True, append_images=frames[1:])
    return found.getvalue()


def jpeg(mode: str) -> bytes:
    found = BytesIO()
    Image.new(mode, (32, 32)).save(found, "JPEG")
    return found.getvalue()


def palette_with_transparency() -> bytes:
    found = BytesIO()
    Image.new("P", (32, 32)).save(found, "PNG", transparency=0)
    return found.getvalue()


def of_format(name: str) -> bytes:
    """An image that Pillow reads, and would with what is not looked at here."""
    found = BytesIO()
    Image.new("RGB", (32, 32)).save(found, name)
    return found.getvalue()


NOISE = bytes(range(256)) * 40
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no image that can be read"),
    "text": (b"not an image at all, really", "no image that can be read"),
    "html": (b"<html><body>404</body></html>", "no image that can be read"),
    "cut": (png(64, 64)[:-30], "damaged or cut off"),
    "cut jpeg": (jpeg("RGB")[: len(jpeg("RGB")) // 2], "damaged or cut off|no image"),
    "flipped": (png(64, 64)[:60] + b"\x00\xff" + png(64, 64)[62:], "damaged or cut off"),
    "noise": (NOISE, "no image that can be read"),
    "animated": (animated(), "2 frames"),
    "cmyk": (jpeg("CMYK"), "CMYK"),
    "rgba": (png(32, 32, (1, 2, 3, 4), "RGBA"), "RGBA"),
    "rgba opaque": (png(32, 32, (1, 2, 3, 255), "RGBA"), "RGBA"),
    "grey alpha": (png(32, 32, (1, 2), "LA"), "LA"),
    "transparent palette": (palette_with_transparency(), "with transparency"),
    "sixteen bits": (png(32, 32, 7, "I;16"), "I;16"),
    "one pixel": (png(1, 1), "1 x 1 pixels"),
    "line": (png(5000, 1), "5000 x 1 pixels"),
    "huge": (png(10_000, 16), "10000 x 16 pixels"),
    "postscript": (of_format("EPS"), "no image that can be read .*PNG.*JPEG"),
    "icon": (of_format("ICO"), "no image that can be read"),
    "targa": (of_format("TGA"), "no image that can be read"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_image_is_refused_with_its_row(tmp_path: Path, kind: str) -> None:
    content, words = REFUSED[kind]
    (tmp_path / "good.png").write_bytes(png())
    (tmp_path / "bad.png").write_bytes(content)
    path = write(
        tmp_path,
        {"prompt": "what?", "images": ["good.png"]},
        {"prompt": "what?", "images": ["bad.png"]},
    )
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: the image 'bad\.png'.*({words})"):
        read(path)


@pytest.mark.parametrize("name", ["path", "url", "base64", "bytes"])
def test_an_object_in_an_object_is_no_image(tmp_path: Path, name: str) -> None:
    (tmp_path / "good.png").write_bytes(png())
    path = write(tmp_path, {"prompt": "what?", "images": [{name: {"path": "good.png"}}]})
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: the image .*has an object as its {name}"):
        read(path)


def test_a_ratio_that_the_model_refuses_is_told_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "line.png").write_bytes(png(8000, 8))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the image 'line\.png' cannot be shown"):
        read(write(tmp_path, {"prompt": "what?", "images": ["line.png"]}))


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_the_usual_formats_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(of_format(name))
    [prompt] = read(write(tmp_path, {"prompt": "what?", "images": ["a"]}))
    assert len(prompt.images) == 1


def test_postscript_reaches_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = tmp_path / "bin" / "gs"
    starter.parent.mkdir()
    starter.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    starter.chmod(0o755)
    monkeypatch.setenv("PATH", f"{starter.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    (tmp_path / "bad.png").write_bytes(of_format("EPS"))
    with pytest.raises(DataError, match="no image that can be read"):
        read(write(tmp_path, {"prompt": "what?", "images": ["bad.png"]}))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGB"])
def test_what_is_rgb_without_a_choice_is_read(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a.png").write_bytes(png(32, 32, 1, mode) if mode != "RGB" else png())
    [prompt] = read(write(tmp_path, {"prompt": "what?", "images": ["a.png"]}))
    assert len(prompt.images) == 1


def test_sizes_are_bounded_by_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(32, 16))
    path = write(tmp_path, {"prompt": "what?", "images": ["a.png"]})
    with pytest.raises(DataError, match="fewer than 17"):
        read(path, min_side=17)
    with pytest.raises(DataError, match="more than 31"):
        read(path, max_side=31)
    assert read(path, min_side=16, max_side=32)


def test_images_are_read_from_allowed_places_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "out.png").write_bytes(png())
    (data / "link.png").symlink_to(tmp_path / "out.png")
    for reference in ("../out.png", str(tmp_path / "out.png"), "link.png"):
        path = write(data, {"prompt": "what?", "images": [reference]})
        with pytest.raises(DataError, match=r"rows\.jsonl:1.*outside of the data file's folder"):
            read(path)
        assert read(path, roots=(str(tmp_path),))
    for url in ("http://127.0.0.1:9/a.png", "https://example.invalid/a.png"):
        path = write(data, {"prompt": "what?", "images": [url]})
        with pytest.raises(DataError, match=r"data\.image_roots"):
            read(path, roots=("http://127.0.0.1:99",))
    path = write(data, {"prompt": "what?", "images": ["http://127.0.0.1:9/a.png"]})
    with pytest.raises(DataError, match="cannot be fetched"):
        read(path, roots=("http://127.0.0.1:9",))


def test_an_allowed_url_is_fetched_and_leads_nowhere_else(tmp_path: Path) -> None:
    content = png()

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = self.path == "/images/moved.png"
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", "/images/a.png")
            self.end_headers()
            self.wfile.write(b"" if moved else content)

        def log_message(self, *_: Any) -> None:
            """Nothing is said."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_port}"
        path = write(tmp_path, {"prompt": "what?", "images": [f"{site}/images/a.png"]})
        [prompt] = read(path, roots=(f"{site}/images",))
        assert prompt.images == (hashlib.sha256(content).hexdigest(),)
        moved = write(tmp_path, {"prompt": "what?", "images": [f"{site}/images/moved.png"]})
        with pytest.raises(DataError, match="cannot be fetched.*302"):
            read(moved, roots=(f"{site}/images",))
        with pytest.raises(DataError, match=r"data\.image_roots"):
            read(path, roots=(f"{site}/image",))
        server.shutdown()


@pytest.mark.parametrize(
    "said",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no status", "an endless header", "no length of a chunk"],
)
def test_what_answers_with_no_http_is_told_with_the_row(tmp_path: Path, said: bytes) -> None:
    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        site = f"http://127.0.0.1:{listening.getsockname()[1]}"
        path = write(tmp_path, {"prompt": "what?", "images": [f"{site}/a.png"]})
        with pytest.raises(DataError, match=r"rows.jsonl:1: .* cannot be fetched"):
            read(path, roots=(site,))


MISMATCHED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "<image> or <image>", "images": ["a.png"]}, "more images are shown than the 1"),
    ({"prompt": "<image>", "images": ["a.png", "a.png"]}, "1 of 2 images are shown nowhere"),
    ({"prompt": "<image>", "images": []}, "more images are shown than the 0"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "than the 0"),
    ({"prompt": [{"role": "user", "content": None}], "images": ["a.png"]}, "without a text"),
    ({"prompt": "what?", "images": ["missing.png"]}, "is no file at"),
    ({"prompt": "what?", "images": [3]}, "is int"),
    ({"prompt": "what?", "images": [{}]}, "neither path, url, base64 nor bytes"),
    ({"prompt": "what?", "images": [{"base64": "%%%"}]}, "no base64"),
    ({"prompt": "what?", "images": ["in\x00side.png"]}, "cannot be read"),
    ({"prompt": "what?", "images": [""]}, "is str"),
    ({"prompt": "what?", "images": ["."]}, "is a folder"),
    (
        {
            "prompt": [
                {"role": "user", "content": "draw"},
                {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]},
                {"role": "user", "content": "again"},
            ]
        },
        "holds an image, and is the assistant",
    ),
]


@pytest.mark.parametrize(("row", "words"), MISMATCHED)
def test_images_and_places_have_to_match(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(DataError, match=rf"(?s)rows\.jsonl:1.*{words}"):
        read(write(tmp_path, row))


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path, {"prompt": "what?", "images": ["a.png"]})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: it has images, which this model"):
        PromptDataset.load(path, load_tokenizer("builtin:tiny"))


def test_a_template_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path, {"prompt": "what?", "images": ["a.png"]})
    tokenizer = load_tokenizer(NAME)
    tokenizer.chat_template = load_tokenizer("builtin:tiny").chat_template
    with pytest.raises(DataError, match="the chat template"):
        PromptDataset.load(path, tokenizer, ReadOptions(images=store()))


def test_a_template_that_reads_parts_alone_sees_texts(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "say hello"})
    tokenizer = load_tokenizer(NAME)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% for p in m['content'] %}"
        "{% if p['type'] == 'image' %}<|image_pad|>{% elif p['type'] == 'text' %}{{ p['text'] }}"
        "{% endif %}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    options = ReadOptions(images=store())
    [prompt] = PromptDataset.load(path, tokenizer, options).in_order()
    assert shown(prompt) == USER.format("say hello")


def test_a_file_that_changes_after_it_was_read_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    path = write(tmp_path, {"prompt": "what?", "images": ["a.png"]})
    images = store()
    [prompt] = PromptDataset.load(path, TOKENIZER, ReadOptions(images=images)).in_order()
    images.folder = tmp_path / "kept"
    images.features(prompt.images[0])
    assert [kept.name for kept in images.folder.iterdir()] == list(prompt.images)
    (tmp_path / "a.png").write_bytes(png(color="blue"))
    images.features(prompt.images[0])  # what was kept is still the image

    (tmp_path / "a.png").write_bytes(png())
    images = store()
    [prompt] = PromptDataset.load(path, TOKENIZER, ReadOptions(images=images)).in_order()
    (tmp_path / "a.png").write_bytes(png(color="blue"))
    images.folder = tmp_path / "elsewhere"
    with pytest.raises(DataError, match="changed since its row was read"):
        images.features(prompt.images[0])


def test_an_image_that_a_run_has_kept_is_shown_by_its_name(tmp_path: Path) -> None:
    content = png(color="green")
    name = hashlib.sha256(content).hexdigest()
    row = {"prompt": "what?", "image": name}
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / name).write_bytes(content)
    images = store()
    images.folder = tmp_path / "kept"
    options = ReadOptions(images=images)
    [prompt] = PromptDataset.load(write(tmp_path, row), TOKENIZER, options).in_order()
    assert prompt.images == (name,) and shown(prompt) == USER.format("*what?")
    assert images.contents([name]) == {name: content}
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):  # no run, and no file of that name
        read(write(tmp_path, row))


def test_images_of_another_process_are_held_as_long_as_they_are_needed(tmp_path: Path) -> None:
    contents = {
        hashlib.sha256(content).hexdigest(): content
        for content in (png(32, 32, color) for color in ("red", "green", "blue"))
    }
    red, green, blue = contents
    images = store()
    images.hold_only({red: contents[red], green: contents[green]}, [red, green])
    assert images.features(red).tokens == images.features(green).tokens == 4
    images.hold_only({blue: contents[blue]}, [green, blue])
    assert images.contents([green, blue]) == {green: contents[green], blue: contents[blue]}
    with pytest.raises(DataError, match=f"no image {red}"):
        images.contents([red])


def test_an_image_that_goes_and_comes_again_takes_the_room_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = {
        hashlib.sha256(data).hexdigest(): data
        for data in (png(32, 32, color) for color in ("red", "green"))
    }
    red, green = content
    images = store()
    images.hold_only(content, content)
    size = sum(tensor.nbytes for tensor in images.features(red).tensors.values())
    monkeypatch.setattr("oxrl.data.image_store.HELD_BYTES", 3 * size)
    for _ in range(5):
        images.hold_only({}, [])
        images.hold_only(content, content)
    held = images.features(red)
    images.features(green)
    assert images.features(red) is held


def test_texts_between_images_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    texts = [{"type": "text", "text": text} for text in ("one ", "two ", "three")]
    image = {"type": "image", "image": "a.png"}
    content = [*texts[:2], image, *texts, image]
    [prompt] = read(write(tmp_path, {"prompt": [{"role": "user", "content": content}]}))
    assert shown(prompt) == USER.format("one two *one two three*")
    [message] = prompt.messages
    joined = [part["text"] for part in message["content"] if part["type"] == "text"]
    assert joined == ["one two ", "one two three"]


def test_a_message_without_an_image_stays_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    asked = {"role": "user", "content": "what is <image>?"}
    rows = [asked, {"role": "assistant", "content": "red"}, {"role": "user", "content": "and now?"}]
    [prompt] = read(write(tmp_path, {"prompt": rows, "image": "a.png"}))
    first, *others = prompt.messages
    assert [part["type"] for part in first["content"]] == ["text", "image", "text"]
    assert others == rows[1:]


def test_every_image_that_a_row_names_is_listed() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image", "image": "in.png"}]
    asked = {"role": "user", "content": content}
    said = {"role": "assistant", "content": "red"}
    fields = {"image": "one.png", "images": ["two.png"], "messages": [asked, said, "no message"]}
    for more in ({}, {"prompt": "a text"}, {"chosen": [asked]}):
        found = references(Record("rows.jsonl line 1", {**fields, **more}))
        assert found == ["two.png", "one.png", "in.png", *(["in.png"] if "chosen" in more else [])]
