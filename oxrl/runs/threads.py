"""Work on several things at the same time, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import TypeVar

from oxrl.errors import Stopped
from oxrl.runs.waiting import Patience

T = TypeVar("T")
U = TypeVar("U")


def in_threads(
    work: Callable[[T], U], items: Sequence[T], patience: Patience, *, most: int
) -> list[U]:
    """Do `work` on every item; when it raises on one, the others are given up.

    Args:
        work: done in a thread.
        items: in the order in which they are begun.
        patience: of the waits in `work`.
        most: items at the same time.

    Returns:
        What `work` returned of each, in order.
    """
    waiting = enumerate(items)  # each is taken by one thread: `next` is atomic
    found: dict[int, U] = {}

    def work_off() -> None:
        for place, item in waiting:
            found[place] = work(item)

    with ThreadPoolExecutor(most) as threads:
        asked = [threads.submit(work_off) for _ in range(most)]
        try:
            for done in as_completed(asked):
                done.result()
        except BaseException:
            list(waiting)  # takes the rest: no thread begins another
            patience.cancel()  # the others look at that before long
            # What ended the first may be that another one was given up: that one says why.
            for done in asked:
                with suppress(Stopped):
                    done.result()
            raise
    return [found[place] for place in sorted(found)]
