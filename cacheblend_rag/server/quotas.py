"""Limits how much a tenant may have stored and how much it may ask, and lets its requests in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Quota:
    """Limits what a tenant may use of one server; None sets no limit.

    Attributes:
        max_chunks: How many chunks it may have registered; None: as many as ``--max-chunks`` says.
        max_kv: Bytes of stored KV that its registered chunks may have.
        tokens_per_minute: Tokens of its prompts and answers, and of the chunks that are computed for it.
        max_concurrent: How many of its requests are served at a time.
        expire_after_s: Seconds after which a registered chunk is forgotten, unless it is registered again.
    """

    max_chunks: int | None = None
    max_kv: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    expire_after_s: float | None = None


class TokenBucket:
    """Lets as many tokens pass a minute as are filled in, and at once what has gathered in one minute.

    How many tokens a request will take is known when it has ended: whoever takes more than there are leaves a debt, and nobody is
    let in before it is paid off.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        """Start full."""
        self._most, self._clock = float(per_minute), clock
        self._level, self._at = self._most, clock()

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._most / 60)
        self._at = now

    def take(self, tokens: int) -> None:
        """Take tokens out, more than there are if need be."""
        self._fill()
        self._level -= tokens

    def wait_s(self) -> float:
        """Return in how many seconds there will be a token."""
        self._fill()
        return max(0.0, (1 - self._level) * 60 / self._most)


class Admission:
    """The requests of one tenant that are being served. Lives in the server's event loop."""

    def __init__(self, quota: Quota = Quota(), clock: Callable[[], float] = time.monotonic):
        """Let in what ``quota`` allows."""
        rate = quota.tokens_per_minute
        self._bucket = None if rate is None else TokenBucket(rate, clock)
        self._quota, self._serving = quota, 0
        self.held = 0
        """Bytes of the bodies of its requests that have come, and are not served yet."""

    def refusal(self) -> tuple[str, int] | None:
        """Return why no request is let in now, and after how many seconds to try again; None if one is."""
        most = self._quota.max_concurrent
        if most is not None and self._serving >= most:
            return (
                f"{most} requests of this tenant are being served, as many as may be at a time. Wait for one to end.",
                1,
            )
        wait = 0.0 if self._bucket is None else self._bucket.wait_s()
        if wait:
            rate = self._quota.tokens_per_minute
            return f"This tenant has used its {rate} tokens a minute. Try again in {ceil(wait)} seconds.", ceil(wait)
        return None

    def begin(self) -> None:
        """Count a request that was let in."""
        self._serving += 1

    def end(self) -> None:
        """Count it no more, however it ended."""
        self._serving -= 1

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed for the tenant."""
        if self._bucket is not None:
            self._bucket.take(tokens)
