"""The server's tokenizer, on this machine."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.engines.model_files import is_bundled, model_directory
from cacheblend_rag.errors import ModelError
from cacheblend_rag.prompts.tokens import encoder_for
from cacheblend_rag.protocol import TOKENIZER_PROBE, ModelInfo


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by the name that the server gives it.

    Raises:
        ModelError: It cannot be loaded here.
    """
    from transformers import AutoTokenizer

    try:
        # Only the tokenizer's files: a client needs none of the weights.
        return AutoTokenizer.from_pretrained(model_directory(None) if is_bundled(name) else name)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The server's tokenizer {name!r} cannot be loaded here: {error} Give tokenizer= (that of the same model)."
        ) from error


def checked(tokenizer: Any, model: ModelInfo) -> Any:
    """Return ``tokenizer`` if it splits text as the server's does.

    Raises:
        ModelError: It does not.
    """
    if tuple(encoder_for(tokenizer).template(TOKENIZER_PROBE)) != model.tokenizer_probe:
        raise ModelError(
            f"The tokenizer is not that of the server's model {model.name}: it splits text otherwise. Give the tokenizer of that "
            "model."
        )
    return tokenizer
