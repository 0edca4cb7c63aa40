"""Keeps what vLLM writes while it starts in a file, off the terminal, and words the cause of a failure.

Where vLLM cannot start, each of its processes writes the same traceback once or twice, a hundred lines and more, with the cause
somewhere in the middle.
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
# "(EngineCore pid=12) ERROR 11-22 05:44:41 [core.py:12] " in front of every line of a record.
_PREFIX = re.compile(r"^(?:\([^()]+\) ?)?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d: ,.-]+\[[^\]]+\] ?)?")
_BEGINS = re.compile(r"^(?:Traceback \(most recent call last\)|Process \S+:$)")
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Expired): .")
# What one process says when another has failed.
_ECHO = re.compile(r"initialization failed|[Ss]ee root cause|failed to start|Failed core proc|cancelled")
_NOISE = re.compile(r" \[type=\w+, input_value=.*|^ *For further information visit .*|^\d+ validation errors? for \w+$")
_MOST_LINES: Final = 8
_NOT_INITIALIZED: Final = 3  # as the CUDA driver numbers its errors
_DRAIN_S: Final = 2.0
_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
_LINKED_S: Final = 60.0
"""Age at which nobody is writing a library any more."""
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
    """Have this library's lines go where vLLM's go, in their format: for processes that are vLLM's, not a user's program."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("cacheblend_rag")
    ours.handlers, ours.propagate = list(theirs.handlers), False
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        handler.addFilter(_in_one_line)
        handler.addFilter(_without_schemas)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Keep what a client named, such as its request, from forging lines of ours; vLLM's are vLLM's."""
    if record.name.startswith(("cacheblend_rag", "vllm.cacheblend")) and isinstance(record.args, tuple):
        record.args = tuple(in_one_line(str(a)) if isinstance(a, str | Exception) else a for a in record.args)
    return True


def _without_schemas(record: logging.LogRecord) -> bool:
    """Keep what a schema that a client sent says out of the engine's lines about it."""
    if record.name.startswith("vllm.v1.structured_output"):
        hide_values(record)
    return True


def spawn_if_forking_fails() -> None:
    """Have vLLM spawn its processes where this one has asked the CUDA driver for anything: one that is forked cannot use a GPU.

    vLLM sees to that itself where torch knows of it. But torch asks for some things without taking notice, and transformers asks
    for one of them in every forward pass, of a model on the CPU, too.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none
        return
    if driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _NOT_INITIALIZED:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def keep_what_is_compiled() -> None:
    """Have vLLM's processes on a CPU find what an earlier start compiled, which is most of what a start would compute.

    The CPU build of vLLM 0.32 cannot read the ahead-of-time artifacts that it has written, and compiles anew at each start.
    Without them torch itself keeps compiled graphs, by all that they depend on: here beside vLLM's, not in ``/tmp``.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from vllm import envs

    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    # Torch notes its default there when it is imported.
    if os.environ.get(_COMPILED, default_cache_dir()) == default_cache_dir():
        folder = Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache" / "inductor"
        os.environ[_COMPILED] = str(folder)
        for library in folder.rglob("*.so"):  # torch makes one anew that is gone, and fails on one cut short
            with suppress(OSError):
                if time.time() - library.stat().st_mtime > _LINKED_S and _is_cut_short(library):
                    library.unlink()


def _is_cut_short(library: Path) -> bool:
    """Say whether a shared library (ELF) lacks its end, where its table of sections stands: its linker was killed."""
    with library.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
        return len(head) < 64
    at, size, count = *struct.unpack_from("<Q", head, 0x28), *struct.unpack_from("<HH", head, 0x3A)
    return bool(library.stat().st_size < at + size * count)


