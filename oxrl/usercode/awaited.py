"""Results of functions that may be `async`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor


def awaited(result: object) -> object:
    """Return a function's result, waited for where the function is `async`.

    Args:
        result: anything.

    Returns:
        The value; in an event loop of its own where it had to be waited for, and where a loop runs
        already, as in a notebook, in a thread of its own.
    """
    if not inspect.isawaitable(result):
        return result
    import asyncio  # a third of the time that a reward worker takes to import

    waiting = _result_of(result)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(waiting)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, waiting).result()


async def _result_of(waiting: Awaitable[object]) -> object:
    return await waiting
