"""Reads the addresses of a store's tiers: ``ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast, get_args
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.base import TIMEOUT_S, Writes
from cacheblend_rag.store.codec import RAW, get_codec

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")
OBJECTS = ("s3", "gs", "az")
_OURS = {"ram", "file", *REDIS, *OBJECTS}
TIERS_GROUP = "cacheblend_rag.tiers"
"""Entry points by which other packages add tiers: the scheme of their addresses, and what opens one."""
_EXAMPLE = "write as ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0?budget=64GiB,s3://bucket/prefix"


def parse_size(text: str) -> int:
    """Return a size in bytes: ``2GiB`` is 2 * 1024³ bytes, ``2GB`` 2 * 1000³, ``2G`` as ``2GiB``.

    Raises:
        InputError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a size; write 2GiB, 500MB or 0.")
    number, unit, binary = match.groups()
    decimal = not binary and text.strip().upper().endswith("B")
    return int(float(number) * (1000 if decimal else 1024) ** " KMGT".index(unit.upper() or " "))


def parse_duration(text: str) -> float:
    """Return a time in seconds: ``500ms``, ``2s``, ``10m``, ``12h`` or ``7d``.

    Raises:
        InputError: It is none, or 0.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds:
        raise InputError(f"{text!r} is not a time; write 500ms, 2s, 10m, 12h or 7d.")
    return seconds


@dataclass(frozen=True)
class TierURL:
    """Holds what one tier's address says.

    Attributes:
        url: What is the tier's own, without the options below.
        scheme: ``ram``, ``file``, ``redis``, ``s3``...
        place: What stands behind ``://``, without options.
        budget: Bytes to hold; None: no limit, of RAM and of the disk the usual share.
        ttl_s: Seconds after which an entry is gone; None: never.
        timeout_s: Seconds that a look-up or a read may take.
        codec: How new entries are encoded (:func:`~cacheblend_rag.store.codec.get_codec`); RAM holds them as they are.
        write: When the tier is given entries; see :attr:`KVStore.writes`.
        encrypt: Directory of the keys that entries are encrypted with (:meth:`Keyring.read`); empty: not encrypted.
        config: Further options, of an object store or a tier of another package.
    """

    url: str
    scheme: str
    place: str
    budget: int | None = None
    ttl_s: float | None = None
    timeout_s: float = TIMEOUT_S
    codec: str = RAW
    write: Writes = "through"
    encrypt: str = ""
    config: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Return what such a tier is called in statistics and costs."""
        return {"file": "disk", **dict.fromkeys(REDIS, "redis")}.get(self.scheme, self.scheme)


def is_urls(text: str) -> bool:
    """Say whether ``text`` names tiers, and is no directory."""
    return "://" in text


def parse_tiers(urls: str) -> tuple[TierURL, ...]:
    """Read the addresses of tiers, fastest first, separated by commas.

    Raises:
        InputError: One is malformed, or there are two of RAM.
    """
    found = tuple(_parse(url.strip()) for url in urls.split(",") if url.strip())
    if not found:
        raise InputError(f"{urls!r} names no tier; {_EXAMPLE}.")
    if sum(tier.scheme == "ram" for tier in found) > 1:
        raise InputError(f"{urls!r} names RAM twice.")
    return found


def _parse(url: str) -> TierURL:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"{url!r} is no address ({error}); {_EXAMPLE}.") from error
    scheme = parts.scheme
    if "#" in url:  # what follows would be ignored, whatever it asks for
        raise InputError(f"{url!r} holds a '#'; write it as %23.")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    place = parts.netloc + parts.path if scheme in {*REDIS, *OBJECTS} else unquote(parts.netloc + parts.path)
    tier = TierURL("", scheme, place)
    ours = scheme in _OURS
    if "://" not in url or not (ours or plugged_in(scheme)):
        raise InputError(f"{url!r} is no tier of a KV store; {_EXAMPLE}.")
    if scheme == "ram" and place:
        options, tier = {"budget": place, **options}, replace(tier, place="")
    if scheme == "file" and parts.netloc:
        raise InputError(f"{url!r} names a host: a directory takes three slashes, as file:///nvme/kv.")
    if ours and scheme not in {"ram", "file", "unix"} and not parts.netloc:
        raise InputError(f"{url!r} lacks a {'bucket' if scheme in OBJECTS else 'host'}; {_EXAMPLE}.")
    taken: dict[str, Callable[[str], object]] = {"budget": parse_size}
    if scheme != "ram":
        taken |= {"codec": _codec, "encrypt": str, "write": _writes}
    if scheme in {*REDIS, *OBJECTS}:
        taken |= {"ttl": parse_duration, "timeout": parse_duration}
    for name, parse in taken.items():
        if name in options:
            field = f"{name}_s" if name in {"ttl", "timeout"} else name
            tier = replace(tier, **{field: parse(options.pop(name))})  # type: ignore[arg-type]
    config = () if ours and scheme not in OBJECTS else tuple(sorted(options.items()))
    if options and scheme in {"ram", "file"}:
        raise InputError(f"{url!r}: {', '.join(options)} is no option of this tier; it takes {' and '.join(taken)}.")
    query = urlencode(options) if scheme in REDIS else ""
    own = urlunsplit((scheme.replace("valkey", "redis"), parts.netloc, parts.path, query, ""))
    if not parts.netloc:  # which urlunsplit writes with one slash
        own = f"{scheme}://{parts.path}{'?' if query else ''}{query}"
    return replace(tier, url=own, config=config)


def plugged_in(scheme: str) -> EntryPoint | None:
    """Return what an installed package opens addresses of this scheme with, which is none of ours; None where none does."""
    return next(iter(entry_points(group=TIERS_GROUP, name=scheme)), None)


def _codec(text: str) -> str:
    return get_codec(text.replace(" ", "+")).name  # a plus sign in an address stands for a space


def _writes(text: str) -> Writes:
    for known in get_args(Writes):
        if text == known:
            return cast("Writes", known)
    raise InputError(f"write={text!r} is none of {', '.join(get_args(Writes))}.")


def with_keys(urls: str, keys: Path) -> str:
    """Return addresses with the directory of keys that all tiers but RAM are encrypted with."""
    option = urlencode({"encrypt": str(keys)}, safe="/")
    return ",".join(
        url if urlsplit(url).scheme == "ram" else f"{url}{'&' if '?' in url else '?'}{option}"
        for url in (_without(url.strip(), "encrypt") for url in urls.split(",") if url.strip())
    )


def _without(url: str, option: str) -> str:
    place, _, query = url.partition("?")
    left = "&".join(each for each in query.split("&") if each and each.partition("=")[0] != option)
    return f"{place}?{left}" if left else place


def password_in(urls: str) -> bool:
    """Say whether an address holds a password."""
    return any(urlsplit(url).password or "password=" in urlsplit(url).query for url in urls.split(","))
