"""Keeps a store and a model open, and answers the questions of one user's commands until none has come for some minutes.

:mod:`cacheblend_rag.cli.resident` starts this process with the number of a listening socket and a description of the store and
model. Each connection carries one question, and questions are answered one after another. If a client disconnects, its answer
stops.
"""

from __future__ import annotations

import _thread
import select
import signal
import socket
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.cli import tell_warnings
from cacheblend_rag.cli.resident import (
    CHANGED,
    DONE,
    TAKEN,
    Held,
    Nearest,
    Question,
    Refused,
    minutes,
    nearest_in,
    of_same_user,
)
from cacheblend_rag.console.engines import index_directory, open_pipeline
from cacheblend_rag.console.groups import BudgetOptions
from cacheblend_rag.console.output import heard_by
from cacheblend_rag.errors import CacheBlendError

if TYPE_CHECKING:
    from cacheblend_rag.rag.pipeline import RagPipeline

_LOOK_S = 5.0  # interval of the checks whether the loaded files are out of date
_HELLO_S = 10.0  # time within which a client must send its question


class Resident:
    """Answers questions that come through a socket.

    Args:
        listening: Listening socket.
        answer: Yields the events of an answer to a :class:`Question` or a :class:`Nearest`; raises a pipeline's errors.
        told: Messages printed on stderr while the model was loaded; each client prints them as if it had loaded the model.
        out_of_date: Returns whether a command would now load other files or settings.
        idle_s: Seconds without a question after which :meth:`serve` returns.
        interrupt: Raises KeyboardInterrupt in the thread that answers.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        listening: socket.socket,
        answer: Callable[[Any], Iterator[Any]],
        *,
        idle_s: float,
        told: tuple[str, ...] = (),
        out_of_date: Callable[[], bool] = lambda: False,
        interrupt: Callable[[], None] = _thread.interrupt_main,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._listening, self._answer, self._told = listening, answer, told
        self._out_of_date, self._interrupt = out_of_date, interrupt
        self._idle_s, self._clock = idle_s, clock

    def serve(self) -> None:
        """Answer until no question has come for ``idle_s`` seconds, or the loaded files are out of date."""
        last = self._clock()
        while True:
            if select.select([self._listening], [], [], min(_LOOK_S, max(0.0, self._idle_s)))[0]:
                if not self._met():
                    return
                last = self._clock()
            elif self._clock() - last >= self._idle_s or self._out_of_date():
                return

    def _met(self) -> bool:
        """Serve one client; return whether to continue."""
        client, _ = self._listening.accept()
        if not of_same_user(client):
            client.close()
            return True
        with Connection(client.detach()) as connection, suppress(EOFError, OSError):
            if self._out_of_date():
                self._listening.close()  # first, so that the client cannot connect to this process again
                connection.send(CHANGED)
                return False
            connection.send(TAKEN)
            if connection.poll(_HELLO_S):
                self._answered(connection, connection.recv())
        return True

    def _answered(self, connection: Connection, question: Any) -> None:
        """Answer one question. Errors of other libraries are not sent: the client then answers itself and meets them, too."""
        # Every client gets all warnings: leaving this block resets the record of warnings given.
        with suppress(KeyboardInterrupt, Exception), warnings.catch_warnings(), heard_by(connection.send):
            for text in self._told:
                connection.send(text)
            try:
                with _stopped_without(connection, self._interrupt):
                    for event in self._answer(question):
                        connection.send(event)
                connection.send(DONE)
            except CacheBlendError as error:
                connection.send(Refused(type(error).__name__, str(error)))


@contextmanager
def _stopped_without(connection: Connection, interrupt: Callable[[], None]) -> Iterator[None]:
    """Interrupt the block if the client disconnects; the client must not send anything more."""
    inside, outside = Pipe()
    lock, over = threading.Lock(), False

    def watch() -> None:
        wait([connection, outside])
        with lock:
            if not over:
                interrupt()

    watching = threading.Thread(target=watch, name="client", daemon=True)
    watching.start()
    try:
        yield
    finally:
        with lock:
            over = True
        inside.close()
        watching.join()
        outside.close()


class Answers:
    """Answers questions with an open pipeline as a new process for each question would."""

    def __init__(self, pipeline: RagPipeline):
        self._pipeline = pipeline

    def __call__(self, question: Question | Nearest) -> Iterator[Any]:
        """Yield the events of an answer, or the place of the nearest sentence; raises the pipeline's errors."""
        from cacheblend_rag.rag.pipeline import RagPipeline

        pipeline = self._pipeline
        if isinstance(question, Nearest):
            return iter([nearest_in(pipeline, *question)])
        if not question.history:  # reuse nothing from other commands' questions
            pipeline.engine.reset_prefix_cache()
        asked = RagPipeline(pipeline.engine, pipeline.chunks, k=question.k)
        events = asked.stream(question.question, question.sampling, question.settings, question.history)
        return (replace(event, prompt=None) for event in events)  # to read a prompt, the client would import much more


def state_of(held: Held, pipeline: RagPipeline) -> tuple[object, ...]:
    """Return the states of all loaded files and the index's configuration; a change means that a command would load anew."""
    from cacheblend_rag.engines.models import is_named, named_file
    from cacheblend_rag.homes import user_folder
    from cacheblend_rag.retrieval.documents import INDEX_FILE
    from cacheblend_rag.store.opening import RECORD

    engine, index = pipeline.engine, index_directory(Path(held.store), held.namespace) / INDEX_FILE
    name, writer = engine.fingerprint.name, engine.writer
    folders = [named_file(name) if is_named(name) else Path(name)]
    folders += [Path(each) for each in (held.retriever, None if writer is None else writer.directory) if each]
    files = [Path(sysconfig.get_path("purelib")), Path(held.store) / RECORD, *user_folder("data").glob("*/*.json")]
    files += [each for folder in folders if folder for each in (folder, *folder.glob("*"))]
    files += Path(__file__).parent.parent.rglob("*.py")
    there = index.stat()
    return (there.st_dev, there.st_ino), pipeline.chunks.config, tuple(map(_state, files))


def _state(file: Path) -> tuple[object, ...]:
    try:
        found = file.stat()
    except OSError:
        return (file,)
    return file, found.st_ino, found.st_size, found.st_mtime_ns


def main(listening: socket.socket, held: Held) -> None:
    """Open the pipeline and answer until idle; an error ends the process, and clients then answer by themselves."""
    tell_warnings()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the first command ran in the background
    path = Path(listening.getsockname())
    own, told = _state(path), list[str]()
    with ExitStack() as opened:
        with heard_by(told.append):
            pipeline = opened.enter_context(
                open_pipeline(
                    held.model,
                    Path(held.store),
                    BudgetOptions(),
                    namespace=held.namespace,
                    ram_budget=0,
                    query_encoder=held.retriever,
                )
            )
        with suppress(CacheBlendError):
            pipeline.chunks.load_embedder()
        before = state_of(held, pipeline)

        def out_of_date() -> bool:
            with suppress(OSError, CacheBlendError):
                return _state(path) != own or state_of(held, pipeline) != before
            return True

        answers = Answers(pipeline)
        try:
            Resident(listening, answers, idle_s=60 * minutes(), told=tuple(told), out_of_date=out_of_date).serve()
        finally:
            if _state(path) == own:  # unless another process has its socket at the path meanwhile
                path.unlink(missing_ok=True)
            listening.close()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Held.read(sys.argv[2]))
