"""Opens a store: a directory with the tiers recorded in it, or a list of tier addresses.

Example of addresses: ``ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.homes import from_home
from cacheblend_rag.store import plugins
from cacheblend_rag.store.base import TIMEOUT_S, KVStore, TierOptions, Writes
from cacheblend_rag.store.codec import RAW, get_codec
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.files import make_root, write_text
from cacheblend_rag.store.kvfile import EntryFormat
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.source import Keyring
from cacheblend_rag.store.tiered import TieredStore

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i)?B?", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
REDIS = ("redis", "rediss", "unix", "valkey", "valkeys")
OBJECTS = ("s3", "gs", "az")
_OURS = {"ram", "file", *REDIS, *OBJECTS}
TIERS_GROUP = "cacheblend_rag.tiers"
"""Group of the entry points by which other packages add tiers: name of the scheme, and function that opens a tier."""
_EXAMPLE = "write as ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0?budget=64GiB,s3://bucket/prefix"


def parse_size(text: str | int) -> int:
    """Return a size in bytes: ``2GiB`` and ``2G`` are 2 * 1024³, ``2GB`` is 2 * 1000³; an int is returned unchanged.

    Raises:
        InputError: The text is no size, or is a size below 1 MiB without a unit.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a size; write 2GiB, 500MB or 0.")
    number, unit, binary = match.groups()
    if text.strip() == number and 0 < float(number) < 1 << 20:  # the user probably forgot the unit
        raise InputError(f"{text} is {text} bytes; add a unit, as {text}GiB, {text}MB or, if it is meant, {text}B.")
    decimal = not binary and text.strip().upper().endswith("B")
    return int(float(number) * (1000 if decimal else 1024) ** " KMGT".index(unit.upper() or " "))


def parse_duration(text: str) -> float:
    """Return a time in seconds: ``500ms``, ``2s``, ``10m``, ``12h`` or ``7d``.

    Raises:
        InputError: The text is no time, or the time is 0.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds:
        raise InputError(f"{text!r} is not a time; write 500ms, 2s, 10m, 12h or 7d.")
    return seconds


@dataclass(frozen=True)
class TierURL:
    """Holds the parsed address of one tier.

    Attributes:
        url: Address without the options below.
        scheme: Scheme of the address: ``ram``, ``file``, ``redis``, ``s3``...
        place: Part of the address behind ``://``, without options.
        budget: Most bytes to hold; None: the default share of RAM or disk, no limit for other tiers.
        ttl_s: Seconds after which an entry expires; None: never.
        timeout_s: Most seconds for a look-up or a read.
        codec: Name of the codec for new entries (:func:`~cacheblend_rag.store.codec.get_codec`).
        write: When entries are written to the tier; see :attr:`KVStore.writes`.
        encrypt: Directory of the keys that encrypt the entries (:meth:`Keyring.read`); empty: no encryption.
        config: Further options for an object store or a tier of another package.
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
        """Return the tier's name in statistics and costs."""
        return {"file": "disk", **dict.fromkeys(REDIS, "redis")}.get(self.scheme, self.scheme)


def is_urls(text: str) -> bool:
    """Return whether ``text`` holds tier addresses, and not the path of a directory."""
    return "://" in text


def parse_tiers(urls: str) -> tuple[TierURL, ...]:
    """Parse tier addresses, fastest tier first, separated by commas.

    Raises:
        InputError: An address is malformed, there is no address, or two tiers are RAM.
    """
    found = tuple(map(_parse, _each(urls)))
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
    if "#" in url:  # options behind the '#' would be ignored silently
        raise InputError(f"{url!r} holds a '#'; write it as %23.")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    place = parts.netloc + parts.path if scheme in {*REDIS, *OBJECTS} else unquote(parts.netloc + parts.path)
    tier = TierURL("", scheme, place)
    ours = scheme in _OURS
    if "://" not in url or not (ours or scheme in plugins.names(TIERS_GROUP)):
        raise InputError(f"{url!r} is no tier of a KV store; {_EXAMPLE}.")
    if scheme == "ram" and place:
        options, tier = {"budget": place, **options}, replace(tier, place="")
    if scheme == "file" and parts.netloc:
        raise InputError(f"{url!r} names a host: a directory takes three slashes, as file:///nvme/kv.")
    if ours and scheme not in {"ram", "file", "unix"} and not parts.netloc:
        raise InputError(f"{url!r} lacks a {'bucket' if scheme in OBJECTS else 'host'}; {_EXAMPLE}.")
    # parse_qsl decodes a plus sign as a space.
    taken: dict[str, Callable[[str], object]] = {
        "budget": parse_size, "codec": lambda text: get_codec(text.replace(" ", "+")).name,
    }  # fmt: skip
    if scheme != "ram":
        taken |= {"encrypt": str, "write": _writes}
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
    own = f"{scheme.replace('valkey', 'redis')}://{parts.netloc}{parts.path}{'?' if query else ''}{query}"
    return replace(tier, url=own, config=config)


