"""Breaks the code, one line at a time, and checks that a test fails: `make mutants`; the list is `tests/mutants.toml`.

Every mutant is tried in a copy of the package and the tests, by a process that is forked from this one, so that slow imports
run once. A mutant is caught if its tests fail; if they pass, a test is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
_COPIED = ("cacheblend_rag", "tests", "examples", "docs", "pyproject.toml")
_TIMEOUT_S = 300
_ALWAYS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header")
# All tests of vLLM are marked slow, since its import takes seconds; this program imports vLLM once.
_FAST, _IN_VLLM = "not slow and not gpu", "not gpu"


@dataclass(frozen=True)
class Mutant:
    """A change of the code.

    Attributes:
        file: The file, below the repository.
        old: The text to replace, which stands in the file once.
        new: The text in its place.
        tests: The tests that pytest runs.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied_to(self, text: str) -> str:
        """Return the file's text with the change; raises ValueError unless ``old`` stands there once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.old!r} stands {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        """Return it in one line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old}  ->  {new or '(nothing)'}"


def mutants() -> list[Mutant]:
    """Read the list."""
    tables = tomllib.loads(LIST.read_text(encoding="utf-8"))["file"]
    return [
        Mutant(table["path"], old, new, tuple(more or table["tests"]))
        for table in tables
        for old, new, *more in table["mutants"]
    ]


class _Copy:
    """A copy of the code that holds one mutant at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy2(ROOT / name, directory / name)

    def begin(self, mutant: Mutant | None, tests: Sequence[str]) -> int:
        """Run ``tests`` with or without a mutant in a new process; return its id."""
        if mutant is not None:
            file = self.directory / mutant.file
            file.write_text(mutant.applied_to((ROOT / mutant.file).read_text(encoding="utf-8")), encoding="utf-8")
        if (process := os.fork()) == 0:
            os._exit(self._run(tests))
        return process

    def end(self, mutant: Mutant | None) -> str:
        """Remove the mutant; return the end of pytest's output."""
        if mutant is not None:
            shutil.copy2(ROOT / mutant.file, self.directory / mutant.file)
        return self.said.read_text(encoding="utf-8", errors="replace")[-3000:]

    @property
    def said(self) -> Path:
        return self.directory / "said.txt"

    def _run(self, tests: Sequence[str]) -> int:
        signal.alarm(_TIMEOUT_S)
        said = os.open(self.said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(self.directory)
        sys.dont_write_bytecode = True  # the bytecode of two mutants of one second would be confused
        sys.path[:] = [str(self.directory), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        os.environ |= {"PYTHONPATH": str(self.directory), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "cacheblend_rag")]:
            del sys.modules[name]
        import hypothesis
        import pytest

        # A failing example is enough: shrinking it would take minutes.
        hypothesis.settings.register_profile(
            "mutants", deadline=None, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
        )
        marked = _IN_VLLM if _needs_vllm(tests) else _FAST
        return int(
            pytest.main(
                [*_ALWAYS, "--hypothesis-profile", "mutants", "-m", marked, "--rootdir", str(self.directory), *tests]
            )
        )


def _needs_vllm(tests: Sequence[str]) -> bool:
    return any(test.startswith(("tests/engines/vllm/", "tests/server/")) for test in tests)


def _verdict(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "out of time" if os.WTERMSIG(status) == signal.SIGALRM else "the process died"
    return {0: "passed", 1: "caught"}.get(code := os.WEXITSTATUS(status), f"pytest ended with {code}")


def _tried(
    copies: Sequence[_Copy], jobs: Sequence[tuple[Mutant | None, Sequence[str]]]
) -> Iterator[tuple[Mutant | None, Sequence[str], str, str, float]]:
    """Yield each mutant, as it ends, with its tests, its verdict, the end of pytest's output, and its seconds."""
    waiting, free = list(jobs), list(copies)
    running: dict[int, tuple[_Copy, Mutant | None, Sequence[str], float]] = {}
    while waiting or running:
        while waiting and free:
            mutant, tests = waiting.pop(0)
            copy = free.pop()
            running[copy.begin(mutant, tests)] = copy, mutant, tests, time.monotonic()
        process, status = os.wait()
        copy, mutant, tests, begun = running.pop(process)
        free.append(copy)
        yield mutant, tests, _verdict(status), copy.end(mutant), time.monotonic() - begun


def _try_all(copies: Sequence[_Copy], chosen: Sequence[Mutant], missed: list[tuple[Mutant, str, str]]) -> bool:
    """Try mutants, and record uncaught mutants; return False if tests fail without a mutant."""
    sets = sorted({each.tests for each in chosen})
    for _, tests, verdict, said, seconds in _tried(copies, [(None, tests) for tests in sets]):
        print(f"{seconds:6.1f} s  {verdict:8}  without a mutant: {' '.join(tests)}", flush=True)
        if verdict != "passed":
            print(said)
            return False
    for mutant, _, verdict, said, seconds in _tried(copies, [(each, each.tests) for each in chosen]):
        print(f"{seconds:6.1f} s  {verdict:8}  {mutant}", flush=True)
        if mutant is not None and verdict != "caught":
            missed.append((mutant, verdict, said))
    return True


def main() -> int:
    """Try the mutants; return 1 if a mutant was not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose line of the report holds this")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    chosen = [each for each in mutants() if given.only in str(each)]
    begun = time.monotonic()
    missed: list[tuple[Mutant, str, str]] = []
    # This process imports none of our code, which must come from the copy; vLLM changes other libraries and comes last.
    import torch  # noqa: F401
    import transformers  # noqa: F401

    in_vllm = [each for each in chosen if _needs_vllm(each.tests)]
    with tempfile.TemporaryDirectory() as directory:
        copies = [_Copy(Path(directory) / str(number)) for number in range(given.jobs)]
        if not _try_all(copies, [each for each in chosen if each not in in_vllm], missed):
            return 1
        if in_vllm:
            import vllm.entrypoints.openai.api_server
            import vllm.v1.worker.gpu_worker  # noqa: F401

            if not _try_all(copies, in_vllm, missed):
                return 1
    print(f"{len(chosen)} mutants, {len(missed)} not caught, in {time.monotonic() - begun:.0f} s")
    for mutant, verdict, said in missed:
        print(f"\n{verdict}: {mutant}", "" if verdict == "passed" else f"\n{said}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
