"""Who may ask a server what: API keys with roles, given one by one or in a file."""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheblend_rag.errors import InputError
from cacheblend_rag.protocol import first_problem

Role = Literal["ask", "write", "admin"]
"""Each may what those before it may: send prompts; read, register and delete chunks; everything."""

_RANKS: dict[str, int] = {role: rank for rank, role in enumerate(get_args(Role))}
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
    """An API key: its SHA-256, and what it is good for."""

    digest: bytes
    role: Role = "admin"

    @classmethod
    def of(cls, value: str) -> Key:
        """Return the key ``value``, good for everything."""
        return cls(_digest(value))


def role_of(value: str, keys: Iterable[Key]) -> Role | None:
    """Return the role of the key ``value``, None if it is none of ``keys``."""
    digest = _digest(value)
    # Every key is compared, so that the time taken says nothing about which one nearly fits.
    matches = [(secrets.compare_digest(digest, key.digest), key.role) for key in keys]
    return next((role for same, role in matches if same), None)


def may(role: Role, method: str, path: str, query: bytes = b"") -> bool:
    """Say whether a role may send such a request; what is not listed is an administrator's."""
    needed: Role = "admin"
    if (method, path) in _ASK:
        needed = "ask"
    elif path == "/v1/chunks" or path.startswith("/v1/chunks/"):
        everything = method == "DELETE" and path == "/v1/chunks" and "all" in parse_qs(query.decode("latin-1"), True)
        needed = "admin" if everything else "write"
    return _RANKS[role] >= _RANKS[needed]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: str | None = Field(default=None, min_length=1)
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    role: Role


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: tuple[_Entry, ...] = Field(min_length=1)


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read a TOML file of ``[[key]]`` tables: ``value`` or its ``sha256``, and ``role``.

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
        keys.append(Key(digest, entry.role))
    if len({key.digest for key in keys}) < len(keys):
        raise InputError(f"The keys in {path} cannot be used: one of them is there twice.")
    return tuple(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
