"""One call of an engine, with nothing left open."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.blending.settings import ResolvedSettings
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.prompts.prompt import TokenizedPrompt


@dataclass(frozen=True)
class Request:
    """What an engine is asked to do; :meth:`BlendEngine.request` makes one.

    Attributes:
        prompt: Token ids and the chunks in them.
        sampling: How to decode.
        settings: How to treat stored KV, with every option given.
    """

    prompt: TokenizedPrompt
    sampling: SamplingParams
    settings: ResolvedSettings


def check_length(prompt_tokens: int, max_tokens: int, context_window: int) -> None:
    """Refuse an empty prompt, and one that leaves no room for its answer.

    Raises:
        PromptTooLongError: Prompt and ``max_tokens`` exceed the context window, or there is no prompt.
    """
    if not prompt_tokens:
        raise PromptTooLongError("The prompt is empty; give at least one token.")
    if prompt_tokens + max_tokens > context_window:
        raise PromptTooLongError(
            f"The prompt has {prompt_tokens} tokens; with max_tokens={max_tokens} that exceeds the model's context window of "
            f"{context_window}. Retrieve fewer or smaller chunks, or lower max_tokens."
        )
