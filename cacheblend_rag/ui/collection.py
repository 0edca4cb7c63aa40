"""Holds the documents of the page: adds, updates and removes them, and reports the progress."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from cacheblend_rag.console.output import counted
from cacheblend_rag.errors import CacheBlendError, StoreError
from cacheblend_rag.retrieval.documents import absolute

if TYPE_CHECKING:
    from cacheblend_rag.rag.indexing import IndexProgress, IndexReport
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.retrieval.index import IndexedDocument

_DOCUMENTS = "documents"

State = Literal["waiting", "indexing", "done", "unchanged", "skipped", "removed", "failed"]


@dataclass(frozen=True)
class FileState:
    """Reports the progress of one file during indexing: its name, its state, and a note for the user."""

    name: str
    state: State = "waiting"
    note: str = ""


class Collection:
    """Holds an open store directory and its pipeline. The store's folder ``documents`` has copies of added files."""

    def __init__(self, directory: Path, pipeline: RagPipeline):
        self.directory, self.pipeline = absolute(directory), pipeline  # absolute, like the paths in the index
        self._changing = threading.Lock()

    def documents(self) -> list[IndexedDocument]:
        """List the indexed documents, in path order."""
        return self.pipeline.chunks.documents()

    def add(self, files: Sequence[Path]) -> Iterator[list[FileState]]:
        """Copy each file into the store and index the copy; a file replaces the file of the same name.

        Yields:
            The states of all files, whenever one state has changed.
        """
        yield from self._index({self.directory / _DOCUMENTS / file.name: self._keep(file) for file in files})

    def remove(self, paths: Sequence[str]) -> None:
        """Remove documents from the index, and delete their copies; a document that is not in the index is no error.

        Raises:
            StoreError: The index cannot be written, or a copy cannot be deleted.
        """
        with self._changing:
            for path in paths:
                if self.pipeline.chunks.digest_of(path) is not None:
                    self.pipeline.remove(path)
                if Path(path).parent == self.directory / _DOCUMENTS:
                    self._delete(Path(path))

    def _keep(self, file: Path) -> str | None:
        """Copy a file into the store in one step, so that an earlier copy survives a failure; return why it failed."""
        kept = self.directory / _DOCUMENTS
        new = kept / f".{secrets.token_hex(8)}"
        try:
            kept.mkdir(parents=True, exist_ok=True)
            with suppress(PermissionError):  # another user owns the folder, and has given access
                kept.chmod(0o700)
            try:
                new.touch(0o600)
                shutil.copyfile(file, new)
                new.replace(kept / file.name)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            return f"no copy of it can be kept in {kept}: {error.strerror or error}"
        return None

    @staticmethod
    def _delete(copy: Path) -> None:
        try:
            copy.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{copy.name} is removed, but its copy {copy} cannot be deleted: {error.strerror or error}. "
                "Delete it yourself."
            ) from error

    def _index(self, found: Mapping[Path, str | None]) -> Iterator[list[FileState]]:
        """Index files in a thread, which goes on if the tab is closed; a file that has no copy is only reported."""
        files = [file for file, why in found.items() if why is None]
        failed = [FileState(file.name, "failed", why) for file, why in found.items() if why is not None]
        states = [*(FileState(file.name) for file in files), *failed]
        yield list(states)
        told: SimpleQueue[tuple[int, FileState] | None] = SimpleQueue()

        def tell(number: int, state: FileState) -> None:
            told.put((number, state))

        def work() -> None:
            with self._changing:
                for number, file in enumerate(files):
                    tell(number, FileState(file.name, "indexing", "reading"))
                    tell(number, self._index_one(file, partial(tell, number)))
            told.put(None)

        threading.Thread(target=work, name="index documents", daemon=True).start()
        while (news := told.get()) is not None:
            states[news[0]] = news[1]
            yield list(states)

    def _index_one(self, file: Path, tell: Callable[[FileState], None]) -> FileState:
        """Index one file; an error becomes the file's state, so that the other files are indexed."""
        from cacheblend_rag.rag.planning import TooMuchKVError

        def step(at: IndexProgress) -> None:
            if at.chunks:
                tell(FileState(file.name, "indexing", f"{at.chunks_done} of {at.chunks} chunks"))

        try:
            report = self.pipeline.index([file], step)
            if self.pipeline.chunks.digest_of(str(file)) is None and file.parent == self.directory / _DOCUMENTS:
                file.unlink(missing_ok=True)  # the index has no such document, so the copy has no use
            return _outcome(file.name, report)
        except TooMuchKVError as error:
            what = "Start the page with a larger --disk-budget, or split the file and drop the part you need."
            return FileState(file.name, "failed", f"{error.what}. {what}")
        except CacheBlendError as error:
            return FileState(file.name, "failed", str(error))
        except Exception as error:  # shown beside the file's name, unlike a thread's traceback
            return FileState(file.name, "failed", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close the index and the model."""
        self.pipeline.close()
        self.pipeline.engine.close()


def _outcome(name: str, report: IndexReport) -> FileState:
    if report.skipped:
        return FileState(name, "skipped", report.skipped[0].reason)
    if report.removed:
        return FileState(name, "removed", "it holds no text any more")
    if report.unchanged:
        return FileState(name, "unchanged", "indexed before")
    note = counted(report.chunks, "chunk")
    if report.without_kv:
        reason = next(iter(report.without_kv.values()))
        note += f", {len(report.without_kv)} of them without stored KV: {reason}"
    return FileState(name, "done", note)
