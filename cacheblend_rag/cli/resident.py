"""Sends questions to a process that keeps a model loaded between commands, and starts the process if none runs: the client.

Importing torch, loading a model and running the parity gate takes many times as long as the first token. So the first `ask` or
`chat` starts a process (:mod:`cacheblend_rag.cli.resident_process`) that keeps the model loaded. Later commands ask that process
through a Unix socket in a directory that only this user can enter. Both sides check the other side's user before they send data.
If anything goes wrong with the process, the command answers by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cacheblend_rag import __version__, errors
from cacheblend_rag.console.engines import found_anywhere, index_directory, store_directory
from cacheblend_rag.console.groups import EngineOptions, QuestionOptions
from cacheblend_rag.console.output import echo, status
from cacheblend_rag.engines.models import NO_WRITER, PROBE_WRITER
from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import from_home
from cacheblend_rag.rag.results import RagAnswer, RagEvent, Turn

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.pipeline import RagPipeline

MINUTES = "CACHEBLEND_RESIDENT_MINUTES"
"""Environment variable with the minutes that the process stays after the last question; 0 starts no process."""
_DEFAULT_MINUTES = 5.0
# Time within which a running process must accept a question; a process that answers another question does not accept.
_PATIENCE_S = 3.0
# Beginnings of the variables that decide how a model is loaded, where files are, and which keys are used.
_DECIDING = (
    "AWS_",
    "CACHEBLEND_",
    "CUDA",
    "HF_",
    "HOME",
    "MKL_",
    "OMP_",
    "PYTHON",
    "REDIS",
    "TORCH",
    "TRANSFORMERS_",
    "XDG_",
)


class UnreachableError(Exception):
    """Reports that no other process answers, so that the caller must answer."""


class Question(NamedTuple):
    """Requests an answer from ``k`` chunks, with the arguments of :meth:`RagPipeline.stream`."""

    question: str
    k: int
    sampling: SamplingParams
    settings: BlendSettings
    history: tuple[Turn, ...] = ()


class Nearest(NamedTuple):
    """Requests the sentence of a passage that is nearest to a question."""

    question: str
    text: str


class Refused(NamedTuple):
    """Carries an error of this library that a question raised in the process."""

    kind: str
    message: str

    def error(self) -> errors.CacheBlendError:
        """Return the error for this process to raise."""
        kind = getattr(errors, self.kind, errors.CacheBlendError)
        made = errors.CacheBlendError(self.message)
        if isinstance(kind, type) and issubclass(kind, InputError):
            made = InputError(self.message)
        made.exit_code = kind.exit_code
        return made


TAKEN, CHANGED, DONE = b"taken", b"changed", b"done"
"""Messages of the process. "taken" accepts a question. "changed" says that the process ends, because its loaded files are out of
date. "done" follows a complete answer."""


@dataclass(frozen=True)
class Held:
    """Describes what a process keeps open: a store, its index and a model. All paths are absolute."""

    store: str
    namespace: str
    model: EngineOptions
    retriever: str | None

    @classmethod
    def by(cls, how: QuestionOptions, namespace: str, retriever: Path | None) -> Held | None:
        """Return the description for a command's options; None if the command itself must answer.

        Raises:
            InputError: The environment variable is not a number of minutes, or an option cannot be used.
        """
        model = how.model
        elsewhere = model.server is not None or model.engine != "transformers" or how.budgets.given
        if elsewhere or minutes() <= 0 or not hasattr(socket, "SO_PEERCRED"):
            return None
        from cacheblend_rag.retrieval.documents import INDEX_FILE

        if not (index_directory(how.store, namespace) / INDEX_FILE).is_file():
            return None
        writer = model.writer if model.writer in (NO_WRITER, PROBE_WRITER) else found_anywhere(model.writer)
        whole = EngineOptions(found_anywhere(model.model), model.device, model.dtype, model.threads, writer)
        tuned = None if retriever is None else str(from_home(retriever).resolve())
        return cls(str(store_directory(how.store).resolve()), namespace, whole, tuned)

    @classmethod
    def read(cls, text: str) -> Held:
        """Return the description that :attr:`text` encodes."""
        told = json.loads(text)
        return cls(**{**told, "model": EngineOptions(**told["model"])})

    @property
    def text(self) -> str:
        """Return the description as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def socket(self) -> Path:
        """Return the path of the process's socket, which differs between versions and environments.

        Raises:
            UnreachableError: No directory for sockets is private to this user.
        """
        deciding = {name: value for name, value in os.environ.items() if name.startswith(_DECIDING)}
        code = [__version__, sys.executable, str(Path(__file__).parent), sysconfig.get_path("purelib")]
        text = json.dumps([self.text, deciding, code, os.geteuid()], sort_keys=True)
        return _private_directory() / hashlib.sha256(text.encode()).hexdigest()[:32]


def minutes() -> float:
    """Return how many minutes a process stays after its last question.

    Raises:
        InputError: The environment variable is not a number.
    """
    text = os.environ.get(MINUTES, str(_DEFAULT_MINUTES))
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{MINUTES} is {text!r}; give a number of minutes, or 0 to start no process.") from None


