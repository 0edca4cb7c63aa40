"""Opens engines and pipelines with the options of a command, and chooses the model if a command is given none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cacheblend_rag.console import options
from cacheblend_rag.console.groups import BudgetOptions, EngineOptions, ModelOptions
from cacheblend_rag.console.output import echo, status
from cacheblend_rag.engines.models import BUNDLED_MODEL, NO_WRITER, SMOLLM2, is_named
from cacheblend_rag.errors import InputError, StoreError
from cacheblend_rag.homes import from_home

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import BlendEngine
    from cacheblend_rag.engines.remote import RemoteEngine
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.engines.vllm import VLLMEngine
    from cacheblend_rag.prompts.prompt import Header
    from cacheblend_rag.rag.inventory import Inventory
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.retrieval.database import IndexConfig
    from cacheblend_rag.store import KVStore

_Options = TypeVar("_Options", bound=ModelOptions)


def store_directory(given: Path | None) -> Path:
    """Return the store's directory: ``given``, else a directory in the user's cache (or ``CACHEBLEND_HOME``)."""
    if given is not None:
        return from_home(given)
    from cacheblend_rag.homes import user_folder

    return user_folder("cache") / "store"


def index_directory(directory: Path | None, namespace: str) -> Path:
    """Return the directory of a namespace's index in a command's store."""
    from cacheblend_rag.store.files import home_of

    return home_of(store_directory(directory), namespace)


def open_inventory(directory: Path | None, namespace: str = "default") -> Inventory:
    """Open the contents of a command's store and index, without a model."""
    from cacheblend_rag.rag.inventory import Inventory

    return Inventory(store_directory(directory), namespace)


def open_engine(chosen: ModelOptions, store: KVStore | None = None) -> TransformersEngine:
    """Load the model of a command with transformers."""
    _leave_it_to_answers()
    with status("Loading the model"):
        import torch
        from transformers.utils.logging import disable_progress_bar

        from cacheblend_rag.engines.models import dtype_named
        from cacheblend_rag.engines.transformers import TransformersEngine

        disable_progress_bar()
        if chosen.threads is not None:
            torch.set_num_threads(chosen.threads)
        dtype = dtype_named(chosen.dtype) if chosen.dtype else None
        model = found_anywhere(chosen.model)
        return TransformersEngine(model, device=chosen.device, dtype=dtype, store=store, writer=chosen.writer)


def open_vllm(
    chosen: ModelOptions, store: Path | None, ram_budget: int | None, disk_budget: int | None, header: Header | None
) -> VLLMEngine:
    """Start vLLM with the model of a command; :class:`VLLMEngine` describes ``store`` and ``header``.

    Raises:
        InputError: An option does not apply to vLLM.
        ModelError: vLLM is missing, or does not start; the message says why in a few lines.
    """
    for name, value in (("--device", chosen.device), ("--threads", chosen.threads)):
        if value is not None:
            raise InputError(f"{name} does not go with --engine vllm, which chooses for itself.")
    # vLLM's log is for servers; a user of the command line wants to read only answers.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    _leave_it_to_answers()
    with status("Starting vLLM"):
        from cacheblend_rag.engines.vllm import VLLMEngine
        from cacheblend_rag.engines.vllm.starting import StartError, StartLog

        log = StartLog()
        try:
            with log:
                return VLLMEngine(
                    found_anywhere(chosen.model),
                    store=store,
                    header=header,
                    dtype=chosen.dtype,
                    ram_budget=ram_budget,
                    disk_budget=disk_budget,
                    writer=chosen.writer,
                )
        except StartError as error:
            why = log.why(error.cause, " (flags named here are those of `cacheblend serve`)")
            raise StartError(error.model, error.cause, why, error.note) from error


def open_server(chosen: EngineOptions) -> RemoteEngine:
    """Connect to the server of a command; the server must serve the model that ``--model`` names.

    Raises:
        InputError: An option applies only to a model loaded in this process.
    """
    assert chosen.server is not None
    if chosen.engine != "transformers":
        raise InputError("--engine does not go with --server: the model runs there.")
    local = {"--device": chosen.device, "--dtype": chosen.dtype, "--threads": chosen.threads, "--writer": chosen.writer}
    if given := [name for name, value in local.items() if value is not None]:
        raise InputError(f"{', '.join(given)} does not go with --server: the model runs there.")
    with status("Connecting"):
        from cacheblend_rag.engines.remote import RemoteEngine

        return RemoteEngine(chosen.server, model=chosen.model)


def _leave_it_to_answers() -> None:
    """Silence the 'not calibrated' warning, which commands print with their answers."""
    logging.getLogger("cacheblend_rag.blending.profile").setLevel(logging.ERROR)


