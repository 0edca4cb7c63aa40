"""Tests the resident process that holds a model between commands: its clients and its end. Most answers are made up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.blending.outcome import PromptOutcome, Usage
from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.cli import resident
from cacheblend_rag.cli.resident import Held, Question, ResidentPipeline, of_same_user
from cacheblend_rag.cli.resident_process import Resident
from cacheblend_rag.console.groups import BudgetOptions, EngineOptions, QuestionOptions
from cacheblend_rag.console.output import echo
from cacheblend_rag.engines.results import Generation, Timings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import InputError, StoreMismatchError
from cacheblend_rag.rag.results import RagAnswer, RagEvent, Turn

HELD = Held("/store", "default", EngineOptions(model="made-up"), None)
Answer = Callable[[Question], Iterator[RagEvent]]


def said(text: str) -> Iterator[RagEvent]:
    """Yield an answer in two pieces."""
    generation = Generation.of(PromptOutcome("blend", "", Usage(0, 0, 0, 0)), text, (1,), "stop", Timings(0.1, 0.2))
    yield RagEvent(text[:2])
    yield RagEvent(text[2:], answer=RagAnswer(text, (), generation, 0.0))


class OwnPipeline:
    def stream(self, question: str, *_: object) -> Iterator[RagEvent]:
        return said(f"own answer to {question}")


@contextmanager
def own() -> Iterator[Any]:
    yield OwnPipeline()


class Started:
    """Starts processes by forking, whose answers a test makes up, and counts them."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.answer: Answer = lambda asked: said(f"{asked.question} by {os.getpid()}")
        self.how: dict[str, Any] = {"idle_s": 600}

    def __call__(self, held: Held, listening: socket.socket) -> None:
        if pid := os.fork():
            self.pids.append(pid)
            return
        with suppress(BaseException):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Resident(listening, self.answer, **self.how).serve()
        os._exit(0)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory for sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, short: Path) -> Iterator[Started]:
    made = Started()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    monkeypatch.setattr(resident, "start", made)
    yield made
    for pid in made.pids:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def pipeline(k: int = 6) -> ResidentPipeline:
    return ResidentPipeline(HELD, k, own)


def ask(question: str = "Why?", *history: Turn) -> str:
    with pipeline() as asked:
        *_, last = asked.stream(question, SamplingParams(), BlendSettings(), history)
    assert last.answer is not None
    return last.answer.answer


def test_a_second_question_is_answered_by_the_process_that_the_first_has_started(started: Started):
    assert [ask("one"), ask("two")] == [f"one by {started.pids[0]}", f"two by {started.pids[0]}"]
    assert len(started.pids) == 1


def test_an_answer_arrives_in_the_pieces_of_the_stream(started: Started):
    with pipeline() as asked:
        assert next(asked.stream("x", SamplingParams(), BlendSettings())).text == "x "


def test_k_sampling_and_settings_of_a_question_reach_the_process(started: Started):
    started.answer = lambda asked: said(json.dumps([asked.k, asked.sampling.max_tokens, asked.settings.quality]))
    with pipeline(k=9) as asked:
        assert asked.ask("x", SamplingParams(7), BlendSettings(quality="fast")).answer == '[9, 7, "fast"]'
    started.answer = lambda asked: said(asked.history[0].answer)


def test_the_conversation_before_a_question_reaches_the_process(started: Started):
    started.answer = lambda asked: said(f"after {asked.history[0].answer}")
    assert ask("And where?", Turn("Who?", "Ada")) == "after Ada"


def test_the_marked_sentence_comes_from_the_process(started: Started):
    started.answer = lambda asked: iter([(3, len(asked.text))])
    with pipeline() as asked:
        assert asked.nearest("Why?", "a passage") == (3, 9)


