"""Loads data sets by name or file; the package contains the synthetic data set only, users have copies of the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from cacheblend_lab.datasets.formats import PLAIN_FORMAT, dialogue_example, dialogue_request, questions_of, sample_of
from cacheblend_lab.fiction.world import DEFAULT_KINDS, KINDS, demo_samples
from cacheblend_lab.rows import Skipped, hash_file, read_rows
from cacheblend_lab.samples import Sample
from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import from_home

__all__ = [
    "DEFAULT_KINDS",
    "ENVIRONMENT",
    "KINDS",
    "NAMED",
    "DataSet",
    "demo_samples",
    "find_file",
    "hash_files",
    "load_data_set",
    "read_data_set",
]

ENVIRONMENT = "CACHEBLEND_DATA"

# Usual file names of each data set, most specific first: globs in the directory, or in one of the _FOLDERS.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "musique": ("musique.json*", "musique*dev*.json*", "musique*.json*", "*.json*"),
    "2wikimqa": ("2wikimqa*.json*", "wikihop*.json*", "dev.json*", "*dev*.json*", "train.json*"),
    "hotpotqa": ("hotpotqa*.json*", "hotpot_dev*.json*", "hotpot*.json*", "*dev*.json*"),
    "samsum": ("samsum*.json*", "test.json*", "val*.json*", "*.json*"),
    "multi_news": ("multi_news*.json*", "*.json*"),
}
_FOLDERS: dict[str, tuple[str, ...]] = {
    "musique": ("musique",),
    "2wikimqa": ("2wikimqa", "2wikimultihopqa", "2WikiMultihopQA"),
    "hotpotqa": ("hotpotqa", "hotpot_qa"),
    "samsum": ("samsum",),
    "multi_news": ("multi_news", "multi_news_longbench", "multinews"),
}
NAMED = tuple(_PATTERNS)


def find_file(name: str, data: Path | None) -> Path:
    """Return the file of the data set ``name``.

    Args:
        name: A name in :data:`NAMED`.
        data: The file itself, or a directory that holds the file, at its top or in a folder of the data set's name;
            None takes the environment variable ``CACHEBLEND_DATA``.

    Raises:
        InputError: No directory is given, or the directory holds no such file.
    """
    root = data or (Path(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None)
    if root is None:
        raise InputError(
            f"{name} is not part of this package. Point to your copy with --data DIR or {ENVIRONMENT}=DIR: a directory with "
            f"the file, or with a folder {_FOLDERS[name][0]}/."
        )
    root = from_home(root)
    if root.is_file():
        return root
    if not root.is_dir():
        raise InputError(f"There is no file or directory {root}.")
    for folder in (*(root / f for f in _FOLDERS[name]), root):
        # At the top of the directory, patterns that match any file would match another data set's file.
        patterns = [p for p in _PATTERNS[name] if folder != root or name.split("_", maxsplit=1)[0] in p]
        for pattern in patterns:
            found = sorted(f for f in folder.glob(pattern) if f.is_file() and "corpus" not in f.name)
            if found:
                return found[0]
    raise InputError(
        f"No file of {name} in {root}; looked for {', '.join(_PATTERNS[name])} in {', '.join(_FOLDERS[name])} and for "
        "names with the data set's own at the top. Give the file itself with --data FILE."
    )


# Number of few-shot examples: more than fit into six chunks of 512 tokens at SAMSum's usual dialogue length.
_EXAMPLES = 40
_NAMED_ROWS = 3


@dataclass(frozen=True)
class DataSet:
    """Holds a data set's samples.

    Attributes:
        files: Hash of every file that was read, by name; empty for the demo.
    """

    samples: list[Sample]
    files: dict[str, str]
    skipped: list[Skipped]


def load_data_set(
    name: str,
    data: Path | None,
    limit: int,
    seed: int,
    tokenizer: Any,
    *,
    kinds: Sequence[str] | None = None,
    chunks: int = 6,
    chunk_tokens: int = 512,
) -> DataSet:
    """Return a data set with up to ``limit`` samples, drawn by ``seed``, in the file's order.

    Args:
        name: ``demo``, a name in :data:`NAMED`, or a ``.json``, ``.jsonl`` or ``.gz`` file of any known format.
        data: Directory of the named data sets; see :func:`find_file`.
        limit: Maximum number of samples.
        seed: Seed of samples, few-shot examples, and the demo's documents.
        tokenizer: Tokenizer of the model.
        kinds: Kinds of questions to use; None uses all of a file and the default kinds of the demo.
        chunks: Number of chunks in a demo context.
        chunk_tokens: Tokens of a demo chunk.

    Raises:
        InputError: The data set or file does not exist, or none of its rows can be used; the message names them.
    """
    if limit < 1:
        raise InputError(f"limit is {limit}; ask for at least 1 question.")
    file = file_of(name, data)
    if file is None:
        wanted = DEFAULT_KINDS if kinds is None else kinds
        samples = demo_samples(tokenizer, limit, seed, kinds=wanted, chunks=chunks, chunk_tokens=chunk_tokens)
        return DataSet(samples, {}, [])
    found = read_data_set(file, seed)
    samples = found.samples
    if kinds is not None:
        samples = [sample for sample in samples if sample.kind in kinds]
        if not samples:
            raise InputError(f"{file} has no questions of the kinds {', '.join(kinds)}.")
    if len(samples) > limit:
        kept = sorted(Random(seed).sample(range(len(samples)), limit))
        samples = [samples[i] for i in kept]
    return replace(found, samples=samples)


def hash_files(name: str, data: Path | None) -> dict[str, str]:
    """Return the hash of each file that :func:`load_data_set` would read, by name.

    Raises:
        InputError: The data set or file does not exist.
    """
    file = file_of(name, data)
    return {} if file is None else {file.name: hash_file(file)}


def file_of(name: str, data: Path | None) -> Path | None:
    """Return the file that :func:`load_data_set` would read; None for ``demo``, which has no file.

    Raises:
        InputError: The data set or file does not exist.
    """
    if name == "demo":
        return None
    if name in NAMED:
        return find_file(name, data)
    file = from_home(name)
    if not file.is_file():
        raise InputError(f"There is no data set {name!r}; give demo, {', '.join(NAMED)}, or a file of JSON lines.")
    return file


def read_data_set(file: Path, seed: int = 0) -> DataSet:
    """Return all samples of a file. Rows that cannot be used are listed in ``skipped``.

    Raises:
        InputError: The file cannot be read, or none of its rows can be used; the message names the first rows.
    """
    read = read_rows(file)
    samples, skipped = [], list(read.skipped)
    for where, row in read.rows:
        name = f"{file.stem}-{where.rpartition(' ')[2]}"
        try:
            found = [sample_of(question, name) for question in questions_of(row)]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, InputError) as error:
            skipped.append(Skipped(file.name, where, _said(error)))
            continue
        samples += [replace(sample, where=where) for sample in found if sample is not None]
    if not samples:
        raise InputError(f"{file} has no question with an answer{_because(skipped)}")
    if len({sample.id for sample in samples}) < len(samples):
        # Some files restart the numbers of their rows for every question type.
        samples = [replace(sample, id=f"{sample.id}-{i}") for i, sample in enumerate(samples)]
    if samples[0].task == "dialogue" and not samples[0].texts:
        samples = _with_examples(samples, seed)
    return DataSet(samples, {file.name: read.digest}, skipped)


def _because(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return "."
    named = "; ".join(f"{row.where}: {row.why.rstrip('.')}" for row in skipped[:_NAMED_ROWS])
    more = f"; and {len(skipped) - _NAMED_ROWS} more rows" if len(skipped) > _NAMED_ROWS else ""
    return f" that can be used ({named}{more}). {PLAIN_FORMAT}"


def _with_examples(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """Return dialogues with other dialogues and their summaries as few-shot examples (paper section 7.1)."""
    if len(samples) < 2:
        raise InputError("Few-shot examples come from the other rows of the file, and there is only one row.")
    examples = [dialogue_example(s.question, s.answers[0]) for s in samples]
    found = []
    for number, sample in enumerate(samples):
        others = [i for i in range(len(samples)) if i != number and samples[i].question != sample.question]
        drawn = Random(f"{seed}:{sample.id}").sample(others, min(_EXAMPLES, len(others)))
        texts = tuple(examples[i] for i in drawn)
        found.append(replace(sample, question=dialogue_request(sample.question), texts=texts))
    return found


def _said(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
