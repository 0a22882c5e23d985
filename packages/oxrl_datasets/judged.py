"""Preference pairs from samples and a judge: which response a language model prefers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Literal

from oxrl.data.rows import Fields, Json, Record, Rows
from oxrl.errors import DataError
from oxrl.runs.waiting import Patience, StopRequest
from oxrl.types import Completion, Completions, Prompt, Score
from oxrl_graders.judge.options import RUBRIC, JudgeOptions
from oxrl_graders.judge.pool import JudgePool

EXPECTED = (
    'lines of samples.jsonl ("prompt" or "messages", "response"), rows with "prompt" and '
    '"completions", or rows of one "prompt" and one "completion" each'
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Asks a judge about the responses to each prompt, and makes pairs of better and worse.

    Args:
        url, model, key_env, rubric, compare: of the judge, as the reward `judge` has them.
        verdict, pattern, constrained, swap, opponents, low, high, max_tokens: likewise.
        pairs: best_worst: one of each prompt; all: every two that differ by enough.
        least_gap: pairs differ by more than this, on a scale from 0 to 1.
        requests: at a time.
        timeout_s: seconds for each verdict.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    rubric: str = RUBRIC
    compare: Literal["none", "group"] = "none"
    verdict: Literal["json", "regex"] = "json"
    pattern: str = ""
    constrained: bool = True
    swap: bool = True
    opponents: int = 0
    low: int = 1
    high: int = 10
    max_tokens: int = 512
    pairs: Literal["best_worst", "all"] = "best_worst"
    least_gap: float = 0.0
    requests: int = 8
    timeout_s: float = 60.0

    def pool(self, out: Path) -> JudgePool:
        """Make the pool that asks the judge.

        Args:
            out: folder that verdicts are kept in, so that nothing is asked twice.

        Returns:
            The pool, which has asked nothing yet.

        Raises:
            DataError, RewardDefinitionError: an option that cannot work.
        """
        if self.requests < 1 or self.timeout_s <= 0:
            given = f"{self.requests} and {self.timeout_s:g}"
            raise DataError(f"need requests >= 1 and timeout_s > 0, got {given}")
        of_judge = {field.name for field in fields(JudgeOptions)}
        options = {name: value for name, value in asdict(self).items() if name in of_judge}
        return JudgePool(
            options,
            workers=self.requests,
            timeout_s=self.timeout_s,
            field="judged",
            directory=out,
        )

    def make(self, pool: JudgePool, stem: str, records: Iterable[Record]) -> tuple[Rows, Json]:
        """The pairs of one file, and what came of its prompts.

        Args:
            pool: asks the judge.
            stem: of the file that is written.
            records: samples.

        Raises:
            DataError: a row without a prompt or a response, or no pair at all.
            RewardDefinitionError: an option that cannot work, or no key.
            Interrupted: a signal asked to stop; what was said is kept.
        """
        groups = _groups(records)
        with StopRequest() as stop:
            try:
                scores = pool.score(groups, Patience(lambda: bool(stop)))
            finally:
                pool.close()
        rows: Rows = []
        failures: list[str] = []
        for (prompt, members), judged in zip(groups, scores, strict=True):
            failures += [score.reason for score in judged if score.value is None]
            rows += self._pairs(stem, prompt, members, judged)
        facts: Json = {
            "prompts": len(groups),
            "responses": sum(len(members) for _, members in groups),
            "failed": len(failures),
            "failures": failures[:10],
        }
        if not rows:
            example = f"; the first failure: {failures[0]}" if failures else ""
            raise DataError(f"{stem}: no two responses to one prompt differ: {facts}{example}")
        return rows, facts

    def _pairs(
        self, stem: str, prompt: Prompt, members: Completions, scores: Sequence[Score]
    ) -> Rows:
        found = [
            (score.value, completion.text)
            for score, completion in zip(scores, members, strict=True)
            if score.value is not None
        ]
        ranked = sorted(found, key=itemgetter(0), reverse=True)
        chosen = list(combinations(ranked, 2))
        if self.pairs == "best_worst":
            chosen = chosen and [(ranked[0], ranked[-1])]
        rows: Rows = []
        for (high, better), (low, worse) in chosen:
            if high - low > self.least_gap:
                part = f"/{len(rows)}" if self.pairs == "all" else ""
                rows.append(
                    {
                        "uid": f"judged/{stem}/{prompt.uid}{part}",
                        "source": "judged",
                        "prompt": [dict(message) for message in prompt.messages],
                        "chosen": better,
                        "rejected": worse,
                        "scores": [high, low],
                    }
                )
        return rows


def _groups(records: Iterable[Record]) -> list[tuple[Prompt, list[Completion]]]:
    """The different responses to each prompt, in the order in which prompts come first."""
    groups: dict[str, tuple[Prompt, dict[str, Completion]]] = {}
    for record in records:
        messages = _messages(record)
        key = json.dumps(messages, ensure_ascii=False)
        if key not in groups:
            prompt = Prompt(
                uid=f"{len(groups):06d}",
                messages=tuple(messages),
                token_ids=(),
                answer=record.fields.get("answer"),
            )
            groups[key] = (prompt, {})
        for text in _responses(record):
            completion = Completion(segments=(), text=text, finish_reason="stop")
            groups[key][1][text] = completion
    return [(prompt, list(members.values())) for prompt, members in groups.values()]


def _messages(record: Record) -> Sequence[Fields]:
    prompt = record.fields.get("messages") or record.fields.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        record.fail("no prompt", EXPECTED)
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            record.fail("a prompt that is neither text nor messages of role and content", EXPECTED)
    return prompt


def _responses(record: Record) -> list[str]:
    found = record.fields
    given = found.get("completions", found.get("response", found.get("completion")))
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        record.fail("no response", EXPECTED)
    return texts
