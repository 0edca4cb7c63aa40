"""Parses files in a separate process (:mod:`~cacheblend_rag.retrieval.parsing`), where a bad file does no harm."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from cacheblend_rag.retrieval.extraction import UnusableFileError
from cacheblend_rag.retrieval.parsing import OUT_OF_MEMORY, Task

_log = logging.getLogger(__name__)

_MIB: Final = 1 << 20
_KEPT: Final = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Environment variables passed to the parser process, because Python may need them to start. No other variable is
passed: keys and passwords may be among them."""
_ADVICE: Final = "convert it to text"


@dataclass(frozen=True)
class ParserLimits:
    """Limits the resources for parsing one file. Sizes are in bytes, times in seconds.

    Attributes:
        cpu_s: CPU time for any file.
        cpu_s_per_mib: Additional CPU time for each MiB of the file.
        wall_factor: Limit of the wall-clock time as a multiple of the CPU time, since the machine may be busy.
        memory: Address space for any file.
        memory_per_byte: Additional address space for each byte of the file.
        answer: Size of the text and metadata as JSON.
    """

    cpu_s: float = 60.0
    cpu_s_per_mib: float = 30.0
    wall_factor: float = 3.0
    memory: int = 2 << 30
    memory_per_byte: int = 4
    answer: int = 1 << 30

    def task(self, suffix: str, nbytes: int) -> Task:
        """Return the task of parsing a file of a given type and size, with its limits."""
        cpu_s = max(1, round(self.cpu_s + self.cpu_s_per_mib * nbytes / _MIB))
        return Task(suffix, nbytes, cpu_s, self.memory + self.memory_per_byte * nbytes)


class Parser:
    """Parses one file after another in a process; a process that dies is replaced for the next file. Thread-safe."""

    def __init__(self, limits: ParserLimits | None = None):
        """Set the limits; the process starts with the first file."""
        self._limits = limits or ParserLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def parse(self, suffix: str, data: bytes) -> tuple[str, dict[str, Any]]:
        """Return the text and the metadata of a file (:data:`~cacheblend_rag.retrieval.parsing.PARSERS`).

        Raises:
            UnusableFileError: The file has no usable text, or parsing exceeds a limit.
        """
        task = self._limits.task(suffix, len(data))
        with self._lock:
            try:
                answer = self._asked(task, data)
            except BaseException:  # also on Ctrl-C: the next call must not read the answer of this call
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
        """End the process; a later :meth:`parse` starts a new process."""
        with self._lock:
            self._stop()

    def _asked(self, task: Task, data: bytes) -> dict[str, Any]:
        process = self._running()
        to_it, from_it = _pipes(process)
        wall_s, begin = task.cpu_s * self._limits.wall_factor, time.monotonic()
        timer = threading.Timer(wall_s, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):  # the process has ended; its exit code gives the reason
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
        raise UnusableFileError(_why(process.wait(), time.monotonic() - begin >= wall_s, task))

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
            with suppress(BrokenPipeError):  # the process had not read all data
                pipe.close()


def _started() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path if each)
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
    # -P keeps Python from importing modules in the current directory; the new session keeps Ctrl-C from the parser.
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
"""Parser that this process uses."""
atexit.register(PARSER.close)
