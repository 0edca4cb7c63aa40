"""Decides who may ask a server what, and how much: API keys with roles and tenants, and the tenants' quotas."""

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
    """More than a tenant may have registered."""


@dataclass(frozen=True)
class Quota:
    """Limits what a tenant may use of one server; None sets no limit.

    Attributes:
        max_chunks: How many chunks it may have registered; None: as many as ``--max-chunks`` says.
        max_kv: Bytes of stored KV that its registered chunks may have.
        tokens_per_minute: Tokens of its prompts and answers, and of the chunks that are computed for it.
        max_concurrent: How many answers are computed for it at a time: each of a request's prompts has one, or as many as ``n``
            or beams ask for. A request that computes none counts as one.
        expire_after_s: Seconds after which a registered chunk is forgotten, unless it is registered again.
    """

    max_chunks: int | None = None
    max_kv: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    expire_after_s: float | None = None

    def check_chunks(self, held: int, new: int) -> None:
        """Refuse ``new`` chunks beside the ``held``, where they are too many; raises QuotaError."""
        if self.max_chunks is not None and held + new > self.max_chunks:
            raise QuotaError(
                f"{held} chunks are registered, and {new} more would exceed the {self.max_chunks} that may be. Delete some, or "
                "start the server with a larger --max-chunks, or max_chunks of the tenant."
            )

    def check_kv(self, held: int, new: int) -> None:
        """Refuse chunks with ``new`` bytes of KV beside the ``held``, where they have too much; raises QuotaError."""
        if self.max_kv is not None and held + new > self.max_kv:
            raise QuotaError(
                f"The registered chunks have {held} bytes of KV, and {new} more would exceed the {self.max_kv} that this tenant "
                "may have (max_kv). Delete some chunks."
            )

    def check_request(self, sequences: int, tokens: int, logprobs: int = 0) -> None:
        """Refuse a request of so many answers, with at most so many tokens and logprobs of its prompts; raises InputError."""
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

    def check_grammar(self, characters: int, free: bool) -> None:
        """Refuse what an answer is to follow, so long, or free to be as dear for each token as it likes; raises InputError."""
        if self != NO_QUOTA and (free or characters > MOST_SCHEMA):
            raise InputError(
                "The answer is to follow a schema or choices that all who ask might wait for. This tenant may send JSON schemas "
                f"and choices of {MOST_SCHEMA} characters in all, without regular expressions (pattern), and no grammars. A "
                f"string's minLength or maxLength counts for {PER_LIMITED} by character that it limits, up to {MOST_LIMITED} of "
                f"them; a format for {PER_FORMAT}."
            )


MOST_LOGPROBS = 4096
"""Of the prompts of one request of a tenant with a quota: vLLM makes objects of all of them while nothing else is served."""
MOST_SCHEMA = 1 << 13
"""Of what one answer of such a tenant is to follow: an engine makes a grammar of one after another, and none is given up."""
PER_LIMITED, MOST_LIMITED, PER_FORMAT = 32, 128, 256
"""What counts as so many characters of a schema, being as dear to make a grammar of: see the message that names them."""
NO_QUOTA = Quota()
"""Limits nothing."""


class TokenBucket:
    """Lets as many tokens pass a minute as are filled in, and at once what has gathered in one minute.

    How many tokens a request will take is known when it has ended: whoever takes more than there are leaves a debt, and nobody is
    let in before it is paid off.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic):
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
    """Counts what is computed for one tenant. Lives in the server's event loop.

    Attributes:
        quota: What it may use.
        serving: How many answers are computed for it now.
        held: Bytes of the bodies of its requests that have come, and are not served yet.
    """

    def __init__(self, quota: Quota = NO_QUOTA, clock: Callable[[], float] = time.monotonic):
        """Let in what ``quota`` allows."""
        rate = quota.tokens_per_minute
        self._bucket = None if rate is None else TokenBucket(rate, clock)
        self.quota, self.serving, self.held = quota, 0, 0

    def refusal(self, more: int = 1) -> tuple[str, int] | None:
        """Return why no ``more`` answers are let in now, and after how many seconds to try again; None if they are."""
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
        """Return whether its tokens are counted."""
        return self._bucket is not None

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed for the tenant."""
        if self._bucket is not None:
            self._bucket.take(tokens)


