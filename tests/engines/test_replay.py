"""Tests which passes are captured as graphs, and when a model stops using graphs; both engines follow this rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cacheblend_rag.engines.replay import Kind, Replays, padded

WANT = torch.tensor([3.0, 4.0])


def captured(replays: Replays[str], kind: Kind, gives: torch.Tensor = WANT) -> list[str]:
    """Capture a pass whose graph returns ``gives``; return the steps that were done."""
    done: list[str] = []

    def make() -> str:
        done.append("captured")
        return f"graph of {kind[0]}"

    def replay(made: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        done.append("replayed")
        return [(gives, WANT)]

    replays.add(kind, make, replay)
    return done


def test_the_second_pass_of_a_width_is_captured_and_serves_slightly_shorter_passes() -> None:
    replays: Replays[str] = Replays()
    assert [replays.due(40), replays.due(70), replays.due(60)] == [None, None, (64, False)]
    assert captured(replays, (64, False)) == ["captured", "replayed"]
    found = [replays.serving(tokens) for tokens in (33, 64, 32, 65)]
    assert found == ["graph of 64", "graph of 64", None, None]
    assert replays.due(64) is None
    captured(replays, (288, False))
    assert [replays.serving(260), replays.serving(256), replays.serving(255)] == ["graph of 288"] * 3
    assert replays.serving(224) is None


def test_passes_that_return_attention_have_separate_captures() -> None:
    replays: Replays[str] = Replays()
    captured(replays, (64, True))
    assert replays.serving(64) is None
    assert replays.serving(64, looked=True) == "graph of 64"
    assert [replays.due(64, looked=True), replays.due(64), replays.due(64)] == [None, None, (64, False)]


def test_passes_above_2048_tokens_are_never_captured() -> None:
    replays: Replays[str] = Replays()
    assert [replays.due(2049), replays.due(2049), replays.serving(2049)] == [None] * 3


@pytest.mark.parametrize("gives", [WANT * 1.01, WANT * float("nan")])
def test_a_capture_with_a_wrong_result_ends_capturing(gives: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    replays: Replays[str] = Replays()
    captured(replays, (64, False), gives)
    assert replays.refused
    assert replays.passes == {}
    assert [replays.due(32), replays.due(32)] == [None, None]
    assert "Blends do without CUDA graphs, more slowly: what a graph gives differs by" in caplog.text


def test_a_failed_capture_logs_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    replays: Replays[str] = Replays()

    def fails(*_: object) -> str:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    replays.add((64, False), fails, lambda made: [])
    assert replays.refused
    assert caplog.messages == [
        "Blends do without CUDA graphs, more slowly: RuntimeError: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(("refusing", "done"), [(0, ["captured"]), (1, ["captured", "replayed"])])
def test_no_rank_captures_or_replays_after_another_rank_refuses(refusing: int, done: list[str]) -> None:
    asked: list[bool] = []

    def agree(ok: bool) -> bool:
        asked.append(ok)
        return len(asked) - 1 != refusing

    replays: Replays[str] = Replays(agree)
    # A replay without the other ranks would wait for them forever.
    assert captured(replays, (64, False)) == done
    assert all(asked)
    assert (replays.refused, replays.passes) == (True, {})


def test_a_rank_that_fails_takes_part_in_every_vote() -> None:
    votes: list[bool] = []

    def agree(ok: bool) -> bool:
        votes.append(ok)
        return ok

    def fails(_: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
        raise RuntimeError

    failing: list[tuple[Callable[[], str], Callable[[str], list[tuple[torch.Tensor, torch.Tensor]]]]] = [
        (lambda: str(fails(0)), lambda made: []),
        (lambda: "made", fails),
    ]
    for make, replay in failing:
        Replays[str](agree).add((64, False), make, replay)
    assert votes == [False, True, False]


def test_short_inputs_are_padded_by_their_last_token() -> None:
    assert padded(torch.tensor([5, 9]), 4).tolist() == [5, 9, 9, 9]
