"""Published datasets row by row: one short function each, from raw fields to rows oxRL reads.

A function returns the rows it makes of one raw row, or raises ValueError with the reason why it
makes none. Its keyword arguments are the options that a user may set.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain, combinations, cycle, pairwise
from math import inf
from pathlib import Path

from oxrl.data.rows import Fields, Json, Rows, field_at
from oxrl_graders.relations import closing_bracket

_FINAL_NUMBER = (
    'Think step by step, then write the final number alone on the last line as "#### N".'
)
_FINAL_LETTER = 'Think step by step, then write the letter as "#### X" on the last line.'
_WHOLE_FUNCTION = "Complete this Python function. Answer with the whole function."


def gsm8k(fields: Fields, *, instruction: str = _FINAL_NUMBER, calculator: bool = False) -> Rows:
    """A word problem, its bare number and its solution.

    Args:
        fields: `question` and `answer`, which ends in "#### N".
        instruction: stands below the problem.
        calculator: keep the solution's <<48/2=24>>.

    Returns:
        One row: prompt, answer, completion.

    Raises:
        ValueError: the answer does not end so, or the question is empty.
    """
    solution, marker, last = fields["answer"].rpartition("####")
    gold = last.strip().replace(",", "")
    if not marker or not re.fullmatch(r"-?\d+(\.\d+)?", gold):
        end = fields["answer"][-40:]
        raise ValueError(f"the answer does not end in '#### N' but in {end!r}")
    if not calculator:
        solution = re.sub(r"<<[^<>]*>>", "", solution)
    question = fields["question"].strip()
    if not question:
        raise ValueError("the question is empty")
    prompt = f"{question}\n{instruction}".strip()
    return [{"prompt": prompt, "answer": gold, "completion": f"{solution.strip()}\n#### {gold}"}]


def math(fields: Fields) -> Rows:
    """MATH and its like: `problem`, and a `solution` whose last box is the answer.

    Args:
        fields: `problem`, `solution`, and perhaps `level` and `type`, which are kept.

    Returns:
        One row: prompt, answer, completion, and what is kept.

    Raises:
        ValueError: the solution has no whole box.
    """
    solution = fields["solution"]
    _, marker, rest = solution.rpartition("\\boxed{")
    end = closing_bracket(rest, 0)
    if not marker or end == len(rest):
        raise ValueError("no \\boxed{} in the solution, or it never ends")
    kept = {name: fields[name] for name in ("level", "type") if name in fields}
    return [{"prompt": fields["problem"], "answer": rest[:end], "completion": solution, **kept}]


def svamp(fields: Fields) -> Rows:
    """The story and its question in one prompt; the answer as a plain number.

    Args:
        fields: `Body`, `Question`, `Answer` and `ID`.

    Returns:
        One row: prompt, answer, uid.
    """
    body = fields["Body"].strip()
    stop = "" if body[-1] in ".?!," else "."
    prompt = f"{body}{stop} {fields['Question'].strip()}"
    return [{"prompt": prompt, "answer": f"{fields['Answer']:g}", "uid": fields["ID"]}]


def aqua(fields: Fields) -> Rows:
    """Multiple choice: the letter is the answer.

    Args:
        fields: `question`, `options` ("A)21"), `correct` and `rationale`.

    Returns:
        One row: prompt, answer, completion.

    Raises:
        ValueError: the right letter is no option.
    """
    letters = [option[0] for option in fields["options"]]
    right = fields["correct"]
    if right not in letters:
        raise ValueError(f"the right letter {right!r} is no option")
    options = [option.replace(")", ") ", 1) for option in fields["options"]]
    prompt = "\n".join([f"{fields['question']}", *options, _FINAL_LETTER])
    completion = f"{fields['rationale']}\n#### {right}"
    return [{"prompt": prompt, "answer": right, "completion": completion}]


def humaneval(fields: Fields) -> Rows:
    """A function to complete; the answer is its tests.

    Args:
        fields: `prompt`, `test`, `entry_point`, `canonical_solution` and `task_id`.

    Returns:
        One row: prompt, answer, completion, uid; for the reward `code`.
    """
    answer = {name: fields[name] for name in ("prompt", "test", "entry_point")}
    return [
        {
            "prompt": f"{_WHOLE_FUNCTION}\n\n{fields['prompt']}",
            "answer": answer,
            "completion": fields["prompt"] + fields["canonical_solution"],
            "uid": fields["task_id"],
        }
    ]


def mbpp(fields: Fields) -> Rows:
    """A function to write from one sentence and its first test; the answer is all tests.

    Args:
        fields: `text`, `code`, `test_list`, `challenge_test_list`, `test_setup_code` and `task_id`.

    Returns:
        One row: prompt, answer, completion, uid; for the reward `code`.
    """
    tests = fields["test_list"]
    setup = fields["test_setup_code"].replace("\r\n", "\n")
    return [
        {
            "prompt": f"{fields['text']}\nYour code must pass this test:\n{tests[0]}",
            "answer": {"tests": tests + fields["challenge_test_list"], "setup": setup},
            "completion": fields["code"].replace("\r\n", "\n"),
            "uid": f"mbpp/{fields['task_id']}",
        }
    ]


def bbh(fields: Fields) -> Rows:
    """A task of BIG-Bench Hard; the authors' canary stays in every row.

    Args:
        fields: `input`, `target`, `task` and `canary`.

    Returns:
        One row: prompt, answer, source, canary.
    """
    return [
        {
            "prompt": fields["input"],
            "answer": fields["target"],
            "source": f"bbh/{fields['task']}",
            "canary": fields["canary"],
        }
    ]


def ifeval(fields: Fields) -> Rows:
    """The answer is what a checker reads: instruction ids and their arguments.

    Args:
        fields: `prompt`, `instruction_id_list`, `kwargs` (one mapping for each id) and `key`.

    Returns:
        One row: prompt, answer, uid; for the reward `ifeval`.
    """
    answer = {"instructions": fields["instruction_id_list"], "kwargs": fields["kwargs"]}
    return [{"prompt": fields["prompt"], "answer": answer, "uid": f"ifeval/{fields['key']}"}]


def pandalm(fields: Fields) -> Rows:
    """The reply that more annotators preferred; `margin` is by how many votes, of three.

    Args:
        fields: an instruction, `response1`, `response2`, and `annotator1` to `annotator3`, each 0
            (neither), 1 or 2.

    Returns:
        One row: prompt, chosen, rejected, margin.

    Raises:
        ValueError: neither has more votes, or both replies are the same.
    """
    votes = Counter(fields[f"annotator{number}"] for number in (1, 2, 3))
    if votes[1] == votes[2]:
        raise ValueError("no reply has more votes")
    best = 1 if votes[1] > votes[2] else 2
    worst = 3 - best
    pair = _pair(fields[f"response{best}"], fields[f"response{worst}"])
    margin = (votes[best] - votes[worst]) / 3
    return [{"prompt": _instruction(fields), **pair, "margin": margin}]


def ranked(fields: Fields) -> Rows:
    """`output` lists replies, best first: every pair of them; `history` holds the turns before.

    Args:
        fields: an instruction, `output`, and perhaps `history`.

    Returns:
        A row for each pair: prompt (messages), chosen, rejected.
    """
    prompt = _messages(fields, [_instruction(fields)])
    pairs = combinations(fields["output"], 2)
    return [{"prompt": prompt, "chosen": better, "rejected": worse} for better, worse in pairs]


def instructions(fields: Fields) -> Rows:
    """instruction, input, output, history: one conversation to learn.

    Args:
        fields: `instruction`, `output`, and perhaps `input` and `history`.

    Returns:
        One row: messages.

    Raises:
        ValueError: the output is empty.
    """
    if not fields["output"].strip():
        raise ValueError("the output is empty")
    return [{"messages": _messages(fields, [_instruction(fields), fields["output"]])}]


def oasst_pairs(fields: Fields) -> Rows:
    """Every two ranked replies to the same message, after everything said before; 0 is best.

    Args:
        fields: `prompt`, a tree of messages with `replies`.

    Returns:
        A row for each pair: prompt (messages), chosen, rejected.

    Raises:
        ValueError: no two replies to one message are ranked.
    """
    rows: Rows = []
    for path, node in _walk(fields["prompt"], []):
        replies = [reply for reply in _replies(node) if reply.get("rank") is not None]
        for better, worse in combinations(sorted(replies, key=_rank), 2):
            if node["role"] == "prompter" and better["rank"] < worse["rank"]:
                rows.append({"prompt": path, "chosen": better["text"], "rejected": worse["text"]})
    if not rows:
        raise ValueError("no two ranked replies to one message")
    return rows


def oasst_chats(fields: Fields) -> Rows:
    """Every way to a last reply of the assistant, along replies that are ranked best.

    Args:
        fields: `prompt`, a tree of messages with `replies`.

    Returns:
        A row for each way: messages.

    Raises:
        ValueError: the assistant says nothing in it.
    """
    walk = _walk(fields["prompt"], [], best_only=True)
    paths = [path for path, node in walk if node["role"] == "assistant"]
    if not paths:
        raise ValueError("nobody answered")
    # What continues a path stands right behind it.
    following = pairwise([*paths, []])
    return [{"messages": path} for path, after in following if after[: len(path)] != path]


def prompt_response(
    fields: Fields, *, prompt: str = "prompt", response: str = "completion"
) -> Rows:
    """Any prompt and response columns, by their names.

    Args:
        fields: of any row.
        prompt, response: names of the columns.

    Returns:
        One row: prompt, completion.
    """
    return [{"prompt": fields[prompt], "completion": fields[response]}]


def prompt_answer(
    fields: Fields, *, prompt: str = "prompt", answer: str = "answer", completion: str = ""
) -> Rows:
    """Any prompt and answer columns, by their names ("a.b": field b inside of a), for rewards.

    Args:
        fields: of any row.
        prompt, answer: names of the columns.
        completion: column of a whole solution, for supervised fine-tuning and its evaluation.

    Returns:
        One row: prompt, answer, and completion where it is asked for.

    Raises:
        ValueError: the prompt or the answer is empty.
    """
    row = {"prompt": _column(fields, prompt), "answer": _column(fields, answer)}
    if completion:
        row["completion"] = _column(fields, completion)
    if isinstance(row["prompt"], str) and not row["prompt"].strip():
        raise ValueError("the prompt is empty")
    if row["answer"] is None:
        raise ValueError("the answer is empty")
    return [row]


def preference(
    fields: Fields, *, prompt: str = "prompt", chosen: str = "chosen", rejected: str = "rejected"
) -> Rows:
    """Any preference columns, by their names.

    Args:
        fields: of any row.
        prompt, chosen, rejected: names of the columns.

    Returns:
        One row: prompt, chosen, rejected.

    Raises:
        ValueError: both replies are the same.
    """
    return [{"prompt": fields[prompt], **_pair(fields[chosen], fields[rejected])}]


def nlvr(fields: Fields) -> Rows:
    """NLVR: is the sentence true of the drawing? Drawings are put on white where they let through.

    A row holds its drawing, or stands beside a folder `images` with `dev-<identifier>-0.png`.

    Args:
        fields: `sentence`, `label`, and `image` or `identifier`.

    Returns:
        One row: prompt, answer, images.

    Raises:
        ValueError: the label is neither true nor false.
    """
    picture = fields.get("image")
    content = picture.get("bytes") if isinstance(picture, Mapping) else None
    if content is None:
        name = f"dev-{fields['identifier']}-0.png"
        content = (Path(fields[FOLDER]) / "images" / name).read_bytes()
    answer = str(fields["label"]).lower()
    if answer not in ("true", "false"):
        raise ValueError(f"the label is {answer!r}")
    prompt = f"{fields['sentence']}\ntrue or false?"
    return [{"prompt": prompt, "answer": answer, "images": [_on_white(content)]}]


def _on_white(content: bytes) -> str:
    """An image without transparency, as a data URL."""
    from PIL import Image

    from oxrl.data.image_files import FORMATS  # with Pillow, for images alone

    with Image.open(BytesIO(content), formats=FORMATS) as image:
        drawn = image.convert("RGBA")
        white = Image.new("RGBA", drawn.size, "white")
        white.alpha_composite(drawn)
        written = BytesIO()
        white.convert("RGB").save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


# Field with the folder of the raw file, beside which images may lie.
FOLDER = " folder"
# What else a converter takes are its own options, whose types `prepare` reads from its signature.
CONVERTERS: dict[str, Callable[..., Rows]] = {
    "gsm8k": gsm8k,
    "math": math,
    "svamp": svamp,
    "aqua": aqua,
    "humaneval": humaneval,
    "mbpp": mbpp,
    "bbh": bbh,
    "ifeval": ifeval,
    "pandalm": pandalm,
    "ranked": ranked,
    "instructions": instructions,
    "oasst-pairs": oasst_pairs,
    "oasst-chats": oasst_chats,
    "prompt-response": prompt_response,
    "prompt-answer": prompt_answer,
    "preference": preference,
    "nlvr": nlvr,
}


def checked(row: Fields) -> Fields:
    """Return a converted row if it can be written and read.

    Args:
        row: of a converter.

    Raises:
        ValueError, TypeError: what should be text is not, or a line of JSON cannot hold it.
    """
    json.dumps(row, ensure_ascii=False).encode()
    for name in ("prompt", "completion", "chosen", "rejected"):
        if name in row and not isinstance(row[name], str | list):
            raise ValueError(f"{name} is {type(row[name]).__name__}, not text")
    return row


def _column(fields: Fields, path: str) -> Json:
    found, value = field_at(fields, path)
    if not found:
        raise KeyError(path)
    return value


def _pair(chosen: str, rejected: str) -> Fields:
    if chosen == rejected:
        raise ValueError("both replies are the same")
    return {"chosen": chosen, "rejected": rejected}


def _instruction(fields: Fields) -> str:
    given = f"\n\n{fields['input']}" if fields.get("input") else ""
    return fields["instruction"] + given


def _messages(fields: Fields, turn: Sequence[str]) -> list[dict[str, str]]:
    """Turns of [user, assistant] as messages: those of `history`, and behind them one more."""
    texts = chain.from_iterable([*(fields.get("history") or ()), turn])
    return [
        {"role": role, "content": text} for text, role in zip(texts, cycle(("user", "assistant")))
    ]


def _replies(node: Fields) -> Rows:
    """The replies to a message of an OpenAssistant tree that were not deleted."""
    return [reply for reply in node.get("replies", ()) if not reply.get("deleted")]


def _rank(reply: Fields) -> float:
    """0 for the best of the replies to one message; those that nobody ranked come last."""
    return inf if reply.get("rank") is None else reply["rank"]


def _walk(
    node: Fields, before: list[dict[str, str]], *, best_only: bool = False
) -> Iterator[tuple[list[dict[str, str]], Fields]]:
    """Every node of an OpenAssistant tree that was not deleted, after the messages up to it.

    With `best_only` one answer to each message: the best ranked, an unranked one only where there
    is no other.
    """
    if node.get("deleted"):
        return
    role = "user" if node["role"] == "prompter" else "assistant"
    path = [*before, {"role": role, "content": node["text"]}]
    yield path, node
    replies = _replies(node)
    if best_only and role == "user":
        replies = sorted(replies, key=_rank)[:1]
    for reply in replies:
        yield from _walk(reply, path, best_only=best_only)