def _writes(text: str) -> Writes:
    if text not in get_args(Writes):
        raise InputError(f"write={text!r} is none of {', '.join(get_args(Writes))}.")
    return cast("Writes", text)


def with_keys(urls: str, keys: Path) -> str:
    """Return the addresses with the option ``encrypt`` set to the directory ``keys`` for all tiers except RAM."""
    return ",".join(url if urlsplit(url).scheme == "ram" else _with(url, encrypt=str(keys)) for url in _each(urls))


def _with(url: str, **options: str) -> str:
    """Return an address with ``options`` in place of its options of the same names."""
    place, _, query = url.partition("?")
    kept = [each for each in query.split("&") if each and each.partition("=")[0] not in options]
    return f"{place}?{'&'.join([*kept, urlencode(options, safe='/')])}"


def _each(urls: str) -> list[str]:
    return [url.strip() for url in urls.split(",") if url.strip()]


RECORD = "tiers"
"""File in a store's directory that records the store's tiers."""
_USUAL = "ram://,file://"
# Files with the memory limit of a container on Linux, for control groups of version 2 and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def default_ram_budget(processes: int = 1) -> int:
    """Return the default bytes of KV in RAM for each of ``processes``: together a quarter of the machine's memory."""
    return memory_bytes() // 4 // processes


