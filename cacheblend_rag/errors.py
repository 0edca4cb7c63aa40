"""Defines the errors a user can meet; their message is shown as it is: what was wrong, and what to do about it."""

from __future__ import annotations


class CacheBlendError(Exception):
    """Base of every error this library raises on purpose."""

    exit_code = 1


class InputError(CacheBlendError):
    """A file, a flag or an argument that cannot be used as given."""

    exit_code = 2


class PromptTooLongError(InputError):
    """Prompt plus requested completion exceed the model's context window."""


class UnknownChunkError(InputError):
    """A chunk id that the engine has never been given."""


class AlteredChunkError(InputError):
    """A retrieved chunk stands in the prompt altered, so that its stored KV is of no use.

    Attributes:
        chunk_id: The chunk.
    """

    def __init__(self, message: str, chunk_id: str):
        super().__init__(message)
        self.chunk_id = chunk_id


class StoreError(CacheBlendError):
    """The KV store cannot do what was asked: full disk, no write permission, foreign contents."""

    exit_code = 3


class StoreMismatchError(StoreError):
    """A store that was written for another model or with other settings."""


class DamagedKVError(StoreError):
    """A stored KV entry failed its checks. Always handled as a miss; it reaches a user only through `verify`."""


class StoreUnavailableError(StoreError):
    """A tier does not answer, or its medium cannot be read now: a timeout, a refused connection, a server's 5xx, ESTALE.

    It says nothing about what is stored. For the prompt at hand it is a miss, and nothing is deleted for it.
    """


class UnknownCodecError(StoreUnavailableError):
    """An entry in a format or a codec that this version does not know; it stays for those who do."""


class UnknownKeyError(StoreUnavailableError):
    """An encrypted entry without the key that it takes; it stays for those who have it."""


class ModelError(CacheBlendError):
    """A model that cannot be loaded or used."""

    exit_code = 4


class ServerError(CacheBlendError):
    """A `cacheblend serve` that does not answer, is not what it should be, or refuses.

    Attributes:
        status: HTTP status of its answer; None without one.
    """

    exit_code = 5

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, without its full stop; its class's name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
