"""Opens a store: a directory, with the tiers that are recorded in it, or a list of tiers."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import overload

from cacheblend_rag.errors import CacheBlendError, InputError, StoreError
from cacheblend_rag.store.base import KVStore, TierOptions
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.format import EntryFormat
from cacheblend_rag.store.keyring import Keyring
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.private import make_root, write_text
from cacheblend_rag.store.tally import StoreTally
from cacheblend_rag.store.tiered import TieredStore
from cacheblend_rag.store.urls import (
    OBJECTS,
    REDIS,
    TIERS_GROUP,
    TierURL,
    is_urls,
    parse_tiers,
    password_in,
    plugged_in,
    with_keys,
)

_RECORD = "tiers"
_USUAL = "ram://,file://"


def default_ram_budget(processes: int = 1) -> int:
    """Return how many bytes of KV each of ``processes`` on this machine may hold in RAM: together a quarter of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // processes


@overload
def open_store(where: None = None, ram_budget: int | None = None, *, processes: int = 1) -> MemoryStore: ...


@overload
def open_store(
    where: Path | str, ram_budget: int | None = None, disk_budget: int | None = None, processes: int = 1
) -> TieredStore: ...


@overload
def open_store(
    where: Path | str | None, ram_budget: int | None = None, disk_budget: int | None = None, processes: int = 1
) -> KVStore: ...


def open_store(
    where: Path | str | None = None,
    ram_budget: int | None = None,
    disk_budget: int | None = None,
    processes: int = 1,
) -> KVStore:
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
        return MemoryStore(default_ram_budget(processes) if ram_budget is None else ram_budget)
    urls = where if isinstance(where, str) and is_urls(where) else None
    home = None if urls is not None else Path(where).expanduser()
    tiers = _opened(urls or (home and recorded_tiers(home)) or _USUAL, home, ram_budget, disk_budget, processes)
    return TieredStore(tiers or [MemoryStore(0)], None if home is None else StoreTally(home))


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
        return MemoryStore(tier.budget)
    keys = Keyring.read(tier.encrypt) if tier.encrypt else None
    options: TierOptions = {"tier": name, "format": EntryFormat(tier.codec, keys), "writes": tier.write}
    if tier.scheme == "file":
        if not tier.place and home is None:
            raise InputError("file:// without a path means a store's own directory, and there is none; add the path.")
        root = Path(tier.place).expanduser() if tier.place else home or Path()
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


def record_tiers(directory: Path, urls: str | None, encrypt: Path | None = None) -> None:
    """Note in a store's directory where its KV is kept, for whoever opens it from now on. KV elsewhere is not moved.

    Args:
        directory: The store's.
        urls: Its tiers by address; None for those that it has.
        encrypt: Directory of the keys that all tiers but RAM are encrypted with; None for what the addresses say.

    Raises:
        InputError: They are no addresses, or hold a password; or the keys cannot be used.
        StoreError: The directory cannot be written to; or it holds KV that is encrypted with other keys, or not.
    """
    urls = urls or recorded_tiers(directory) or _USUAL
    if encrypt is not None:
        urls = with_keys(urls, encrypt.expanduser().resolve())
    tiers = parse_tiers(urls)
    if password_in(urls):
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
        write_text(directory / _RECORD, f"{urls}\n")
    except OSError as error:
        raise StoreError(f"cannot note the tiers in {directory}: {error}; check the directory") from error


def recorded_tiers(directory: Path) -> str | None:
    """Return the addresses that :func:`record_tiers` has noted in a directory; None if it has none.

    Raises:
        StoreError: They cannot be read.
    """
    try:
        return (directory / _RECORD).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):  # of the latter the tier itself will tell
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"cannot read the tiers noted in {directory / _RECORD}: {error}; check the file") from error