def end_with_parent() -> None:
    """Have this process end once the one that has started it is gone, however it ended: vLLM's would stay, with all they hold.

    Where this is a user's own process, nothing happens.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return
    gone: list[int] = [parent.sentinel]
    with suppress(AttributeError, OSError):  # of Linux alone: what the parent has forked since holds the pipe open, too
        gone.append(os.pidfd_open(parent.pid or 0))
    _end_after(gone)


class Tie:
    """Ties a process that is spawned with it to the one that spawns it, as :func:`end_with_parent`, from its first moment on.

    The connector is made after minutes of importing, of waiting for a parent that may be gone, and of loading the model.
    """

    def __reduce__(self) -> tuple[object, tuple[int, ...]]:
        """Tie nothing by a mere copy."""
        return (Tie, ()) if multiprocessing.context.get_spawning_popen() is None else (_tied, (os.getpid(),))


def _tied(parent: int) -> Tie:
    try:
        _end_after([os.pidfd_open(parent)])
    except ProcessLookupError:  # gone already
        os._exit(1)
    except (AttributeError, OSError):  # a system without
        pass
    return Tie()


def _end_after(gone: Sequence[int]) -> None:
    def watch() -> None:
        multiprocessing.connection.wait(gone)
        os._exit(1)

    threading.Thread(target=watch, name="cacheblend-parent", daemon=True).start()


def end_at_once() -> None:
    """Have this process of vLLM's end when its work has, as a forked one does: taking all of torch apart takes it seconds more.

    vLLM waits for that, and on a busy machine loses patience. Where this is a user's own process, nothing happens.
    """
    if multiprocessing.parent_process() is not None and multiprocessing.get_start_method(allow_none=True) == "spawn":
        # The last thing that a process of multiprocessing does by itself, after its own children have ended.
        Finalize(None, _end, exitpriority=-1000)


def _end() -> None:
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):  # else it is told the ordinary way
        end_now()


def end_now() -> NoReturn:
    """End this process with exit code 0, with what is registered for its end done, and without taking all of torch apart.

    Taking torch apart lasts seconds, and Triton would list hundreds of its own objects as leaked.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class StartError(ModelError):
    """vLLM did not start with a model; ``cause`` is what it raised."""

    def __init__(self, model: str, cause: BaseException, why: str):
        super().__init__(f"vLLM does not start with {model!r}: {why}")
        self.model, self.cause = model, cause


class StartLog:
    """Stands between vLLM's processes and the terminal while they start; a context manager.

    Attributes:
        file: All that was written; kept if the start fails.
    """

    def __init__(self, verbose: bool = False):
        """Hide errors and tracebacks from the terminal unless ``verbose``; they are shown if vLLM starts in spite of them."""
        self._verbose, self._starting = verbose, True
        self._terminal: dict[int, int] = {}
        self._hidden: list[tuple[int, bytes]] = []
        self._in_traceback: set[int] = set()
        self._thread: threading.Thread | None = None
        self._shown = threading.Event()
        self._end = -1
        self.file = Path()

    def __enter__(self) -> StartLog:
        """Take stdout and stderr, which the processes that are started inherit."""
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
        """Give them back; vLLM's processes keep theirs, and all they write is shown from now on."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, terminal in self._terminal.items():
            os.dup2(terminal, number)
        assert self._thread is not None
        if error is None:
            os.write(self._end, b"\n")
        os.close(self._end)
        if error is not None:
            # Until the last of its processes is gone; a helper of multiprocessing may outlive them.
            self._thread.join(timeout=_DRAIN_S)
            return
        # Our process may end right after this, and the thread with it.
        self._shown.wait(timeout=_DRAIN_S)
        self.file.unlink(missing_ok=True)

    def why(self, error: BaseException, further: str = "") -> str:
        """Return why the start failed and what to do about it: the cause in the log, else ``error``; call it afterwards.

        ``further`` ends the sentence that says where the whole log is.
        """
        lines = self.file.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"{explain(lines, str(error))}\nvLLM's whole log is in {self.file}{further}."

    def _forward(self, ends: dict[int, int], asked: int, descriptor: int) -> None:
        """Hand on, line by line, what arrives from vLLM's processes, until the last of them is gone.

        ``asked`` says that the start is over, by a byte if it succeeded; what was written before that comes first.
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
        """Show what was hidden, and hide nothing from now on."""
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
    """Return what vLLM's log ``lines`` give as the cause of a failed start, else ``error``, with advice, in a few lines."""
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
    """Return a log line's level, None for lines that are no record's, and its text."""
    plain = _ANSI.sub("", line).rstrip()
    match = _PREFIX.match(plain)
    assert match is not None
    return match.group(1), plain[match.end() :]
