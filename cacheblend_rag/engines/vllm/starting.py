"""Writes a starting vLLM's output to a file, hides errors from the terminal, and reports why a start failed.

If vLLM cannot start, each of its processes writes the same traceback, a hundred lines with the cause in the middle.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing.connection
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Final, NoReturn

from cacheblend_rag.errors import ModelError
from cacheblend_rag.printable import hide_values, in_one_line

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Prefix of every line of a log record, such as "(EngineCore pid=12) ERROR 11-22 05:44:41 [core.py:12] ".
_PREFIX = re.compile(r"^(?:\([^()]+\) ?)?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d: ,.-]+\[[^\]]+\] ?)?")
_BEGINS = re.compile(r"^(?:Traceback \(most recent call last\)|Process \S+:$)")
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Expired): .")
# Messages of a process when another process has failed.
_ECHO = re.compile(r"initialization failed|[Ss]ee root cause|failed to start|Failed core proc|cancelled")
_NOISE = re.compile(r" \[type=\w+, input_value=.*|^ *For further information visit .*|^\d+ validation errors? for \w+$")
_MOST_LINES: Final = 8
_NOT_INITIALIZED: Final = 3  # error number of the CUDA driver
_DRAIN_S: Final = 2.0
_STARTED: Final = b"\0vLLM has started\n"
"""Follows the last line that vLLM's processes write before they have started."""
_ERRORS: Final = ("ERROR", "CRITICAL")
_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
_ADVICE: Final = (
    (r"greater than the derived max_model_len", "Give a smaller --max-model-len."),
    (
        r"max(?:imum)? (?:seq|model) len|No available memory for the cache blocks",
        "Give vLLM's KV cache more memory (--kv-memory 4GiB), or less to hold (--max-model-len 4096).",
    ),
    (
        r"[Oo]ut of memory|Free memory on device|Available memory|available memory|[Cc]annot allocate|can't allocate",
        "Give it less memory (--kv-memory 2GiB; on a GPU --gpu-memory-utilization 0.7), or choose a smaller model.",
    ),
    (r"ipc path .* is longer than", "Set TMPDIR to a directory with a shorter path."),
    (r"requires Triton", "Set VLLM_USE_V2_MODEL_RUNNER=0, or install Triton."),
    (r"[Mm]odel architectures? .*not supported", "This vLLM does not know the model; a newer one may."),
)


def log_as_vllm() -> None:
    """Send this package's log lines to vLLM's log handlers, in vLLM's processes but not in a user's program."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("cacheblend_rag")
    ours.handlers, ours.propagate = list(theirs.handlers), False
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        handler.addFilter(_in_one_line)
        handler.addFilter(_without_schemas)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Put clients' text, such as request names, on one line, so that the text cannot forge this package's log lines."""
    if record.name.startswith(("cacheblend_rag", "vllm.cacheblend")) and isinstance(record.args, tuple):
        record.args = tuple(in_one_line(str(a)) if isinstance(a, str | Exception) else a for a in record.args)
    return True


def _without_schemas(record: logging.LogRecord) -> bool:
    """Hide the contents of clients' JSON schemas in vLLM's log lines about schemas."""
    if record.name.startswith("vllm.v1.structured_output"):
        hide_values(record)
    return True


def spawn_if_forking_fails() -> None:
    """Make vLLM spawn its processes if this process has initialised the CUDA driver: a fork cannot use a GPU then.

    vLLM itself does so if torch knows of the initialisation. But some calls of torch initialise the driver without a
    record, and transformers makes such a call in every forward pass, even of a model on the CPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no CUDA driver
        return
    if driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _NOT_INITIALIZED:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def keep_what_is_compiled() -> None:
    """Make vLLM's processes on a CPU reuse the graphs that an earlier start compiled: compiling is most of the work.

    The CPU build of vLLM 0.32 cannot read the ahead-of-time artifacts that it has written, and compiles again at each
    start. Without these artifacts torch itself caches compiled graphs, keyed by everything that the graphs depend on.
    This function puts torch's cache beside vLLM's cache, not into ``/tmp``.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    # Torch sets the variable to its default when torch is imported.
    if os.environ.get(_COMPILED, default_cache_dir()) == default_cache_dir():
        os.environ[_COMPILED] = str(_compiled())


def forget_what_is_compiled(error: Exception) -> str:
    """Delete the graphs of :func:`keep_what_is_compiled` if ``error`` ended vLLM's start; return a sentence about that.

    A start that was killed may leave a truncated library, and vLLM fails whenever it loads the library. The function
    deletes the libraries alone: torch rebuilds a missing library, also in another process that is starting. The function
    keeps the graphs, and returns an empty string, if vLLM refused its arguments.
    """
    folder = _compiled()
    libraries = list(folder.rglob("*.so")) if os.environ.get(_COMPILED) == str(folder) else []
    if isinstance(error, ValueError) or not libraries:
        return ""
    for library in libraries:
        library.unlink(missing_ok=True)
    return "\nThe graphs that earlier starts compiled are deleted: the next start compiles the model anew."


def _compiled() -> Path:
    from vllm import envs

    return Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache" / "inductor"


def end_with(starter: int) -> None:
    """End this process of vLLM once the process ``starter``, which started vLLM, is gone, however that process ended.

    vLLM's processes would otherwise stay, with all their memory. In the starter itself, and in processes on other
    machines, nothing happens. A process that still imports vLLM when the starter is killed waits for the starter's
    answer, five minutes at most, before vLLM ends the process.
    """
    parent = multiprocessing.parent_process()
    if parent is None or starter == os.getpid():
        return
    gone = parent.sentinel
    try:
        gone = os.pidfd_open(starter)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # not on Linux
        pass

    def watch() -> None:
        multiprocessing.connection.wait([gone])
        os._exit(1)

    threading.Thread(target=watch, name="cacheblend-starter", daemon=True).start()


