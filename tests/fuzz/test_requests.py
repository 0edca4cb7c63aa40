"""Tests that options, prompts, bodies, addresses and key files are parsed, or refused with a message."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.prompts.chunk import Chunk, encoder_for, make_chunk
from cacheblend_rag.prompts.placing import search_content, search_rendered, text_of
from cacheblend_rag.prompts.prompt import text_prompt, tokenize
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.protocol import PrecomputeBody, read_options
from cacheblend_rag.store.opening import parse_duration, parse_size, parse_tiers, with_keys
from tests.conftest import tokenizer_named
from tests.fuzz import examples
from tests.fuzz.test_files import JSON

pytestmark = pytest.mark.slow

TOKENIZER = tokenizer_named("byte_level")
TEXTS = [
    "The harbour is old.",
    "The harbour is old. So is",
    "old. So is the light",
    "a",
    "<eos>",
    "é — 東京 🙂",
    "\n\nx\n",
]
# These pieces overlap known texts, spell control tokens, or are cut through.
FRAGMENTS = st.sampled_from(
    [*TEXTS, "<bos>", "<|im_end|>\n", "<|im_", " ", "\n", "So is the light", "\ud83d", "\0", "́"]
)
PROMPTS = st.lists(FRAGMENTS | st.text(max_size=5), max_size=8).map("".join)
OPTIONS = st.sampled_from(
    ["ratio", "policy", "check_layers", "reuse", "chunk_ids", "spans", "cacheblend", "id", "start", "end", "text", "q"]
)
VALUES = st.one_of(
    JSON,
    st.sampled_from(["auto", "hkvd", "static", "off", "prefix", 0.15, [1, 3], "nan"]),
    st.lists(st.text(max_size=3)),
)


def registry() -> ChunkRegistry:
    known = ChunkRegistry()
    known.add(make_chunk(text.strip(), TOKENIZER) for text in TEXTS)
    return known


@examples(80)
@given(
    options=st.dictionaries(OPTIONS, VALUES | st.dictionaries(OPTIONS, VALUES, max_size=4), max_size=5) | JSON,
    named=VALUES,
)
def test_options_are_read_or_refused(options: Any, named: Any) -> None:
    for extra in ({"cacheblend": options}, {"cacheblend": options, "chunk_ids": named}):
        try:
            found = read_options(extra)
        except InputError as error:
            assert str(error)
            continue
        assert BlendSettings.from_params(found.settings.to_params()) == found.settings
        assert len(set(found.chunk_ids)) == len(found.chunk_ids)


@examples(60)
@given(prompt=PROMPTS)
def test_the_pieces_of_a_searched_text_join_to_the_text(prompt: str) -> None:
    known, encoder = registry(), encoder_for(TOKENIZER)
    for search in (search_content, search_rendered):
        try:
            pieces = search(prompt, known, [], encoder)
        except InputError as error:
            assert "not valid Unicode" in str(error)
            continue
        assert "".join(map(text_of, pieces)) == prompt
        for piece in pieces:
            assert not isinstance(piece, Chunk) or known.get(piece.id) == piece


@examples(50)
@given(prompt=PROMPTS, names=st.lists(st.integers(0, len(TEXTS) - 1), max_size=3))
def test_the_spans_of_a_prompt_hold_its_chunks_tokens(prompt: str, names: list[int]) -> None:
    known = registry()
    ids = [make_chunk(TEXTS[name].strip(), TOKENIZER).id for name in names]
    try:
        tokens = tokenize(text_prompt(TOKENIZER, prompt, known, chunk_ids=ids), TOKENIZER, known)
    except InputError as error:
        assert str(error)
        return
    before = 0
    for span in tokens.spans:
        assert before <= span.start < span.end <= len(tokens.token_ids)
        assert tuple(tokens.token_ids[span.start : span.end]) == span.chunk.token_ids
        before = span.end


@examples(50)
@given(body=st.dictionaries(st.sampled_from(["texts", "chunks", "x"]), JSON | st.lists(st.dictionaries(OPTIONS, JSON))))
def test_bodies_are_parsed_or_refused_with_a_validation_error(body: dict[str, Any]) -> None:
    from pydantic import ValidationError

    with suppress(ValidationError):
        parsed = PrecomputeBody.model_validate(body)
        assert all(chunk.text for chunk in parsed.chunks)


PARTS = st.sampled_from(
    [
        *(
            "ram://",
            "file://",
            "file:///kv",
            "redis://h:6379/0",
            "s3://b/p",
            "unix:///s",
            "http://",
            ",",
            "?",
            "&",
            "=",
            "%",
        ),
        *(
            "budget=1GiB",
            "codec=int8",
            "codec=none+none",
            "encrypt=/k",
            "ttl=1h",
            "timeout=2s",
            "[",
            "]",
            "@",
            ":",
            "//",
            "ram",
        ),
    ]
)


@examples(100)
@given(urls=st.lists(PARTS | st.text(max_size=4), max_size=8).map("".join), keys=st.text(min_size=1, max_size=20))
def test_addresses_are_parsed_to_tiers_or_refused(urls: str, keys: str) -> None:
    for parse in (parse_size, parse_duration):
        with suppress(InputError):
            assert parse(urls) >= 0
    try:
        tiers = parse_tiers(urls)
    except InputError as error:
        assert str(error)
        return
    directory = Path("/") / keys.replace("\0", "")
    encrypted = parse_tiers(with_keys(urls, directory))
    assert [tier.scheme for tier in encrypted] == [tier.scheme for tier in tiers]
    for plain, tier in zip(tiers, encrypted, strict=True):
        if tier.scheme != "ram":
            assert tier.encrypt == str(directory)
            assert (tier.place, tier.budget, tier.codec) == (plain.place, plain.budget, plain.codec)


@examples(60)
@given(
    keys=st.lists(
        st.dictionaries(st.sampled_from(["value", "sha256", "role", "tenant", "x"]), JSON, max_size=4), max_size=3
    ),
    tenants=st.lists(
        st.dictionaries(
            st.sampled_from(["name", "reads", "max_kv", "expire_after", "max_chunks", "x"]), JSON, max_size=4
        ),
        max_size=2,
    ),
    raw=st.text(max_size=30),
)
def test_key_files_are_read_or_refused(
    tmp_path_factory: Any, keys: list[dict[str, Any]], tenants: list[dict[str, Any]], raw: str
) -> None:
    from cacheblend_rag.server.keys import read_keys

    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    tables = [("key", table) for table in keys] + [("tenant", table) for table in tenants]
    lines = [
        f"[[{name}]]\n" + "\n".join(f"{each} = {toml(value)}" for each, value in table.items())
        for name, table in tables
    ]
    for text in ("\n".join(lines), raw):
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            read_keys(file)
        except CacheBlendError as error:
            assert str(error)


def toml(value: Any) -> str:
    import json

    if isinstance(value, dict | list) or value is None:
        return "[]" if isinstance(value, list) else "{}"
    return json.dumps(value)
