"""Tests that a server's chunks survive a restart and reach other servers on the same directory."""

from __future__ import annotations

import os
import random
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import StoreError
from cacheblend_rag.prompts.chunk import Chunk, make_chunk
from cacheblend_rag.prompts.registry import ChunkRegistry
from cacheblend_rag.retrieval.documents import REGISTERED_FILE
from cacheblend_rag.retrieval.index import ChunkIndex, IndexConfig
from cacheblend_rag.retrieval.registered import ConflictError
from cacheblend_rag.server.catalogue import ChunkCatalogue
from cacheblend_rag.store.files import home_of
from cacheblend_rag.store.kv import ModelFingerprint, WrittenBy
from tests.conftest import tokenizer_named

MODEL = ModelFingerprint("a" * 32, "one")
OTHER = ModelFingerprint("b" * 32, "two")


def catalogue(directory: Path | None, model: ModelFingerprint = MODEL) -> tuple[ChunkCatalogue, ChunkRegistry]:
    registry = ChunkRegistry()
    return ChunkCatalogue(directory, registry, model), registry


def chunk(text: str) -> Chunk:
    return make_chunk(text, tokenizer_named("byte_level"), {"source": "notes.md"})


def test_registered_chunks_are_known_after_a_restart_with_tokens_and_metadata(tmp_path: Path) -> None:
    first, _ = catalogue(tmp_path)
    want = [chunk(f"Document number {i} of the harbour.") for i in range(3)]
    first.add(want)
    first.close()
    second, registry = catalogue(tmp_path)
    assert sorted(c.id for c in registry) == sorted(c.id for c in want)
    got = registry.get(want[0].id)
    assert got == want[0]
    assert dict(got.metadata) == {"source": "notes.md"}
    assert second.origin(want[0].id) == "registered"


def test_a_server_of_another_model_does_not_see_registered_chunks(tmp_path: Path) -> None:
    first, _ = catalogue(tmp_path)
    first.add([chunk("Known to one model only.")])
    other, registry = catalogue(tmp_path, OTHER)
    assert len(registry) == 0
    other.add([chunk("Known to one model only.")])
    other.remove([chunk("Known to one model only.").id])
    assert len(catalogue(tmp_path)[1]) == 1


def test_registrations_and_removals_of_one_server_reach_another(tmp_path: Path) -> None:
    one, _ = catalogue(tmp_path)
    two, registry = catalogue(tmp_path)
    text = chunk("A text that both servers know.")
    one.add([text])
    two.refresh(force=True)
    assert registry.find("x " + text.text) == ["x ", text]
    one.remove([text.id])
    two.refresh(force=True)
    assert registry.get(text.id) is None


def test_index_chunks_appear_and_disappear_only_with_the_index(tmp_path: Path) -> None:
    config = IndexConfig(MODEL)
    first, later = chunk("The index holds this text."), chunk("And this one came while the server ran.")
    with ChunkIndex(tmp_path, config) as index:
        index.add("a.md", "1", [first])
        mine, registry = catalogue(tmp_path)
        assert registry.get(first.id) is not None
        index.add("b.md", "1", [later])
        mine.refresh(force=True)
        assert registry.get(later.id) is not None
        assert mine.origin(later.id) == "index"
        mine.add([first])
        mine.remove([first.id])
        assert registry.get(first.id) is not None
        index.delete("b.md")
        mine.refresh(force=True)
        assert registry.get(later.id) is None


def test_an_index_of_another_model_is_skipped_with_a_warning(tmp_path: Path) -> None:
    with ChunkIndex(tmp_path, IndexConfig(OTHER)) as index:
        index.add("a.md", "1", [chunk("The index holds this text.")])
    mine, registry = catalogue(tmp_path)
    assert len(registry) == 0
    assert "another model" in mine.warnings[0]
    assert "two" in mine.warnings[0]


def test_an_index_of_another_kv_writer_is_read_with_a_warning(tmp_path: Path) -> None:
    hand = WrittenBy("ab", "/writers/one")
    with ChunkIndex(tmp_path, IndexConfig(MODEL, writer=hand)) as index:
        index.add("a.md", "1", [chunk("The index holds this text.")])
    for writer, said in ((None, ["Give --writer /writers/one."]), (hand, [])):
        registry = ChunkRegistry()
        mine = ChunkCatalogue(tmp_path, registry, MODEL, writer=writer)
        assert len(registry) == 1
        assert [each in warning for each, warning in zip(said, mine.warnings, strict=True)] == [True] * len(said)


def test_a_damaged_registration_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / REGISTERED_FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match=r"registered\.sqlite.*delete it"):
        catalogue(tmp_path)


def test_each_tenant_knows_its_own_index(tmp_path: Path) -> None:
    for tenant in ("default", "acme"):
        with ChunkIndex(home_of(tmp_path, tenant), IndexConfig(MODEL)) as index:
            index.add("a.md", "1", [chunk(f"The index of {tenant} holds this text.")])
    for tenant, expected in (("default", 1), ("acme", 1), ("globex", 0)):
        registry = ChunkRegistry()
        mine = ChunkCatalogue(tmp_path, registry, MODEL, namespace=tenant)
        assert [each.text for each in registry] == [f"The index of {tenant} holds this text."] * expected
        assert all(mine.origin(each.id) == "index" for each in registry)
        mine.close()


