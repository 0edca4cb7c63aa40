"""Writes a starting vLLM's output to a file, hides errors from the terminal, and reports why a start failed.

If vLLM cannot start, each of its processes writes the same traceback once or twice, a hundred lines or more, with the
cause somewhere in the middle.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing.connection
import multiprocessing.context
import os
import re
import selectors
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
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
_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
_LINKED_S: Final = 60.0
"""Age in seconds from which no process writes a library any more."""
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
    from vllm import envs

    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    # Torch sets the variable to its default when torch is imported.
    if os.environ.get(_COMPILED, default_cache_dir()) == default_cache_dir():
        folder = Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache" / "inductor"
        os.environ[_COMPILED] = str(folder)
        for library in folder.rglob("*.so"):  # torch rebuilds a missing library, but fails on a truncated one
            with suppress(OSError):
                if time.time() - library.stat().st_mtime > _LINKED_S and _is_cut_short(library):
                    library.unlink()


def _is_cut_short(library: Path) -> bool:
    """Return whether a shared library (ELF) lacks its end, which holds the section table: its linker was killed."""
    with library.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
        return len(head) < 64
    at, size, count = *struct.unpack_from("<Q", head, 0x28), *struct.unpack_from("<HH", head, 0x3A)
    return bool(library.stat().st_size < at + size * count)


def end_with_parent() -> None:
    """End this process once its parent is gone, however the parent ended.

    vLLM's processes would otherwise stay, with all their memory. In a user's own process nothing happens.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return
    gone: list[int] = [parent.sentinel]
    with suppress(AttributeError, OSError):  # Linux only; the parent's later forks also hold the sentinel's pipe open
        gone.append(os.pidfd_open(parent.pid or 0))
    _end_after(gone)


class Tie:
    """Ends a spawned process with its parent, as :func:`end_with_parent` does, from the process's first moment on.

    The connector is created after minutes of importing, of waiting for a parent that may be gone, and of model loading.
    """

    def __reduce__(self) -> tuple[object, tuple[int, ...]]:
        """Return a function that ties a process to this one if a process is being spawned; a mere copy ties nothing."""
        return (Tie, ()) if multiprocessing.context.get_spawning_popen() is None else (_tied, (os.getpid(),))


def _tied(parent: int) -> Tie:
    try:
        _end_after([os.pidfd_open(parent)])
    except ProcessLookupError:  # the parent is gone already
        os._exit(1)
    except (AttributeError, OSError):  # no pidfd on this system
        pass
    return Tie()


def _end_after(gone: Sequence[int]) -> None:
    def watch() -> None:
        multiprocessing.connection.wait(gone)
        os._exit(1)

    threading.Thread(target=watch, name="cacheblend-parent", daemon=True).start()


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
    """Reports that vLLM did not start with a model; ``cause`` is the exception that vLLM raised."""

    def __init__(self, model: str, cause: BaseException, why: str):
        super().__init__(f"vLLM does not start with {model!r}: {why}")
        self.model, self.cause = model, cause


class StartLog:
    """Records and filters the output of vLLM's processes while they start; a context manager.

    Attributes:
        file: Log file with all output; deleted unless the start fails.
    """

    def __init__(self, verbose: bool = False):
        """Hide errors and tracebacks from the terminal unless ``verbose``; a successful start shows them afterwards."""
        self._verbose, self._starting = verbose, True
        self._terminal: dict[int, int] = {}
        self._hidden: list[tuple[int, bytes]] = []
        self._in_traceback: set[int] = set()
        self._thread: threading.Thread | None = None
        self._shown = threading.Event()
        self._end = -1
        self.file = Path()

    def __enter__(self) -> StartLog:
        """Redirect stdout and stderr, which started processes inherit."""
        descriptor, name = tempfile.mkstemp(prefix="cacheblend-vllm-", suffix=".log")
        self.file = Path(name)
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            os.environ.setdefault("VLLM_LOGGING_COLOR", "1")
        ends: dict[int, int] = {}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            read, write = os.pipe()
            self._terminal[number] = os.dup(number)
            os.dup2(write, number)
            os.close(write)
            ends[read] = number
        asked, self._end = os.pipe()
        self._thread = threading.Thread(target=self._forward, args=(ends, asked, descriptor), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Restore stdout and stderr; vLLM's processes keep the redirected streams, whose output is now shown."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, terminal in self._terminal.items():
            os.dup2(terminal, number)
        assert self._thread is not None
        if error is None:
            os.write(self._end, b"\n")
        os.close(self._end)
        if error is not None:
            # Wait until vLLM's last process is gone; a helper of multiprocessing may outlive vLLM's processes.
            self._thread.join(timeout=_DRAIN_S)
            return
        # This process, and with it the thread, may end right after the context.
        self._shown.wait(timeout=_DRAIN_S)
        self.file.unlink(missing_ok=True)

    def why(self, error: BaseException, further: str = "") -> str:
        """Return why the start failed, by the log or else by ``error``, with advice; for use after the context.

        ``further`` ends the sentence that names the log file.
        """
        lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{explain(lines, str(error))}\nvLLM's whole log is in {self.file}{further}."

    def _forward(self, ends: dict[int, int], asked: int, descriptor: int) -> None:
        """Forward the output of vLLM's processes, line by line, until the last process is gone.

        ``asked`` signals the end of the start, with a byte if the start succeeded. Earlier output is forwarded first.
        """
        unfinished = dict.fromkeys(ends.values(), b"")
        with selectors.DefaultSelector() as arriving, os.fdopen(descriptor, "wb", buffering=0) as file:
            for end in (*ends, asked):
                arriving.register(end, selectors.EVENT_READ)
            while arriving.get_map():
                ready = [key.fd for key, _ in arriving.select()]
                if ready == [asked]:
                    if os.read(asked, 1):
                        self._show_all()
                    arriving.unregister(asked)
                    os.close(asked)
                for end in ends.keys() & set(ready):
                    number, data = ends[end], os.read(end, 1 << 16)
                    if not data:
                        arriving.unregister(end)
                        os.close(end)
                    # A progress bar's lines end with a carriage return.
                    *lines, unfinished[number] = re.split(rb"(?<=[\n\r])", unfinished[number] + data)
                    for line in lines if data else [*lines, unfinished[number]]:
                        if self._starting:
                            file.write(line)
                        self._show(number, line)

    def _show_all(self) -> None:
        """Show the hidden lines, and hide no lines from now on."""
        self._starting = False
        for number, line in self._hidden:
            os.write(self._terminal[number], line)
        self._hidden.clear()
        self._shown.set()

    def _show(self, number: int, line: bytes) -> None:
        if self._starting and not self._verbose and self._is_of_an_error(number, line.decode(errors="replace")):
            self._hidden.append((number, line))
        else:
            os.write(self._terminal[number], line)

    def _is_of_an_error(self, number: int, line: str) -> bool:
        level, text = _parsed(line)
        if level in {"ERROR", "CRITICAL"} or (level is None and _BEGINS.match(text)):
            self._in_traceback.add(number)
        elif level is not None:
            self._in_traceback.discard(number)
        return number in self._in_traceback


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