def memory_bytes() -> int:
    """Return the bytes of this machine's memory, or the container's limit, beyond which the container is killed."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            memory = min(memory, int(limit.read_text()))
    return memory


def open_store(
    where: Path | str | None = None, ram_budget: int | None = None, disk_budget: int | None = None, processes: int = 1
) -> TieredStore:
    """Open a store.

    Args:
        where: Directory, made if it is missing: RAM in front of the disk, or the tiers that :func:`record_tiers` has
            recorded in the directory. Or tier addresses, fastest tier first (:func:`parse_tiers`). None for RAM alone.
        ram_budget: Most bytes of KV in RAM; None for the budget in the address, or else a quarter of the machine's
            memory. 0 for no RAM tier; a store without another tier gets a RAM tier with the budget 0.
        disk_budget: Most bytes of KV on disk; None for the budget in the address, or else half of the free disk space,
            counting the store's entries as free.
        processes: Number of processes that share the machine's memory.

    Raises:
        InputError: An address cannot be used, or a package that the tier needs is missing.
        StoreError: A directory cannot be used.

    Example::

        with open_store("~/kv", ram_budget=8 << 30) as store:
            print(store.stats().entries)
        store = open_store("ram://8GiB,file:///nvme/kv?budget=500GiB")
    """
    if where is None:
        return TieredStore([MemoryStore(default_ram_budget(processes) if ram_budget is None else ram_budget)])
    urls = where if isinstance(where, str) and is_urls(where) else None
    home = None if urls is not None else from_home(where)
    tiers = _opened(urls or (home and recorded_tiers(home)) or _USUAL, home, ram_budget, disk_budget, processes)
    return TieredStore(tiers or [MemoryStore(0)])


def _opened(
    urls: str, home: Path | None, ram_budget: int | None = None, disk_budget: int | None = None, processes: int = 1
) -> list[KVStore]:
    tiers: list[KVStore] = []
    names: Counter[str] = Counter()
    for tier in parse_tiers(urls):
        given = {"ram": ram_budget, "file": disk_budget}.get(tier.scheme)
        if given == 0 and tier.scheme == "ram":
            continue
        names[tier.name] += 1
        name = tier.name + (str(names[tier.name]) if names[tier.name] > 1 else "")
        usual = default_ram_budget(processes) if tier.scheme == "ram" and tier.budget is None else tier.budget
        tiers.append(_open_tier(replace(tier, budget=usual if given is None else given), name, home))
    return tiers


def _open_tier(tier: TierURL, name: str, home: Path | None) -> KVStore:
    """Open one tier under ``name``; ``home`` is the directory of an address ``file://`` without a path.

    Raises:
        InputError: The address or its keys cannot be used, or a package is missing.
        StoreError: A directory cannot be used.
    """
    if tier.scheme == "ram":
        return MemoryStore(tier.budget, format=EntryFormat(tier.codec))
    keys = Keyring.read(tier.encrypt) if tier.encrypt else None
    options: TierOptions = {"tier": name, "format": EntryFormat(tier.codec, keys), "writes": tier.write}
    if tier.scheme == "file":
        if not tier.place and home is None:
            raise InputError("file:// without a path means a store's own directory, and there is none; add the path.")
        root = from_home(tier.place) if tier.place else home or Path()
        return DiskStore(root, "half" if tier.budget is None else tier.budget, **options)
    if tier.scheme not in (*REDIS, *OBJECTS):
        return plugins.load(TIERS_GROUP, tier.scheme, "tier", lambda opens: _checked(opens(tier, **options)))
    extra = "redis" if tier.scheme in REDIS else "s3"
    try:
        # The modules imported here need optional packages.
        if extra == "redis":
            from cacheblend_rag.store.redis import RedisStore

            return RedisStore(tier.url, tier.budget, ttl_s=tier.ttl_s, timeout_s=tier.timeout_s, **options)
        from cacheblend_rag.store.objects import ObjectStore
    except ImportError as error:
        raise InputError(
            f"A {tier.scheme}:// tier needs a package that is missing ({error}): pip install 'cacheblend-rag[{extra}]'"
        ) from error
    return ObjectStore.at(
        tier.url, tier.budget, dict(tier.config), ttl_s=tier.ttl_s, timeout_s=tier.timeout_s, **options
    )


def _checked(store: object) -> KVStore:
    if not isinstance(store, KVStore):
        raise TypeError(f"a {type(store).__name__}, which is no KVStore")
    return store


def record_tiers(
    directory: Path, urls: str | None, encrypt: Path | None = None, disk_budget: str | None = None
) -> None:
    """Record a store's tiers in the store's directory, for all later openings. Stored KV is not moved to other tiers.

    Args:
        directory: Directory of the store.
        urls: Tier addresses; None for the present tiers.
        encrypt: Directory of the keys that encrypt all tiers except RAM; None for the keys that the addresses name.
        disk_budget: Budget of the ``file://`` tiers, as ``40GiB``, in place of the budgets in the addresses.

    Raises:
        InputError: An address is malformed or holds a password, or the keys cannot be used.
        StoreError: The directory cannot be written to, or holds KV that is encrypted with other keys or not encrypted.
    """
    urls = urls or recorded_tiers(directory) or _USUAL
    if encrypt is not None:
        urls = with_keys(urls, encrypt)
    if disk_budget is not None:
        every = _each(urls)
        urls = ",".join(_with(url, budget=disk_budget) if urlsplit(url).scheme == "file" else url for url in every)
    tiers = parse_tiers(urls)
    # An absolute path of the keys works from any current directory.
    urls = ",".join(
        with_keys(url, from_home(tier.encrypt).resolve()) if tier.encrypt else url
        for url, tier in zip(_each(urls), tiers, strict=True)
    )
    if any(urlsplit(url).password or "password=" in urlsplit(url).query for url in _each(urls)):
        raise InputError(
            "The address of a tier holds a password, which would be seen by others on this machine and be noted in the store. "
            "Leave it out, and set REDISCLI_AUTH to it in the environment."
        )
    before = parse_tiers(recorded_tiers(directory) or _USUAL)
    keys = next((tier.encrypt for tier in before if tier.encrypt), "")
    if keys and not any(tier.encrypt for tier in tiers):
        raise InputError(f"The store in {directory} is encrypted, and these tiers are not: add --encrypt {keys}.")
    if any(tier.encrypt for tier in tiers):  # wrong keys must not be recorded
        TieredStore(_opened(urls, directory, ram_budget=0)).close()
    try:
        make_root(directory)
        write_text(directory / RECORD, f"{urls}\n")
    except OSError as error:
        raise StoreError(f"cannot note the tiers in {directory}: {error}; check the directory") from error


def recorded_tiers(directory: Path) -> str | None:
    """Return the addresses that :func:`record_tiers` has recorded in a directory, or None.

    Raises:
        StoreError: The recorded addresses cannot be read.
    """
    try:
        return (directory / RECORD).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):  # the tier itself reports a path that is not a directory
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read the tiers noted in {directory / RECORD}: {error}; check the file") from error
