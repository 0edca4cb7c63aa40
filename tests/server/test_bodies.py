"""Tests that a list of a body is read up to its first wrong element: errors of all elements would take gigabytes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse

from cacheblend_rag.protocol import NamedChunks, PrecomputeBody

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from cacheblend_rag.server.bodies import stop_at_first

TEXT = {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
MODELS: dict[str, Any] = {
    "responses": ResponsesRequest,
    "chat": ChatCompletionRequest,
    "messages": AnthropicMessagesRequest,
}


@pytest.fixture
def app() -> FastAPI:
    made = FastAPI()

    def add(name: str, model: Any) -> None:
        async def answer(request: Any) -> Any:
            return request.model_dump(exclude={"request_id"})

        answer.__annotations__["request"] = model
        made.post(f"/{name}")(answer)

    for name, model in MODELS.items():
        add(name, model)

    @made.exception_handler(RequestValidationError)
    async def count(_: Any, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(len(error.errors()), 400)

    return made


async def _post(app: FastAPI, name: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post(f"/{name}", json={"model": "m", "max_tokens": 1, **body})


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("responses", lambda wrong: {"input": wrong}),
        ("responses", lambda wrong: {"input": [TEXT, {"role": "user", "content": wrong}]}),
        ("responses", lambda wrong: {"input": "Who?", "tools": wrong}),
        ("chat", lambda wrong: {"messages": wrong}),
        ("messages", lambda wrong: {"messages": [{"role": "user", "content": wrong}]}),
    ],
)
async def test_only_the_first_wrong_element_of_a_list_is_reported(app: FastAPI, name: str, body: Any) -> None:
    stop_at_first(app)
    one, many = [(await _post(app, name, body([0] * count))).json() for count in (1, 100)]
    assert one == many > 0


async def test_valid_bodies_are_parsed_unchanged(app: FastAPI) -> None:
    bodies = [
        ("responses", {"input": [TEXT, CALL, TEXT], "tools": [{"type": "function", "name": "f", "parameters": {}}]}),
        ("chat", {"messages": [{"role": "user", "content": "Who?"}], "stop": ["a", "b"]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]}),
    ]
    before = [await _post(app, *each) for each in bodies]
    stop_at_first(app)
    after = [await _post(app, *each) for each in bodies]
    assert [answer.status_code for answer in before] == [200] * 3
    assert [answer.json() for answer in after] == [answer.json() for answer in before]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (PrecomputeBody, lambda wrong: {"texts": wrong}),
        (PrecomputeBody, lambda wrong: {"chunks": wrong}),
        (PrecomputeBody, lambda wrong: {"chunks": [{"text": "a", "token_ids": wrong}]}),
        (NamedChunks, lambda wrong: {"chunk_ids": wrong}),
        (NamedChunks, lambda wrong: {"spans": wrong}),
    ],
)
def test_our_own_models_report_only_the_first_wrong_element(model: Any, body: Any) -> None:
    counts = []
    for many in (1, 100):
        with pytest.raises(ValidationError) as refused:
            model.model_validate_json(json.dumps(body([None] * many)))
        counts.append(refused.value.error_count())
    assert counts[0] == counts[1]
