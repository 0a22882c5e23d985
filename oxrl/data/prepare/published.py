"""Published datasets row by row: one short function each, from the fields as published to rows oxRL
reads.

A function returns the rows it makes of one raw row, or raises ValueError with the reason why it
makes none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NoReturn

from oxrl.rewards.math import closing_brace

Fields = Mapping[str, Any]
Rows = list[dict[str, Any]]
_FINAL_NUMBER = (
    'Think step by step, then write the final number alone on the last line as "#### N".'
)


def gsm8k(fields: Fields, *, instruction: str = _FINAL_NUMBER, calculator: bool = False) -> Rows:
    """A word problem, then `instruction`; the bare number; the solution, with its <<48/2=24>> only
    for `calculator`.
    """
    solution, marker, last = fields["answer"].rpartition("####")
    gold = last.strip().replace(",", "")
    if not marker or not re.fullmatch(r"-?\d+(\.\d+)?", gold):
        _no(f"the answer does not end in '#### N' but in {fields['answer'][-40:]!r}")
    solution = solution if calculator else re.sub(r"<<[^<>]*>>", "", solution)
    question = fields["question"].strip() or _no("the question is empty")
    prompt = f"{question}\n{instruction}".strip()
    return [{"prompt": prompt, "answer": gold, "completion": f"{solution.strip()}\n#### {gold}"}]


def math(fields: Fields) -> Rows:
    """MATH and its like: `problem`, and a `solution` whose last box is the answer."""
    solution = fields["solution"]
    _, marker, rest = solution.rpartition("\\boxed{")
    end = closing_brace(rest, 0)
    answer = (
        rest[:end]
        if marker and end < len(rest)
        else _no("no \\boxed{} in the solution, or it never ends")
    )
    kept = {name: fields[name] for name in ("level", "type") if name in fields}
    return [{"prompt": fields["problem"], "answer": answer, "completion": solution, **kept}]


def svamp(fields: Fields) -> Rows:
    """The story and its question in one prompt; the answer as a plain number."""
    body = fields["Body"].strip()
    prompt = f"{body}{'' if body[-1] in '.?!,' else '.'} {fields['Question'].strip()}"
    return [{"prompt": prompt, "answer": f"{fields['Answer']:g}", "uid": fields["ID"]}]


def aqua(fields: Fields) -> Rows:
    """Multiple choice: the letter is the answer."""
    letters = [option[0] for option in fields["options"]]
    if fields["correct"] not in letters:
        _no(f"the right letter {fields['correct']!r} is no option")
    options = "\n".join(option.replace(")", ") ", 1) for option in fields["options"])
    prompt = f'{fields["question"]}\n{options}\nThink step by step, then write the letter as "#### X" on the last line.'
    completion = f"{fields['rationale']}\n#### {fields['correct']}"
    return [{"prompt": prompt, "answer": fields["correct"], "completion": completion}]


def humaneval(fields: Fields) -> Rows:
    """A function to complete; the answer is its tests."""
    answer = {name: fields[name] for name in ("prompt", "test", "entry_point")}
    prompt = f"Complete this Python function. Answer with the whole function.\n\n{fields['prompt']}"
    completion = fields["prompt"] + fields["canonical_solution"]
    return [
        {"prompt": prompt, "answer": answer, "completion": completion, "uid": fields["task_id"]}
    ]


def mbpp(fields: Fields) -> Rows:
    """A function to write from one sentence and its first test; the answer is all tests."""
    tests, setup = fields["test_list"], fields["test_setup_code"].replace("\r\n", "\n")
    prompt = f"{fields['text']}\nYour code must pass this test:\n{tests[0]}"
    answer = {"tests": tests + fields["challenge_test_list"], "setup": setup}
    completion = fields["code"].replace("\r\n", "\n")
    return [
        {
            "prompt": prompt,
            "answer": answer,
            "completion": completion,
            "uid": f"mbpp/{fields['task_id']}",
        }
    ]


def bbh(fields: Fields) -> Rows:
    """The authors' canary stays in every row."""
    row = {"prompt": fields["input"], "answer": fields["target"], "source": f"bbh/{fields['task']}"}
    return [{**row, "canary": fields["canary"]}]


def ifeval(fields: Fields) -> Rows:
    """The answer is what a checker reads: instruction ids and their arguments."""
    answer = {"instructions": fields["instruction_id_list"], "kwargs": fields["kwargs"]}
    return [{"prompt": fields["prompt"], "answer": answer, "uid": f"ifeval/{fields['key']}"}]