T = TypeVar("T")

Role = Literal["ask", "write", "admin"]
"""Each may what those before it may: send prompts; read, register and delete chunks; all that is its tenant's, and of the default
tenant all that is the server's."""

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
    ("GET", "/v1/chunks/stats"),  # which `RemoteEngine` begins with
}


@dataclass(frozen=True)
class Key:
    """An API key: its SHA-256, what it is good for, and the name of the tenant whose it is."""

    digest: bytes
    role: Role = "admin"
    tenant: str = DEFAULT_NAME

    @classmethod
    def of(cls, value: str) -> Key:
        """Return the key ``value``, good for everything."""
        return cls(_digest(value))

    @property
    def operator(self) -> bool:
        """Return whether it is good for what is not one tenant's."""
        return self.role == "admin" and self.tenant == DEFAULT_NAME


def key_of(value: str, keys: Iterable[Key]) -> Key | None:
    """Return which of ``keys`` has the value ``value``, None if none has."""
    digest = _digest(value)
    # Every key is compared, so that the time taken says nothing about which one nearly fits.
    matches = [(secrets.compare_digest(digest, key.digest), key) for key in keys]
    return next((key for same, key in matches if same), None)


def needed(method: str, path: str, query: bytes = b"") -> tuple[Role, bool]:
    """Return the smallest role that a request takes, and whether its key must be the default tenant's, as for all not listed."""
    if (method, path) in _ASK:
        return "ask", False
    if path == "/v1/chunks" or path.startswith("/v1/chunks/"):
        everything = method == "DELETE" and path == "/v1/chunks" and "all" in parse_qs(query.decode("latin-1"), True)
        return "admin" if everything else "write", False
    return "admin", True


def may(key: Key, method: str, path: str, query: bytes = b"") -> bool:
    """Say whether a key is good for such a request."""
    role, operators = needed(method, path, query)
    return key.operator if operators else _ORDER[key.role] >= _ORDER[role]


def _read_by(read: Callable[[str], T]) -> Callable[[object], T]:
    def checked(value: object) -> T:
        try:
            return read(value if isinstance(value, str) else repr(value))
        except InputError as error:
            raise ValueError(str(error)) from None  # of which pydantic says the place

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
    """A server's keys (none: everybody may do everything), all tenants that are named, and the quotas of those with a limit."""

    keys: tuple[Key, ...] = ()
    tenants: tuple[Namespace, ...] = (DEFAULT,)
    quotas: Mapping[str, Quota] = field(default_factory=dict)

    @property
    def shared(self) -> bool:
        """Return whether there are several tenants."""
        return len(self.tenants) > 1


def read_keys(path: Path) -> Keys:
    """Read a TOML file of ``[[key]]`` and ``[[tenant]]`` tables.

    A key has a ``value`` or its ``sha256``, a ``role``, and may have a ``tenant``; a tenant has a ``name``, and may have
    ``reads``, the names of tenants whose chunks it may use, and limits: the fields of :class:`Quota`, of which ``max_kv`` is
    written as ``"50GiB"`` and ``expire_after`` as ``"30d"``.

    Raises:
        InputError: It cannot be read, or is not such a file; the message shows no key.
    """
    try:
        parsed = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"Cannot read the keys in {path}: {error.strerror or error}.") from error
    except ValidationError as error:
        raise InputError(f"The keys in {path} cannot be used: {first_problem(error)}.") from None
    except ValueError as error:  # no TOML, or no UTF-8
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
    """Return the tenants of keys and tables; one that is read but has neither is a slip of the pen."""
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
    """Refuse tenants where vLLM keeps answers of the Responses API: it hands them to whoever names their id.

    Raises:
        InputError: It does, and there are several.
    """
    from vllm import envs

    if keys.shared and envs.VLLM_ENABLE_RESPONSES_API_STORE:
        raise InputError(
            "VLLM_ENABLE_RESPONSES_API_STORE keeps answers that any tenant could go on from. Unset it, or give each tenant a "
            "server of its own."
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
