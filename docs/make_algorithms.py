"""Write docs/algorithms.md from the table of algorithms and the docstrings of its functions: `make
docs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oxrl.functional.equations import EQUATIONS, LOSSES, told_of
from oxrl.tables.cells import find_cell
from oxrl.tables.numbers import Value
from oxrl.tables.policy import ROWS, Row
from oxrl_proofs.rows import ROW_PROOFS, proofs_of

ROOT = Path(__file__).resolve().parent.parent
HEADER = """# Algorithms

Generated from `oxrl/tables/policy.py` and the docstrings in `oxrl/functional` by `make docs`.

A policy-gradient algorithm is a row of named cells; `train.alg_name` picks a row, any cell can be
replaced from YAML (`train.advantage`, `train.ratio`, `train.denominator`, `train.loss`,
`train.correction`, `train.centering`, `train.kl`, `train.weights`), and
such a combination is a new algorithm without code.

```text
rewards -> advantage -> ratio (level, denominator) -> gate -> correction -> centering -> KL
        -> loss weights

loss = sum_bt loss_weights * ( -correction * S(r, A) + kl_coeff * kl - entropy_coeff * H )
```

With centering, the expectation of `-correction * S(r, A)` under the sampler is subtracted from it.

`S` is the gate's surrogate, `r` the ratio to the old or the sampling policy, `A` the advantage.
Loss weights are computed once per optimizer step over the global batch, so micro-batches, padding
and ranks cannot change a gradient. At `r = 1` every gate has the gradient of the plain policy
gradient, unless its row says otherwise.

`oxrl algorithms` prints the table, `oxrl algorithms --family NAME` the rows of one recipe (`rl`,
`preference`, ...) or with one cell or need (`cispo`, `critic`), and `oxrl algorithms --check` runs
the proofs of every row:

"""
COMPARED = ("ppo", "sgrpo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "maxrl")
SUPERVISED = (
    "Answers are given, and a loss is all there is to prove: its numbers stand beside those of "
    "others in `tests/functional/test_others_functions.py`."
)
LEFT_OUT = (
    (
        "REAL",
        "arXiv:2602.05630",
        "One framework has it. Its log-sum-exp over a group is no sum over tokens, so it cannot be "
        "cut into micro-batches; at one update per batch it is a constant advantage of "
        "±1 / (1 + n±).",
    ),
    ("MASPO", "arXiv:2602.17550", "Only its authors' fork has it, and nothing to compare it with."),
    (
        "VCPO",
        "arXiv:2602.17616",
        "Its baseline needs the gradient norm of every sample, which `otb` approximates; its rule, "
        "lr x sqrt(ESS / B), does nothing on policy.",
    ),
    ("TPO", "arXiv:2405.16681", "Three answers to a prompt, and one experimental trainer."),
    (
        "PG-DPO",
        "arXiv:2511.19049",
        "Written for diffusion models, without code of its authors. Of its two parts the scale of "
        "the rejected side, sigmoid(K (r_w - r_l) / (r_l + eps)), is known second-hand, and "
        "divides by a reward that may be 0 or negative here; the formula of the other, its "
        "regularisation, was not found where it could be checked.",
    ),
    ("GTPO", "TRL, pull request 5226", "Closed for want of users."),
    (
        "Self-play baselines",
        "prime-rl: rae, hierarchical",
        "No environment here has several agents that learn.",
    ),
    ("A*-PO", "TRL: a2po", "Waits for somebody who uses it."),
)
# What stands beside each correction: ratio, drift, covariance, prefixes.
UP_TO = "removed up to the bounds"
OF_KEPT = "left of what is kept"
INSIDE = "removed inside of the bounds"
AS_RATIO = "as a ratio to the sampler"
WHAT_IS_REMOVED = (
    ("none", "left", "left: 0.16", "left", "left"),
    (
        "[`truncate`](#correction-truncate), [`mask`](#correction-mask), level token",
        UP_TO,
        f"{UP_TO}: 0.03",
        UP_TO,
        "left",
    ),
    ("the same, level sequence", UP_TO, "as the ratio", UP_TO, f"{UP_TO}, at a high variance"),
    ("the same, level geometric", "that of the row's mean", "left", "left", "left"),
    (
        "[`reject`](#correction-reject), [`reject_k3`](#correction-reject_k3), "
        "[`veto`](#correction-veto), [`second_moment`](#correction-second_moment)",
        OF_KEPT,
        f"{OF_KEPT}, and what is dropped adds to it",
        OF_KEPT,
        OF_KEPT,
    ),
    (
        "[`drop_drifted_failures`](#correction-drop_drifted_failures)",
        "left",
        "left, without failures that are far",
        OF_KEPT,
        OF_KEPT,
    ),
    (
        "[`importance_sampling`](#gate-importance_sampling), `train.denominator: rollout`",
        "removed",
        "removed",
        "removed",
        "left",
    ),
    ("other gates with `train.denominator: rollout`", INSIDE, INSIDE, INSIDE, "left"),
    ("`train.old_logprobs: bypass`", AS_RATIO, AS_RATIO, AS_RATIO, "left"),
    (
        "[`score`](#centering-score), center_tail event",
        "left",
        "removed: 0 to rounding",
        "left; of the tail that of its tokens together",
        "left",
    ),
    (
        "[`score`](#centering-score), center_tail token",
        "left",
        "left of the tail: 0.047, 0.027, 0.006 at 2, 3, 5 of 7 tokens",
        "left",
        "left",
    ),
    ("[`score`](#centering-score) and `truncate` or `mask`", UP_TO, "removed", UP_TO, "left"),
)
REMOVED = """## Where sampler and trainer differ