def pandalm(fields: Fields) -> Rows:
    """The reply that more annotators preferred; `margin` is by how many votes, of three."""
    votes = Counter(fields[f"annotator{number}"] for number in (1, 2, 3))
    if votes[1] == votes[2]:
        _no("no reply has more votes")
    best, worst = (1, 2) if votes[1] > votes[2] else (2, 1)
    replies = {"chosen": fields[f"response{best}"], "rejected": fields[f"response{worst}"]}
    return [
        {
            "prompt": _instruction(fields),
            **_pair(**replies),
            "margin": (votes[best] - votes[worst]) / 3,
        }
    ]


def ranked(fields: Fields) -> Rows:
    """`output` lists replies, best first: every pair of them; `history` holds the turns before."""
    prompt = _messages([*(fields.get("history") or ()), (_instruction(fields),)])
    return [
        {"prompt": prompt, "chosen": a, "rejected": b} for a, b in combinations(fields["output"], 2)
    ]


def instructions(fields: Fields) -> Rows:
    """instruction, input, output, history: one conversation to learn."""
    if not fields["output"].strip():
        _no("the output is empty")
    turns = [*(fields.get("history") or ()), (_instruction(fields), fields["output"])]
    return [{"messages": _messages(turns)}]


def oasst_pairs(fields: Fields) -> Rows:
    """Every two ranked replies to the same message, after everything said before; rank 0 is
    best.
    """
    rows: Rows = []
    for path, node in _walk(fields["prompt"], []):
        replies = [
            r for r in node.get("replies", ()) if r.get("rank") is not None and not r.get("deleted")
        ]
        for a, b in combinations(sorted(replies, key=lambda reply: reply["rank"]), 2):
            if node["role"] == "prompter" and a["rank"] < b["rank"]:
                rows.append({"prompt": path, "chosen": a["text"], "rejected": b["text"]})
    return rows if rows else _no("no two ranked replies to one message")


def oasst_chats(fields: Fields) -> Rows:
    """Every way from the first message to a last reply of the assistant, along replies that are
    ranked best.
    """
    paths = [
        path
        for path, node in _walk(fields["prompt"], [], best_only=True)
        if node["role"] == "assistant"
    ]
    # What continues a path stands right behind it.
    last = [
        path
        for path, after in zip(paths, [*paths[1:], []], strict=True)
        if after[: len(path)] != path
    ]
    return [{"messages": path} for path in last] if last else _no("nobody answered")


def prompt_response(
    fields: Fields, *, prompt: str = "prompt", response: str = "completion"
) -> Rows:
    """Any prompt and response columns, by their names."""
    return [{"prompt": fields[prompt], "completion": fields[response]}]


def preference(
    fields: Fields, *, prompt: str = "prompt", chosen: str = "chosen", rejected: str = "rejected"
) -> Rows:
    """Any preference columns, by their names."""
    return [{"prompt": fields[prompt], **_pair(fields[chosen], fields[rejected])}]


CONVERTERS: dict[str, Callable[..., Rows]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(gsm8k, math, svamp, aqua, humaneval, mbpp, bbh, ifeval, pandalm, ranked, instructions),
        *(oasst_pairs, oasst_chats, prompt_response, preference),
    )
}


def checked(row: dict[str, Any]) -> dict[str, Any]:
    """`row`, or a ValueError or TypeError if what should be text is not, or a line of JSON cannot
    hold it.
    """
    json.dumps(row, ensure_ascii=False).encode()
    for name in ("prompt", "completion", "chosen", "rejected"):
        if name in row and not isinstance(row[name], str | list):
            raise ValueError(f"{name} is {type(row[name]).__name__}, not text")
    return row


def _no(reason: str) -> NoReturn:
    raise ValueError(reason)


def _pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    return (
        {"chosen": chosen, "rejected": rejected}
        if chosen != rejected
        else _no("both replies are the same")
    )


def _instruction(fields: Fields) -> str:
    return fields["instruction"] + (f"\n\n{fields['input']}" if fields.get("input") else "")


def _messages(turns: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Turns of [user, assistant] as messages."""
    texts = [text for turn in turns for text in turn]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _walk(
    node: Fields, before: list[dict[str, str]], *, best_only: bool = False
) -> Iterator[tuple[list[dict[str, str]], Fields]]:
    """(messages up to and with a node, the node) of every node of an OpenAssistant tree that was
    not deleted.

    With `best_only` one answer to each message: the best ranked, an unranked one only where there
    is no other.
    """
    if node.get("deleted"):
        return
    path = [
        *before,
        {"role": "user" if node["role"] == "prompter" else "assistant", "content": node["text"]},
    ]
    yield path, node
    replies = [reply for reply in node.get("replies", ()) if not reply.get("deleted")]
    if best_only and node["role"] == "prompter":
        replies = sorted(
            replies, key=lambda r: float("inf") if r.get("rank") is None else r["rank"]
        )[:1]
    for reply in replies:
        yield from _walk(reply, path, best_only=best_only)