def test_an_index_that_breaks_under_a_running_server_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkIndex(tmp_path, IndexConfig(MODEL)) as index:
        index.add("a.md", "1", [chunk("The index holds this text.")])
    mine, registry = catalogue(tmp_path)

    def broken(self: ChunkIndex) -> object:
        raise StoreError("damaged")

    monkeypatch.setattr(ChunkIndex, "generation", property(broken))
    mine.refresh()
    assert len(registry) == 1
    mine.add([chunk("Another text, registered over HTTP.")])
    assert len(registry) == 2
    with pytest.raises(StoreError, match="damaged"):
        mine.refresh(force=True)


def test_unregistered_chunks_of_prompts_are_forgotten_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.server.catalogue._MAX_NOTED", 2)
    mine, registry = catalogue(tmp_path)
    brought = [chunk(f"A prompt brought text number {i}.") for i in range(5)]
    mine.note(brought[0])
    mine.add([brought[0]])
    for piece in brought:
        mine.note(piece)
    assert {c.id for c in registry} == {brought[0].id, brought[3].id, brought[4].id}
    assert [mine.origin(c.id) for c in (brought[0], brought[4])] == ["registered", None]
    mine.close()
    assert [c.id for c in catalogue(tmp_path)[1]] == [brought[0].id]


def test_a_text_registered_anew_under_an_id_replaces_the_old_text_on_every_server(tmp_path: Path) -> None:
    one, two, three = (catalogue(tmp_path) for _ in range(3))
    old = Chunk("policy", "Travel above 500 euros needs a signature.", (1, 2))
    new = Chunk("policy", "Travel above 900 euros needs a signature.", (3, 4))
    one[0].add([old])
    for mine, registry in (two, three):
        mine.refresh(force=True)
        assert registry.find(old.text) == [old]
    two[0].remove(["policy"])
    two[0].add([new])
    for mine, registry in (one, two, three):
        mine.refresh(force=True)
        assert (registry.get("policy"), registry.find(old.text), registry.find(new.text)) == (new, [old.text], [new])


def test_a_server_polls_for_changes_of_other_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.server.catalogue._REFRESH_S", 0.001)
    (one, _), (two, registry) = catalogue(tmp_path), catalogue(tmp_path)
    looked = threading.Event()
    refresh, text = two.refresh, chunk("A text that the other server registers.")
    monkeypatch.setattr(two, "refresh", lambda: (refresh(), looked.set()))
    two.watch()
    one.add([text])
    looked.clear()
    assert looked.wait(60)  # this refresh may have begun before the text was added
    looked.clear()
    assert looked.wait(60)
    assert registry.find(text.text) == [text]
    two.close()
    assert "cacheblend-registry" not in [thread.name for thread in threading.enumerate()]


# CACHEBLEND_FAULTS=full runs 10,000 operations.
OPERATIONS = 10_000 if os.environ.get("CACHEBLEND_FAULTS") == "full" else 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_three_servers_converge_after_any_number_of_changes(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    servers = [catalogue(tmp_path) for _ in range(3)]
    texts = [f"Version {version} of document {name}, as it was." for name in range(8) for version in range(3)]
    want: dict[str, Chunk] = {}
    for _ in range(OPERATIONS):
        mine, _ = dice.choice(servers)
        number = dice.randrange(len(texts))
        name, act = f"document-{number // 3}", dice.random()
        if act < 0.45:
            new = Chunk(name, texts[number], (number,))
            taken = want.setdefault(name, new) != new
            with pytest.raises(ConflictError) if taken else nullcontext():
                mine.add([new])
        elif act < 0.75:
            want.pop(name, None)
            mine.remove([name])
        elif act < 0.85:
            mine.note(chunk(f"A prompt brought text number {number}."))
        else:
            mine.refresh()
    for mine, registry in servers:
        mine.refresh(force=True)
        assert {name: registry.get(name) for name in want} == want
        for text in texts:
            assert registry.find(text) in ([each] for each in want.values() if each.text == text) or (
                registry.find(text) == [text] and text not in [each.text for each in want.values()]
            )
        mine.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), max_size=25))
def test_two_servers_converge_to_equal_chunks(steps: list[tuple[bool, bool, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        pair = [catalogue(Path(directory)) for _ in range(2)]
        texts = [chunk(f"Text number {i}, long enough to be found.") for i in range(6)]
        want: set[str] = set()
        for which, adding, number in steps:
            mine = pair[which][0]
            if adding:
                mine.add([texts[number]])
                want.add(texts[number].id)
            else:
                mine.remove([texts[number].id])
                want.discard(texts[number].id)
        for mine, registry in pair:
            mine.refresh(force=True)
            assert {c.id for c in registry} == want
            mine.close()
