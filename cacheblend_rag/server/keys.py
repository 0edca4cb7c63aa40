"""Checks API keys with their roles and tenants, and enforces the tenants' quotas."""

from __future__ import annotations

import hashlib
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args
from urllib.parse import parse_qs

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.protocol import StrictModel, first_problem
from cacheblend_rag.store.files import DEFAULT, DEFAULT_NAME, Namespace
from cacheblend_rag.store.opening import parse_duration, parse_size


class QuotaError(StoreError):
    """Reports that a tenant would register more than its quota allows."""

    public = True


@dataclass(frozen=True)
class Quota:
    """Limits a tenant's use of one server; None sets no limit.

    Attributes:
        max_chunks: Most registered chunks; None for the value of ``--max-chunks``.
        max_kv: Most bytes of stored KV of the registered chunks.
        tokens_per_minute: Most tokens per minute: of prompts, answers and precomputed chunks.
        max_concurrent: Most answers computed at a time. Each prompt of a request has one answer, or as many as ``n`` or beams
            ask for. A request without answers counts as one answer.
        expire_after_s: Seconds after which a registered chunk expires, unless the chunk is registered again.
    """

    max_chunks: int | None = None
    max_kv: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    expire_after_s: float | None = None

    def check_chunks(self, held: int, new: int) -> None:
        """Raise QuotaError if ``new`` chunks beside the ``held`` chunks exceed ``max_chunks``."""
        if self.max_chunks is not None and held + new > self.max_chunks:
            raise QuotaError(
                f"{held} chunks are registered, and {new} more would exceed the {self.max_chunks} that may be. Delete some, or "
                "start the server with a larger --max-chunks, or max_chunks of the tenant."
            )

    def check_kv(self, held: int, new: int) -> None:
        """Raise QuotaError if ``new`` bytes of KV beside the ``held`` bytes exceed ``max_kv``."""
        if self.max_kv is not None and held + new > self.max_kv:
            raise QuotaError(
                f"The registered chunks have {held} bytes of KV, and {new} more would exceed the {self.max_kv} that this tenant "
                "may have (max_kv). Delete some chunks."
            )

    def check_request(self, sequences: int, tokens: int, logprobs: int = 0) -> None:
        """Raise InputError if a request has too many answers, tokens, or log-probabilities of its prompts."""
        if self != NO_QUOTA and logprobs > MOST_LOGPROBS:
            raise InputError(
                f"The request asks for {logprobs} log-probabilities of its prompts: 1 + prompt_logprobs for each token. All who "
                f"ask wait while they are written; this tenant may ask for {MOST_LOGPROBS}. Ask for fewer, or of less."
            )
        if self.max_concurrent is not None and sequences > self.max_concurrent:
            raise InputError(
                f"The request asks for {sequences} answers at a time: n, or beams, to each of its prompts. This tenant may have "
                f"{self.max_concurrent} (max_concurrent). Ask for fewer."
            )
        if self.tokens_per_minute is not None and tokens > self.tokens_per_minute:
            raise InputError(
                f"The request may take {tokens} tokens: its prompts and max_tokens for each of {sequences} answers. This tenant "
                f"has {self.tokens_per_minute} a minute (tokens_per_minute). Ask for fewer or shorter answers, or of less."
            )


MOST_LOGPROBS = 4096
"""Most log-probabilities of one request's prompts, for a tenant with a quota: vLLM blocks while it makes their objects."""
NO_QUOTA = Quota()
"""Quota without limits."""


