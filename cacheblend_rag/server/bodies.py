"""Has vLLM's routes read a body's lists no further than to the first element that is wrong."""

from __future__ import annotations

from typing import Any

from pydantic_core import SchemaValidator

_LISTS = ("list", "tuple", "set", "frozenset")


def stop_at_first(app: Any) -> None:
    """Have the routes of a FastAPI application tell of what is wrong in a list its first element alone.

    An element that may be one of many things is wrong in hundreds of ways, and pydantic keeps four kilobytes of each: some
    kilobytes of ``{"input": [0, 0, ...]}`` would take gigabytes, and everybody's time.
    """
    for route in app.routes:
        if (body := getattr(route, "body_field", None)) is not None:
            checks = body._type_adapter
            checks.validator = SchemaValidator(_stopping(checks.core_schema), _use_prebuilt=False)


def _stopping(schema: Any) -> Any:
    """Return a part of pydantic's description of a type with all of its lists stopping at once."""
    if isinstance(schema, dict):
        # A default is a value, whatever it looks like.
        stopping = {name: part if name == "default" else _stopping(part) for name, part in schema.items()}
        return {**stopping, "fail_fast": True} if schema.get("type") in _LISTS else stopping
    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_stopping, schema))
    return schema
