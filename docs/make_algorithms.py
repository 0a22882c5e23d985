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
`train.correction`, `train.kl`, `train.weights`), and such a combination is a new algorithm without
code.

```text
rewards -> advantage -> ratio (level, denominator) -> gate -> correction -> KL -> loss weights

loss = sum_bt loss_weights * ( -correction * S(r, A) + kl_coeff * kl - entropy_coeff * H )
```

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
TITLES = {
    "advantage": "Advantages",
    "ratio": "Ratio levels",
    "gate": "Gates",
    "correction": "Corrections",
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
    yield "| algorithm | advantage | ratio / to | gate | correction | KL | weights |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [
            cell(kind, getattr(row, kind))
            for kind in ("advantage", "gate", "correction", "kl", "weights")
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
    if read.needs:
        yield f"\nNeeds {', '.join(feature.name for feature in read.needs)}."
    yield ""


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
        lines += [f"## {title}", ""]
        for name in EQUATIONS[kind]:
            lines += equation(kind, name)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "algorithms.md").write_text(page())