def _private_directory() -> Path:
    """Return the directory of the sockets, made if missing; raises UnreachableError if other users can enter."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    usable = given is not None and Path(given).is_dir()
    folder = Path(given or "") / "cacheblend" if usable else Path(tempfile.gettempdir()) / f"cacheblend-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UnreachableError from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise UnreachableError
    return folder


def of_same_user(connected: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _connected(path: Path) -> Connection | None:
    """Return a connection to the process that listens at ``path``; None if no process listens."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.connect(str(path))
        if not of_same_user(found):
            raise UnreachableError
        return Connection(found.detach())
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except OSError as error:
        raise UnreachableError from error
    finally:
        found.close()


def start(held: Held, listening: socket.socket) -> None:
    """Start the process for ``held`` with the socket ``listening``; the process outlives this one and inherits no other file."""
    subprocess.Popen(
        [sys.executable, "-P", "-m", "cacheblend_rag.cli.resident_process", str(listening.fileno()), held.text],
        pass_fds=(listening.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def _reached(held: Held) -> tuple[Connection, bool]:
    """Return a connection to the process for ``held``, and whether the process was started now."""
    from filelock import FileLock

    path = held.socket
    if (found := _connected(path)) is not None:
        return found, False
    with FileLock(path.with_name("starting.lock"), timeout=_PATIENCE_S, mode=0o600):
        if (found := _connected(path)) is not None:  # another command has started the process
            return found, False
        with suppress(FileNotFoundError):
            path.unlink()  # left behind by a process that was killed
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(str(path))
            listening.listen()
            start(held, listening)
        if (found := _connected(path)) is None:
            raise UnreachableError
        return found, True


def _taken(held: Held) -> Connection:
    """Return a connection to a process that has accepted a question.

    The socket listens before its process has loaded anything. A connection closes when the process ends.
    """
    try:
        for _ in range(2):  # a process that is ending makes the client try again
            connection, started = _reached(held)
            try:
                said = connection.recv() if started or connection.poll(_PATIENCE_S) else None
            except EOFError:
                said = None if started else CHANGED
            except BaseException:
                connection.close()
                raise
            if said == TAKEN:
                return connection
            connection.close()
            if said != CHANGED:
                break
    except (OSError, TimeoutError) as error:
        raise UnreachableError from error
    raise UnreachableError


class ResidentPipeline:
    """Answers as a :class:`RagPipeline` does, through another process if possible, else with a pipeline in this process.

    Args:
        held: Description of the other process.
        k: Most chunks in a prompt.
        own: Opens the pipeline in this process, which :meth:`__exit__` closes.
    """

    def __init__(self, held: Held, k: int, own: Callable[[], AbstractContextManager[RagPipeline]]):
        self._held, self._k, self._open = held, k, own
        self._own: RagPipeline | None = None
        self._opened = ExitStack()

    def __enter__(self) -> ResidentPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def ask(self, question: str, sampling: SamplingParams, settings: BlendSettings) -> RagAnswer:
        """Answer in one piece; raises the pipeline's errors."""
        *_, last = self.stream(question, sampling, settings)
        assert last.answer is not None
        return last.answer

    def stream(
        self, question: str, sampling: SamplingParams, settings: BlendSettings, history: Sequence[Turn] = ()
    ) -> Iterator[RagEvent]:
        """Answer piece by piece; raises the pipeline's errors.

        If the process ends in the middle of an answer, the answer starts again on the next line.
        """
        said = False
        if self._own is None:
            try:
                for event in self._asked(Question(question, self._k, sampling, settings, tuple(history))):
                    said = said or bool(event.text)
                    yield event
                return
            except UnreachableError:
                if said:
                    yield RagEvent("\n")
        yield from self.own.stream(question, sampling, settings, history)

    def nearest(self, question: str, text: str) -> tuple[int, int] | None:
        """Return the result of :func:`nearest_sentence`; None if no process answers."""
        if self._own is not None:
            return nearest_in(self._own, question, text)
        try:
            (found,) = self._asked(Nearest(question, text))
        except UnreachableError:
            return None
        return None if found is None else (found[0], found[1])

    @property
    def own(self) -> RagPipeline:
        """Return the pipeline in this process, opened on first use."""
        if self._own is None:
            self._own = self._opened.enter_context(self._open())
        return self._own

    def _asked(self, question: Question | Nearest) -> Iterator[Any]:
        with status("Loading the model"):
            connection = _taken(self._held)
        with connection:  # closing the connection early stops the answer
            try:
                connection.send(question)
                while True:
                    said: Any = connection.recv()
                    if isinstance(said, Refused):
                        raise said.error()
                    if isinstance(said, str):
                        echo(said, err=True)
                        continue
                    if said == DONE:  # sent after the KV of the answer has been stored
                        return
                    yield said
            except (EOFError, OSError) as error:
                raise UnreachableError from error


def nearest_in(pipeline: RagPipeline, question: str, text: str) -> tuple[int, int] | None:
    """Return the result of :func:`nearest_sentence` with the embedding model of a pipeline's index."""
    from cacheblend_rag.retrieval.passages import nearest_sentence

    return nearest_sentence(text, question, pipeline.chunks.load_embedder())
