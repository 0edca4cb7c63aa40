"""Adds up what the processes that have used a store's directory counted, for ``cacheblend store stats``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from cacheblend_rag.store.events import Activity
from cacheblend_rag.store.private import file_mode, write_text

_log = logging.getLogger(__name__)
_LOCK_S = 5.0


class StoreTally:
    """Adds up the counters of each tier over processes; each adds its own when it closes the store."""

    def __init__(self, directory: Path):
        """Keep them in ``directory``; touches nothing yet."""
        self._file = directory / "activity.json"

    def read(self) -> dict[str, Activity]:
        """Return the counters by tier; none where there are none, or they cannot be read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(tier): Activity(**counted) for tier, counted in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def add(self, counted: Mapping[str, Activity]) -> None:
        """Add a process's counters; silent where the directory cannot be written to."""
        new = {tier: each for tier, each in counted.items() if each != Activity()}
        if not new:
            return
        lock = self._file.with_suffix(".lock")
        try:
            with FileLock(lock, timeout=_LOCK_S, mode=file_mode(lock.parent)):
                all_in_all = self.read()
                for tier, each in new.items():
                    all_in_all[tier] = all_in_all.get(tier, Activity()) + each
                written = self._file.with_suffix(".new")
                write_text(written, json.dumps({tier: asdict(each) for tier, each in all_in_all.items()}))
                written.replace(self._file)
        except (OSError, Timeout) as error:
            _log.debug("What was counted cannot be kept in %s: %s", self._file, error)
