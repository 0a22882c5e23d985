"""Which fields a run reads, by its algorithm's row and the features it switches on, and its YAML,
resolved to those.

A field that is written down but not read is refused: a knob that turns nothing must not look as if
it did.
"""

from __future__ import annotations

import json
import re
from typing import Any

from oxrl.config.schema import CELLS, FIELDS, Config
from oxrl.runs.directory import differences
from oxrl.tables.policy import PARAMETERS, ROWS, Row

# Read only where a cell or a number of the algorithm's row asks for them.
_OF_ROWS = {
    f"train.{name}"
    for names in (*PARAMETERS.values(), *(r.numbers for r in ROWS.values()))
    for name in names
}


def row_fields(row: Row) -> frozenset[str]:
    """Dotted `train.*` paths that the cells and features of `row` read."""
    cells = [*row.cells, ("selection", row.gate), *(("extra", extra) for extra in row.needs)]
    names = [name for cell in cells for name in PARAMETERS.get(cell, ())]
    return frozenset(f"train.{name}" for name in (*names, *row.numbers))


def has_reference_model(cfg: Config) -> bool:
    """Whether a frozen or following copy of the policy is held beside it: a table or a switched-off
    adapter is none.
    """
    row = cfg.train.row
    if row.recipe == "preference":
        return "reference_sync_rate" in row.numbers
    return row.kl != "none" and cfg.train.kl_coeff > 0 and not cfg.lora.rank


def _unread(cfg: Config) -> dict[str, str]:
    """Dotted path -> why training with `cfg` does not read it; without the fields that only other
    rows read.
    """
    found: dict[str, str] = {}

    def skip(fields: str, why: str) -> None:
        for name in fields.split():
            paths = (
                [path for path in FIELDS if path.startswith(name[:-1])]
                if name.endswith("*")
                else [name]
            )
            found.update((path, why) for path in paths if path not in found)

    recipe, algorithm, backend = cfg.train.row.recipe, cfg.train.alg_name, cfg.train.backend
    rl, samples = recipe == "rl", recipe in ("rl", "rejection")
    training, sampling = rl and backend != "local", rl and cfg.inference_engine.actors > 0
    if cfg.data.eval is None:
        why = "has no effect without data.eval; remove it, or give held-out rows in data.eval"
        skip(
            "run.eval_every run.keep_best data.eval_rows rollout.eval_samples rollout.eval_temperature",
            why,
        )
    if not cfg.lora.rank:
        why = "is read with lora.rank above 0, the rank of the adapters; set that, or remove it"
        skip("lora.alpha lora.targets", why)
    if backend != "deepspeed":
        skip(
            "deepspeed.* deepspeed_ref.*",
            f"is read with train.backend: deepspeed; this run's is {backend}: remove it",
        )
    if not has_reference_model(cfg):
        why = f"is read where there is a reference model; {algorithm} as configured has none: remove it"
        skip("deepspeed_ref.*", why)
    actors = {"run.ray_address": training or sampling, "run.max_restarts": training}
    actors |= {
        "inference_engine.placement": training and sampling,
        "inference_engine.probe_every": sampling,
    }
    why = (
        "is read by reinforcement learning with Ray actors (train.backend deepspeed or fsdp: training actors; "
        "inference_engine.actors: rollout actors; the placement needs both): remove it"
    )
    skip(" ".join(path for path, read in actors.items() if not read), why)
    if not rl or cfg.inference_engine.name != "vllm":
        why = "is read by reinforcement learning with inference_engine.name: vllm; set that, or remove it"
        skip(
            "inference_engine.tensor_parallel inference_engine.gpu_memory_fraction inference_engine.kv_cache_gb",
            why,
        )
    why = f"is read by reinforcement learning; {algorithm} is not: remove it"
    if not samples:
        skip(
            "reward.* rollout.* inference_engine.* data.prompts_per_step data.max_prompt_tokens",
            why,
        )
    if not samples and backend == "local":
        skip("run.deadline_s", why)
    if not rl:
        skip(
            "run.record inference_engine.actors rollout.force_strict_on_policy rollout.max_staleness",
            why,
        )
        skip(
            "rollout.eval_samples rollout.eval_temperature train.epochs train.minibatches train.old_logprobs",
            why,
        )
        skip(
            "train.entropy_coeff train.mask_truncated "
            + " ".join(f"train.{name}" for name in CELLS),
            why,
        )
    else:
        why = f"is read by supervised and preference algorithms; {algorithm} is reinforcement learning: remove it"
        skip("run.keep_best data.rows_per_step", why)
    if recipe != "preference":
        skip("train.mix", f"is read by preference methods; {algorithm} is none: remove it")
    if recipe not in ("supervised", "rejection"):
        skip(
            "data.pack_tokens", f"is read by supervised fine-tuning; {algorithm} is not: remove it"
        )
    return found


def fields_read(cfg: Config) -> frozenset[str]:
    """Dotted paths that training with `cfg` reads."""
    return frozenset(FIELDS).difference(_unread(cfg), _OF_ROWS - row_fields(cfg.train.row))


def why_unread(path: str, cfg: Config) -> str:
    """Say what reads `path`, and so why this run does not."""
    if (why := _unread(cfg).get(path)) is not None:
        return why
    algorithms = ", ".join(name for name, row in ROWS.items() if path in row_fields(row))
    kinds = {kind: field for field, kind in CELLS.items()}
    choices = [
        (kind, cell)
        for (kind, cell), names in PARAMETERS.items()
        if path.partition(".")[2] in names
    ]
    cells = ", ".join(f"train.{kinds[kind]}: {cell}" for kind, cell in choices if kind in kinds)
    readers = "; ".join(
        part for part in (f"algorithms: {algorithms}" if algorithms else "", cells) if part
    )
    return f"is not read by {cfg.train.alg_name} as configured (read by {readers}); remove it, or choose one of those"


def read_values(cfg: Config) -> dict[str, Any]:
    """Dotted path -> value of every field that is read, in the order of the schema; unset cells are
    left out.
    """
    read, cells = fields_read(cfg), {f"train.{name}" for name in CELLS}
    values = {
        path: getattr(getattr(cfg, path.partition(".")[0]), path.partition(".")[2])
        for path in FIELDS
    }
    return {
        path: value
        for path, value in values.items()
        if path in read and not (path in cells and value is None)
    }


def dump_config(cfg: Config) -> str:
    """YAML text of the resolved configuration; loading it gives an equal object."""
    sections: dict[str, list[str]] = {}
    for path, value in read_values(cfg).items():
        section, _, name = path.partition(".")
        sections.setdefault(section, [f"{section}:"]).append(f"  {name}: {_scalar(value)}")
    return "".join(f"{line}\n" for lines in sections.values() for line in lines)


def _scalar(value: Any) -> str:
    """One YAML value that YAML 1.1 and 1.2 readers agree on."""
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    # JSON is YAML, apart from characters in strings that YAML wants escaped and JSON does not.
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(
        "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text
    )


def config_diff(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (value in `a`, value in `b`) where they differ; `(not read)` where only one
    reads the field.
    """
    return differences(read_values(a), read_values(b), absent="(not read)")
