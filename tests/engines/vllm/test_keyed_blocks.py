"""Tests that keys change vLLM's block hashes; no engine is started."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from cacheblend_rag.engines.vllm.versions import key_blocks

SIZE = 4
IDS = list(range(3, 30))  # six whole blocks, and three tokens


def request(*keys: tuple[int, str], size: int | None = SIZE, hashes: bool = True) -> Any:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256) if hashes else None
    made = Request("r", list(IDS), SamplingParams(max_tokens=20), None, block_hasher=hasher)
    if keys:
        assert key_blocks(made, keys, size)
    return made


def same(one: Any, other: Any) -> list[bool]:
    return [a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=True)]


def test_only_blocks_in_front_of_the_first_key_have_an_exact_prompts_hashes() -> None:
    assert same(request(), request((9, "a"))) == [True, True, False, False, False, False]
    assert same(request((9, "a")), request((9, "a"))) == [True] * 6
    assert same(request((9, "a")), request((9, "b"))) == [True, True, False, False, False, False]
    assert same(request((9, "a"), (17, "b")), request((9, "a"))) == [True] * 4 + [False] * 2
    assert same(request((0, "a")), request()) == [False] * 6


def test_every_key_in_a_block_changes_its_hash() -> None:
    assert same(request((9, "a"), (10, "b")), request((9, "a"))) == [True, True, False, False, False, False]
    assert same(request((9, "a"), (10, "b")), request((9, "a"), (10, "c")))[2:] == [False] * 4


def test_blocks_of_the_answer_depend_on_the_keys_too() -> None:
    plain, early, late = request(), request((9, "a")), request((25, "a"))
    for each in (plain, early, late):
        for token in range(40, 46):
            each.append_output_token_ids(token)
        assert len(each.block_hashes) == 8
    assert same(plain, early)[6:] == [False, False]
    assert same(plain, late) == [True] * 6 + [False, False]


def test_all_blocks_depend_on_all_keys_if_the_block_size_is_unknown() -> None:
    assert same(request((9, "a"), (17, "b"), size=None), request()) == [False] * 6
    assert same(request((9, "a"), (17, "b"), size=None), request((9, "a"), size=None)) == [False] * 6


def test_a_request_without_hashes_needs_no_keys_and_hidden_hashes_are_refused() -> None:
    assert key_blocks(request(hashes=False), [(0, "a")], SIZE)
    hidden = request()
    del hidden._block_hasher
    assert not key_blocks(hidden, [(0, "a")], SIZE)
