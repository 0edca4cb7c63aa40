"""Calls tiers on other machines with a deadline per call, and stops calling a tier for some seconds after a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from cacheblend_rag.errors import StoreUnavailableError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

AT_ONCE = 8
"""Number of calls to one tier that run in parallel."""
WRITE_FACTOR = 30
"""Factor on the deadline for calls that no prompt waits for: writing an entry, listing all entries."""
_OUT_S = 5
_LONGEST = 300


class RemoteCalls:
    """Calls one remote tier.

    Each call runs in a worker thread, so that the caller continues at the deadline whatever the client library does.
    The client library's own timeouts end the call. After a call that fails or is late, all calls fail
    at once for some seconds, so that a failing tier costs a prompt at most one deadline. Then calls are allowed again.
    """

    def __init__(self, name: str, failures: tuple[type[Exception], ...], timeout_s: float):
        """Prepare calls to the tier that messages call ``name`` (``redis tier redis://host:6379/0``).

        ``failures`` are the client library's exceptions for a failing tier; other exceptions pass through.
        ``timeout_s`` is the deadline of a call.
        """
        self.name, self.timeout_s = name, timeout_s
        self._failures = failures
        self._out_until = 0.0
        # Long calls have their own threads, so that no look-up waits while entries are being written.
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cacheblend-remote")
        self._long = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cacheblend-remote-long")
        self._lock = threading.Lock()
        self._why, self._closed = "", False
        self._unsettled: list[Future[object]] = []

    @property
    def out(self) -> str:
        """Return the reason why the tier is not used at the moment; empty if the tier is used."""
        return self._why if time.monotonic() < self._out_until else ""

    def __call__(self, function: Callable[[], _T], long: bool = False) -> _T:
        """Return the result of ``function``; a ``long`` call has :data:`WRITE_FACTOR` times the deadline.

        Raises:
            StoreUnavailableError: The tier failed, exceeded the deadline, or is not used at the moment.
        """
        if why := self.out:
            raise StoreUnavailableError(f"The {self.name} is out: {why}")
        deadline_s = self.timeout_s * (WRITE_FACTOR if long else 1)
        future = self._begun(function, long)
        try:
            found = future.result(deadline_s)
        except TimeoutError as error:
            future.cancel()
            raise self._failed(f"no answer within {deadline_s:g} s") from error
        except self._failures as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        with self._lock:
            known, self._why, self._out_until = self._why, "", 0.0
        if known:
            _log.warning("The %s answers again.", self.name)
        return found

    def _begun(self, function: Callable[[], _T], long: bool) -> Future[_T]:
        try:
            return (self._long if long else self._pool).submit(function)
        except RuntimeError:
            if self._closed:
                raise
        # The interpreter is shutting down and starts no more threads, but the deferred writes must still be written.
        done: Future[_T] = Future()
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        return done

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` in a worker thread and ignore the result; do nothing while the tier is not used."""
        if not self.out:
            with self._lock:
                self._unsettled = [each for each in self._unsettled if not each.done()]
                self._unsettled.append(self._pool.submit(function))

    def settle(self) -> None:
        """Wait for the calls of :meth:`soon`, at most until the deadline."""
        with self._lock:
            waiting, self._unsettled = self._unsettled, []
        wait(waiting, self.timeout_s)

    def _failed(self, why: str) -> StoreUnavailableError:
        # obstore appends debugging details to its messages.
        why = " ".join(why.partition("Debug source:")[0].split())[:_LONGEST]
        with self._lock:
            known, self._why, self._out_until = self._why, why, time.monotonic() + _OUT_S
        if not known:
            _log.warning(
                "The %s is out (%s). It is tried again every %d s; until then its KV counts as missing, nothing in it is "
                "deleted, and nothing is written to it.",
                self.name,
                why,
                _OUT_S,
            )
        return StoreUnavailableError(f"The {self.name} does not answer: {why}")

    def close(self) -> None:
        """Accept no more calls, and do not wait for the running calls."""
        self._closed = True
        for pool in (self._pool, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