def open_any_engine(
    chosen: EngineOptions, store: Path, budgets: BudgetOptions, ram_budget: int | None = None
) -> BlendEngine:
    """Open the model of a command with a store directory.

    With a server, the KV is in the server's store. ``ram_budget`` is the RAM tier's size in bytes if the options set none.

    Raises:
        InputError: The options contradict each other.
    """
    from cacheblend_rag.store import open_store

    ram, disk = budgets.nbytes()
    ram = ram_budget if ram is None else ram
    if chosen.server is not None and budgets.given:
        raise InputError(f"{', '.join(budgets.given)} does not go with --server: its store is its own.")
    if chosen.server:
        return open_server(chosen)
    budgets.note(store)
    if chosen.engine == "vllm":
        return open_vllm(chosen, store, ram, disk, None)
    return open_engine(chosen, open_store(store, ram, disk))


@contextmanager
def open_pipeline(
    chosen: EngineOptions,
    directory: Path | None,
    budgets: BudgetOptions,
    *,
    must_exist: bool = True,
    namespace: str = "default",
    ram_budget: int | None = None,
    **how: Any,
) -> Iterator[RagPipeline]:
    """Open a pipeline with the store and model of a command, within a namespace; ``how`` is passed to :class:`RagPipeline`.

    With a server, the directory holds only the index, and the KV is in the server's store. For ``ram_budget``, see
    :func:`open_any_engine`.
    """
    from cacheblend_rag.retrieval.index import ChunkIndex
    from cacheblend_rag.store.files import DEFAULT_NAME

    path = store_directory(directory)
    home = index_directory(directory, namespace)
    if must_exist and not ChunkIndex.exists(home):
        # Raised for a wrong path before a model is loaded.
        named = "" if namespace == DEFAULT_NAME else f" {options.NAMESPACE_FLAG} {namespace}"
        raise StoreError(f"Nothing is indexed in {home}. Run `cacheblend index FILES --store DIR{named}` first.")
    chosen = with_model(chosen, home)
    with open_any_engine(chosen, path, budgets, ram_budget) as engine:
        from cacheblend_rag.rag.pipeline import RagPipeline

        with RagPipeline(engine.within(namespace), home, **how) as pipeline:
            yield pipeline


def with_model(chosen: _Options, home: Path | None = None, otherwise: str = SMOLLM2) -> _Options:
    """Return the options of a command with a model, unless a server runs the model.

    The model is the given one, else the model of the index in ``home``, else ``otherwise``. If nobody has chosen SmolLM2, a
    message on stderr names it. With the index's model, a dtype and a writer that are not given are the index's.
    """
    from cacheblend_rag.retrieval.index import ChunkIndex

    if getattr(chosen, "server", None) is not None:
        return chosen
    if home is not None and ChunkIndex.exists(home):
        with ChunkIndex(home) as index:
            return _as_indexed(chosen, index.config)
    if chosen.model is not None:
        return chosen
    if otherwise == SMOLLM2:
        echo(_about_smollm2(), err=True)
    return replace(chosen, model=otherwise)


def _about_smollm2() -> str:
    from cacheblend_rag.console.known_models import machine, next_larger

    memory, dtype, _ = machine()
    larger = next_larger(memory, dtype)
    offer = f"The next larger that fits this machine is --model {larger.name}, from the model hub; " if larger else ""
    return (
        "Without --model it is smollm2, SmolLM2-135M-Instruct: for a quick trial. It is small and often reads wrongly. "
        f"{offer}`cacheblend models` lists more."
    )


def _as_indexed(chosen: _Options, made: IndexConfig) -> _Options:
    """Return options with the model, the dtype and the KV writer of an index, where the options name none."""
    chosen = replace(chosen, model=chosen.model or made.model.name)
    if found_anywhere(chosen.model) != made.model.name:
        return chosen
    chosen = replace(chosen, dtype=chosen.dtype or made.model.dtype)
    if chosen.writer is not None:
        return chosen
    if made.writer is None:
        return replace(chosen, writer=NO_WRITER)
    # If the writer's directory is gone, the model's own writer may be the same.
    return replace(chosen, writer=made.writer.directory if Path(made.writer.directory).is_dir() else None)


def model_for(files: Iterable[Path]) -> str:
    """Return the default model for documents: the bundled model if all are bundled documents, else SmolLM2."""
    from cacheblend_rag.demo.bundle import bundled_corpus
    from cacheblend_rag.retrieval.documents import file_digest

    # By content, wherever the package is installed.
    known = {file_digest(file) for file in bundled_corpus().iterdir()}
    return BUNDLED_MODEL if all(file_digest(file) in known for file in files) else SMOLLM2


def found_anywhere(model: str | None) -> str | None:
    """Return a model path as an absolute path, because indexes record it; return any other name unchanged."""
    if model is None or is_named(model) or not (at := from_home(model)).exists():
        return model
    return str(at.resolve())
