"""Runs the conversation of `cacheblend chat`."""

from __future__ import annotations

from contextlib import suppress
from textwrap import indent
from typing import TYPE_CHECKING

from cacheblend_rag.cli.citations import cite, reuse_line, source_lines
from cacheblend_rag.console.output import echo
from cacheblend_rag.errors import InputError
from cacheblend_rag.printable import in_one_line

if TYPE_CHECKING:
    from cacheblend_rag.blending.settings import BlendSettings
    from cacheblend_rag.cli.resident import ResidentPipeline
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.rag.pipeline import RagPipeline
    from cacheblend_rag.rag.results import RagAnswer

_HELP = """/sources  the text of the last answer's sources
/history  questions and answers so far
/new      start anew: the next question follows none of them
/help     this list
/quit     leave (as does Ctrl-D); Ctrl-C stops an answer
Anything else is a question, which may refer to the ones before it."""


class Chat:
    """Answers questions from standard input until the input ends."""

    def __init__(self, pipeline: RagPipeline | ResidentPipeline, sampling: SamplingParams, settings: BlendSettings):
        self._pipeline, self._sampling, self._settings = pipeline, sampling, settings
        self._answers: list[tuple[str, RagAnswer]] = []
        self._begin = 0  # index of the first answer that the next question may refer to

    def run(self, interactive: bool) -> None:
        """Run the conversation; ``interactive`` shows a prompt and enables line editing."""
        if interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing in input())
            echo("Ask a question; /help lists commands.")
        while (line := self._read(interactive)) is not None:
            if line and not self._handle(line):
                return

    def _read(self, interactive: bool) -> str | None:
        while True:
            try:
                return input("\n> " if interactive else "").strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                echo("\n/quit or Ctrl-D leaves.")

    def _handle(self, line: str) -> bool:
        """Handle a line of input; return whether to continue."""
        if line == "/quit":
            return False
        if line == "/help":
            echo(_HELP)
        elif line == "/sources":
            self._print_sources()
        elif line == "/history":
            for number, (question, answer) in enumerate(self._answers, 1):
                echo(f"{number}. {question}\n   {answer.answer}")
        elif line == "/new":
            self._begin = len(self._answers)
            echo("The next question stands alone.")
        elif line.startswith("/"):
            echo(f"There is no command {line.split(maxsplit=1)[0]}; /help lists them.")
        else:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        try:
            history = [answer.turn(asked) for asked, answer in self._answers[self._begin :]]
            for event in self._pipeline.stream(question, self._sampling, self._settings, history):
                echo(event.text, nl=False)
                if event.answer is not None:
                    self._answers.append((question, event.answer))
                    echo()
                    for line in (*source_lines(event.answer, question), reuse_line(event.answer)):
                        echo(f"  {line}")
        except KeyboardInterrupt:
            echo("\n  (stopped)")
        except InputError as error:  # concerns this question only, for example too long for the window
            echo(f"Error: {error}", err=True)

    def _print_sources(self) -> None:
        if not self._answers:
            echo("No answer yet.")
            return
        for number, source in enumerate(self._answers[-1][1].sources, 1):
            # Indented, because a document may contain text that looks like the next source.
            echo(f"[{number}] {cite(source)} ({in_one_line(source.path)})\n{indent(source.text, '    ')}\n")
