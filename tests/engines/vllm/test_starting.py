"""Tests that a failed start of vLLM shows one screen with the cause and a remedy, and how engine processes end."""

from __future__ import annotations

import ctypes
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from cacheblend_rag.engines.vllm import starting
from cacheblend_rag.engines.vllm.starting import (
    end_with,
    explain,
    forget_what_is_compiled,
    keep_what_is_compiled,
    log_as_vllm,
    spawn_if_forking_fails,
)
from cacheblend_rag.errors import InputError
from tests.engines.vllm.forked import EnvironedProcess

# The log of vLLM 0.32's processes, shortened in the middle.
FAILED = """\
(EngineCore pid=77) INFO 11-22 05:44:40 [core.py:101] Initializing a V1 LLM engine
(EngineCore pid=77) ERROR 11-22 05:44:41 [core.py:1180] EngineCore failed to start.
(EngineCore pid=77) ERROR 11-22 05:44:41 [core.py:1180] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-22 05:44:41 [core.py:1180]   File "/vllm/v1/engine/core.py", line 1170, in run_engine_core
(EngineCore pid=77) ERROR 11-22 05:44:41 [core.py:1180]     engine_core = EngineCoreProc(*args, **kwargs)
(EngineCore pid=77) ERROR 11-22 05:44:41 [core.py:1180] ValueError: To serve at least one request with the model's max seq \
len (1024), (0.25 GiB KV cache is needed, which is larger than the available KV cache memory (0.01 GiB).
(EngineCore pid=77) Process EngineCore:
(EngineCore pid=77) Traceback (most recent call last):
(EngineCore pid=77)   File "/python/multiprocessing/process.py", line 314, in _bootstrap
(EngineCore pid=77)     self.run()
(EngineCore pid=77) ValueError: To serve at least one request with the model's max seq len (1024)
"""
PARENT = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"


LOADING = """
import atexit, multiprocessing, sys
from importlib.util import module_from_spec, spec_from_file_location

def load():
    spec = spec_from_file_location("starting", sys.argv[1])
    sys.modules["starting"] = starting = module_from_spec(spec)
    spec.loader.exec_module(starting)
    return starting
"""
ENDING = f"""{LOADING}
class Whole:
    def __del__(self):
        print("taken apart", flush=True)

whole = Whole()

def work(code):
    atexit.register(print, "asked for", flush=True)
    load().end_at_once()
    sys.exit(code)

if __name__ == "__main__":
    whole = None
    for code in (0, 3):
        process = multiprocessing.get_context("spawn").Process(target=work, args=(code,))
        process.start()
        process.join()
        print(process.exitcode)
"""


def run_like_an_engine(ready: Connection, starter: int) -> None:
    end_with(starter)
    ready.send(os.getpid())
    signal.pause()


def stay(theirs: Connection) -> None:
    theirs.send("here")
    theirs.recv()


def start_both(ready: Connection, theirs: Connection) -> None:
    fork = multiprocessing.get_context("fork")
    fork.Process(target=run_like_an_engine, args=(ready, os.getpid())).start()
    ready.close()
    fork.Process(target=stay, args=(theirs,)).start()  # this process inherits the open pipes and outlives its parent
    signal.pause()


