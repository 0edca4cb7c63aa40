"""Parses files in a process of its own (:mod:`~cacheblend_rag.retrieval.parsing`), so that none can do more than be skipped."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from cacheblend_rag.retrieval.extraction import UnusableFileError
from cacheblend_rag.retrieval.parsing import OUT_OF_MEMORY, Task

_log = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_KEPT: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Of the environment, what a Python may need to start. Nothing else is handed on: keys and passwords are there."""
_ADVICE: Final = "convert it to text"


@dataclass(frozen=True)
class ParserLimits:
    """Limits what parsing one file may take. Sizes in bytes, times in seconds.

    Attributes:
        cpu_s: Time of computing, and
        cpu_s_per_mib: so much more for each MiB of the file.
        wall_factor: How much longer than that it may take altogether, on a busy machine.
        memory: Address space, and
        memory_per_byte: so much more for each byte of the file.
        answer: Text and metadata as JSON.
    """

    cpu_s: float = 60.0
    cpu_s_per_mib: float = 30.0
    wall_factor: float = 3.0
    memory: int = 2 << 30
    memory_per_byte: int = 4
    answer: int = 1 << 30

    def task(self, suffix: str, nbytes: int) -> Task:
        """Return what a file of that type and size may take."""
        cpu_s = max(1, round(self.cpu_s + self.cpu_s_per_mib * nbytes / _MIB))
        return Task(suffix, nbytes, cpu_s, self.memory + self.memory_per_byte * nbytes)


class Parser:
    """A process that parses one file after another; one that dies of a file is replaced for the next. Thread-safe."""

    def __init__(self, limits: ParserLimits | None = None):
        """Start it when the first file comes."""
        self._limits = limits or ParserLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def parse(self, suffix: str, data: bytes) -> tuple[str, dict[str, Any]]:
        """Return the text of a file and what is known of it (:data:`~cacheblend_rag.retrieval.parsing.PARSERS`).

        Raises:
            UnusableFileError: It gives no text, or takes more than it may.
        """
        task = self._limits.task(suffix, len(data))
        with self._lock:
            try:
                answer = self._asked(task, data)
            except BaseException:  # Ctrl-C too: an answer that nobody took must not be the next one's
                self._stop()
                raise
        for warning in answer["warnings"]:
            _log.warning("%s", warning)
        if "reason" in answer:
            raise UnusableFileError(str(answer["reason"]), bool(answer["blank"]))
        text, metadata = answer["text"], answer["metadata"]
        if "page_starts" in metadata:
            metadata["page_starts"] = [(offset, number) for offset, number in metadata["page_starts"]]
        return text, metadata

    def close(self) -> None:
        """End the process; another file would start a new one."""
        with self._lock:
            self._stop()

    def _asked(self, task: Task, data: bytes) -> dict[str, Any]:
        process = self._running()
        to_it, from_it = _pipes(process)
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(task.cpu_s * self._limits.wall_factor, stop)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):  # it ended: what it leaves behind says why
                to_it.write(json.dumps(task._asdict()).encode() + b"\n")
                to_it.write(data)
                to_it.flush()
            line = from_it.readline(self._limits.answer)
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if line and len(line) == self._limits.answer:
            raise UnusableFileError(f"its text is larger than {self._limits.answer // _MIB} MiB; split it")
        raise UnusableFileError(_why(process.wait(), late.is_set(), task))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._process, self._owner = _started(), os.getpid()
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for pipe in _pipes(process):
            with suppress(BrokenPipeError):  # it had not read all
                pipe.close()


def _started() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path if each)
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
    # -P: what lies in the current directory is no module. A session of its own: Ctrl-C is for the process that asks.
    command = [sys.executable, "-P", "-m", "cacheblend_rag.retrieval.parsing"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd="/", start_new_session=True
    )


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _why(code: int, late: bool, task: Task) -> str:
    if late or code == -signal.SIGXCPU:
        return f"reading it takes more than {task.cpu_s} s of computing; {_ADVICE}"
    if code == OUT_OF_MEMORY:
        return f"reading it takes more than {task.memory // _MIB:,} MiB of memory; {_ADVICE}"
    return f"its reader crashed on it (exit code {code}); {_ADVICE}"


PARSER: Final = Parser()
"""The one that this process uses."""
atexit.register(PARSER.close)
