"""Holds the parts that all tabs of a page share: the model, which loads behind the page, and the documents."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.models import BUNDLED_MODEL
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.ui.collection import Collection

if TYPE_CHECKING:  # these imports load torch, and the page must come before torch
    from cacheblend_rag.engines.base import BlendEngine

_LOADING = "Loading the model…"


@dataclass(frozen=True)
class Choices:
    """Holds the settings of the page from the command line.

    Attributes:
        load_engine: Loads the model for a store directory; called in a thread.
        store: Returns the store directory to open; called in the same thread, since its name may depend on the model's
            files.
        why: Measures a prompt, and returns HTML that shows which tokens are recomputed, and why; takes the engine, the
            prompt, the settings, and the hits and fates of the prompt's chunks.
        seed: Directory of example documents to index.
        k: Maximum number of chunks in a prompt.
        sampling: Sampling parameters of answers.
        settings: Settings for the reuse of stored KV.
    """

    load_engine: Callable[[Path], BlendEngine]
    store: Callable[[], Path]
    why: Callable[..., str]
    seed: Path | None = None
    k: int = 6
    sampling: SamplingParams = field(default_factory=SamplingParams)
    settings: BlendSettings = field(default_factory=BlendSettings)


class Workspace:
    """Loads the model in the background; :meth:`collection` waits for the model.

    Attributes:
        choices: Settings from the command line.
        status: State of the model, in words for the page.
    """

    def __init__(self, choices: Choices):
        self.choices, self.status = choices, _LOADING
        self._opened: Future[Collection] = Future()
        self._starting = threading.Lock()

    @property
    def ready(self) -> bool:
        """Return whether the model is loaded."""
        return self._opened.done() and not self.failed

    @property
    def failed(self) -> bool:
        """Return whether loading the model has failed; ``status`` has the reason."""
        return self._opened.done() and self._opened.exception() is not None

    def start(self) -> None:
        """Load the model in a thread, also again after a failure; do nothing if the model is loading or loaded."""
        with self._starting:
            if self._opened.running() or self.ready:
                return
            if self.failed:
                self._opened = Future()
            self._opened.set_running_or_notify_cancel()
            self.status = _LOADING
        threading.Thread(target=self._load, name="load the model", daemon=True).start()

    def collection(self) -> Collection:
        """Return the documents and their pipeline; blocks until the model is loaded.

        Raises:
            CacheBlendError: The model could not be loaded.
        """
        return self._opened.result()

    def _load(self) -> None:
        try:
            opened = self._open()
            self._seed(opened)
        except Exception as error:  # the page must show any error
            why = error
            if not isinstance(error, CacheBlendError):
                why = CacheBlendError(f"The model could not be loaded ({type(error).__name__}: {error}).")
            self.status = str(why)
            self._opened.set_exception(why)
        else:
            self.status = _describe(opened.pipeline.engine)
            self._opened.set_result(opened)

    def _open(self) -> Collection:
        from cacheblend_rag.rag.pipeline import RagPipeline

        directory = self.choices.store()
        engine = self.choices.load_engine(directory)
        try:
            return Collection(directory, RagPipeline(engine, directory, k=self.choices.k))
        except CacheBlendError:
            engine.close()
            raise

    def _seed(self, collection: Collection) -> None:
        """Index the example documents; indexed documents are only checked, and an interrupted start is completed."""
        files = sorted(self.choices.seed.iterdir()) if self.choices.seed is not None else []
        for number, file in enumerate(files, 1):
            self.status = f"Indexing the example documents: {number} of {len(files)}…"
            collection.pipeline.index([file])

    def close(self) -> None:
        """Close everything that was opened."""
        if self.ready:
            self.collection().close()


def _describe(engine: BlendEngine) -> str:
    if not engine.gate.passed:
        return f"{engine.fingerprint.name}. It is not blended, so every prompt is computed whole: {engine.gate.reason}."
    if engine.fingerprint.name == BUNDLED_MODEL:
        return "bundled, which knows its own fictional world alone"
    return engine.fingerprint.name


def explain(error: Exception) -> str:
    """Return the text that a user sees for an error."""
    if isinstance(error, CacheBlendError):
        return str(error)
    return f"Unexpected {type(error).__name__}: {error}. This is a bug in cacheblend-rag; please report it."