A sampler `q` that is not the trainer's policy `p` (other kernels, rounded weights, older weights)
moves the expected update in four ways, and no correction takes out all of them:

- **ratio**: a sampled token counts 1, not `p / q`;
- **drift**: what all tokens of a place have in common, a baseline that is off, moves the policy,
  because the score of `p` has no mean of 0 under `q`;
- **covariance**: of advantage and score, the gradient itself, is that of `q`;
- **prefixes**: places are reached as often as `q` reaches them, and rewards are those of `q`'s
  continuations.

{table}

Two causes of a difference can be taken away, and then nothing is left of them to correct:
[`run.exact`](exact.md) has the same weights say the same in sampler and trainer, to the last bit,
on a CPU; and with [cut sampling](cut_sampling.md) `p` is the policy over the tokens that were kept,
where the softmax over the whole vocabulary would be another policy, off in all four ways.

Nothing in this table makes an update an unbiased one of `p`. Whole ratios of whole responses come
nearest (`train.loss: importance_sampling`, `train.ratio: sequence`, `train.denominator:
rollout`), at a variance that grows with length. Centering is no unbiased estimator either: it
makes the expected update of a constant advantage 0, and leaves the covariance under the sampler.
The figures are lengths of the expected update of one place where every token is worth 1, from
`python oxrl_proofs/drift.py`, which enumerates: 7 tokens, logits of the sampler off by 0.5, a
bound of 1.5. It also trains without chance: with all rewards equal and a baseline that is off by
0.5, the largest logit goes from 4.4 to 8.0 without centering, and stays with it; with rewards and
a baseline that is 0.5 too low, the trainer's policy earns 0.84 without and 0.94 with it; with a
baseline that is right 0.947 and 0.940.

A tail that is one event costs signal where it is heavy: the distance to the trainer's gradient,
0.33 of its length with all 7 tokens known, is 0.51, 0.42 and 0.34 with 2, 3 and 5 of them.
`center_tail: token` keeps that signal (0.33), and drifts: with a baseline off by 1 its distance
is 0.40, 0.36 and 0.33. `update/center_tail_frac` says how many sampled tokens were of the tail;
`train.center_top` makes it smaller, at 8 bytes for each of its tokens and each sampled one. With
vLLM it is at most 256.

"""
TITLES = {
    "advantage": "Advantages",
    "ratio": "Ratio levels",
    "gate": "Gates",
    "correction": "Corrections",
    "centering": "Centering",
    "kl": "KL terms",
    "weights": "Loss weights",
}


def source(function: Callable[..., Any]) -> str:
    """Link to the function's file."""
    function = inspect.unwrap(function)
    path = Path(inspect.getsourcefile(function) or "").relative_to(ROOT)
    return f"[`{path}`](../{path})"


def cell(kind: str, name: str) -> str:
    return f"[`{name}`](#{kind}-{name})" if name != "none" else "-"


def shown(value: Value) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def ratio(row: Row) -> str:
    return "-" if row.ratio == "none" else f"{cell('ratio', row.ratio)} / {row.denominator}"


def table(rows: list[Row]) -> Iterator[str]:
    yield "| algorithm | advantage | ratio / to | gate | correction | centering | KL | weights |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [
            cell(kind, getattr(row, kind))
            for kind in ("advantage", "gate", "correction", "centering", "kl", "weights")
        ]
        columns = [f"[`{row.name}`](#{row.name})", cells[0], ratio(row), *cells[1:]]
        yield f"| {' | '.join(columns)} |"


