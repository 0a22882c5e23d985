"""The actions of a run: which tokens they are, decided once from config, model and tokenizer."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from oxrl.config import Config
from oxrl.data.action_heads import FastHead, read_head
from oxrl.data.actions import ActionHead, read_quantiles
from oxrl.data.chat import ChatEncoder
from oxrl.data.fast import FastCode, read_code
from oxrl.data.turns import TurnEncoder
from oxrl.errors import ConfigError, shortened
from oxrl.modelfiles.dims import vocabulary_of
from oxrl.types import TokenIds


def action_head(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> ActionHead:
    """The actions of the run of `cfg`, whose turns are no text.

    Raises:
        ConfigError: the vocabulary is too small for them, or the model was trained with others.
    """
    action = cfg.action
    trained = read_head(Path(cfg.model.name))
    low = ()
    high = ()
    if not action.names:
        if action.statistics is not None:
            low, high = read_quantiles(Path(action.statistics))
        elif trained is not None:
            low, high = trained.low, trained.high
    code = _fast_code(cfg, trained)
    if code is None:
        head = ActionHead(
            token_ids=_token_ids(cfg, tokenizer, len(action.names) or action.bins),
            chunk=action.chunk,
            choices=action.names,
            low=low,
            high=high,
        )
    else:
        head = FastHead(
            token_ids=_token_ids(cfg, tokenizer, len(code.pieces)),
            chunk=action.chunk,
            low=low,
            high=high,
            code=code,
            end=_turn_end(tokenizer),
        )
    if trained is not None:
        _check_same(head, trained, cfg.model.name)
    return head


def _fast_code(cfg: Config, trained: ActionHead | None) -> FastCode | None:
    """The pieces of `action.code: fast`; None of another code.

    Raises:
        ConfigError: they are of other chunks than the actions of the run.
    """
    action = cfg.action
    if action.names or action.code != "fast":
        return None
    if action.fast is None and isinstance(trained, FastHead):
        found = trained.code
    else:
        # The config's checks have seen that one of the two names the pieces.
        found = read_code(Path(action.fast or ""))
    asked = (action.chunk, action.size)
    if (found.chunk, found.size) != asked:
        raise ConfigError(
            f"action.fast: its chunks are {found.chunk} actions of {found.size} numbers, and "
            f"action.chunk and action.size are {asked[0]} and {asked[1]}"
        )
    return found


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with which the chat template ends a turn of the assistant."""
    encoder = ChatEncoder(tokenizer)
    turns = TurnEncoder(encoder, encoder.special_ids)
    return turns.suffix([{"role": "user", "content": "x"}]).stop_id


def _token_ids(cfg: Config, tokenizer: PreTrainedTokenizerBase, count: int) -> TokenIds:
    """Tokens for so many actions: the last plain ones, or those that the tokenizer does not use."""
    known = len(tokenizer)
    if cfg.action.ids == "reserved":
        rows = vocabulary_of(cfg.model.name)
        left = max(0, rows - known)
        if left < count:
            raise ConfigError(
                f"action.ids=reserved needs {count} rows of the embedding that the tokenizer has "
                f"no token for, and there are {left}: use tail, or fewer bins or pieces"
            )
        return tuple(range(known, known + count))
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    plain = (token for token in reversed(range(known)) if token not in special)
    found = tuple(islice(plain, count))
    if len(found) < count:
        raise ConfigError(
            f"action.bins, choices or fast need {count} tokens, and the tokenizer has "
            f"{len(found)} that are no special ones"
        )
    return found[::-1]


def _check_same(head: ActionHead, trained: ActionHead, model: str) -> None:
    """Refuse other actions than those that a model was trained with.

    Raises:
        ConfigError: names what differs.
    """
    if type(head) is not type(trained):
        now, then = ("fast" if isinstance(one, FastHead) else "bins" for one in (head, trained))
        raise ConfigError(
            f"action: code is {now}, and {model} was trained with {then}: say the same"
        )
    for field in fields(head):
        now = getattr(head, field.name)
        then = getattr(trained, field.name)
        if now != then:
            raise ConfigError(
                f"action: {field.name} is {shortened(str(now))}, and {model} was trained with "
                f"{shortened(str(then))}: say the same in section action, or leave "
                "action.statistics out"
            )
