"""A store by the addresses of its tiers: ``ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from cacheblend_rag.errors import InputError
from cacheblend_rag.store.base import TIMEOUT_S, KVStore, Writes
from cacheblend_rag.store.codec import RAW, get_codec
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.keyring import Keyring
from cacheblend_rag.store.memory import MemoryStore

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")
_OBJECTS = ("s3", "gs", "az")
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
    """One tier's address.

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
        config: Further options, of an object store.
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
        """What such a tier is called in statistics and costs."""
        return {"file": "disk", **dict.fromkeys(_REDIS, "redis")}.get(self.scheme, self.scheme)


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
    place = unquote(parts.netloc + parts.path) if scheme in {"ram", "file"} else parts.netloc + parts.path
    tier = TierURL("", scheme, place)
    if scheme not in {"ram", "file", *_REDIS, *_OBJECTS} or "://" not in url:
        raise InputError(f"{url!r} is no tier of a KV store; {_EXAMPLE}.")
    if scheme == "ram" and place:
        options, tier = {"budget": place, **options}, replace(tier, place="")
    if scheme == "file" and parts.netloc:
        raise InputError(f"{url!r} names a host: a directory takes three slashes, as file:///nvme/kv.")
    if scheme not in {"ram", "file", "unix"} and not parts.netloc:
        raise InputError(f"{url!r} lacks a {'bucket' if scheme in _OBJECTS else 'host'}; {_EXAMPLE}.")
    taken: dict[str, Callable[[str], object]] = {"budget": parse_size}
    if scheme != "ram":
        taken |= {"codec": _codec, "encrypt": str, "write": _writes}
    if scheme not in {"ram", "file"}:
        taken |= {"ttl": parse_duration, "timeout": parse_duration}
    for name, parse in taken.items():
        if name in options:
            field = f"{name}_s" if name in {"ttl", "timeout"} else name
            tier = replace(tier, **{field: parse(options.pop(name))})  # type: ignore[arg-type]
    config = () if scheme not in _OBJECTS else tuple(sorted(options.items()))
    if options and scheme in {"ram", "file"}:
        raise InputError(f"{url!r}: {', '.join(options)} is no option of this tier; it takes {' and '.join(taken)}.")
    query = urlencode(options) if scheme in _REDIS else ""
    own = urlunsplit((scheme.replace("valkey", "redis"), parts.netloc, parts.path, query, ""))
    if not parts.netloc:  # which urlunsplit writes with one slash
        own = f"{scheme}://{parts.path}{'?' if query else ''}{query}"
    return replace(tier, url=own, config=config)


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


def open_tier(
    tier: TierURL, name: str, home: Path | None, ram_budget: Callable[[], int], disk_budget: Callable[[DiskStore], int]
) -> KVStore:
    """Open one tier.

    Args:
        tier: Its address.
        name: What it is called in statistics and costs.
        home: The directory that ``file://`` without a path means.
        ram_budget: What RAM may hold where the address does not say it.
        disk_budget: The same of a disk.

    Raises:
        InputError: The address or its keys cannot be used, or a package is missing.
        StoreError: A directory cannot be used.
    """
    store = _opened(tier, name, home, ram_budget, disk_budget)
    store.writes = tier.write
    return store


def _opened(
    tier: TierURL, name: str, home: Path | None, ram_budget: Callable[[], int], disk_budget: Callable[[DiskStore], int]
) -> KVStore:
    if tier.scheme == "ram":
        return MemoryStore(ram_budget() if tier.budget is None else tier.budget)
    keys = Keyring.read(tier.encrypt) if tier.encrypt else None
    if tier.scheme == "file":
        if not tier.place and home is None:
            raise InputError("file:// without a path means a store's own directory, and there is none; add the path.")
        root = Path(tier.place).expanduser() if tier.place else home or Path()
        disk = DiskStore(root, tier=name, codec=tier.codec, keys=keys)
        disk.budget = disk_budget(disk) if tier.budget is None else tier.budget
        return disk
    common: Any = {
        "tier": name,
        "ttl_s": tier.ttl_s,
        "timeout_s": tier.timeout_s,
        "codec": tier.codec,
        "keys": keys,
    }
    extra = "redis" if tier.scheme in _REDIS else "s3"
    try:
        # What is imported here takes packages that not everybody has.
        if extra == "redis":
            from cacheblend_rag.store.redis import RedisStore

            return RedisStore(tier.url, tier.budget, **common)
        from cacheblend_rag.store.objects import ObjectStore
    except ImportError as error:
        raise InputError(
            f"A {tier.scheme}:// tier needs a package that is missing ({error}): pip install 'cacheblend-rag[{extra}]'"
        ) from error
    return ObjectStore.at(tier.url, tier.budget, **{**common, **dict(tier.config)})
