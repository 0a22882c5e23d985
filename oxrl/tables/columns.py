"""Columns that rows of data may have: pure data."""

from __future__ import annotations

IMAGES = ("images", "image")
CHATS = (
    *("messages", "conversations", "tools", "system", "history", "instruction", "input"),
    *IMAGES,
)
# Of the rows of a recipe, by the recipe; prompts may have any.
READ = {
    "supervised": ("prompt", "completion", "output", *CHATS),
    "preference": (
        *("prompt", "chosen", "rejected", "completion", "label", "offset", "margin", "uid"),
        *("output", *CHATS),
    ),
    "reward_model": (
        *("prompt", "chosen", "rejected", "margin", "completions", "labels", "uid"),
        *CHATS,
    ),
}
