"""Look-ups on another machine are on their way side by side; near ones are made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier

import pytest

from cacheblend_rag.engines.entries import SideBySide


def test_look_ups_of_a_store_on_another_machine_run_side_by_side() -> None:
    together = Barrier(3)

    def look(ids: Sequence[int]) -> int:
        together.wait(30)  # none answers before all are asked
        return sum(ids)

    found = SideBySide(look, [(), (1, 2), (3,), (3,)], remote=True)
    assert [found(ids) for ids in ((3,), [1, 2], (), (3,))] == [3, 3, 0, 3]


def test_near_look_ups_are_made_when_they_are_asked_for() -> None:
    asked: list[Sequence[int]] = []
    found = SideBySide(asked.append, [(1,), (2,)], remote=False)
    assert asked == []
    found((2,))
    assert asked == [(2,)]


def test_what_a_look_up_raises_is_raised_where_it_is_asked_for() -> None:
    found = SideBySide(lambda ids: 1 // len(ids), [(), (7,)], remote=True)
    assert found((7,)) == 1
    assert found((7, 8)) == 0, "one that nobody announced"
    with pytest.raises(ZeroDivisionError):
        found(())
