"""The rotation has properties that hold for any table, layout, position and dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blending.rope import NotRotaryError, Rope, apply_rotation, detect_rope, moved
from cacheblend_rag.store.kv import LayerKV

positions = st.integers(min_value=0, max_value=130_000)


def table_of(dims: int, theta: float, scale: float, layout: str):
    frequencies = 1 / theta ** (torch.arange(0, dims, 2) / dims)

    def table(at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = at[:, None].float() * frequencies
        both = angles.repeat(1, 2) if layout == "half" else angles.repeat_interleave(2, 1)
        return both.cos() * scale, both.sin() * scale

    return table


tables = st.builds(
    lambda dims, theta, scale, layout: (table_of(dims, theta, scale, layout), layout, dims),
    st.sampled_from([2, 8, 16]),
    st.sampled_from([100.0, 10_000.0, 1e6]),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from(["half", "interleaved"]),
)


def move(table, layout: str, k: torch.Tensor, start: int, end: int) -> torch.Tensor:
    at = torch.arange(k.shape[1])
    rope = Rope([table], [0], [layout])
    return rope.rotate(0, k, rope.rotations(at + start, at + end))


@given(tables, positions, positions, st.integers(0, 2**31))
@settings(max_examples=60)
def test_moving_keys_there_and_back_restores_them_and_keeps_their_length(
    chosen, start: int, end: int, seed: int
) -> None:
    table, layout, dims = chosen
    k = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))
    there = move(table, layout, k, start, end)
    assert torch.allclose(move(table, layout, there, end, start), k, atol=1e-5)
    assert torch.allclose(there.norm(dim=-1), k.norm(dim=-1), atol=1e-5)
    assert torch.equal(there[..., dims:], k[..., dims:])


@given(tables, positions, positions, positions)
@settings(max_examples=60)
def test_two_successive_moves_equal_one_move(chosen, a: int, b: int, c: int) -> None:
    table, layout, _ = chosen
    k = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(
        move(table, layout, move(table, layout, k, a, b), b, c), move(table, layout, k, a, c), atol=1e-5
    )


@given(tables, positions, positions)
@settings(max_examples=60)
def test_moving_a_key_equals_rotating_the_unrotated_key_at_its_new_position(chosen, start: int, end: int) -> None:
    table, layout, dims = chosen
    raw = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2))

    def at(first: int) -> torch.Tensor:
        cos, sin = (x.double() for x in table(torch.arange(3) + first))
        x, rest = raw[..., :dims].double(), raw[..., dims:].double()
        if layout == "half":
            turned = torch.cat([-x[..., dims // 2 :], x[..., : dims // 2]], -1)
        else:
            turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        return torch.cat([x * cos + turned * sin, rest], -1)

    assert torch.allclose(move(table, layout, at(start).float(), start, end).double(), at(end), atol=2e-5)


@given(tables, st.integers(0, 5000), st.integers(1, 5000))
@settings(max_examples=40)
def test_scores_depend_on_distance_alone(chosen, start: int, shift: int) -> None:
    table, layout, dims = chosen
    k = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(3))
    there = move(table, layout, k, start, start + shift)
    # A table rounds each angle to fp32, so distances carry an error that grows with the position.
    rounding = 1e-6 * (start + shift + 6) * dims
    got, want = there[..., :dims] @ there[..., :dims].mT, k[..., :dims] @ k[..., :dims].mT
    assert torch.allclose(got, want, atol=1e-5 + rounding)


def test_the_layout_and_the_table_of_every_layer_are_detected() -> None:
    at = torch.arange(12)
    made = [table_of(16, 1e4, 1.0, "half"), table_of(8, 1e6, 1.2, "half"), table_of(16, 1e4, 1.0, "interleaved")]
    truth = [(0, "half"), (1, "half"), (2, "interleaved"), (0, "half")]
    old = [torch.randn(2, 12, 16) for _ in truth]
    new = [move(made[t], layout, k, 0, 31) for (t, layout), k in zip(truth, old, strict=True)]
    rope = detect_rope(made, old, new, at, at + 31)
    for layer, (k, want) in enumerate(zip(old, new, strict=True)):
        assert torch.allclose(rope.rotate(layer, k, rope.rotations(at, at + 31)), want, atol=1e-5)


def test_unrotated_keys_are_left_alone_and_keys_that_move_otherwise_are_refused() -> None:
    at, k = torch.arange(8), torch.randn(2, 8, 16)
    rope = detect_rope([], [k], [k], at, at + 5)
    assert rope.rotate(0, k, rope.rotations(at, at + 5)) is k
    with pytest.raises(NotRotaryError, match="layer 1"):
        detect_rope([table_of(16, 1e4, 1.0, "half")], [k, k], [k, k + torch.randn(2, 8, 16)], at, at + 5)


def test_one_token_sent_to_other_experts_does_not_hide_the_rotation_but_many_do() -> None:
    at, table, k = torch.arange(9), table_of(16, 1e4, 1.0, "half"), torch.randn(2, 9, 16)
    there = move(table, "half", k, 0, 5)
    there[:, 3] = torch.randn(2, 16)
    assert detect_rope([table], [k], [there], at, at + 5).layout_of_layer == ("half",)
    there[:, 4:] = torch.randn(2, 5, 16)
    with pytest.raises(NotRotaryError):
        detect_rope([table], [k], [there], at, at + 5)


def test_keys_before_the_first_moved_token_keep_their_bits() -> None:
    table, k = table_of(16, 1e4, 1.0, "half"), torch.randn(2, 9, 16).bfloat16()
    rope = Rope([table], [0], ["half"])
    at = torch.arange(4, 9)
    got = moved(LayerKV(k, k), rope.move(0, rope.rotations(at, at + 7), first=4)).k
    assert torch.equal(got[:, :4], k[:, :4])
    assert not torch.equal(got[:, 4:], k[:, 4:])
    whole = torch.randn(2, 5, 16)
    assert torch.equal(apply_rotation(whole, rope.rotations(at, at)[0], "half"), whole)
