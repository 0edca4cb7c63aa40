"""Runs the commands and programs of README, the how-to guides and the integrations' pages unchanged and in order.

Each page finds the things that it assumes: documents, questions, a retriever, an index. The models it names are folders
with the bundled model. The output of a page is not compared here; `test_snippets.py` compares the tutorial's.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheblend_rag import TransformersEngine
from cacheblend_rag.cli import app
from cacheblend_rag.demo.bundle import bundled_corpus
from cacheblend_rag.engines.models import SMOLLM2, bundled_model_directory, model_directory, smollm2_file
from tests.command_line import spend_less
from tests.docs.test_pages import PARSER, ROOT, commands
from tests.recorded_spans import exporter
from tests.retrieval.test_documents import write_pdf

QUESTION = "Who approves travel above 500 euros?"
RULE = "Travel above 500 euros is approved by the head of finance."
MODELS = ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "MODEL", "M")
# Commands that need a browser, a server or minutes; tests/ui, tests/server, test_snippets.py and lab/lab_tests test them.
LEFT_OUT = ("demo", "ui", "serve", "bench ttft", "bench controller", "figures")
# Pages that lab/lab_tests, tests/calibrate and tests/cli/test_store_calibrate.py test.
PAGES_LEFT_OUT = {"docs/howto/realm.md", "docs/howto/retriever.md", "docs/howto/tuning.md"}
# Pages of each package import every name that they use, except for these names of the reader and names with "your_".
READERS = {"langchain": {"prompt", "loader", "record_manager"}, "llama-index": {"documents", "index"}}
PACKAGE_OF = {
    "docs/howto/langchain.md": "langchain",
    "docs/howto/llamaindex.md": "llama-index",
    "integrations/langchain-cacheblend/README.md": "langchain",
    "integrations/llama-index-cacheblend/README.md": "llama-index",
}
PAGES = (
    "README.md",
    "docs/howto/documents.md",
    "docs/howto/evaluation.md",
    "docs/howto/langchain.md",
    "docs/howto/llamaindex.md",
    "docs/howto/migrate.md",
    "docs/howto/model.md",
    "docs/howto/observe.md",
    "docs/howto/store.md",
    "docs/howto/tenants.md",
    "integrations/langchain-cacheblend/README.md",
    "integrations/langchain-cacheblend/docs/chat.mdx",
    "integrations/langchain-cacheblend/docs/retriever.mdx",
    "integrations/llama-index-cacheblend/README.md",
)


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with the default profile, as a reader has a model before calibrating it."""
    folder = tmp_path_factory.mktemp("models") / "bundled"
    shutil.copytree(bundled_model_directory(), folder)
    (folder / "cacheblend.json").unlink()
    return folder


@pytest.fixture
def place(tmp_path: Path, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name, which is also the reader's home."""
    exporter()  # a process has only one: a page that set up its own would receive the spans of all later tests
    for name in MODELS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(bundled)
    for folder in ("docs", "site/guides"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "travel.md").write_text(f"{RULE}\n\nBelow that, any manager does.\n")
    handbook = (bundled_corpus() / "handbook.md").read_text("utf-8")
    (tmp_path / "docs" / "handbook.md").write_text(handbook[:2000])
    if smollm2_file() is not None:  # all pages share the converted model
        (tmp_path / "cacheblend").mkdir()
        (tmp_path / "cacheblend" / "models").symlink_to(model_directory(SMOLLM2).parent)
    for name in ("handbook.pdf", "docs/old-handbook.pdf"):
        write_pdf(tmp_path / name, [f"As {name} says, offices open at nine."])
    (tmp_path / "notes.md").write_text("The canteen is closed on Fridays.\n")
    row = {"question": QUESTION, "answers": ["the head of finance"], "chunks": [RULE, "Offices open at nine."]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row))
    monkeypatch.chdir(tmp_path)
    spend_less(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "cacheblend"))
    monkeypatch.setenv("CACHEBLEND_MODEL", str(bundled))
    monkeypatch.setenv("CACHEBLEND_STORE", str(tmp_path / "shared"))
    return tmp_path


def run(command: list[str]) -> tuple[int, str]:
    """Run a page's command; return its exit status and its output."""
    words = [str(Path(word).expanduser()) if word.startswith("~") else word for word in command[1:]]
    if (
        words[0] == "index" and "--model" not in words
    ):  # the default model, forty times as large, would test nothing more
        words += ["--model", "M"]
    if "--kv" in words:  # only tiers of this machine (tests/cli/test_kv.py tests the others)
        words[words.index("--kv") + 1] = "ram://1GiB,file://?budget=1GiB"
    if "ID" in words:
        listed = CliRunner().invoke(app, ["store", "ls", "--json", "--store", words[words.index("--store") + 1]])
        words[words.index("ID")] = json.loads(listed.stdout)[0]["id"][:6]
    result = CliRunner().invoke(app, words)
    return result.exit_code, f"{result.output}\n{result.exception!r}"


