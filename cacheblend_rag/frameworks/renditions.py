"""Makes the forms that formatters commonly give a text: escaped as JSON or HTML, Python's, whitespace closed up.

A rendition is a text of its own: its tokens, and so its KV, are those that a prompt with it has. All of them can be made from the
text alone, so that what is stored of them can be deleted with it.
"""

from __future__ import annotations

import html
import json
from functools import lru_cache

from cacheblend_rag.prompts.registry import MATCH_WINDOW

_MOST_KEPT = 256


@lru_cache(_MOST_KEPT)
def renditions(text: str) -> tuple[str, ...]:
    """Return the renditions of a text that differ from it, without outer whitespace; those too short to be found are left out."""
    forms = (
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        repr(text)[1:-1],
        html.escape(text, quote=True),
        html.escape(text, quote=False),
        " ".join(text.split()),
    )
    made = dict.fromkeys(form.strip() for form in forms)
    return tuple(form for form in made if form != text and len(form) >= MATCH_WINDOW)
