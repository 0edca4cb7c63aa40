"""Renders messages with the model's chat template, or with a plain template, and finds the turns in a prompt."""

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
"""Template for models without a chat template: instruction, chunks, question, ``Answer:``, with blank lines between."""

SEPARATOR = "\n\n"
"""Separator between chunks, and between a system message and the user turn that it is merged into."""

PROBE = "cacheblend-probe-7f3a"
"""Probe text that no template writes by itself; it shows where a template places a content."""

# Templates that print today's date would change the header every day, so that stored KV would not match the header.
_FIXED_DATE = datetime(2024, 7, 26)
_TODAY = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")

# Template variable by which some models can be set to answer without thinking first.
_THINKING: Final = "enable_thinking"

_REFUSALS = (TemplateError, TypeError)
"""Exceptions of a template for messages that it cannot render: Jinja's, and TypeError for unsuitable types."""


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render with the generation prompt. Without a system role, system messages are merged into the next user turn.

    ``tools`` are in JSON-schema form; ``variables`` are further variables for the template, as ``enable_thinking``.
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


@lru_cache(maxsize=16)
def dated_template(template: str) -> str:
    """Return the chat template with a fixed date in place of today's date."""
    # The date is written into the template, because newer versions of transformers pass plain data only, no functions.
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
    except TypeError:  # templates that join a call's arguments with text need the arguments as JSON
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
    """Return whether the model's chat template renders the given tools."""
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
"""Returns the template variables that make the model answer without thinking first, for example for Qwen3.

The result is empty if the template has no such variable, or if the variable changes the header behind which KV was
computed.
"""


def turn_lead(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the chat template writes between a user's message and the answer, white space stripped.

    Text that the template writes before an existing answer, but not in the generation prompt, is left out, because no
    prompt ended there. The result is empty if the template has no such text, or ``tokenizer`` is None.
    """
    return () if tokenizer is None else _leads(tokenizer)


def _measured(tokenizer: Any) -> tuple[int, ...]:
    asked, answered = f"{PROBE}?", f"{PROBE}!"
    roles = (("user", asked), ("assistant", answered), ("user", "x"))
    try:
        talk = [{"role": role, "content": content} for role, content in roles]
        rendered, asking = render(tokenizer, talk), render(tokenizer, talk[:1])
        encoder = encoder_for(tokenizer)
    except CacheBlendError:  # the template refuses the messages, or the tokenizer is not supported
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
    """Return the position directly after each ``lead`` in a prompt, ascending. Earlier prompts ended there."""
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
