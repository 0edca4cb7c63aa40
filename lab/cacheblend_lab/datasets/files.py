"""Finds a data set's file under the user's directory."""

from __future__ import annotations

import os
from pathlib import Path

from cacheblend_rag.errors import InputError
from cacheblend_rag.homes import from_home

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
