"""One question to the Hugging Face hub, whether it answers, in place of a wait in every library.

The libraries that read from the hub wait and try again, for half a minute per file. Where it does
not answer at all they are told to read the cache alone, so that what is there loads at once, and
what is not there is one message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Event, Thread

from oxrl.errors import DataError

# Seconds within which the hub has to say anything; the library's own variable sets another time.
ANSWER_S = 2.5
VARIABLE = "HF_HUB_ETAG_TIMEOUT"
# What reading an answer raises that is none of a hub's.
NONSENSE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


def answer_seconds() -> float:
    """Seconds that the hub may take to answer at all."""
    given = os.environ.get(VARIABLE, "")
    return float(given) if given.isdecimal() and int(given) > 0 else ANSWER_S


def hub_answers() -> bool:
    """True if the hub says anything, whatever it is; False where HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT, answer_seconds())


def why_silent() -> str:
    """The reason why nothing comes from the hub, as a part of a sentence."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    waited = f"within {answer_seconds():g} s ({VARIABLE} sets another time)"
    return f"the hub {constants.ENDPOINT} cannot be reached {waited}"


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Have libraries read their cache alone inside the block, where the hub does not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_answers():
        yield
        return
    constants.HF_HUB_OFFLINE = True  # read by the libraries whenever they would ask
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def check_on_hub(name: str, revision: str | None) -> None:
    """Make sure, before anything heavy is imported, that `model.name` can be had at all.

    Args:
        name: of a model on the hub.
        revision: a branch, tag or commit; None: the main branch.

    Raises:
        DataError: it is not in the cache, and the hub does not answer or has no such model.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    try:
        for file in ("config.json", "adapter_config.json"):
            if isinstance(try_to_load_from_cache(name, file, revision=revision), str):
                return
        if not hub_answers():
            option = f" --revision {revision}" if revision else ""
            raise DataError(
                f"model.name: {name!r} is no folder here and not in the cache, and {why_silent()}. "
                f"Where there is a network: hf download {name}{option}; without one give a folder "
                "or builtin:tiny"
            )
        HfApi().model_info(name, revision=revision, timeout=answer_seconds())
    except DataError:
        raise
    except errors.HFValidationError as error:
        raise DataError(f"model.name: {name!r} is no folder here, nor a name on the hub") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise DataError(
            f"model.name: {name!r} is no folder here, and the hub has no such model{at}; a private "
            "or gated one needs `hf auth login`"
        ) from error
    except (errors.HTTPError, OSError, *NONSENSE):
        return  # it answers, but not this: whoever loads the model hears why


@cache
def _answers(endpoint: str, seconds: float) -> bool:
    """True if `endpoint` says anything within `seconds`, resolving its name included."""
    from huggingface_hub import errors, get_session

    heard = Event()

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=seconds)
        except (errors.HTTPError, OSError, ValueError, RuntimeError):
            return
        heard.set()

    asking = Thread(target=ask, daemon=True, name="is-the-hub-there")
    asking.start()
    asking.join(seconds)
    return heard.is_set()