def langchain_names(engine: TransformersEngine) -> dict[str, Any]:
    """Return the names that a LangChain app has before its migration."""
    core = pytest.importorskip(
        "langchain_core", reason="the LangChain package is not installed; make setup installs it"
    )
    import langchain_cacheblend
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_core.indexing import InMemoryRecordManager, index
    from langchain_core.vectorstores import InMemoryVectorStore

    documents = [core.documents.Document(text, metadata={"source": "a"}) for text in (RULE, "Offices open at nine.")]
    vectors = InMemoryVectorStore.from_documents(documents, langchain_cacheblend.BundledEmbeddings())
    records = InMemoryRecordManager("notes")
    records.create_schema()
    template = core.prompts.ChatPromptTemplate.from_messages([("human", "{context}\n\nQuestion: {input}")])
    given = {"engine": engine, "your_retriever": vectors.as_retriever(), "prompt": template, "loader": documents}
    given |= {"your_vector_store": InMemoryVectorStore(langchain_cacheblend.BundledEmbeddings())}
    given |= {"record_manager": records, "index": index, "create_retrieval_chain": create_retrieval_chain}
    given |= {"create_stuff_documents_chain": create_stuff_documents_chain}
    return given | {name: getattr(langchain_cacheblend, name) for name in langchain_cacheblend.__all__}


def llamaindex_names(engine: TransformersEngine) -> dict[str, Any]:
    """Return the names that a LlamaIndex app has before its migration."""
    core = pytest.importorskip("llama_index.core", reason="the LlamaIndex package is not installed; make setup does it")
    import llama_index_cacheblend
    from llama_index.core.ingestion import IngestionPipeline
    from llama_index.core.node_parser import SentenceSplitter
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.storage.docstore import SimpleDocumentStore
    from llama_index.core.vector_stores import SimpleVectorStore

    core.Settings.embed_model = llama_index_cacheblend.BundledEmbedding()
    documents = [core.Document(text=text) for text in (RULE, "Offices open at nine.")]
    index = core.VectorStoreIndex.from_documents(documents)
    given = {"engine": engine, "documents": documents, "index": index, "base": index.as_retriever()}
    given |= {"SentenceSplitter": SentenceSplitter, "RetrieverQueryEngine": RetrieverQueryEngine}
    given |= {"StorageContext": core.StorageContext, "VectorStoreIndex": core.VectorStoreIndex}
    given |= {"IngestionPipeline": IngestionPipeline, "SimpleDocumentStore": SimpleDocumentStore}
    given |= {"your_store": SimpleVectorStore(), "your_transformations": [SentenceSplitter()]}
    return given | {name: getattr(llama_index_cacheblend, name) for name in llama_index_cacheblend.__all__}


@contextlib.contextmanager
def program_runner(bundled: Path, place: Path, page: str) -> Iterator[Callable[[str], str]]:
    """Yield a function that runs a page's Python blocks one after another and returns the output of each."""
    with TransformersEngine(bundled, store=place / "before") as engine:
        names: dict[Any, dict[str, Any]] = {}
        package = PACKAGE_OF.get(page)

        def run_program(code: str) -> str:
            words = ("use_engine", "llama_index", "query_engine")
            in_llamaindex = package == "llama-index" or any(word in code for word in words)
            kind = llamaindex_names if in_llamaindex else langchain_names
            if kind not in names:
                given = kind(engine) | {"TransformersEngine": TransformersEngine}
                if package is not None:
                    own = READERS[package]
                    given = {name: given[name] for name in given if name.startswith("your_") or name in own}
                names[kind] = given
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, "page", "exec"), names[kind])
            return out.getvalue()

        yield run_program
        for given in names.values():
            if (own := given["engine"]) is not engine:
                own.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_and_programs_of_a_page_run(page: str, place: Path, bundled: Path) -> None:
    ran = 0
    with program_runner(bundled, place, page) as run_program:
        for block in PARSER.parse((ROOT / page).read_text("utf-8")):
            if block.type == "fence" and block.info == "python":
                run_program(block.content)
                ran += 1
            elif block.type == "fence" and block.info == "toml":
                name = block.content.splitlines()[0].removeprefix("# ")
                (place / name).write_text(block.content)
        for command in followed(ROOT / page):
            code, said = run(command)
            assert code == 0, f"{' '.join(command)}\n{said}"
            ran += 1
    assert ran


def test_every_guide_with_commands_is_run_or_listed_as_left_out() -> None:
    guides = (page for page in sorted((ROOT / "docs/howto").glob("*.md")) if any(followed(page)))
    assert {page.relative_to(ROOT).as_posix() for page in guides} <= {*PAGES, *PAGES_LEFT_OUT}


def followed(page: Path) -> Iterator[list[str]]:
    return (
        command
        for command in commands(page)
        if not " ".join(command[1:3]).startswith(LEFT_OUT) and "--calibrate" not in command
    )
