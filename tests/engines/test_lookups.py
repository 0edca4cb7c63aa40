"""Tests that look-ups in a remote store run side by side, and that local look-ups run when they are requested."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier
from typing import Any

import pytest

from cacheblend_rag.engines.entries import Entries, SideBySide
from cacheblend_rag.store import open_store
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy

WRITTEN = Entries(open_store(None), ModelFingerprint("0" * 32, "a model"), (), writer=WrittenBy("1" * 32, "a writer"))
OWN = WRITTEN.by(None)


def test_remote_look_ups_run_side_by_side_also_for_one_chunk_of_both_writers() -> None:
    together = Barrier(4)

    def look(hand: Entries, ids: Sequence[int]) -> int:
        together.wait(30)  # no look-up answers before all have begun
        return sum(ids) + (100 if hand is OWN else 0)

    wanted: list[tuple[Entries, tuple[int, ...]]] = [
        (WRITTEN, ()),
        (OWN, (3,)),
        (WRITTEN, (1, 2)),
        (WRITTEN, (3,)),
        (WRITTEN, (3,)),
    ]
    found = SideBySide(look, wanted, remote=True)
    asked: list[Any] = [(WRITTEN, (3,)), (WRITTEN.by(None), (3,)), (WRITTEN, [1, 2]), (WRITTEN, ()), (WRITTEN, (3,))]
    assert [found(hand, ids) for hand, ids in asked] == [3, 103, 3, 0, 3]


def test_local_look_ups_run_when_they_are_requested() -> None:
    asked: list[Sequence[int]] = []
    found = SideBySide(lambda _, ids: asked.append(ids), [(OWN, (1,)), (OWN, (2,))], remote=False)
    assert asked == []
    found(OWN, (2,))
    assert asked == [(2,)]


def test_a_look_ups_error_is_raised_when_its_result_is_requested() -> None:
    found = SideBySide(lambda _, ids: 1 // len(ids), [(OWN, ()), (OWN, (7,))], remote=True)
    assert found(OWN, (7,)) == 1
    assert found(OWN, (7, 8)) == 0, "one that nobody announced"
    with pytest.raises(ZeroDivisionError):
        found(OWN, ())
