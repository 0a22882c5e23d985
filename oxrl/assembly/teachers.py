"""The teachers of a run: who is asked, whether they have the policy's tokens, and agree with
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oxrl.assembly.assemble import FIRST_RATIO_TOLERANCE
from oxrl.assembly.assembly import Assembly
from oxrl.config.sections.model import Teacher as Asked
from oxrl.data.batching import to_token_batch
from oxrl.engines.train import Scorer
from oxrl.entry_points import TEACHER_ENGINES, own_function
from oxrl.errors import ConfigError, DataError, EngineError, required
from oxrl.models.load import load_tokenizer
from oxrl.recipes.features.base import Hint, Teacher
from oxrl.seeds import stable_seed
from oxrl.tables.roles import POLICY, TEACHER
from oxrl.types import Prompt, TokenIds

# Ids that stand for other tokens, of which an error names so many.
NAMED = 3
# Lengths of the rows by which a teacher is compared with itself.
LENGTHS = (7, 19, 12)


def build_teachers(
    assembly: Assembly, models: Mapping[str, Scorer], stack: ExitStack
) -> dict[str, Teacher]:
    """Build everything that scores what the policy samples, and try it.

    Args:
        assembly: of the run.
        models: by role; of those teachers that are engines of the run.
        stack: closes what is started for the others.

    Raises:
        ConfigError: a teacher has other tokens than the policy.
        EngineError: it does not agree with itself.
    """
    check_vocabularies(assembly)
    found: dict[str, Teacher] = {}
    for name, asked in assembly.cfg.model.teachers.items():
        if asked.prompt and not asked.follows and asked.weights == "live":
            scorer = models[POLICY]
        elif asked.own_weights:
            scorer = models[f"{TEACHER}{name}"]
        else:
            scorer = _engine_beside(assembly, name, asked, stack)
        if not asked.prompt:
            _compare_with_itself(assembly, name, asked, scorer)
        found[name] = Teacher(scorer, frozenset(asked.sources), hint_of(asked))
    return found


def hint_of(asked: Asked) -> Hint | None:
    """Read the template of a teacher that is the policy under another prompt; None of others."""
    if not asked.prompt:
        return None
    text = Path(asked.prompt).read_text("utf-8")
    return Hint(template=text, reads=tuple(asked.reads), follows=asked.follows)


def check_sources(teachers: Mapping[str, Asked], prompts: Sequence[Prompt]) -> None:
    """Make sure that rows have a teacher, by their source.

    Args:
        teachers: of `model.teachers`.
        prompts: of the data, some or all.

    Raises:
        DataError: one has none.
    """
    if not all(asked.sources for asked in teachers.values()):
        return
    named = {source for asked in teachers.values() for source in asked.sources}
    for prompt in prompts:
        if prompt.source not in named:
            raise DataError(
                f"model.teachers: the source {prompt.source!r} of row {prompt.uid} is named by no "
                f"teacher; they name {', '.join(sorted(named))}. Add it to one, or leave sources "
                "out of one, which then has all others"
            )


def check_templates(teachers: Mapping[str, Asked], prompts: Sequence[Prompt]) -> None:
    """Make sure that templates can be written, and show the policy something else.

    Args:
        teachers: of `model.teachers`.
        prompts: of the data, some or all.

    Raises:
        ConfigError: one cannot, or writes what stands there already.
    """
    check = own_function(TEACHER_ENGINES, "template")
    for name, asked in teachers.items():
        hint = hint_of(asked)
        if hint is not None and check is not None:
            check(f"model.teachers.{name}.prompt", asked.prompt, hint, prompts)


def _engine_beside(assembly: Assembly, name: str, asked: Asked, stack: ExitStack) -> Scorer:
    """Build what asks a model of another process.

    Raises:
        ConfigError: the package that can is not installed.
    """
    make = own_function(TEACHER_ENGINES, asked.engine)
    if make is None:
        raise ConfigError(
            f"model.teachers.{name}.engine: {asked.engine} needs the packages beside oxRL: install "
            "it with pip"
        )
    cfg = assembly.cfg
    return make(
        field=f"model.teachers.{name}",
        asked=asked.model_dump() | {"dtype": asked.dtype or cfg.model.dtype},
        tokenizer=assembly.tokenizer,
        waits=cfg.run.waits,
        stop=assembly.stop,
        closing=stack.callback,
        run=cfg.run.directory,
    )


def check_vocabularies(assembly: Assembly) -> None:
    """Make sure that every id of the policy's tokenizer stands for the same token in each teacher.

    Args:
        assembly: of the run.

    Raises:
        ConfigError: one does not; names the first.
    """
    cfg = assembly.cfg
    for name, asked in cfg.model.teachers.items():
        if not asked.name or asked.engine == "endpoint":
            continue  # itself; of a server nothing is known but what it answers
        theirs = load_tokenizer(
            asked.name,
            trust_remote_code=cfg.model.trust_remote_code,
            revision=asked.revision,
        )
        problem = why_other_tokens(assembly.tokenizer, theirs)
        if problem:
            raise ConfigError(f"model.teachers.{name}.name: {asked.name} {problem}")


def why_other_tokens(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str:
    """Say which ids of the policy stand for other tokens in a teacher; empty if none does.

    Args:
        policy, teacher: their tokenizers. A teacher may have more tokens.
    """
    ours = {index: token for token, index in policy.get_vocab().items()}
    theirs = {index: token for token, index in teacher.get_vocab().items()}
    if len(theirs) < len(ours):
        return (
            f"has {len(theirs):,} tokens and the policy {len(ours):,}: a teacher says how likely "
            "each of the policy's is, so take one with the policy's tokenizer"
        )
    differ = [index for index in sorted(ours) if theirs.get(index) != ours[index]]
    if not differ:
        return ""
    told = "; ".join(
        f"{index} is {ours[index]!r} for the policy and {theirs.get(index)!r} for the teacher"
        for index in differ[:NAMED]
    )
    return (
        f"has other tokens, at {len(differ):,} ids: {told}. Take a teacher with the policy's "
        "tokenizer"
    )


def _compare_with_itself(assembly: Assembly, name: str, asked: Asked, scorer: Scorer) -> None:
    """Ask a teacher about rows alone, in a batch of other lengths, and twice.

    Raises:
        EngineError: it says something else.
    """
    rows = list(_some_rows(assembly))
    together = _said(assembly, scorer, rows)
    alone = torch.cat([_said(assembly, scorer, [row]) for row in rows])
    again = _said(assembly, scorer, rows)
    bound = FIRST_RATIO_TOLERANCE[asked.dtype or assembly.cfg.model.dtype]
    for how, other in (("alone and in a batch", alone), ("asked twice", again)):
        apart = float((together - other).abs().max())
        if not apart <= bound:
            raise EngineError(
                f"model.teachers.{name} says something else of the same rows {how}: up to "
                f"{apart:.3g} nats apart, and {bound:g} are allowed. What it teaches would depend "
                "on what else is in a batch"
            )


def _some_rows(assembly: Assembly) -> Iterator[TokenIds]:
    """Rows of tokens of the vocabulary, the same in every run."""
    tokenizer = assembly.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    known = sorted(assembly.sampled_alone) or sorted({*range(len(tokenizer))} - special)
    draw = torch.Generator().manual_seed(stable_seed("teachers"))
    for length in LENGTHS:
        chosen = torch.randint(len(known), (length,), generator=draw)
        yield tuple(known[place] for place in chosen.tolist())


def _said(assembly: Assembly, scorer: Scorer, rows: list[TokenIds]) -> Tensor:
    """What a scorer says of the tokens of rows, in nats, one after another."""
    trained = [[place > 0 for place in range(len(row))] for row in rows]
    batch = to_token_batch(rows, trained, assembly.pad_id)
    said = scorer.forward(batch, frozenset({"logprobs"}))
    return required(said.logprobs, "logprobs")[batch.response_mask]
