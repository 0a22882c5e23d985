"""A process around a rollout engine, served to the one that started it: `python -m ... FD`.

See `sample/hosted.py` for the other side.
"""

from __future__ import annotations

import sys
import traceback
from functools import partial

from oxrl.engines.sample.workers import EngineActor
from oxrl.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EngineError,
    MissingExtraError,
    WeightSyncError,
)
from oxrl.models.lazy_transformers import import_model_classes
from oxrl.usercode.given import unpacked
from oxrl.usercode.messages import Json, Replies
from oxrl.usercode.user_code import raised_as

# What arrives as it was raised; anything else is an error of the engine.
KINDS = (ConfigError, DataError, DeadlineError, EngineError, MissingExtraError, WeightSyncError)
ERRORS = {kind.__name__: kind for kind in KINDS}


def answer(actor: EngineActor, request: Json) -> Json:
    """Call a method of the engine's actor, and return its result or its error.

    Args:
        request: a method's name, and what it is called with.
    """
    methods = {
        "build": actor.build,
        "call": actor.call,
        "poll": actor.poll,
        "update_weights": actor.update_weights,
    }
    try:
        return {"value": methods[request["method"]](*unpacked(request))}
    except Exception as error:  # noqa: BLE001 - raised again where the call was asked for
        name = type(error).__name__
        if name in ERRORS:
            return {"error": name, "text": str(error)}
        traceback.print_exc()
        return {"error": EngineError.__name__, "text": raised_as(error, None)}


def main() -> None:
    """Serve until the other end is closed."""
    import_model_classes()
    replies = Replies(int(sys.argv[1]))
    replies.answer_all(partial(answer, EngineActor()))


if __name__ == "__main__":
    main()
