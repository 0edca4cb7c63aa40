"""Finds the files whose functions run while a question is answered, in all processes that take part.

A file counts if a function of it was called (``sys.setprofile`` in every thread): module and class bodies, which run when a file
is imported, do not count, nor do functions that only run for them, such as decorators; those files are listed apart. What
``dataclass`` writes into a class lies in no file.

Every process that is started loads this module (by a ``sitecustomize.py`` in front of its path) and writes the files it meets
to a file of its own. A byte that all of them map says whether that is wanted just now: 0 not yet, 1 yes, 2 no more.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PARTS = ("cacheblend_rag", "langchain_cacheblend")
NOT_YET, NOW, NO_MORE = 0, 1, 2
_FUNCTION = 0x1  # CO_OPTIMIZED: code of functions has it, that of modules and classes does not


def watch(folder: Path) -> None:
    """Write the names of all files of the package whose functions run from now on, in all threads of this process."""
    with (folder / "wanted").open("r+b") as file:
        wanted = mmap.mmap(file.fileno(), 1)
    places = tuple(f"{part}{os.sep}" for part in PARTS)
    names: dict[str, str | None] = {}
    seen: set[str] = set()

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if wanted[0] != NOW:
            return
        if event == "return" and type(argument).__name__ == "StreamEvent" and (argument.text or argument.generation):
            wanted[0] = NO_MORE  # the first token
        if event != "call" or not frame.f_code.co_flags & _FUNCTION:
            return
        at = frame.f_code.co_filename
        if at not in names:
            names[at] = next((at[at.rindex(place) :] for place in places if place in at), None)
        name = names[at]
        if name is None or name in seen:
            return
        imported = _below_an_import(frame)
        if not imported:
            seen.add(name)
        with (folder / f"{os.getpid()}.txt").open("a") as file:
            file.write(f"{'imported' if imported else 'ran'} {name}\n")

    threading.setprofile(hook)
    sys.setprofile(hook)


def _below_an_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


class Watched:
    """Processes that are watched.

    Attributes:
        environment: What starts them so.
    """

    def __init__(self, folder: Path):
        self._folder = folder / "ran"
        self._folder.mkdir()
        self.want(NOT_YET)
        start = folder / "start"
        start.mkdir()
        lines = ("import pathlib, sys", f"sys.path.append({str(HERE)!r})", "import files_run")
        text = "\n".join((*lines, f"files_run.watch(pathlib.Path({str(self._folder)!r}))\n"))
        (start / "sitecustomize.py").write_text(text)
        path = os.pathsep.join([str(start), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": path, "CACHEBLEND_HOME": str(folder / "home")}

    def want(self, state: int) -> None:
        """Say whether what runs is to be written."""
        file = self._folder / "wanted"
        if not file.exists():
            file.write_bytes(bytes(1))
        with file.open("r+b") as opened:
            opened.write(bytes([state]))

    def first_token_came(self) -> bool:
        return (self._folder / "wanted").read_bytes()[0] == NO_MORE

    def watch_this_process(self) -> None:
        watch(self._folder)

    def ran(self) -> dict[str, set[str]]:
        """Return the files that ran: ours, the integration's, and those of ours that ran for imports alone."""
        rows = [line.split() for file in self._folder.glob("*.txt") for line in file.read_text().splitlines()]
        ran = {name for kind, name in rows if kind == "ran"}
        ours = {name for name in ran if name.startswith(PARTS[0])}
        rest = {name for kind, name in rows if kind == "imported" and name.startswith(PARTS[0])} - ran
        return {
            "files whose functions ran": ours,
            "files of langchain-cacheblend whose functions ran": ran - ours,
            "files whose functions ran while files were imported, and never else": rest,
        }


def ask() -> dict[str, set[str]]:
    """Run `cacheblend ask` over the bundled corpus, indexed beforehand, to its first token."""
    from cacheblend_rag import bundled_corpus

    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(Path(folder))
        command = [sys.executable, "-m", "cacheblend_rag"]
        for arguments in (["index", str(bundled_corpus())], ["ask", _question()]):
            watched.want(NOW if arguments[0] == "ask" else NOT_YET)
            subprocess.run([*command, *arguments], env=watched.environment, check=True, stdout=subprocess.DEVNULL)
        if not watched.first_token_came():
            raise SystemExit("No first token was seen: is an engine's piece of an answer no StreamEvent any more?")
        return watched.ran()


def chat() -> dict[str, set[str]]:
    """Ask `ChatCacheBlend` for one token, from a server with vLLM that has the chunks' KV."""
    from langchain_cacheblend import ChatCacheBlend
    from langchain_core.messages import HumanMessage, SystemMessage

    from cacheblend_rag import RagPipeline, RemoteEngine, bundled_corpus
    from cacheblend_rag.frameworks import DEFAULT_INSTRUCTION

    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(Path(folder))
        with _server(Path(folder), watched.environment) as url, RemoteEngine(url) as engine:
            with RagPipeline(engine, Path(folder) / "index") as pipeline:
                pipeline.index([bundled_corpus()])
                found = pipeline.retrieve(_question()).hits
            model = ChatCacheBlend(engine=engine, max_tokens=1)
            texts = [{"type": "text", "text": source.text, "id": source.id} for source in found]
            question = HumanMessage([*texts, {"type": "text", "text": f"\n\n{_question()}"}])
            watched.watch_this_process()
            watched.want(NOW)
            answer = model.invoke([SystemMessage(DEFAULT_INSTRUCTION), question])
            watched.want(NO_MORE)
            sys.setprofile(None)
            threading.setprofile(None)
            if (mode := answer.response_metadata["cacheblend"]["mode"]) != "blend":
                raise SystemExit(f"It did not blend: {mode}, {answer.response_metadata['cacheblend']}")
        return watched.ran()


def _question() -> str:
    from cacheblend_rag import bundled_questions

    return bundled_questions()[0].question


@contextmanager
def _server(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    import socket
    import time

    import httpx

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "cacheblend_rag", "serve", "--store", str(folder / "store"), "--port", str(port)]
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--enforce-eager"], env={**environment, **vllm}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit(f"The server did not start:\n{(folder / 'log').read_text()[-3000:]}")
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()
