"""Records when each layer was loaded and computed (paper section 5), for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cacheblend_rag.errors import InputError

Track = Literal["computing", "loading"]
_COMPUTATION: Final = 0

PLAN: Final = "plan"
"""Looking stored KV up, and what it is used for."""
PREFILL: Final = "prefill"
"""A whole prompt computed without stored KV."""
REST: Final = "rest of the prompt"
"""What an engine computes behind a blend."""
DECODE: Final = "token of the answer"


@dataclass(frozen=True)
class Recorded:
    """Holds what a trace has recorded, on its way to another process of the same machine.

    Attributes:
        began: When its times begin, by ``time.perf_counter``, which is the machine's.
        events: As they are in Chrome's trace event format.
    """

    began: float
    events: Sequence[Mapping[str, Any]]

    @property
    def computed_until(self) -> float:
        """Return when the last computation ended; when the trace began, if there was none."""
        ends = (event["ts"] + event["dur"] for event in self.events if event["tid"] == _COMPUTATION)
        return self.began + max(ends, default=0.0) / 1e6


class Trace:
    """Records events from several threads, by the host's clock: of a device's work, when it was asked for.

    The computation is one track, and each thread that loads is another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._tracks: dict[object, int] = {}
        self._events: list[dict[str, Any]] = []

    def add(self, kind: Track, name: str, begin: float, **details: Any) -> None:
        """Add an event from ``begin``, of ``time.perf_counter``, until now; of loading, in the calling thread."""
        self.add_until(time.perf_counter(), kind, name, begin, **details)

    def add_until(self, end: float, kind: Track, name: str, begin: float, **details: Any) -> None:
        """Add an event that ended before now."""
        with self._lock:
            track = _COMPUTATION
            if kind == "loading":
                track = self._tracks.setdefault(threading.get_ident(), 1 + len(self._tracks))
            times = {"ts": 1e6 * (begin - self._began), "dur": 1e6 * (end - begin)}
            self._events.append(
                {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": track, **times, "args": details}
            )

    @contextmanager
    def during(self, kind: Track, name: str, **details: Any) -> Iterator[None]:
        """Add what runs inside as an event, also if it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, name, begin, **details)

    def recorded(self) -> Recorded:
        """Return what was recorded so far, for :meth:`merge`."""
        with self._lock:
            return Recorded(self._began, list(self._events))

    def merge(self, other: Recorded) -> None:
        """Take in what another process has recorded; its threads get tracks of their own."""
        later = 1e6 * (other.began - self._began)
        with self._lock:
            tracks = {_COMPUTATION: _COMPUTATION}
            for event in other.events:
                track = event["tid"]
                if track not in tracks:
                    tracks[track] = self._tracks.setdefault(object(), 1 + len(self._tracks))
                self._events.append({**event, "ts": event["ts"] + later, "tid": tracks[track]})

    def as_json(self) -> dict[str, Any]:
        """Return the events in Chrome's trace event format; times in microseconds."""
        with self._lock:
            tracks = {_COMPUTATION: "computing", **{track: f"loading {track}" for track in self._tracks.values()}}
            names = [
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
                for track, name in tracks.items()
            ]
            return {"traceEvents": [*names, *sorted(self._events, key=lambda event: float(event["ts"]))]}

    def write(self, path: Path) -> None:
        """Write :meth:`as_json` to a file.

        Raises:
            InputError: It cannot be written.
        """
        try:
            path.write_text(json.dumps(self.as_json()), encoding="utf-8")
        except OSError as error:
            raise InputError(f"The trace cannot be written to {path}: {error}. Give another file.") from error


class LayerTrace:
    """Records the layers of passes: each is computed from when its KV is in place until the next one's is asked for."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._pass = ""
        self._layer: int | None = None
        self._since = 0.0

    @contextmanager
    def running(self, kind: str, tokens: int) -> Iterator[None]:
        """Record what runs inside as part of a pass of ``tokens``."""
        self._pass = kind
        with self._trace.during("computing", f"{kind} pass", tokens=tokens):
            try:
                yield
            finally:
                self._end()
                self._pass = ""

    @contextmanager
    def placing(self, layer: int) -> Iterator[None]:
        """Record what runs inside as waiting for a layer's stored KV and placing it; behind it the layer is computed."""
        self._end()
        with self._trace.during("computing", f"layer {layer}: wait and place", layer=layer):
            yield
        if self._pass:
            self._layer, self._since = layer, time.perf_counter()

    def _end(self) -> None:
        if self._layer is not None:
            name = f"layer {self._layer}: {self._pass} pass"
            self._trace.add("computing", name, self._since, layer=self._layer, **{"pass": self._pass})
            self._layer = None
