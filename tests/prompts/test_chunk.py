"""Tests the ids and metadata that a chunk may have."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from cacheblend_rag.errors import InputError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.protocol import read_options
from tests.conftest import tokenizer_named


@pytest.mark.parametrize(
    ("name", "why"), [("a\0b", r"'a\\x00b' has a NUL"), ("a\ud800b", r"'a\\ud800b' is not valid Unicode")]
)
def test_a_chunk_id_with_nul_or_invalid_unicode_is_refused(name: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Chunk(name, "Text.", (1,))
    for named in ({"spans": [{"id": name, "start": 0, "end": 1}]}, {"chunk_ids": [name]}):
        with pytest.raises(InputError, match="cacheblend: "):
            read_options({"cacheblend": named})


@pytest.mark.parametrize("value", [nan, -inf, [{"deep": inf}], {(1, 2): 3}])
def test_metadata_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"the metadata of the chunk .*Use None"):
        make_chunk("Text.", tokenizer_named("byte_level"), {"a": value})


def test_metadata_with_python_objects_are_accepted(tmp_path: Any) -> None:
    assert make_chunk("Text.", tokenizer_named("byte_level"), {"path": tmp_path}).metadata == {"path": tmp_path}
