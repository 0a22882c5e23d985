"""Rows into a part to train on and one to test on, which share no prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from oxrl.data.rows import Fields, JsonObject
from oxrl.errors import DataError
from oxrl.seeds import stable_seed
from oxrl_datasets.generated import Files


def split_rows(rows: Sequence[Fields], share: float, seed: int) -> tuple[Files, JsonObject]:
    """Put some rows aside; rows with the same prompt stay together, so that no test is trained on.

    Args:
        rows: of one file; their order stays.
        share: below 1 the share of the rows that is put aside, else how many rows; as close as
            rows that stay together allow.
        seed: of the choice.

    Returns:
        Both parts, train and test, in their original order; and what the report says of them.

    Raises:
        DataError: nothing would be left on one side.
    """
    wanted = round(share * len(rows)) if share < 1 else int(share)
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(_question(row), []).append(index)
    order = list(groups.values())
    random.Random(stable_seed("split", seed)).shuffle(order)
    aside: set[int] = set()
    for group in order:
        if len(aside) + len(group) <= wanted:
            aside.update(group)
    if not aside or len(aside) == len(rows):
        raise DataError(
            f"--test {share:g} puts {len(aside)} of {len(rows)} rows ({len(groups)} different "
            "prompts) aside; some have to be on either side"
        )
    test = [rows[index] for index in sorted(aside)]
    train = [row for index, row in enumerate(rows) if index not in aside]
    repeated = len(rows) - len(groups)
    facts = {"test": share, "different_prompts": len(groups), "repeated_prompts": repeated}
    return {"train": train, "test": test}, facts


def _question(row: Fields) -> str:
    """The question of a row, alike for rows that differ in white space and case alone."""
    asked = row.get("prompt", row.get("messages", row.get("chosen")))
    if isinstance(asked, list) and "messages" in row:
        asked = asked[:-1]
    text = asked if isinstance(asked, str) else json.dumps(asked, sort_keys=True)
    return " ".join(text.split()).casefold()
