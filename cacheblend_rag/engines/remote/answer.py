"""Turns a streamed completion, piece by piece, into the events of an engine."""

from __future__ import annotations

import time
from typing import Any, Literal

from cacheblend_rag.blending.outcome import PromptOutcome
from cacheblend_rag.engines.results import Generation, StreamEvent, Timings, TokenLogprob, likeliest
from cacheblend_rag.errors import InputError, ServerError
from cacheblend_rag.prompts.tokens import begins_with_space


class ServerAnswer:
    """Collects one answer. Feed it every piece of the stream, then ask for the end."""

    def __init__(self, url: str, fingerprint: str, tokenizer: Any, top_logprobs: int = 0):
        """Begin now: time to first token counts from here.

        Args:
            url: The server, for messages.
            fingerprint: The model that is expected to answer.
            tokenizer: The model's.
            top_logprobs: How many of the likeliest tokens to keep for every token.
        """
        self._url, self._fingerprint, self._tokenizer, self._top = url, fingerprint, tokenizer, top_logprobs
        self._begin = time.perf_counter()
        self._ttft_s = 0.0
        self._pieces = 0
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None
        self._stop: Any = None
        self._usage: Any = None

    def begun(self) -> bool:
        """Say whether a piece has arrived."""
        return self._pieces > 0

    def push(self, piece: Any) -> str:
        """Take a piece; return its text."""
        self._pieces += 1
        if piece.usage is not None:
            self._usage = piece.usage
        text = ""
        for choice in piece.choices:
            fields = choice.model_extra or {}
            new = fields.get("token_ids") or ()
            if new and not self._token_ids:
                self._ttft_s = time.perf_counter() - self._begin
            self._token_ids.extend(new)
            if choice.logprobs is not None:
                self._logprobs.extend(_logprobs(choice.logprobs, self._top))
            text += choice.text
            if choice.finish_reason is not None:
                self._finish, self._stop = choice.finish_reason, fields.get("stop_reason")
        if not self._text and text.startswith(" ") and not begins_with_space(self._tokenizer, self._token_ids):
            text = text[1:]
        self._text += text
        return text

    def end(self) -> StreamEvent:
        """Return the last event.

        Raises:
            ServerError: The stream ended too early, or another model answered.
        """
        extra = (self._usage.model_extra or {}) if self._usage is not None else {}
        if self._finish not in ("stop", "length") or "cacheblend" not in extra:
            how = "ended the answer early" if self._finish is None else f"ended the answer with {self._finish!r}"
            raise ServerError(
                f"The server at {self._url} {how}, after {len(self._token_ids)} tokens; its log says why."
            )
        try:
            outcome = PromptOutcome.from_params(extra["cacheblend"])
        except InputError as error:
            raise ServerError(f"{error} Give the server at {self._url} the version of this package.") from error
        if outcome.fingerprint != self._fingerprint:
            raise ServerError(
                f"The server at {self._url} now serves another model ({outcome.fingerprint[:8]}, not {self._fingerprint[:8]}): "
                "connect again, with a new RemoteEngine."
            )
        ids = self._token_ids
        if self._finish == "stop" and not isinstance(self._stop, str) and ids:
            ids = ids[:-1]  # the end-of-sequence token
        total = time.perf_counter() - self._begin
        timings = Timings(self._ttft_s or total, total)
        finish: Literal["stop", "length"] = "stop" if self._finish == "stop" else "length"
        return StreamEvent("", Generation.of(outcome, self._text, ids, finish, timings, self._logprobs))


def _logprobs(found: Any, top: int) -> list[TokenLogprob]:
    # Asked for by id: "token_id:17". Texts would not do, different tokens can have the same.
    tokens = [_token_id(name) for name in found.tokens]
    ranked = [
        likeliest(((_token_id(name), value) for name, value in (rank or {}).items()), top)
        for rank in found.top_logprobs or [None] * len(tokens)
    ]
    return [TokenLogprob(t, p, r) for t, p, r in zip(tokens, found.token_logprobs, ranked, strict=True)]


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