def end_at_once() -> None:
    """Make this process of vLLM exit when its work has ended, as a forked process does, without torch's teardown.

    The teardown takes seconds. vLLM waits for the exit, and times out on a busy machine. In a user's own process
    nothing happens.
    """
    if multiprocessing.parent_process() is not None and multiprocessing.get_start_method(allow_none=True) == "spawn":
        # The last action of a multiprocessing process, after its own children have ended.
        Finalize(None, _end, exitpriority=-1000)


def _end() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):  # other errors are reported as usual
        end_now()


def end_now() -> NoReturn:
    """End this process with exit code 0, after the registered exit functions, and without the teardown of torch.

    The teardown takes seconds, and Triton would list hundreds of its own objects as leaked.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class StartError(ModelError):
    """Reports that vLLM did not start with a model; ``cause`` is vLLM's exception, ``note`` the end of the message."""

    def __init__(self, model: str, cause: Exception, why: str, note: str = ""):
        super().__init__(f"vLLM does not start with {model!r}: {why}{note}")
        self.model, self.cause, self.note = model, cause, note


class StartLog:
    """Records and filters the output of vLLM's processes while they start; a context manager.

    Attributes:
        file: Log file with all output; deleted unless the start fails.
    """

    def __init__(self, verbose: bool = False):
        """Hide errors and tracebacks from the terminal unless ``verbose``; a successful start shows them afterwards."""
        self._verbose = verbose
        self._terminal: dict[int, int] = {}
        self._forwarded = {number: threading.Event() for number in (1, 2)}
        self.file = Path()

    def __enter__(self) -> StartLog:
        """Redirect stdout and stderr, which started processes inherit."""
        log, name = tempfile.mkstemp(prefix="cacheblend-vllm-", suffix=".log")
        os.close(log)
        self.file = Path(name)
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            os.environ.setdefault("VLLM_LOGGING_COLOR", "1")
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            read, write = os.pipe()
            self._terminal[number] = os.dup(number)
            os.dup2(write, number)
            os.close(write)
            log = os.open(name, os.O_WRONLY | os.O_APPEND)
            threading.Thread(target=self._forward, args=(read, number, log), daemon=True).start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Restore stdout and stderr; vLLM's processes keep the redirected streams, whose output is now shown."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, terminal in self._terminal.items():
            if error is None:
                os.write(number, _STARTED)
            os.dup2(terminal, number)
        # This process, and with it the threads, may end right after the context.
        for forwarded in self._forwarded.values():
            forwarded.wait(timeout=_DRAIN_S)
        if error is None:
            self.file.unlink(missing_ok=True)

    def why(self, error: BaseException, further: str = "") -> str:
        """Return why the start failed, by the log or else by ``error``, with advice; for use after the context.

        ``further`` ends the sentence that names the log file.
        """
        lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{explain(lines, str(error))}\nvLLM's whole log is in {self.file}{further}."

    def _forward(self, read: int, number: int, log: int) -> None:
        """Forward the output of vLLM's processes from ``read`` to the stream ``number``, until the last process is gone."""
        starting, in_error, hidden = True, False, list[bytes]()
        for line in _lines(read):
            if starting and line.endswith(_STARTED):
                starting = False
                os.write(self._terminal[number], b"".join([*hidden, line.removesuffix(_STARTED)]))
                os.close(log)
                self._forwarded[number].set()
                continue
            if starting:
                os.write(log, line)
                level, text = _parsed(line.decode(errors="replace"))
                in_error = level in _ERRORS or (level is None and (in_error or _BEGINS.match(text) is not None))
            if starting and in_error and not self._verbose:
                hidden.append(line)
            else:
                os.write(self._terminal[number], line)
        self._forwarded[number].set()


def _lines(read: int) -> Iterator[bytes]:
    """Yield the lines of a pipe until its last writer is gone; a progress bar's lines end with a carriage return."""
    unfinished = b""
    while data := os.read(read, 1 << 16):
        *lines, unfinished = re.split(rb"(?<=[\n\r])", unfinished + data)
        yield from lines
    yield unfinished


def explain(lines: Sequence[str], error: str) -> str:
    """Return the cause of a failed start from vLLM's log ``lines``, else ``error``, with advice, in a few lines."""
    said = error
    for index, line in enumerate(lines):
        _, text = _parsed(line)
        if _RAISED.match(text) and not _ECHO.search(text):
            said = "\n".join([text, *_continuation(lines[index + 1 : index + _MOST_LINES])])
            break
    kept = [clean for line in said.splitlines() if (clean := _NOISE.sub("", line).rstrip())][:_MOST_LINES]
    cause = "\n".join(kept).replace("  Value error, ", "")
    advice = next((text for pattern, text in _ADVICE if re.search(pattern, cause)), "")
    return f"{cause}\n{advice}".rstrip()


def _continuation(lines: Sequence[str]) -> list[str]:
    """Return the lines that belong to the message above them: up to the next record, traceback, or blank line."""
    found: list[str] = []
    for line in lines:
        level, text = _parsed(line)
        if not text or level in {"DEBUG", "INFO", "WARNING"} or _BEGINS.match(text) or text.startswith("[rank"):
            break
        found.append(text)
    return found


def _parsed(line: str) -> tuple[str | None, str]:
    """Return a log line's level (None for lines outside log records) and its text."""
    plain = _ANSI.sub("", line).rstrip()
    match = _PREFIX.match(plain)
    assert match is not None
    return match.group(1), plain[match.end() :]
