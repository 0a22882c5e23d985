"""The built-in tool `search`: the passages of a file that fit some words best, by BM25."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from oxrl.data.rows import Record, read_rows
from oxrl.errors import DataError

# How much a word counts that comes again, and how much long passages are made to weigh less.
K1 = 1.2
B = 0.75
_WORD = re.compile(r"\w+")
EXPECTED = '{"text": "a passage", "title": "its title, which may be left out"}'


def words(text: str) -> list[str]:
    """The words of a text, in small letters.

    Args:
        text: of a passage or of a query.

    Returns:
        Runs of letters, digits and underscores, in order.
    """
    return _WORD.findall(text.lower())


class Bm25:
    """Index of some texts that finds those which fit a query best.

    The weight of a word in a text, with idf = ln(1 + (N - n + 0.5) / (n + 0.5)) for a word in n of
    N texts, and tf times in this one, which has L words where the mean is M:

        idf · tf · (k1 + 1) / (tf + k1 · (1 - b + b · L / M))

    Args:
        texts: at least one.

    Source: Robertson, Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009),
        equation 3.15; the idf is Lucene's, which is never negative.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(words(text)) for text in texts]
        lengths = np.array([count.total() for count in counts])
        places: dict[str, list[tuple[int, int]]] = {}
        for number, count in enumerate(counts):
            for word, times in count.items():
                places.setdefault(word, []).append((number, times))
        longer = K1 * (1 - B + B * lengths / (lengths.mean() or 1.0))
        self._count = len(texts)
        self._weights: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, found in places.items():
            inside, often = np.array(found).T
            idf = math.log(1 + (self._count - len(found) + 0.5) / (len(found) + 0.5))
            weights = idf * often * (K1 + 1) / (often + longer[inside])
            # A view would keep the counts as well.
            self._weights[word] = (inside.copy(), weights.astype(np.float32))

    def best(self, query: str, top: int) -> list[tuple[int, float]]:
        """The numbers of the best texts and their scores, best first; of equal ones the first.

        Texts without any word of the query are left out.

        Args:
            query: words that count as often as they stand in it.
            top: at most so many.
        """
        scores = np.zeros(self._count)
        for word, times in Counter(words(query)).items():
            if word in self._weights:
                inside, weights = self._weights[word]
                scores[inside] += times * weights
        order = np.argsort(-scores, kind="stable")[:top]
        return [(int(number), float(scores[number])) for number in order if scores[number] > 0]


# Read once in the process that all episodes are copies of.
@functools.cache
def read_passages(file: str) -> tuple[list[tuple[str, str]], Bm25]:
    """The passages of a JSONL or Parquet file.

    Args:
        file: with fields `text` and perhaps `title`.

    Returns:
        Title and text of each, in file order, a missing title empty; and what finds those that fit.

    Raises:
        DataError: it cannot be read, or a row has no text; names the row.
    """
    passages: list[tuple[str, str]] = []
    for record in read_rows(file):
        text = _text(record, "text")
        title = _text(record, "title") if "title" in record.fields else ""
        passages.append((title, text))
    if not passages:
        raise DataError(f"{file} has no row; a passage is {EXPECTED}")
    return passages, Bm25([f"{title}\n{text}" for title, text in passages])


def _text(record: Record, field: str) -> str:
    value = record.fields.get(field)
    if not isinstance(value, str):
        record.fail(f'no text under "{field}"', EXPECTED)
    return value


class SearchTool:
    """Search in a file of passages.

    Args:
        file: JSONL or Parquet, a passage per row: `text`, and perhaps `title`.
        top: passages per answer.
        longest: characters shown of a passage.

    Raises:
        ValueError: no file, or limits that leave nothing.
    """

    def __init__(self, file: str = "", top: int = 3, longest: int = 1000) -> None:
        if not file:
            raise ValueError("the tool search needs a file: write {name: search, file: F.jsonl}")
        if not (isinstance(top, int) and top > 0 and isinstance(longest, int) and longest > 0):
            found = f"top={top!r}, longest={longest!r}"
            raise ValueError(f"the tool search needs top and longest of 1 or more, got {found}")
        self._file = str(Path(file).resolve())
        self._top = top
        self._longest = longest
        # What the policy calls.
        self.function = self.search

    def search(self, query: str) -> str:
        """Search for passages; returns those that fit best.

        Args:
            query: A few words to look for.
        """
        passages, ranking = read_passages(self._file)
        found: list[str] = []
        for rank, (number, _) in enumerate(ranking.best(query, self._top), start=1):
            title, text = passages[number]
            if len(text) > self._longest:
                text = f"{text[: self._longest]} ..."
            found.append(f"[{rank}] {title}\n{text}" if title else f"[{rank}] {text}")
        return "\n\n".join(found) or "Nothing was found."

    def check(self) -> None:
        """Read the file.

        Raises:
            DataError: it holds no passages; says which row is wrong.
        """
        read_passages(self._file)
