"""Limits how much a tenant may have stored and how much it may ask, and lets its requests in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from cacheblend_rag.errors import StoreError


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

    def check_chunks(self, held: int, new: int) -> None:
        """Refuse ``new`` chunks beside the ``held``, where they are too many; raises StoreError."""
        if self.max_chunks is not None and held + new > self.max_chunks:
            raise StoreError(
                f"{held} chunks are registered, and {new} more would exceed the {self.max_chunks} that may be. Delete some, or "
                "start the server with a larger --max-chunks, or max_chunks of the tenant."
            )

    def check_kv(self, held: int, new: int) -> None:
        """Refuse chunks with ``new`` bytes of KV beside the ``held``, where they have too much; raises StoreError."""
        if self.max_kv is not None and held + new > self.max_kv:
            raise StoreError(
                f"The registered chunks have {held} bytes of KV, and {new} more would exceed the {self.max_kv} that this tenant "
                "may have (max_kv). Delete some chunks."
            )


NO_QUOTA = Quota()
"""Limits nothing."""


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

    def __init__(self, quota: Quota = NO_QUOTA, clock: Callable[[], float] = time.monotonic):
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

    def body_refusal(self, most: int) -> str | None:
        """Return why no more of a body is read, where all of them may have ``most`` bytes; None if it is."""
        if self.held <= most:
            return None
        return (
            f"The bodies of this tenant's requests that are being read and served have more than {most} bytes. Wait for some to "
            "end."
        )

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