class TokenBucket:
    """Limits tokens per minute; unused tokens of one minute accumulate.

    The tokens that a request takes are known only when the request has ended. A request that takes more tokens than are
    available leaves a debt, and no request is admitted before the debt is paid off.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
        self._most, self._clock = float(per_minute), clock
        self._level, self._at = self._most, clock()

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._at) * self._most / 60)
        self._at = now

    def take(self, tokens: int) -> None:
        """Take tokens out, even more than are available."""
        self._fill()
        self._level -= tokens

    def wait_s(self) -> float:
        """Return the seconds until a token is available."""
        self._fill()
        return max(0.0, (1 - self._level) * 60 / self._most)


class Admission:
    """Counts the answers and tokens computed for one tenant. Used only in the server's event loop.

    Attributes:
        quota: Limits of the tenant.
        serving: Number of answers being computed.
        held: Bytes of the bodies of requests that are being read or served.
    """

    def __init__(self, quota: Quota = NO_QUOTA, clock: Callable[[], float] = time.monotonic):
        """Admit requests within ``quota``."""
        rate = quota.tokens_per_minute
        self._bucket = None if rate is None else TokenBucket(rate, clock)
        self.quota, self.serving, self.held = quota, 0, 0

    def refusal(self, more: int = 1) -> tuple[str, int] | None:
        """Return why ``more`` answers are not admitted now, and the seconds to wait; None if they are admitted."""
        most = self.quota.max_concurrent
        if most is not None and self.serving + more > most:
            return (
                f"This tenant may have {most} answers computed at a time; {self.serving} are, and {more} more would be too many. "
                "Wait for some to end.",
                1,
            )
        wait = 0.0 if self._bucket is None else self._bucket.wait_s()
        if wait:
            rate = self.quota.tokens_per_minute
            return f"This tenant has used its {rate} tokens a minute. Try again in {ceil(wait)} seconds.", ceil(wait)
        return None

    @property
    def counts(self) -> bool:
        """Return whether the tenant's tokens are counted."""
        return self._bucket is not None

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed for the tenant."""
        if self._bucket is not None:
            self._bucket.take(tokens)


T = TypeVar("T")

Role = Literal["ask", "write", "admin"]
"""Each role includes all earlier roles. "ask" sends prompts. "write" reads, registers and deletes chunks. "admin" may do
everything for its tenant, and an "admin" of the default tenant may do everything on the server."""

_ORDER: dict[str, int] = {role: place for place, role in enumerate(get_args(Role))}
_ASK = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/version"),
    ("GET", "/v1/chunks/stats"),  # the first request of `RemoteEngine`
}


@dataclass(frozen=True)
class Key:
    """Holds an API key: its SHA-256 digest, its role, and the name of its tenant."""

    digest: bytes
    role: Role = "admin"
    tenant: str = DEFAULT_NAME

    @classmethod
    def of(cls, value: str) -> Key:
        """Return the key with the value ``value`` and full rights."""
        return cls(_digest(value))

    @property
    def operator(self) -> bool:
        """Return whether the key belongs to the operator: an admin of the default tenant."""
        return self.role == "admin" and self.tenant == DEFAULT_NAME


def key_of(value: str, keys: Iterable[Key]) -> Key | None:
    """Return the one of ``keys`` with the value ``value``; None if no key has it."""
    digest = _digest(value)
    # Every key is compared, so that the time taken reveals nothing about a key that nearly matches.
    matches = [(secrets.compare_digest(digest, key.digest), key) for key in keys]
    return next((key for same, key in matches if same), None)


def needed(method: str, path: str, query: bytes = b"") -> tuple[Role, bool]:
    """Return the role that a request needs, and whether its key must be the default tenant's (all unlisted routes)."""
    if (method, path) in _ASK:
        return "ask", False
    if path == "/v1/chunks" or path.startswith("/v1/chunks/"):
        everything = method == "DELETE" and path == "/v1/chunks" and "all" in parse_qs(query.decode("latin-1"), True)
        return "admin" if everything else "write", False
    return "admin", True


def may(key: Key, method: str, path: str, query: bytes = b"") -> bool:
    """Return whether a key may send a request."""
    role, operators = needed(method, path, query)
    return key.operator if operators else _ORDER[key.role] >= _ORDER[role]


def _read_by(read: Callable[[str], T]) -> Callable[[object], T]:
    def checked(value: object) -> T:
        try:
            return read(value if isinstance(value, str) else repr(value))
        except InputError as error:
            raise ValueError(str(error)) from None  # pydantic adds the field's place

    return checked


_Name = Annotated[str, AfterValidator(_read_by(lambda name: Namespace(name).name))]


class _Entry(StrictModel):
    value: str | None = Field(default=None, min_length=1)
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    role: Role
    tenant: _Name = DEFAULT_NAME


