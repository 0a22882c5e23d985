"""A ledger of tensor bytes: what is alive at a time, by the memory behind tensors.

Views share what they view, and a storage that a library empties or fills again (as sharding does
with gathered weights) counts with the size that it has. What a kernel takes for itself while it
runs is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resize: Any = None

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        resize = self._resize

        def counted(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            found = resize(storage, size)
            self._note(storage)
            return found

        torch.UntypedStorage.resize_ = counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        there: set[int] | None = None
        for storage in _storages(made):
            if id(storage) not in self._sizes:
                if there is None:
                    there = {id(given) for given in _storages((args, kwargs))}
                if id(storage) in there:
                    continue  # a view of what was there before
            self._note(storage)
        return made

    def take_in_everything(self) -> None:
        """Count all that is alive as well, however it came about: loaded, shared, by other threads.

        What is frozen is not listed. Then the peak begins anew.
        """
        everything = gc.get_objects()
        # By their types, because some objects answer for others when asked.
        tensors = {kind for kind in set(map(type, everything)) if issubclass(kind, Tensor)}
        for found in everything:
            if type(found) in tensors:
                for storage in _storages(found):
                    self._note(storage)
        self.peak = self.now

    def _note(self, storage: torch.UntypedStorage) -> None:
        """What a storage has now."""
        key = id(storage)
        size = storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key).atexit = False
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The memory behind the tensors among `values`; none of those on the meta device."""
    if isinstance(values, Tensor):
        own = getattr(values, "_local_tensor", values)  # a rank's piece of a whole
        if not own.is_meta:
            yield own.untyped_storage()
    elif isinstance(values, dict):
        yield from _storages(tuple(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _storages(value)
