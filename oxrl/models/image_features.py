"""Images as inputs of a model: pixels, and the tokens that stand for them in a prompt.

The image processor is transformers' own, on PIL. Which text stands for an image in a prompt is what
transformers' processors of each family write there; those cannot all be loaded without torchvision.
"""

from __future__ import annotations

from typing import Any

from PIL.Image import Image
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase

from oxrl.data.image_store import Features
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.builtin_vision import vision_config, vision_processor
from oxrl.modelfiles.folder import vision_family
from oxrl.models.load import named_in_errors

# Towers of LLaVA, and how many tokens each puts in front of those of its patches.
LLAVA_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}
FAKE = "<fake_token_around_image>"
WHOLE = "<global-img>"


def load_image_processor(
    name: str, *, revision: str = "main", trust_remote_code: bool = False
) -> Any:
    """Load the image processor of a model, which is transformers' own, on PIL.

    Args:
        name: as `model.name`.
        revision: commit, tag or branch on the hub.
        trust_remote_code: run Python code that the model's authors ship with it.

    Raises:
        DataError: the model's files have none.
    """
    if is_builtin(name):
        return vision_processor(name)
    with named_in_errors("image processor", name):
        return AutoImageProcessor.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )


class ImageReader:
    """Turns images into inputs of a model.

    Args:
        name: as `model.name`.
        tokenizer: of the model.
        revision: as `model.revision`.
        trust_remote_code: as `model.trust_remote_code`.
        max_pixels: larger images are made smaller; None: as the model's own files say.

    Raises:
        DataError: the model's files do not say how, or in a way that is not known here.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        max_pixels: int | None = None,
    ) -> None:
        family = vision_family(name)
        if family is None:
            raise DataError(f"model.name: {name!r} reads no images")
        self.family = family
        more: dict[str, Any] = {
            "revision": revision or "main",
            "trust_remote_code": trust_remote_code,
        }
        if is_builtin(name):
            self.config: Any = vision_config(name)
        else:
            with named_in_errors("image processor", name):
                self.config = AutoConfig.from_pretrained(name, **more)
        self.processor = load_image_processor(name, **more)
        self.image_id = int(getattr(self.config, family.image))
        self._image = _token(tokenizer, self.image_id)
        # What the chat template writes where an image is.
        self.placeholder = _token(tokenizer, int(getattr(self.config, family.placeholder)))
        self._end = ""
        if family.types:
            self._end = _token(tokenizer, int(self.config.eoi_token_index))
        self._check_tokenizer(tokenizer)
        if max_pixels is not None:
            self._limit(max_pixels)

    def features(self, image: Image) -> Features:
        """One image, in RGB, as the model reads it."""
        if self.family.layout == "patches":
            return self._patches(image)
        if self.family.layout == "tiles":
            return self._tiles(image)
        return self._square(image)

    def _patches(self, image: Image) -> Features:
        """Source: Qwen2VLProcessor of transformers: patches / merge_size ** 2 tokens per image."""
        read = self.processor(images=[image], return_tensors="pt")
        grid = read["image_grid_thw"]
        patches = int(grid.prod())
        tokens = patches // self.config.vision_config.spatial_merge_size**2
        tensors = {"pixel_values": read["pixel_values"], "image_grid_thw": grid}
        return Features(tensors=tensors, patches=patches, text=self._image * tokens, tokens=tokens)

    def _tiles(self, image: Image) -> Features:
        """Source: Idefics3Processor of transformers: row by row of tiles, then the whole image."""
        read = self.processor(images=[[image]], return_row_col_info=True, return_tensors="pt")
        pixels = read["pixel_values"][0]
        side = self.config.vision_config.patch_size
        squares = (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
        per_tile = squares // self.config.scale_factor**2
        shown = self._image * per_tile
        rows = int(read["rows"][0][0])
        columns = int(read["cols"][0][0])
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{FAKE}<row_{row}_col_{column}>{shown}"
            text += "\n"
        if rows:
            text += "\n"
        text += f"{FAKE}{WHOLE}{shown}{FAKE}"
        tensors = {"pixel_values": pixels}
        if "pixel_attention_mask" in read:
            tensors["pixel_attention_mask"] = read["pixel_attention_mask"][0].bool()
        return Features(
            tensors=tensors,
            patches=len(pixels) * squares,
            text=text,
            tokens=len(pixels) * per_tile,
        )

    def _square(self, image: Image) -> Features:
        """Source: Gemma3Processor and LlavaProcessor of transformers."""
        more = {"do_pan_and_scan": False} if self.family.types else {}
        read = self.processor(images=[image], return_tensors="pt", **more)
        pixels = read["pixel_values"]
        side = self.config.vision_config.patch_size
        patches = (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
        if self.family.types:
            tokens = int(self.config.mm_tokens_per_image)
            text = f"\n\n{self.placeholder}{self._image * tokens}{self._end}\n\n"
        else:
            tokens = patches + self._in_front()
            text = self._image * tokens
        return Features(tensors={"pixel_values": pixels}, patches=patches, text=text, tokens=tokens)

    def _in_front(self) -> int:
        """Tokens of LLaVA's tower that stand for no patch, and are kept."""
        tower = self.config.vision_config.model_type
        if tower not in LLAVA_TOWERS:
            raise DataError(
                f"model.name: a LLaVA with the vision tower {tower} is not known here; there are "
                f"{', '.join(LLAVA_TOWERS)}"
            )
        cut = self.config.vision_feature_select_strategy == "default"
        return LLAVA_TOWERS[tower] - cut

    def _limit(self, most: int) -> None:
        """Let no image have more pixels, as the model sees it."""
        if self.family.layout != "patches":
            raise DataError(
                f"data.image_max_pixels: {self.family.name} shows every image to its tower at a "
                "size that its own files fix; leave it out"
            )
        size = self.processor.size
        least = int(size["shortest_edge"])
        if most < least:
            raise DataError(
                f"data.image_max_pixels={most} is below the {least} pixels that the model's own "
                "files make the smallest image"
            )
        self.processor.size = {"shortest_edge": least, "longest_edge": most}

    def _check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make sure that the text of image tokens is read back as these tokens."""
        read = tokenizer.encode(self._image * 3, add_special_tokens=False)
        if read != [self.image_id] * 3:
            raise DataError(
                f"the tokenizer reads {self._image * 3!r} as {read}, and config.json says that "
                f"images are token {self.image_id}: it is the tokenizer of another model"
            )


def _token(tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    """The text of a token.

    Raises:
        DataError: the tokenizer has none of that number.
    """
    text = tokenizer.convert_ids_to_tokens(number)
    if not isinstance(text, str):
        raise DataError(
            f"config.json names token {number} for images, and the tokenizer has "
            f"{len(tokenizer)}: it is the tokenizer of another model"
        )
    return text
