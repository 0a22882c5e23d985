"""Environments that show images: every turn reads those that its context holds, and so do the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oxrl.data.batching import to_rollout_batch
from oxrl.data.episode_rows import EpisodeInputs
from oxrl.data.image_files import ImageRules, content_name
from oxrl.data.image_store import ImageStore
from oxrl.data.samples import sample_line
from oxrl.engines.sample.sampler import generate
from oxrl.modelfiles.builtin_vision import vision_tokenizer
from oxrl.models.image_features import ImageReader
from oxrl.types import Completion, Request, TokenBatch
from oxrl.usercode.environment_answers import as_messages, image_content
from support.scripted import PAD, Play, ScriptedSampler, requests, scored

# Frame k of an episode is a picture of its own: one of a fixed size for all, or growing ones.
SHOWS = """
import numpy as np
from PIL import Image
from oxrl.environments import Step

class Made:
    def __init__(self, grows=False, ends_at=0):
        self.grows, self.ends_at, self.turn = grows, ends_at, 0
    def frame(self):
        side = 16 + 16 * self.grows * (self.turn % 3)
        found = np.full((side, 32, 3), (self.start + self.turn) % 256, np.uint8)
        return found if self.turn % 2 else Image.fromarray(found)
    def reset(self, prompt, seed):
        self.start = seed % 200
        return [{"role": "system", "content": "act"}, self.said("go")]
    def said(self, text):
        parts = [{"type": "image", "image": self.frame()}, {"type": "text", "text": text}]
        return {"role": "user", "content": parts}
    def step(self, text):
        self.turn += 1
        if self.turn == self.ends_at:
            return Step(self.said("bye"), 1.0, terminated=True)
        return Step([self.said("now")], 0.25)
"""


class SeesImages(ScriptedSampler):
    """Notes the images that every turn reads."""

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, list[tuple[str, ...]]] = {}

    def _sampled(self, request: Request) -> Completion:
        self.images.setdefault(request.id, []).append(request.prompt.images)
        return super()._sampled(request)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setattr("support.scripted.FIRST_BYTE", 9)  # behind the tokens of images
    reader = ImageReader("builtin:tiny-vl", vision_tokenizer())
    return ImageStore(lambda: reader, ImageRules(), tmp_path / "images")


def shown(inputs: TokenBatch) -> list[int]:
    """Images per row, by the grids that go to the model."""
    return inputs.extras["image_grid_thw"].row_offsets.diff().tolist()


@pytest.mark.parametrize(("reads", "most"), [("last", 1), ("window: 2", 2), ("whole", 4)])
def test_a_turn_reads_the_images_of_its_context_and_rows_show_them(
    play: Play, images: ImageStore, reads: str, most: int
) -> None:
    sampler = SeesImages()
    asked = requests(4, samples=2)
    engine = play(SHOWS, sampler, reads=reads, images=images, ends_at=4, grows=True)
    done = generate(engine, asked, deadline_s=60)
    for request in asked:
        counts = [len(names) for names in sampler.images[request.id]]
        assert counts == [min(turn + 1, most) for turn in range(4)]
    # Siblings of a group begin with the same picture, other groups with another one.
    first = {request.id: sampler.images[request.id][0] for request in asked}
    assert first["0/0"] == first["0/1"] != first["2/0"]
    # `attach` refuses a row whose image tokens are not those of its images.
    batch = to_rollout_batch(scored(asked, done, 2), pad_id=PAD, images=images)
    if reads == "whole":
        assert not isinstance(batch.inputs, EpisodeInputs)
        assert shown(batch.inputs) == [4] * 8
        return
    assert isinstance(batch.inputs, EpisodeInputs)
    rows = batch.inputs.rows
    ids = batch.inputs.episode_ids.tolist()
    expected = {"last": [1, 1, 1, 1], "window: 2": [2, 2, 2]}[reads]
    assert [count for at, count in enumerate(shown(rows)) if ids[at] == 0] == expected


@pytest.mark.parametrize("reads", ["last", "whole"])
def test_a_cut_episode_ends_with_the_image_that_its_next_turn_would_read(
    play: Play, images: ImageStore, reads: str
) -> None:
    asked = requests(1)
    engine = play(SHOWS, SeesImages(), reads=reads, images=images, max_turns=2)
    done = generate(engine, asked, deadline_s=60)
    assert done[0].end == "max_turns"
    inputs = to_rollout_batch(scored(asked, done), pad_id=PAD, images=images).inputs
    if not isinstance(inputs, EpisodeInputs):
        assert shown(inputs) == [3]
        return
    assert shown(inputs.rows) == [1, 1, 1]
    assert not inputs.rows.response_mask[-1].any()


def test_images_are_kept_once_by_their_hash_and_named_in_samples(
    play: Play, images: ImageStore, tmp_path: Path
) -> None:
    asked = requests(1, samples=3)
    engine = play(SHOWS, SeesImages(), reads="last", images=images, ends_at=3)
    rollouts = scored(asked, generate(engine, asked, deadline_s=60), 3)
    to_rollout_batch(rollouts, pad_id=PAD, images=images)
    files = {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()}
    assert len(files) == 3  # three turns, the same for all samples of the group
    assert all(content_name(content) == name for name, content in files.items())
    line = json.loads(json.dumps(sample_line(rollouts[0], step=0, advantage=None)))
    said = [*line["opening"], *(m for turn in line["turns"] for m in turn["messages"])]
    named = [part["image"] for m in said[1:] for part in m["content"] if part["type"] == "image"]
    assert len(named) == 4 and set(files) == set(named[:3])


def test_an_image_that_cannot_be_used_costs_its_own_episode(play: Play, images: ImageStore) -> None:
    source = SHOWS.replace("side = 16 +", "side = 2 if self.turn == 1 else 16 +")
    asked = requests(1)
    [done] = generate(play(source, SeesImages(), images=images), asked, deadline_s=60)
    assert done.end == "environment_error" and "image of the environment" in done.reason


def said(image: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": image}]}


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (np.zeros((4, 4, 4), np.uint8), r"uint8 \(4, 4, 4\)"),
        (np.zeros((4, 4, 3)), "float64"),
        (3, "type int"),
        ("/no/such/file.png", "cannot be read"),
    ],
)
def test_what_is_no_image_is_refused_with_the_forms_that_are(image: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        as_messages(said(image), "step")


def test_every_form_of_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    picture = Image.fromarray(array)
    written = image_content(array, "step")
    (tmp_path / "a.png").write_bytes(written)
    forms = (array, picture, written, tmp_path / "a.png", str(tmp_path / "a.png"))
    assert {image_content(form, "step") for form in forms} == {written}
    [message] = as_messages(said(array), "step")
    assert as_messages([message], "step") == [message]  # the parent reads what the process wrote
    with pytest.raises(ValueError, match="part of type 'sound'"):
        as_messages({"role": "user", "content": [{"type": "sound"}]}, "reset")
