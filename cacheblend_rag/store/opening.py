"""Opens a store: a directory, with the tiers that are recorded in it, or a list of tiers' addresses.

These are as ``ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0,s3://bucket/prefix``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast, get_args
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from cacheblend_rag.errors import CacheBlendError, InputError, StoreError
from cacheblend_rag.homes import from_home
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
"""Entry points by which other packages add tiers: the scheme of their addresses, and what opens one."""
_EXAMPLE = "write as ram://8GiB,file:///nvme/kv?budget=500GiB,redis://host:6379/0?budget=64GiB,s3://bucket/prefix"


def parse_size(text: str | int) -> int:
    """Return a size in bytes: ``2GiB`` is 2 * 1024³ bytes, ``2GB`` 2 * 1000³, ``2G`` as ``2GiB``; a number is bytes as it is.

    Raises:
        InputError: It is no size, or text for one below 1 MiB without a unit.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{text!r} is not a size; write 2GiB, 500MB or 0.")
    number, unit, binary = match.groups()
    if text.strip() == number and 0 < float(number) < 1 << 20:  # meant as more than it says
        raise InputError(f"{text} is {text} bytes; add a unit, as {text}GiB, {text}MB or, if it is meant, {text}B.")
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
        codec: How new entries are encoded (:func:`~cacheblend_rag.store.codec.get_codec`).
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
    # A plus sign in an address stands for a space.
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
    own = urlunsplit((scheme.replace("valkey", "redis"), parts.netloc, parts.path, query, ""))
    if not parts.netloc:  # which urlunsplit writes with one slash
        own = f"{scheme}://{parts.path}{'?' if query else ''}{query}"
    return replace(tier, url=own, config=config)


def plugged_in(scheme: str) -> EntryPoint | None:
    """Return what an installed package opens addresses of this scheme with, which is none of ours; None where none does."""
    return next(iter(entry_points(group=TIERS_GROUP, name=scheme)), None)


def _writes(text: str) -> Writes:
    if text not in get_args(Writes):
        raise InputError(f"write={text!r} is none of {', '.join(get_args(Writes))}.")
    return cast("Writes", text)


def with_keys(urls: str, keys: Path) -> str:
    """Return addresses with the directory of keys that all tiers but RAM are encrypted with."""
    option = urlencode({"encrypt": str(keys)}, safe="/")
    return _with(urls, option, lambda scheme: scheme != "ram")


def _from_anywhere(url: str, tier: TierURL) -> str:
    """Return an address that means the same directory of keys wherever a command is started."""
    return with_keys(url, from_home(tier.encrypt).resolve()) if tier.encrypt else url


def _each(urls: str) -> list[str]:
    return [url.strip() for url in urls.split(",") if url.strip()]


def _with(urls: str, option: str, takes: Callable[[str], bool]) -> str:
    """Return addresses with an option, as ``name=value``, in those with schemes that take it."""
    name = option.partition("=")[0]
    changed = []
    for url in _each(urls):
        place = _without(url, name)
        changed.append(f"{place}{'&' if '?' in place else '?'}{option}" if takes(urlsplit(url).scheme) else url)
    return ",".join(changed)


def _without(url: str, option: str) -> str:
    place, _, query = url.partition("?")
    left = "&".join(each for each in query.split("&") if each and each.partition("=")[0] != option)
    return f"{place}?{left}" if left else place


RECORD = "tiers"
"""File of a store's directory in which its tiers are noted."""
_USUAL = "ram://,file://"
# Where Linux tells a container how many bytes it may have, by either version of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def default_ram_budget(processes: int = 1) -> int:
    """Return how many bytes of KV each of ``processes`` on this machine may hold in RAM: together a quarter of its memory."""
    return memory_bytes() // 4 // processes


