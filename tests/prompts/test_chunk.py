"""Tests what a chunk may be."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.protocol import read_options
from tests.conftest import tokenizer_named


def test_an_id_with_a_nul_is_refused() -> None:
    with pytest.raises(InputError, match=r"'a\\x00b' has a NUL"):
        Chunk("a\0b", "Text.", (1,))
    span = {"id": "a\0b", "start": 0, "end": 1}
    with pytest.raises(InputError, match=r"cacheblend: the id 'a\\x00b' has a NUL"):
        read_options({"cacheblend": {"spans": [span]}})


@pytest.mark.parametrize("value", [nan, -inf, [{"deep": inf}], {(1, 2): 3}])
def test_metadata_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"the metadata of the chunk .*Use None"):
        make_chunk("Text.", tokenizer_named("byte_level"), {"a": value})


def test_metadata_of_a_programs_own_types_are_taken(tmp_path: Any) -> None:
    assert make_chunk("Text.", tokenizer_named("byte_level"), {"path": tmp_path}).metadata == {"path": tmp_path}
