"""Defines the errors that a user can see. Each message is shown unchanged, and names the problem and the remedy."""

from __future__ import annotations


class CacheBlendError(Exception):
    """Base class of every error that the library raises on purpose.

    Attributes:
        exit_code: Exit code of a command that ends with the error.
        public: Whether a server shows the message to every caller. The operator alone sees other messages, which can name files
            and machines of the server.

    Example::

        try:
            store = open_store("~/kv")
        except CacheBlendError as error:
            sys.exit(error.exit_code)
    """

    exit_code = 1
    public = False


class InputError(CacheBlendError):
    """Reports a file, a flag or an argument that cannot be used as given.

    Example::

        try:
            chunk = make_chunk(text, engine.tokenizer)
        except InputError as error:
            print(f"skipped: {error}")
    """

    exit_code = 2
    public = True


class PromptTooLongError(InputError):
    """Reports that the prompt plus the requested completion exceed the model's context window."""


class UnknownChunkError(InputError):
    """Reports a chunk id that is not registered with the engine."""


class AlteredChunkError(InputError):
    """Reports a retrieved chunk that the prompt lacks or has in an altered form, so that its stored KV cannot be used.

    Attributes:
        chunk_id: Id of the chunk.
    """

    def __init__(self, message: str, chunk_id: str):
        super().__init__(message)
        self.chunk_id = chunk_id


class StoreError(CacheBlendError):
    """Reports that the KV store cannot carry out an operation: full disk, no write permission, foreign contents.

    Example::

        try:
            engine.precompute(chunks)
        except StoreError as error:
            print(f"The KV was not stored: {error}")
    """

    exit_code = 3


class StoreMismatchError(StoreError):
    """Reports a store that was written for another model or with other settings."""


class DamagedKVError(StoreError):
    """Reports that a stored KV entry failed its checks.

    The library always treats the entry as a miss; only `verify` shows the damage to a user.
    """


class StoreUnavailableError(StoreError):
    """Reports a tier that cannot be read now: a timeout, a refused connection, a server's 5xx, ESTALE.

    The stored entries may be intact. The current prompt counts a miss, and no entry is deleted.
    """


class UnknownCodecError(StoreUnavailableError):
    """Reports an entry in a format or a codec that this version cannot read. The entry is not deleted."""


class UnknownKeyError(StoreUnavailableError):
    """Reports an encrypted entry whose key is missing. The entry is not deleted."""


class ModelError(CacheBlendError):
    """Reports a model that cannot be loaded or used.

    Example::

        try:
            engine = TransformersEngine("path/to/model")
        except ModelError as error:
            print(error)
    """

    exit_code = 4


class ServerError(CacheBlendError):
    """Reports that a `cacheblend serve` does not answer, serves another model than expected, or refuses a request.

    Attributes:
        status: HTTP status of the server's answer; None if the server did not answer.

    Example::

        try:
            answer = RemoteEngine("http://localhost:8000/v1").generate("Who sailed first?")
        except ServerError as error:
            print(error.status, error)
    """

    exit_code = 5

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without its full stop; the class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
