"""Separates an answer from the model's thoughts in front of the answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from cacheblend_rag.blending.settings import BlendSettings
from cacheblend_rag.engines.base import BlendEngine, Prompt
from cacheblend_rag.engines.results import Generation
from cacheblend_rag.engines.sampling import SamplingParams, begun_at_end
from cacheblend_rag.prompts.prompt import TokenizedPrompt

_OPEN, _CLOSE = "<think>", "</think>"
# Number of last tokens of a prompt that are searched for the opening marker, which white space may follow.
_TAIL: Final = 8
_JSON_BEGINS: Final = tuple('{["-0123456789tfn')


class Parts(NamedTuple):
    """Holds the two parts of a model's output, or of a piece of the output: the answer, and the thoughts."""

    answer: str
    reasoning: str = ""


class ThoughtReader:
    """Separates thoughts from the answer behind them, piece by piece; drops white space around the markers.

    The whole output is the answer if the tokenizer lacks one of the markers as a token that is visible in decoded text.
    """

    def __init__(self, tokenizer: Any, prompt: TokenizedPrompt, sampling: SamplingParams | None = None):
        """Prepare to read the answer to ``prompt``, which may end with the opening marker."""
        opening = _opening_id(tokenizer)
        self._thinking = None if opening is not None else False  # None: not known yet
        self._opened = opening is not None and _opens(tokenizer, prompt.token_ids, opening)
        self._guided = sampling is not None and sampling.json_schema is not None
        self._held, self._fresh = "", False

    def push(self, piece: str, last: bool = False) -> Parts:
        """Take the next piece, or all, of the model's output; return the text that certainly belongs to either part."""
        self._held += piece
        if self._thinking is None:
            self._begin(last)
        reasoning = self._thoughts(last) if self._thinking else ""
        if self._thinking is not False:
            return Parts("", reasoning)
        self._trim()
        answer, self._held = self._held, ""
        return Parts(answer, reasoning)

    def _begin(self, last: bool) -> None:
        """Decide whether the output begins with thoughts, once enough text has arrived."""
        body = self._held.lstrip()
        if body.startswith(_OPEN):
            self._thinking, self._held = True, body[len(_OPEN) :]
        elif last or (body and not _OPEN.startswith(body)):
            # Guided decoding may start at the first token: then there are no thoughts, although the prompt opened them.
            self._thinking = self._opened and not (self._guided and body.startswith(_JSON_BEGINS))
        self._fresh = bool(self._thinking)

    def _thoughts(self, last: bool) -> str:
        self._trim()
        thought, marker, behind = self._held.partition(_CLOSE)
        if marker:
            self._held, self._thinking, self._fresh = behind, False, True
            return thought.rstrip()
        end = len(thought) - (0 if last else begun_at_end(thought, _CLOSE))
        told = thought[:end].rstrip()
        self._held = thought[len(told) :]
        return told

    def _trim(self) -> None:
        """Drop the white space behind a marker."""
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held


def without_thoughts(engine: BlendEngine, prompt: Prompt, done: Generation) -> Generation:
    """Return the generation ``done`` with the answer alone, without thoughts, as its text."""
    if _opening_id(engine.tokenizer) is None:
        return done
    return replace(
        done, text=ThoughtReader(engine.tokenizer, engine.tokenize(prompt)).push(done.text, last=True).answer
    )


def generate_answer(
    engine: BlendEngine, prompt: Prompt, sampling: SamplingParams | None = None, settings: BlendSettings | None = None
) -> Generation:
    """Return the whole answer, without thoughts; raises the same errors as :meth:`BlendEngine.generate`."""
    return without_thoughts(engine, prompt, engine.generate(prompt, sampling, settings))


def _opening_id(tokenizer: Any) -> int | None:
    """Return the token that opens thoughts; None if the tokenizer lacks a marker or decoding leaves a marker out."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    ids: list[Any] = [None if backend is None else backend.token_to_id(marker) for marker in (_OPEN, _CLOSE)]
    if None in ids:
        return None
    shown = backend.decode(ids)  # leaves out special tokens, as decoding an answer does
    return int(ids[0]) if _OPEN in shown and _CLOSE in shown else None


def _opens(tokenizer: Any, token_ids: Sequence[int], opening: int) -> bool:
    """Return whether a prompt ends with the token that opens thoughts, optionally followed by white space."""
    tail = list(token_ids[-_TAIL:])
    if opening not in tail:
        return False
    behind = tail[len(tail) - tail[::-1].index(opening) :]
    return not tokenizer.backend_tokenizer.decode(behind, skip_special_tokens=False).strip()