def test_no_sentence_is_marked_if_the_process_fails(started: Started):
    started.answer = lambda asked: iter([1 // 0])
    with pipeline() as asked:
        assert asked.nearest("Why?", "a passage") is None


def test_every_client_gets_the_warnings_of_loading_and_of_its_own_answer(started: Started, capsys):
    def warned(asked: Question) -> Iterator[RagEvent]:
        echo("Warning: an odd chunk", err=True)
        return said("yes")

    started.answer, started.how = warned, {"idle_s": 600, "told": ("Warning: not blended",)}
    for _ in range(2):
        assert ask() == "yes"
        assert capsys.readouterr().err == "Warning: not blended\nWarning: an odd chunk\n"


@pytest.mark.parametrize(
    ("error", "code"), [(InputError("The question is too long."), 2), (StoreMismatchError("Other."), 3)]
)
def test_an_error_of_the_process_is_raised_with_its_message_and_exit_code(started: Started, error, code):
    def refused(_: Question) -> Iterator[RagEvent]:
        raise error

    started.answer = refused
    with pytest.raises(InputError if code == 2 else Exception, match=str(error)) as raised:
        ask()
    assert raised.value.exit_code == code


def test_the_command_answers_itself_if_the_process_cannot_load(started: Started, monkeypatch):
    monkeypatch.setattr(resident, "start", lambda held, listening: None)  # the process has ended at once
    assert ask() == "own answer to Why?"


def test_the_command_answers_itself_if_the_process_fails(started: Started):
    started.answer = lambda asked: iter([1 // 0])  # type: ignore[list-item]
    assert ask() == "own answer to Why?"


def test_the_command_answers_anew_on_the_next_line_if_the_process_dies(started: Started):
    def dying(_: Question) -> Iterator[RagEvent]:
        yield RagEvent("The mi")
        os._exit(1)

    started.answer = dying
    with pipeline() as asked:
        texts = [event.text for event in asked.stream("Why?", SamplingParams(), BlendSettings())]
    assert "".join(texts) == "The mi\nown answer to Why?"


def test_a_conversation_continues_with_a_new_process_after_the_process_has_died(started: Started):
    with pipeline() as asked:
        first = asked.ask("one", SamplingParams(), BlendSettings()).turn("one")
        os.kill(started.pids[0], signal.SIGKILL)
        os.waitpid(started.pids[0], 0)
        *_, last = asked.stream("two", SamplingParams(), BlendSettings(), [first])
    assert last.answer.answer == f"two by {started.pids[1]}"


def test_a_socket_that_a_killed_process_has_left_is_replaced(started: Started):
    ask()
    os.kill(started.pids[0], signal.SIGKILL)
    os.waitpid(started.pids[0], 0)
    assert HELD.socket.exists()
    assert ask("again") == f"again by {started.pids[1]}"


def test_a_process_whose_store_has_changed_ends_and_a_new_process_answers(started: Started, tmp_path):
    changed = tmp_path / "changed"
    started.how = {"idle_s": 600, "out_of_date": changed.exists}
    ask()
    changed.touch()
    started.how = {"idle_s": 600}
    assert ask("again") == f"again by {started.pids[1]}"
    assert os.waitpid(started.pids[0], 0)[0] == started.pids[0]


def test_a_command_does_not_wait_for_a_busy_process(started: Started, monkeypatch):
    monkeypatch.setattr(resident, "_PATIENCE_S", 0.01)
    with pipeline() as asked:
        events = asked.stream("long", SamplingParams(), BlendSettings())
        next(events)
        os.kill(started.pids[0], signal.SIGSTOP)
        assert ask("meanwhile") == "own answer to meanwhile"
        os.kill(started.pids[0], signal.SIGCONT)
        assert [event.answer is not None for event in events] == [True]


def test_a_client_that_disconnects_stops_its_answer_and_the_next_client_is_answered(started: Started):
    reading, writing = os.pipe()

    def endless(asked: Question) -> Iterator[RagEvent]:
        if asked.question != "endless":
            yield from said("short")
            return
        try:
            yield RagEvent("begun")
            while True:
                threading.Event().wait(0.01)
        finally:  # this runs however early the interruption comes
            os.write(writing, b"stopped")

    started.answer = endless
    with pipeline() as asked:
        events = asked.stream("endless", SamplingParams(), BlendSettings())
        next(events)
        events.close()
    assert os.read(reading, 7) == b"stopped"
    assert ask("short") == "short"
    assert len(started.pids) == 1


def listening() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind("")  # Linux chooses an abstract name
    made.listen()
    return made


def test_a_resident_process_ends_after_its_idle_time():
    times = iter([0.0, 0.005, 1.0])
    with listening() as at:
        Resident(at, lambda asked: said("x"), idle_s=0.01, clock=lambda: next(times)).serve()
    assert list(times) == []


def test_a_resident_process_ends_when_its_loaded_data_is_out_of_date():
    with listening() as at:
        Resident(at, lambda asked: said("x"), idle_s=0.01, clock=lambda: 0.0, out_of_date=lambda: True).serve()


def test_a_socket_directory_open_to_other_users_is_not_used(started: Started):
    (Path(os.environ["XDG_RUNTIME_DIR"]) / "cacheblend").mkdir(mode=0o755)
    assert ask() == "own answer to Why?"
    assert started.pids == []


def test_a_socket_directory_of_another_user_is_not_used(started: Started, monkeypatch):
    ask()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert ask() == "own answer to Why?"
    assert len(started.pids) == 1


def test_client_and_process_refuse_another_user(tmp_path, monkeypatch):
    mine, path = os.geteuid(), tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as at, socket.socket(socket.AF_UNIX) as stranger:
        at.bind(str(path))
        at.listen()
        stranger.connect(str(path))
        assert of_same_user(stranger)
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(resident.UnreachableError):
            resident._connected(path)
        times = iter([0.0, 0.0, 0.0, 1.0])
        Resident(at, lambda asked: said("secret"), idle_s=0.01, clock=lambda: next(times)).serve()
        assert stranger.recv(1) == b""


@pytest.mark.parametrize(
    "how",
    [
        QuestionOptions(model=EngineOptions(server="http://localhost:1")),
        QuestionOptions(model=EngineOptions(engine="vllm")),
        QuestionOptions(budgets=BudgetOptions(ram_budget="1GiB")),
    ],
)
def test_questions_with_another_engine_or_a_budget_get_no_resident_process(how, tmp_path, monkeypatch):
    monkeypatch.setenv(resident.MINUTES, "5")
    (tmp_path / "index.sqlite3").touch()
    assert Held.by(QuestionOptions(store=tmp_path), "default", None) is not None
    assert Held.by(QuestionOptions(tmp_path, how.model, budgets=how.budgets), "default", None) is None


def test_no_process_starts_if_the_environment_disables_it_or_the_store_has_no_index(tmp_path, monkeypatch):
    monkeypatch.setenv(resident.MINUTES, "5")
    assert Held.by(QuestionOptions(store=tmp_path), "default", None) is None
    (tmp_path / "index.sqlite3").touch()
    monkeypatch.setenv(resident.MINUTES, "0")
    assert Held.by(QuestionOptions(store=tmp_path), "default", None) is None
    monkeypatch.setenv(resident.MINUTES, "many")
    with pytest.raises(InputError, match="give a number of minutes"):
        Held.by(QuestionOptions(store=tmp_path), "default", None)


def test_each_model_and_environment_has_its_own_socket(started: Started, monkeypatch):
    other = Held("/store", "default", EngineOptions(model="other"), None)
    assert Held.read(HELD.text) == HELD
    before = HELD.socket
    assert other.socket != before
    monkeypatch.setenv("CACHEBLEND_HOME", "/elsewhere")
    assert HELD.socket != before


@pytest.mark.slow
def test_a_command_that_asks_the_process_imports_no_torch():
    code = (
        "import sys; from cacheblend_rag.console.engines import store_directory; store_directory(None); "
        "from cacheblend_rag.cli import ask, resident; from cacheblend_rag.rag import results; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_resident_process_loads_once_and_gives_the_commands_own_answers(run, model_dir, documents, tmp_path, short):
    store = tmp_path / "store"
    indexed = run("index", documents, "--store", store, "--model", model_dir, "--chunk-tokens", 40)
    assert indexed.exit_code == 0, indexed.stderr
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(short)}

    def answered(minutes: int, *more: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "cacheblend_rag",
            "ask",
            "When was the observatory founded?",
            "--max-tokens",
            "8",
            *more,
        ]
        return subprocess.run(
            [*command, "--store", str(store)],
            env={**environment, resident.MINUTES: str(minutes)},
            capture_output=True,
            text=True,
            check=False,
        )

    def facts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert (done.returncode, done.stderr) == (0, "")
        return {key: value for key, value in json.loads(done.stdout).items() if not key.endswith(("timings", "_s"))}

    alone = facts(answered(0, "--json"))  # stdout holds only JSON, and stderr is empty
    first = facts(answered(5, "--json"))
    (there,) = (short / "cacheblend").glob("*[!k]")
    again = facts(answered(5, "--json"))
    assert alone["answer"] == first["answer"] == again["answer"]
    assert alone["sources"] == first["sources"] == again["sources"]
    assert first["usage"] == again["usage"]
    assert list((short / "cacheblend").glob("*[!k]")) == [there]
    refused = answered(5, "--max-tokens", "2000")
    assert (refused.returncode, refused.stdout) == (2, "")
    (store / "index.sqlite3").unlink()
    gone = answered(5)
    assert (gone.returncode, gone.stdout) == (3, "")
