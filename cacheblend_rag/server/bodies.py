"""Makes vLLM's routes stop validating a list at the first wrong element."""

from __future__ import annotations

from typing import Any

from pydantic_core import SchemaValidator

_LISTS = ("list", "tuple", "set", "frozenset")


def stop_at_first(app: Any) -> None:
    """Make the routes of a FastAPI application report only the first wrong element of a list.

    An element with many allowed types fails in hundreds of ways, and pydantic stores four kilobytes for each failure. Some
    kilobytes of ``{"input": [0, 0, ...]}`` would take gigabytes, and delay all requests.
    """
    for route in app.routes:
        if (body := getattr(route, "body_field", None)) is not None:
            checks = body._type_adapter
            checks.validator = SchemaValidator(_stopping(checks.core_schema), _use_prebuilt=False)


def _stopping(schema: Any) -> Any:
    """Return a part of a pydantic core schema with ``fail_fast`` set for every list."""
    if isinstance(schema, dict):
        # A default is a value, even if it looks like a schema.
        stopping = {name: part if name == "default" else _stopping(part) for name, part in schema.items()}
        return {**stopping, "fail_fast": True} if schema.get("type") in _LISTS else stopping
    if isinstance(schema, (list, tuple)):
        return type(schema)(map(_stopping, schema))
    return schema