def test_a_finished_process_ends_without_module_teardown(tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    command = [sys.executable, str(script), starting.__file__]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert said[1:] == ["asked for", "0", "asked for", "taken apart", "3", ""], said


def test_an_engine_ends_with_its_starter_even_if_a_sibling_process_lives_on() -> None:
    here, ready = multiprocessing.Pipe(duplex=False)
    other, theirs = multiprocessing.Pipe()
    parent = EnvironedProcess(target=start_both, args=(ready, theirs))
    parent.start()
    ready.close()
    engine, _ = here.recv(), other.recv()
    assert not here.poll(0)
    parent.kill()
    ended = here.poll(60)  # the engine had the last open end of the pipe
    if not ended:
        os.kill(engine, signal.SIGKILL)
    other.send("over")
    assert ended


def test_an_engine_ends_at_once_if_its_starter_has_already_ended() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    late = multiprocessing.get_context("fork").Process(target=end_with, args=(gone.pid,))
    late.start()
    late.join(60)
    assert late.exitcode == 1


def test_the_explanation_gives_the_first_error_with_a_cause() -> None:
    text = explain(FAILED.splitlines(), PARENT)
    assert text.startswith("ValueError: To serve at least one request with the model's max seq len (1024)")
    assert "--kv-memory" in text
    assert "--max-model-len" in text
    assert len(text.splitlines()) <= 10


def test_the_explanation_has_every_line_of_a_message() -> None:
    lines = [
        "(W pid=1) ERROR 11-22 05:44:41 [w.py:1] RuntimeError: no",
        "(W pid=1) ERROR 11-22 05:44:41 [w.py:1] memory",
    ]
    assert explain([*lines, "", "(W pid=1) more"], PARENT).splitlines()[:2] == ["RuntimeError: no", "memory"]


def test_the_explanation_uses_the_error_if_the_log_has_no_cause() -> None:
    error = (
        "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (99) is greater than the derived "
        "max_model_len (8). [type=value_error, input_value=ArgsKwargs((), {'model':...}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.example/2.12/v/value_error"
    )
    text = explain([], error)
    assert text.splitlines() == [
        "User-specified max_model_len (99) is greater than the derived max_model_len (8).",
        "Give a smaller --max-model-len.",
    ]


CHILD = """
import subprocess, sys
from cacheblend_rag.engines.vllm.starting import StartLog
log = StartLog(verbose={verbose})
try:
    with log:
        subprocess.run([sys.executable, "-c", {inner!r}])
        print("progress", flush=True)
        if {fails}:
            raise RuntimeError({parent!r})
except RuntimeError as error:
    print("SAID", log.why(error), "KEPT", log.file.exists())
print("after left" if log.file.exists() else "after gone")
"""


def run(fails: bool, verbose: bool = False) -> subprocess.CompletedProcess[str]:
    inner = f"import sys; sys.stderr.write({FAILED!r})"
    code = CHILD.format(inner=inner, parent=PARENT, fails=fails, verbose=verbose)
    # The child needs no vLLM, whose import takes seconds.
    code = code.replace("from cacheblend_rag.engines.vllm.starting", "from starting")
    folder = Path(__file__).parents[3] / "cacheblend_rag" / "engines" / "vllm"
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(folder)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


def test_a_failed_start_prints_no_traceback_and_keeps_the_log() -> None:
    done = run(fails=True)
    assert "Traceback" not in done.stdout + done.stderr
    assert "Initializing a V1 LLM engine" in done.stderr
    assert "progress" in done.stdout
    assert "SAID ValueError: To serve" in done.stdout
    assert "KEPT True" in done.stdout
    assert len((done.stdout + done.stderr).splitlines()) < 12


def test_verbose_prints_the_whole_log() -> None:
    assert run(fails=True, verbose=True).stderr == FAILED


def test_errors_of_a_successful_start_are_printed_and_its_log_is_deleted() -> None:
    done = run(fails=False)
    assert sorted(done.stderr.splitlines()) == sorted(FAILED.splitlines())
    assert "after gone" in done.stdout


def test_vllm_is_not_shut_down_again_at_interpreter_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_rag.engines.vllm.engine import _LLM

    calls: list[str] = []
    monkeypatch.setattr(_LLM, "shutdown", lambda self: calls.append("shutdown"))
    llm = _LLM.__new__(_LLM)
    llm.__del__(ending=lambda: True)
    assert calls == []
    llm.__del__(ending=lambda: False)
    assert calls == ["shutdown"]


async def test_an_engine_refused_after_its_start_shuts_vllm_down(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend_rag.engines.vllm import engine

    ended: list[str] = []
    llm = SimpleNamespace(shutdown=lambda: ended.append("shutdown"))

    async def refuse(*_: object) -> None:
        raise InputError("not blended with a KV writer")

    monkeypatch.setattr(engine, "ask_gate", refuse)
    monkeypatch.setattr(engine._LLM, "from_engine_args", lambda _: llm)
    monkeypatch.setattr(engine, "AsyncEngineArgs", dict)
    with pytest.raises(InputError, match="not blended"):
        await engine._start(SimpleNamespace(arguments={}))  # type: ignore[arg-type]
    assert ended == ["shutdown"]


@pytest.mark.parametrize(("answer", "method"), [(0, "spawn"), (3, None), (OSError("no such library"), None)])
def test_processes_are_spawned_if_the_driver_is_initialised(monkeypatch, answer, method) -> None:
    """The driver returns 0 if there is or could be a context, and 3 if it is not initialised."""

    def load(name: str) -> SimpleNamespace:
        if isinstance(answer, OSError):
            raise answer
        return SimpleNamespace(cuCtxGetCurrent=lambda context: answer)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    spawn_if_forking_fails()
    assert os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == method


def test_a_clients_request_id_cannot_forge_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("cacheblend_rag")
    monkeypatch.setattr(theirs, "handlers", [logging.StreamHandler(written)])
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    log_as_vllm()
    for name in ("cacheblend_rag.engines", "vllm.cacheblend", "vllm.core"):
        logging.getLogger(name).warning("Request %s: %s, %d", "x\nERROR: \x1b[2Kforged", ValueError("a\nb"), 3)
    own = "Request x\\u000aERROR: \\u001b[2Kforged: a\\u000ab, 3\n"
    assert written.getvalue() == own * 2 + "Request x\nERROR: \x1b[2Kforged: a\nb, 3\n"


@pytest.mark.parametrize("noted", [None, "torch's own"])
def test_compiled_code_is_kept_for_the_next_start(
    noted: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    for name, value in (("VLLM_USE_AOT_COMPILE", None), ("TORCHINDUCTOR_CACHE_DIR", noted and default_cache_dir())):
        monkeypatch.setenv(name, value or "")  # monkeypatch restores it later
        if value is None:
            monkeypatch.delenv(name)
    keep_what_is_compiled()
    from vllm import envs

    assert not envs.VLLM_USE_AOT_COMPILE  # vLLM cannot read the files that it writes with this option
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)


def test_a_users_compile_cache_settings_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keep_what_is_compiled()
    assert (os.environ["VLLM_USE_AOT_COMPILE"], os.environ["TORCHINDUCTOR_CACHE_DIR"]) == ("1", str(tmp_path))


@pytest.mark.parametrize(
    ("error", "deleted"), [(RuntimeError("Engine core"), True), (ValueError("max_model_len"), False)]
)
def test_a_failed_start_deletes_compiled_code_unless_vllm_refuses_its_arguments(
    error: Exception, deleted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_what_is_compiled()
    library = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "ab" / "cut.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF")
    assert ("compiles the model anew" in forget_what_is_compiled(error)) == deleted
    assert library.exists() != deleted
    assert forget_what_is_compiled(RuntimeError("again")) == "" or not deleted


def test_a_users_compile_cache_is_never_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert forget_what_is_compiled(RuntimeError("Engine core")) == ""
    assert tmp_path.exists()
