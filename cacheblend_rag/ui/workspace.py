"""Holds what all tabs of one page share: the model, loaded while the page is already there, and the collections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.models import BUNDLED_MODEL
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.ui.collections import Collection, Collections

if TYPE_CHECKING:  # torch comes with them: the page must be there before it is
    from cacheblend_rag.engines.base import BlendEngine
    from cacheblend_rag.rag.pipeline import RagPipeline


_LOADING = "Loading the model…"


@dataclass(frozen=True)
class Choices:
    """Holds what the command line has chosen for the page.

    Attributes:
        load_engine: Loads the model in front of a store directory; called once, in a thread.
        first: Returns the store directory to open first; called in that thread, since naming it may need the model's files.
        home: Where further collections are made.
        seed: Directory of example documents to have in the first one.
        k: Most chunks in a prompt.
        sampling: How answers are decoded.
        settings: How stored KV is treated.
    """

    load_engine: Callable[[Path], BlendEngine]
    first: Callable[[], Path]
    home: Path
    seed: Path | None = None
    k: int = 6
    sampling: SamplingParams = field(default_factory=SamplingParams)
    settings: BlendSettings = field(default_factory=BlendSettings)


class Workspace:
    """Loads the model in the background; everything else waits for it in :meth:`collections`.

    Attributes:
        choices: What the command line has chosen.
        status: What the model is doing, in words for the page.
        failed: Whether that is an error.
    """

    def __init__(self, choices: Choices):
        self.choices = choices
        self.status, self.failed = _LOADING, False
        self._started = False
        self._collections: Collections | None = None
        self._error: CacheBlendError | None = None
        self._done = threading.Event()
        self._starting = threading.Lock()
        self._engine: BlendEngine | None = None

    @property
    def ready(self) -> bool:
        """Return whether the model is loaded."""
        return self._collections is not None

    @property
    def engine(self) -> BlendEngine:
        """Return the model, once it is loaded."""
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Load the model in a thread, again where that failed before; does nothing while it is being loaded."""
        with self._starting:
            if self._started and not self.failed:
                return
            self._started = True
            self.status, self.failed, self._error = _LOADING, False, None
            self._done.clear()
        threading.Thread(target=self._load, name="load the model", daemon=True).start()

    def collections(self) -> Collections:
        """Return the collections, when the model is loaded (blocking).

        Raises:
            CacheBlendError: Why it could not be loaded.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._collections is not None
        return self._collections

    def _load(self) -> None:
        try:
            first = self.choices.first()
            opened = Collections(first, self.choices.home, self._open)
            self._seed(opened.get(first.name))
            self.status = self._describe()
            self._collections = opened
        except CacheBlendError as error:
            self._fail(error)
        except Exception as error:  # the page must say it, whatever it is
            self._fail(CacheBlendError(f"The model could not be loaded ({type(error).__name__}: {error})."))
        finally:
            self._done.set()

    def _fail(self, error: CacheBlendError) -> None:
        self._error, self.failed, self.status = error, True, str(error)

    def _open(self, directory: Path) -> RagPipeline:
        from cacheblend_rag.rag.pipeline import RagPipeline

        if self._engine is None:
            self._engine = self.choices.load_engine(directory)
            return RagPipeline(self._engine, directory, k=self.choices.k)
        engine = _beside(self._engine, directory)
        try:
            return RagPipeline(engine, directory, k=self.choices.k)
        except CacheBlendError:
            if engine is not self._engine:
                engine.close()
            raise

    def _seed(self, collection: Collection) -> None:
        """Index the example documents; those indexed before cost a look, and an interrupted start is made good."""
        files = sorted(self.choices.seed.iterdir()) if self.choices.seed is not None else []
        for number, file in enumerate(files, 1):
            self.status = f"Indexing the example documents: {number} of {len(files)}…"
            collection.pipeline.index([file])

    def _describe(self) -> str:
        engine = self.engine
        if not engine.gate.passed:
            return f"{engine.fingerprint.name}. It is not blended, so every prompt is computed whole: {engine.gate.reason}."
        if engine.fingerprint.name == BUNDLED_MODEL:
            return "bundled, which knows its own fictional world alone; for your documents start with another --model"
        return engine.fingerprint.name

    def close(self) -> None:
        """Close everything that was opened."""
        if self._collections is not None:
            self._collections.close()
        elif self._engine is not None:
            self._engine.close()


def _beside(engine: BlendEngine, directory: Path) -> BlendEngine:
    """Return an engine in front of another store, without loading the model twice.

    A server and vLLM keep the KV of all collections in the one store they were started on.
    """
    from cacheblend_rag.engines.transformers import TransformersEngine
    from cacheblend_rag.store import open_store

    if not isinstance(engine, TransformersEngine):
        return engine
    return engine.beside(open_store(directory, processes=4))  # collections are opened side by side


def explain(error: Exception) -> str:
    """Return what a person is told of an error."""
    if isinstance(error, CacheBlendError):
        return str(error)
    return f"Unexpected {type(error).__name__}: {error}. This is a bug in cacheblend-rag; please report it."


def nothing_indexed(name: str) -> InputError:
    """Return the error for a question to an empty collection."""
    return InputError(f"Nothing is indexed in the collection {name!r} yet. Drop files under “Documents” first.")
