"""`oxrl contamination`: held-out prompts that stand in the training data of a run."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from oxrl.commands.evaluator import open_configured
from oxrl.data.rows import Record
from oxrl.errors import ConfigError, DataError
from oxrl.runs.files import json_safe, pretty_json
from oxrl_stats.evaluated import read_answers
from oxrl_stats.intervals import Interval, all_scored, mean_interval

Words = tuple[str, ...]
# Words in a row that two texts hardly share by chance: as of GPT-3, arXiv:2005.14165, appendix C.
LONG = 13
# With the same answer, fewer are enough.
SHORT = 8
# A word; or an operator between two numbers, without which 3-4 and 3+4 would be one prompt.
WORD = re.compile(r"[^\W_]+|(?<=\d)\s*[-+*/^]\s*(?=\d)")
# Rows of the training data that a report names for each prompt.
SHOWN = 3


def words_of(text: str) -> Words:
    """The words of a text in small letters, without punctuation.

    Args:
        text: of a prompt or an answer.
    """
    return tuple(word.strip() for word in WORD.findall(text.casefold()))


@dataclass(kw_only=True)
class Match:
    """A held-out prompt that stands in training data.

    prompt: its number. place: of its row, "file:line". rows: places of training rows, with what
    they share.
    """

    prompt: int
    place: str
    question: str
    rows: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """The held-out prompts that stand in training data, in their order.

    prompts: of the held-out file. rows: of training data that were read. with_them, without: mean
    reward with all prompts, and without those that match; None where no answers were given.
    """

    prompts: int
    rows: int
    matches: list[Match]
    with_them: Interval | None = None
    without: Interval | None = None


class Index:
    """Held-out prompts by the runs of words that training data are searched for."""

    def __init__(self) -> None:
        self.long: dict[Words, set[int]] = defaultdict(set)
        self.short: dict[Words, set[int]] = defaultdict(set)
        self.answers: dict[int, Words] = {}
        self.lengths: set[int] = set()

    def add(self, number: int, question: str, answer: object) -> None:
        """Take a prompt in.

        Args:
            number: of the prompt.
            question: its text.
            answer: of its row.
        """
        words = words_of(question)
        length = min(LONG, len(words))
        if not length:
            return
        self.lengths.add(length)
        for run in runs_of(words, length):
            self.long[run].add(number)
        told = _answer(answer)
        if told and len(words) >= SHORT:
            self.answers[number] = told
            for run in runs_of(words, SHORT):
                self.short[run].add(number)

    def search(self, text: str, answer: object) -> Iterator[tuple[int, str]]:
        """Yield the number of every prompt that stands in a text, and what they share.

        Args:
            text: of a training row.
            answer: of that row.
        """
        words = words_of(text)
        for length in self.lengths:
            # One word is found in most texts: it counts where it is all there is.
            if length > 1 or len(words) == 1:
                for run in runs_of(words, length):
                    yield from ((number, " ".join(run)) for number in self.long.get(run, ()))
        told = _answer(answer)
        if told and self.short:
            for run in runs_of(words, SHORT):
                for number in self.short.get(run, ()):
                    if self.answers[number] == told:
                        yield number, f"{' '.join(run)}, and the same answer"


def runs_of(words: Words, length: int) -> Iterator[Words]:
    """Yield every `length` words in a row.

    Args:
        words: of a text.
        length: of a run.
    """
    for start in range(len(words) - length + 1):
        yield words[start : start + length]


def _answer(answer: object) -> Words:
    return words_of(str(answer)) if isinstance(answer, str | int | float) else ()


def questions_of(fields: Mapping[str, Any]) -> list[str]:
    """The texts of a held-out row by which it is known: what the user says in it.

    Args:
        fields: of the row.
    """
    return list(_texts(fields.get("prompt", fields.get("messages")), of_user=True))


def texts_of_row(fields: Mapping[str, Any]) -> list[str]:
    """All texts of a training row: its prompt, its answer in words, and both of a pair.

    Args:
        fields: of the row.
    """
    kept = ("prompt", "messages", "completion", "chosen", "rejected", "text")
    return [text for name in kept for text in _texts(fields.get(name), of_user=False)]


def _texts(value: Any, *, of_user: bool) -> Iterator[str]:
    """Texts in a message, a list of messages or the parts of one; none of a system's message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        role = value.get("role")
        if role == "system" or (of_user and role not in (None, "user")):
            return
        yield from _texts(value.get("content", value.get("text")), of_user=of_user)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item, of_user=of_user)


