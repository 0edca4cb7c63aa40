"""Turns messages into text with the model's own chat template, or a plain one for models without, and finds its turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any, Final

from jinja2.exceptions import TemplateError

from cacheblend_rag.errors import CacheBlendError, InputError
from cacheblend_rag.prompts.chunk import PerTokenizer, encoder_for

PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}\n\n"
    "{% elif m['role'] in ('user', 'tool') %}{{ m['content'] }}\nAnswer:"
    "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""For models without a chat template: instruction, chunks, question and ``Answer:``, a blank line between each."""

SEPARATOR = "\n\n"
"""What stands between chunks, and between a system message and the user turn it has to go into."""

PROBE = "cacheblend-probe-7f3a"
"""Text that no template writes by itself, to see where it puts what it is given."""

# Templates that print today's date would give every chunk's KV a header that is out of date tomorrow.
_FIXED_DATE = datetime(2024, 7, 26)
_TODAY = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")

# What the templates of models that can be told not to think first read.
_THINKING: Final = "enable_thinking"

_REFUSALS = (TemplateError, TypeError)
"""What a template raises for messages that it cannot print: its own exceptions, and Python's where types do not fit."""

_KEPT = 64
_probed: PerTokenizer[dict[str, str]] = PerTokenizer(lambda tokenizer: {})


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render with the generation prompt; system messages go into the next user turn if the template has no system role.

    Args:
        tokenizer: The model's.
        messages: What is said.
        tools: Functions for the template to show, in JSON-schema form.
        variables: What else the template reads, as ``enable_thinking``.
    """
    system = [message["content"].strip() for message in messages if message["role"] == "system"]
    refusal: Exception | None = None
    try:
        rendered = _apply(tokenizer, messages, tools, variables)
        if all(text in rendered for text in system):
            return rendered
    except _REFUSALS as error:
        refusal = error
    if system:
        try:
            return _apply(tokenizer, _without_system(messages), tools, variables)
        except _REFUSALS as error:
            refusal = error
    raise InputError(f"The model's chat template refuses these messages: {refusal}.") from refusal


def render_probes(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render messages whose contents are stand-ins; nothing where the template reads what is said, and refuses those.

    What was rendered is kept: the next question of a chain differs in its contents only.
    """
    known, key = _probed(tokenizer), repr((messages, tools, variables))
    found = known.get(key)
    if found is None:
        try:
            found = render(tokenizer, messages, tools, variables)
        except InputError:
            found = ""
        if len(known) >= _KEPT:
            known.clear()
        known[key] = found
    return found


@lru_cache(maxsize=16)
def dated_template(template: str) -> str:
    """Return a chat template that prints a fixed date where it would print today's."""
    # Written into the template: newer versions of transformers hand it plain data only, no functions.
    return _TODAY.sub(lambda call: repr(_FIXED_DATE.strftime(call[2])), template)


def _apply(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    template = getattr(tokenizer, "chat_template", None) or PLAIN_TEMPLATE
    if isinstance(template, str):
        template = dated_template(template)
    rendered = partial(
        tokenizer.apply_chat_template,
        tools=[dict(tool) for tool in tools] if tools else None,
        chat_template=template if isinstance(template, str) else None,
        add_generation_prompt=True,
        tokenize=False,
        **(variables or {}),
    )
    try:
        return str(rendered(list(messages)))
    except TypeError:  # templates that join the arguments of a call to text want them as JSON
        return str(rendered([_with_json_arguments(message) for message in messages]))


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    functions = [{**call["function"], "arguments": json.dumps(call["function"]["arguments"])} for call in calls]
    paired = zip(calls, functions, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in paired]}


def _without_system(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            merged.append({**message, "content": SEPARATOR.join([*waiting, message["content"]])})
            waiting = []
        else:
            merged.append(message)
    if waiting:
        merged.append({"role": "user", "content": SEPARATOR.join(waiting)})
    return merged


def reads_tools(tokenizer: Any) -> bool:
    """Say whether the model's chat template shows the model the tools it is given."""
    messages = [{"role": "user", "content": "x"}]
    function = {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        return PROBE in _apply(tokenizer, messages, [{"type": "function", "function": function}])
    except _REFUSALS:
        return False


def _unthinking(tokenizer: Any) -> Mapping[str, Any]:
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str) or _THINKING not in template:
        return {}
    asked = f"{PROBE}?"
    messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": asked}]
    switched = {_THINKING: False}
    try:
        usual, other = (render(tokenizer, messages, None, variables) for variables in ({}, switched))
    except InputError:
        return {}
    return switched if other.startswith(usual.partition(asked)[0]) else {}


at_once = PerTokenizer(_unthinking)
"""Returns the template's variables by which the model answers without thinking first, as Qwen3's has one.

None where the template has no such switch, or writes another header by it: one that no chunk's KV was computed behind.
"""


def turn_lead(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the chat template writes between what a user says and the answer to it, white space left out.

    What it writes in front of answers that are there, and not where it asks for one, is no part of them: no prompt ended there.
    Returns none where the template has no such text, or there is no tokenizer.
    """
    return () if tokenizer is None else _leads(tokenizer)


def _measured(tokenizer: Any) -> tuple[int, ...]:
    asked, answered = f"{PROBE}?", f"{PROBE}!"
    roles = (("user", asked), ("assistant", answered), ("user", "x"))
    try:
        talk = [{"role": role, "content": content} for role, content in roles]
        rendered, asking = render(tokenizer, talk), render(tokenizer, talk[:1])
        encoder = encoder_for(tokenizer)
    except CacheBlendError:  # a template for other messages, or a tokenizer that no prompt can be made with
        return ()
    begin, end = rendered.find(asked) + len(asked), rendered.find(answered)
    alike = takewhile(
        lambda pair: pair[0] == pair[1], zip(rendered[begin:end], asking.partition(asked)[2], strict=False)
    )
    between = "".join(letter for letter, _ in alike)
    lead = between.strip()
    if begin < len(asked) or not lead:
        return ()
    begin += between.index(lead)
    return tuple(encoder.template_between(rendered, begin, begin + len(lead)))


_leads = PerTokenizer(_measured)


def turn_ends(token_ids: Sequence[int], lead: Sequence[int]) -> tuple[int, ...]:
    """Return the positions right behind each ``lead`` in a prompt, ascending: up to there earlier prompts went."""
    ids, wanted = tuple(token_ids), tuple(lead)
    ends: list[int] = []
    at = -1
    while wanted:
        try:
            at = ids.index(wanted[0], at + 1)
        except ValueError:
            break
        if ids[at : at + len(wanted)] == wanted:
            ends.append(at + len(wanted))
    return tuple(ends)
