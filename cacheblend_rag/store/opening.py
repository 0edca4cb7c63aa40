"""Opening a store: a directory, with the tiers that are recorded in it, or a list of tiers."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.store.base import KVStore
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.private import make_root, write_text
from cacheblend_rag.store.tally import StoreTally
from cacheblend_rag.store.tiered import TieredStore
from cacheblend_rag.store.urls import is_urls, open_tier, parse_tiers, password_in, with_keys

_RECORD = "tiers"
_USUAL = "ram://,file://"


def default_ram_budget(processes: int = 1) -> int:
    """Return how many bytes of KV each of ``processes`` on this machine may hold in RAM: together a quarter of its memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 // processes


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
        if given != 0 or tier.scheme != "ram":
            names[tier.name] += 1
            name = tier.name + (str(names[tier.name]) if names[tier.name] > 1 else "")
            opened = open_tier(tier, name, home, partial(default_ram_budget, processes), _default_disk_budget)
            opened.budget = opened.budget if given is None else given
            tiers.append(opened)
    return tiers


def _default_disk_budget(disk: DiskStore) -> int:
    # Counting what it holds as free keeps the budget the same however full the store is.
    return (shutil.disk_usage(disk.root).free + disk.stats().nbytes) // 2


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
