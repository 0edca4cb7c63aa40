"""Keeps what retrievers have returned until the model is asked, by the framework's run that it belongs to."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable

Retrieved = tuple[str, ...]
"""The text of something retrieved, first as its prompt is expected to hold it, then in other forms that are as good."""

_MOST_RUNS = 16384
_MOST_HELD = 1024
_MOST_LOOSE = 32


class RetrievalLog:
    """Notes what was retrieved in which run, and tells a model's run what was retrieved for it. Thread-safe.

    Runs form trees, as callbacks and tracers show them: a chain, the retriever and the model in it. What a run has retrieved is
    its parent's when it ends, so that the model finds it with the runs it is part of, and requests that run side by side, each a
    tree of its own, do not see one another's. What the outermost run retrieved is *loose* when that ends: it may be for any
    prompt that follows. Bounded: runs that never end, and what nobody asks for, are forgotten, the oldest first.
    """

    def __init__(self) -> None:
        self._parents: OrderedDict[Hashable, Hashable | None] = OrderedDict()
        self._held: dict[Hashable, deque[Retrieved]] = {}
        self._loose: deque[Retrieved] = deque(maxlen=_MOST_LOOSE)
        self._lock = threading.Lock()

    def begin(self, run: Hashable, parent: Hashable | None) -> None:
        """Note that a run has begun."""
        with self._lock:
            self._parents[run] = parent
            if len(self._parents) > _MOST_RUNS:
                self._end(next(iter(self._parents)))

    def end(self, run: Hashable) -> None:
        """Note that a run has ended; one that is not known is ignored."""
        with self._lock:
            self._end(run)

    def note(self, run: Hashable | None, items: Iterable[Retrieved], *, replace: bool = False) -> None:
        """Note what ``run`` has retrieved, in place of what was retrieved by the runs in it.

        Args:
            run: The run; one that is not open counts as none.
            items: What it returned.
            replace: Whether these are what has come of something retrieved before, and stand in its place: of what is held by
                the nearest of the runs that it is part of.
        """
        with self._lock:
            self._held.pop(run, None)
            holder = self._parents.get(run) if replace else None
            while holder is not None and holder not in self._held:
                holder = self._parents.get(holder)
            self._held.pop(holder, None)
            self._hold(run, items)

    def of(self, run: Hashable | None) -> list[Retrieved]:
        """Return what was retrieved for a run: by the runs that are part of the same ones; first what is nearest."""
        found: list[Retrieved] = []
        with self._lock:
            while run is not None:
                found += self._held.get(run, ())
                run = self._parents.get(run)
        return list(dict.fromkeys(found))

    @property
    def loose(self) -> list[Retrieved]:
        """Return what was retrieved lately and for no run that is open, oldest first."""
        with self._lock:
            return list(dict.fromkeys(self._loose))

    def __len__(self) -> int:
        """Count the open runs."""
        return len(self._parents)

    def _end(self, run: Hashable) -> None:
        parent = self._parents.pop(run, None)
        if items := self._held.pop(run, None):
            self._hold(parent, items)

    def _hold(self, run: Hashable | None, items: Iterable[Retrieved]) -> None:
        if run is None or run not in self._parents:
            self._loose.extend(items)
        else:
            self._held.setdefault(run, deque(maxlen=_MOST_HELD)).extend(items)