class _Tenant(StrictModel):
    name: _Name
    reads: tuple[_Name, ...] = ()
    max_chunks: PositiveInt | None = None
    max_kv: Annotated[int, BeforeValidator(_read_by(parse_size))] | None = None
    tokens_per_minute: PositiveInt | None = None
    max_concurrent: PositiveInt | None = None
    expire_after: Annotated[float, BeforeValidator(_read_by(parse_duration))] | None = None

    @property
    def quota(self) -> Quota:
        return Quota(self.max_chunks, self.max_kv, self.tokens_per_minute, self.max_concurrent, self.expire_after)


class _File(StrictModel):
    key: tuple[_Entry, ...] = Field(min_length=1)
    tenant: tuple[_Tenant, ...] = ()


@dataclass(frozen=True)
class Keys:
    """Holds a server's keys (none: everybody may do everything), all tenants, and quotas by the tenant's name."""

    keys: tuple[Key, ...] = ()
    tenants: tuple[Namespace, ...] = (DEFAULT,)
    quotas: Mapping[str, Quota] = field(default_factory=dict)

    @property
    def shared(self) -> bool:
        """Return whether there are several tenants."""
        return len(self.tenants) > 1


def read_keys(path: Path) -> Keys:
    """Read a TOML file of ``[[key]]`` and ``[[tenant]]`` tables.

    A key has a ``value`` or its ``sha256``, a ``role``, and optionally a ``tenant``. A tenant has a ``name``, and optionally
    ``reads`` (names of tenants whose chunks it may use) and limits: the fields of :class:`Quota`, with ``max_kv`` written as
    ``"50GiB"``, and ``expire_after``, written as ``"30d"``, for ``expire_after_s``.

    Raises:
        InputError: The file cannot be read, or is not a valid file of keys; the message shows no key.
    """
    try:
        parsed = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"Cannot read the keys in {path}: {error.strerror or error}.") from error
    except ValidationError as error:
        raise InputError(f"The keys in {path} cannot be used: {first_problem(error)}.") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise InputError(f"{path} is not a TOML file: {error}.") from None
    keys = []
    for number, entry in enumerate(parsed.key):
        if (entry.value is None) == (entry.sha256 is None):
            raise InputError(f"The keys in {path} cannot be used: key.{number} needs either value or sha256.")
        digest = _digest(entry.value) if entry.value is not None else bytes.fromhex(entry.sha256 or "")
        keys.append(Key(digest, entry.role, entry.tenant))
    if len({key.digest for key in keys}) < len(keys):
        raise InputError(f"The keys in {path} cannot be used: one of them is there twice.")
    try:
        tenants = _tenants(keys, parsed.tenant)
    except InputError as error:
        raise InputError(f"The keys in {path} cannot be used: {error}") from None
    return Keys(tuple(keys), tenants, {table.name: table.quota for table in parsed.tenant})


def _tenants(keys: Iterable[Key], described: Iterable[_Tenant]) -> tuple[Namespace, ...]:
    """Return the tenants of keys and tables; raises InputError for a duplicate table, or an unknown name in ``reads``."""
    found = {name: Namespace(name) for name in (DEFAULT_NAME, *(key.tenant for key in keys))}
    tables = list(described)
    for number, table in enumerate(tables):
        if table.name in (other.name for other in tables[:number]):
            raise InputError(f"the tenant {table.name!r} has two tables; give it one.")
        found[table.name] = Namespace(table.name, table.reads)
    for tenant in found.values():
        for name in tenant.reads:
            if name not in found:
                raise InputError(f"the tenant {tenant.name!r} reads {name!r}, which has no key and no table.")
    return tuple(found.values())


def refuse_stored_answers(keys: Keys) -> None:
    """Refuse several tenants if vLLM stores answers of the Responses API: anybody who names an id gets the answer.

    Raises:
        InputError: vLLM stores answers, and there are several tenants.
    """
    from vllm import envs

    if keys.shared and envs.VLLM_ENABLE_RESPONSES_API_STORE:
        raise InputError(
            "VLLM_ENABLE_RESPONSES_API_STORE keeps answers that any tenant could go on from. Unset it, or give each tenant a "
            "server of its own."
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
