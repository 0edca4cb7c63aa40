"""Tests that valid and invalid requests generated from the OpenAPI schema of /v1/chunks get answers of the schema."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz import examples
from tests.server.test_routes import Server

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

SERVER = Server(None)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", SERVER.app)
OPERATIONS = {operation.ok().label: operation.ok() for operation in SCHEMA.get_all_operations()}


def test_the_schema_names_all_routes() -> None:
    assert sorted(OPERATIONS) == [
        "DELETE /v1/chunks",
        "DELETE /v1/chunks/{chunk_id}",
        "GET /v1/chunks",
        "GET /v1/chunks/stats",
        "GET /v1/chunks/{chunk_id}",
        "POST /v1/chunks",
        "POST /v1/chunks/flush",
    ]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_conforms_to_the_schema(label: str, mode: GenerationMode) -> None:
    operation = OPERATIONS[label]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return  # these requests cannot be invalid: any text can be an id

    @examples(15)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        if case.path_parameters != {"chunk_id": "stats"}:  # a separate route, and no chunk can have this id
            case.call_and_validate(checks=CHECKS)

    send()


def test_some_bodies_generated_from_the_schema_are_registered() -> None:
    """The generated bodies above are not all refused: some of them are registered."""
    taken = 0

    @examples(20)
    @given(case=OPERATIONS["POST /v1/chunks"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def send(case: schemathesis.Case) -> None:
        nonlocal taken
        taken += case.call().status_code == 200

    send()
    assert taken
    assert len(SERVER.registry) > 0