def memory_bytes() -> int:
    """Return the bytes of this machine's memory; in a container those it may have, since who takes more is killed."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            memory = min(memory, int(limit.read_text()))
    return memory


def open_store(
    where: Path | str | None = None, ram_budget: int | None = None, disk_budget: int | None = None, processes: int = 1
) -> TieredStore:
    """Open a store.

    Args:
        where: A directory, made where it is missing: RAM in front of its disk, or the tiers that :func:`record_tiers` has noted
            in it. Or tiers by address, fastest first (:func:`parse_tiers`). None for RAM alone.
        ram_budget: Bytes of KV held in RAM; None for what an address says, else for a quarter of the machine's memory. 0 for
            no RAM tier, unless nothing else were left.
        disk_budget: Bytes of KV held on disk; None for what an address says, else for half of what the disk has free besides
            what the store holds.
        processes: How many share the machine's memory.

    Raises:
        InputError: An address cannot be used, or the package that it takes is missing.
        StoreError: A directory cannot be used.
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
    """Open one tier, called ``name``; ``home`` is the directory that ``file://`` without a path means.

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
        return _open_plugged_in(tier, options)
    extra = "redis" if tier.scheme in REDIS else "s3"
    try:
        # What is imported here takes packages that not everybody has.
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


def _open_plugged_in(tier: TierURL, options: TierOptions) -> KVStore:
    """Open a tier of another package; raises as :func:`_open_tier`."""
    found = plugged_in(tier.scheme)
    assert found is not None  # as parse_tiers has seen
    package = found.dist.name if found.dist is not None else found.value
    try:
        store = found.load()(tier, **options)
    except CacheBlendError:
        raise
    except Exception as error:
        raise InputError(
            f"The tier {tier.url} cannot be opened by the package {package}, whose it is: {error!r}; update the package, or "
            "leave the tier out."
        ) from error
    if not isinstance(store, KVStore):
        raise InputError(
            f"The package {package} opens {tier.scheme}:// as a {type(store).__name__}, which is no KVStore: its entry point in "
            f"the group {TIERS_GROUP} must return one."
        )
    return store


def record_tiers(
    directory: Path, urls: str | None, encrypt: Path | None = None, disk_budget: str | None = None
) -> None:
    """Note in a store's directory where its KV is kept, for whoever opens it from now on. KV elsewhere is not moved.

    Args:
        directory: The store's.
        urls: Its tiers by address; None for those that it has.
        encrypt: Directory of the keys that all tiers but RAM are encrypted with; None for what the addresses say.
        disk_budget: Of its directories, as ``40GiB``, in place of what the addresses say.

    Raises:
        InputError: They are no addresses, or hold a password; or the keys cannot be used.
        StoreError: The directory cannot be written to; or it holds KV that is encrypted with other keys, or not.
    """
    urls = urls or recorded_tiers(directory) or _USUAL
    if encrypt is not None:
        urls = with_keys(urls, encrypt)
    if disk_budget is not None:
        urls = _with(urls, f"budget={disk_budget}", lambda scheme: scheme == "file")
    tiers = parse_tiers(urls)
    urls = ",".join(_from_anywhere(url, tier) for url, tier in zip(_each(urls), tiers, strict=True))
    if any(urlsplit(url).password or "password=" in urlsplit(url).query for url in _each(urls)):
        raise InputError(
            "The address of a tier holds a password, which would be seen by others on this machine and be noted in the store. "
            "Leave it out, and set REDISCLI_AUTH to it in the environment."
        )
    before = parse_tiers(recorded_tiers(directory) or _USUAL)
    keys = next((tier.encrypt for tier in before if tier.encrypt), "")
    if keys and not any(tier.encrypt for tier in tiers):
        raise InputError(f"The store in {directory} is encrypted, and these tiers are not: add --encrypt {keys}.")
    if any(tier.encrypt for tier in tiers):  # keys that do not fit must not be noted
        TieredStore(_opened(urls, directory, ram_budget=0)).close()
    try:
        make_root(directory)
        write_text(directory / RECORD, f"{urls}\n")
    except OSError as error:
        raise StoreError(f"cannot note the tiers in {directory}: {error}; check the directory") from error


def recorded_tiers(directory: Path) -> str | None:
    """Return the addresses that :func:`record_tiers` has noted in a directory; None if it has none.

    Raises:
        StoreError: They cannot be read.
    """
    try:
        return (directory / RECORD).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):  # of the latter the tier itself will tell
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read the tiers noted in {directory / RECORD}: {error}; check the file") from error
