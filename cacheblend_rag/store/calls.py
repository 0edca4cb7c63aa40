"""Calls what may not answer: each call has a deadline, and after one that failed none is tried for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from circuitbreaker import CircuitBreaker

from cacheblend_rag.errors import StoreUnavailableError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

AT_ONCE = 8
"""How many calls of one tier run side by side."""
WRITE_FACTOR = 30
"""How much longer a call may take for which no prompt waits: writing an entry, listing all of them."""
_OUT_S = 5
_LONGEST = 300


class RemoteCalls:
    """Calls one remote tier.

    A call runs in a thread of its own, so that whoever waits goes on at the deadline whatever the client does; the client's own
    timeouts end the call. The first call that fails or is late opens the circuit: for some seconds all others fail at once, so
    a sick tier costs a prompt one deadline and no more. Then calls are let through again, and the first that succeeds closes it.
    """

    def __init__(self, name: str, failures: tuple[type[Exception], ...], timeout_s: float):
        """Call the tier that messages call ``name`` (``redis tier redis://host:6379/0``); a call is given up after ``timeout_s``.

        ``failures`` are what the client raises when the tier is to blame; other exceptions pass.
        """
        self.name, self.timeout_s = name, timeout_s
        self._failures = failures
        self._breaker = CircuitBreaker(1, _OUT_S, (*failures, TimeoutError), name)
        # Of their own for the long ones: no look-up shall be late because entries are being written.
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cacheblend-remote")
        self._long = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="cacheblend-remote-long")
        self._lock = threading.Lock()
        self._why, self._closed = "", False
        self._unsettled: list[Future[object]] = []

    @property
    def out(self) -> str:
        """Return why the tier is not used at the moment; empty if it is."""
        return self._why if self._breaker.opened else ""

    def __call__(self, function: Callable[[], _T], long: bool = False) -> _T:
        """Return what ``function`` returns, within the deadline; a ``long`` call has a later one.

        Raises:
            StoreUnavailableError: The tier failed, was late, or is out.
        """
        if self._breaker.opened:
            raise StoreUnavailableError(f"The {self.name} is out: {self._why}")
        deadline_s = self.timeout_s * (WRITE_FACTOR if long else 1)
        future = self._begun(function, long)
        try:
            with self._breaker:
                found = future.result(deadline_s)
        except TimeoutError as error:
            future.cancel()
            raise self._failed(f"no answer within {deadline_s:g} s") from error
        except self._failures as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        with self._lock:
            known, self._why = self._why, ""
        if known:
            _log.warning("The %s answers again.", self.name)
        return found

    def _begun(self, function: Callable[[], _T], long: bool) -> Future[_T]:
        try:
            return (self._long if long else self._pool).submit(function)
        except RuntimeError:
            if self._closed:
                raise
        # The interpreter ends and begins nothing more, but what is written behind is still to be written.
        done: Future[_T] = Future()
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        return done

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` behind the caller's back, who does not care how it ends; nothing where the tier is out."""
        if not self._breaker.opened:
            with self._lock:
                self._unsettled = [each for each in self._unsettled if not each.done()]
                self._unsettled.append(self._pool.submit(function))

    def settle(self) -> None:
        """Wait for what was to be called :meth:`soon`, within the deadline."""
        with self._lock:
            waiting, self._unsettled = self._unsettled, []
        wait(waiting, self.timeout_s)

    def _failed(self, why: str) -> StoreUnavailableError:
        # obstore's messages go on with what only its authors want to know.
        why = " ".join(why.partition("Debug source:")[0].split())[:_LONGEST]
        with self._lock:
            known, self._why = self._why, why
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
        """Take no more calls; those that still run end by themselves."""
        self._closed = True
        for pool in (self._pool, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