def search(held_out: Iterable[Record], training: Iterable[Record]) -> Contamination:
    """Find held-out prompts in training data.

    Args:
        held_out, training: rows of both, in the words of oxRL.

    Raises:
        DataError: no held-out row has a text.
    """
    index = Index()
    known: list[Match] = []
    for number, record in enumerate(held_out):
        texts = questions_of(record.fields)
        known.append(Match(prompt=number, place=record.place, question=texts[-1] if texts else ""))
        for text in texts:
            index.add(number, text, record.fields.get("answer"))
    if not index.lengths:
        raise DataError(
            f"none of {len(known)} held-out rows has a prompt or messages with a text to look for; "
            "name its column in data.columns, such as {prompt: question}"
        )
    rows = 0
    for record in training:
        rows += 1
        answer = record.fields.get("answer")
        for text in texts_of_row(record.fields):
            for number, shared in index.search(text, answer):
                known[number].rows.setdefault(record.place, shared)
    matches = [match for match in known if match.rows]
    return Contamination(prompts=len(known), rows=rows, matches=matches)


def run_contamination(
    target: str | Path,
    overrides: Sequence[str] = (),
    *,
    data: str | None = None,
    answers: Path | None = None,
    out: Path | None = None,
) -> Contamination:
    """`oxrl contamination`: look for the prompts of a held-out file in what a run trains on.

    Args:
        target: a run, or the file of a configuration.
        overrides: of the configuration.
        data: the held-out file; None: `data.eval`.
        answers: of `oxrl eval --out`, to tell the reward with and without the prompts found.
        out: write what was found there, as JSON.

    Raises:
        ConfigError: no file is named, or the answers are not to these prompts.
        DataError: a file cannot be read.
    """
    held_out = () if data is None else (f"data.eval={json.dumps(data)}",)
    run = open_configured(target, (*overrides, *held_out))
    if run.held_out is None:
        raise ConfigError("data.eval is not set: write --data FILE, the held-out prompts")
    found = search(run.rows([run.held_out]), run.rows(run.training_files))
    if answers is not None:
        found = _with_rewards(found, answers)
    if out is not None:
        out.write_text(pretty_json(json_safe(asdict(found))), "utf-8")
    return found


def _with_rewards(found: Contamination, answers: Path) -> Contamination:
    given = read_answers(answers)
    if len(given.uids) != found.prompts:
        raise ConfigError(
            f"--answers {answers} has {len(given.uids)} prompts, and the held-out file "
            f"{found.prompts}: evaluate on that file"
        )
    known = all_scored(given.rewards)
    clean = known.copy()
    clean[[match.prompt for match in found.matches]] = False
    return replace(
        found,
        with_them=mean_interval(given.rewards[known]),
        without=mean_interval(given.rewards[clean]),
    )


def told(found: Contamination) -> str:
    """The matches in lines of text.

    Args:
        found: by `run_contamination`.
    """
    count = len(found.matches)
    share = count / max(found.prompts, 1)
    lines = [
        f"{count} of {found.prompts} held-out prompts ({share:.1%}) stand in {found.rows} training "
        "rows",
        "what the model read before this training is not looked at, and cannot be",
    ]
    if found.with_them is not None and found.without is not None:
        lines += [
            f"reward with all prompts      {found.with_them.text}",
            f"reward without those found   {found.without.text}",
        ]
    for match in found.matches:
        lines.append(f"{match.place}: {match.question[:80]!r}")
        for row, shared in list(match.rows.items())[:SHOWN]:
            lines.append(f"  {row}: {shared[:100]!r}")
    return "\n".join(lines)