def details(row: Row) -> Iterator[str]:
    """One algorithm: what, when, numbers, what is special, what is proved."""
    yield f"### {row.name}"
    yield ""
    yield f"{row.summary[0].upper()}{row.summary[1:]}. Source: {row.source}."
    yield ""
    yield f"- **Use**: {row.use}"
    if row.defaults:
        numbers = [f"`{name}` {shown(value)}" for name, value in row.defaults.items()]
        yield f"- **Numbers**: {', '.join(numbers)}"
    if row.needs:
        yield f"- **Needs**: {', '.join(row.needs)}"
    if row.unsupported:
        yield f"- **Not trainable yet**: {row.unsupported}."
    if row.deviation:
        yield f"- **Deviation**: {row.deviation}"
    if row.shared_weight:
        yield f"- **Not token-local**: {row.shared_weight}."
    for proof, reason in row.exempt.items():
        yield f"- **Exempt from** `{proof}`: {reason}."
    command = f"pytest tests/functional/test_rows.py -k '{row.name}'"
    yield f"- **Proofs**: {len(proofs_of(row)) + 1}, `{command}`"
    yield ""


def equation(kind: str, name: str) -> Iterator[str]:
    """One cell: its docstring without arguments, its line, its numbers."""
    function = EQUATIONS[kind][name]
    yield f"### {kind} {name}"
    yield ""
    yield f"{source(function)}" + (
        f", as `{function.__name__}`" if function.__name__ != name else ""
    )
    yield ""
    yield from ("```text", *told_of(function).splitlines(), "```")
    read = find_cell(kind, name)
    numbers = read.numbers
    if kind == "gate":
        numbers = (*numbers, *find_cell("selection", name).numbers)
    if numbers:
        yield ""
        yield "| reads | default | meaning | default from |"
        yield "|---|---|---|---|"
    for number in numbers:
        unit = f" ({number.unit})" if number.unit else ""
        default = shown(number.default)
        meaning = f"{number.meaning}{unit}".replace("|", "\\|")
        cells = (f"`train.{number.key}`", default, meaning, number.source)
        yield f"| {' | '.join(cells)} |"
    if read.uncentered:
        yield f"\nNot with `train.centering: score`: {read.uncentered}."
    if read.needs:
        yield f"\nNeeds {', '.join(feature.name for feature in read.needs)}."
    yield ""


def removed() -> Iterator[str]:
    """What each correction takes out of an expected update, and what it leaves."""
    yield "| | ratio | drift | covariance | prefixes |"
    yield "|---|---|---|---|---|"
    for cells in WHAT_IS_REMOVED:
        yield f"| {' | '.join(cells)} |"


def supervised(row: Row) -> Iterator[str]:
    """A row that learns from given answers, and the equation of its loss."""
    yield f"### {row.name}"
    yield ""
    origin = f" Source: {row.source}." if row.source else ""
    yield f"{row.summary[0].upper()}{row.summary[1:]}.{origin}"
    yield ""
    yield f"- **Use**: {row.use}"
    yield ""
    yield from ("```text", *told_of(LOSSES[row.name]).splitlines(), "```")
    yield ""


def page() -> str:
    rows = [row for row in ROWS.values() if row.recipe == "rl"]
    lines = [HEADER.rstrip(), ""]
    lines += [
        f"- `{name}`: {' '.join((inspect.getdoc(proof) or '').split())}"
        for name, proof in ROW_PROOFS.items()
    ]
    lines += [
        "- `two_ranks`: Two data-parallel processes under gloo sum to the gradient of one, "
        "relative 1e-10.",
        "",
    ]
    lines += ["## Which one", "", "The cells that tell the usual choices apart:", ""]
    lines += [
        *table([ROWS[name] for name in COMPARED]),
        "",
        "| algorithm | choose it for |",
        "|---|---|",
    ]
    lines += [f"| [`{name}`](#{name}) | {ROWS[name].use} |" for name in COMPARED]
    lines += ["", "## All rows", "", *table(rows), "", "## Row by row", ""]
    for row in rows:
        lines += details(row)
    lines += ["## Supervised rows", "", SUPERVISED, ""]
    for name in ("sft", "dft"):
        lines += supervised(ROWS[name])
    lines += [
        "## Left out, and why",
        "",
        "| method | source | why there is no row |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {origin} | {reason} |" for name, origin, reason in LEFT_OUT]
    lines.append("")
    for kind, title in TITLES.items():
        if kind == "correction":
            lines += REMOVED.format(table="\n".join(removed())).splitlines()
        lines += [f"## {title}", ""]
        for name in EQUATIONS[kind]:
            lines += equation(kind, name)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "algorithms.md").write_text(page())
