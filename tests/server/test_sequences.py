"""Tests the limits of one request's computation: each answer counts as its tokens are generated; other tenants are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import VLLMError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cacheblend_rag.server.keys import Admission, Key, Quota
from cacheblend_rag.server.observing import ReuseMetrics
from cacheblend_rag.server.served_engine import ServedEngine
from cacheblend_rag.server.tenants import Caller, Served, ServedTenants, calling
from tests.server.test_middleware import App
from tests.server.test_quotas import Clock
from tests.server.test_renderer import WINDOW, Server
from tests.server.test_served import Client

PATIENCE_S = 60
"""The longest wait for an event that comes at once, on however busy a machine."""


class Engine:
    """Computes a token of all its sequences at each permitted step, and counts sequences by tenant."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.steps = asyncio.Condition()
        self.allowed = 0

    async def compute(self, tokens: int) -> None:
        async with self.steps:
            self.allowed += tokens
            self.steps.notify_all()

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, **_: Any) -> Any:
        tenant, ids = calling.get().namespace, list(prompt["prompt_token_ids"])
        self.running[tenant] += params.n
        self.most[tenant] = max(self.most[tenant], self.running[tenant])
        try:
            for number in range(1, params.max_tokens + 1):
                async with self.steps:
                    await self.steps.wait_for(lambda: self.allowed > 0)
                    self.allowed -= 1
                done, kind = number == params.max_tokens, params.output_kind
                if kind is RequestOutputKind.FINAL_ONLY and not done:
                    continue
                tokens = [7] if kind is RequestOutputKind.DELTA else [7] * number
                pieces = [
                    CompletionOutput(i, f"{i}", tokens, None, None, finish_reason="length" if done else None)
                    for i in range(params.n)
                ]
                for some in [pieces] if kind is RequestOutputKind.FINAL_ONLY else [[piece] for piece in pieces]:
                    last = done and some[-1] is pieces[-1]
                    yield RequestOutput(request_id, None, ids, None, some, last, kv_transfer_params={"a": 1})
        finally:
            self.running[tenant] -= params.n


class House:
    """The server's own parts in front of an engine that waits, for a tenant with a quota and a tenant without."""

    def __init__(self, quota: Quota):
        self.engine, self.clock, self.rendering = Engine(), Clock(), Server()
        self.admission = Admission(quota, self.clock)
        client: Any = Client()
        tenants = ServedTenants({name: Served(client, None) for name in ("loud", "quiet")})  # type: ignore[arg-type]
        self.served = ServedEngine(self.engine, tenants, ReuseMetrics(CollectorRegistry()))  # type: ignore[arg-type]
        keys = [Key(Key.of(name).digest, "ask", name) for name in ("loud", "quiet")]
        self.app = App(keys, 100_000, admissions={"loud": self.admission})
        paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        self.app.app.router.routes[:] = [Route(path, self._route, methods=["POST"]) for path in paths]
        self.app.app.add_exception_handler(VLLMError, exception_handler)  # type: ignore[arg-type]
        self.app.app.state.args = type("Args", (), {"log_error_stack": False})

    async def _route(self, request: Request) -> JSONResponse:
        body, renderer = {"model": "m", **await request.json()}, self.rendering.renderer
        if request.url.path == "/v1/responses":
            parsed: Any = ResponsesRequest(**body)
            inputs: Any = [(await renderer.render_responses(parsed)).engine_input]  # type: ignore[union-attr]
            most = parsed.max_output_tokens
        elif "messages" in body:
            parsed = ChatCompletionRequest(**body)
            _, inputs = await renderer.render_chat(parsed)  # type: ignore[misc]
            most = parsed.max_completion_tokens or parsed.max_tokens
        else:
            parsed = CompletionRequest(**body)
            inputs, most = await renderer.render_completion(parsed), parsed.max_tokens
        most = most or WINDOW - len(inputs[0]["prompt_token_ids"])
        answered = await asyncio.gather(*(self._answer(parsed, each, most) for each in inputs))
        return JSONResponse({"choices": [text for texts in answered for text in texts]})

    async def _answer(self, parsed: Any, engine_input: Any, most: int) -> list[str]:
        if not getattr(parsed, "use_beam_search", False):
            return await self._generate(engine_input, parsed.to_sampling_params(most, {}))
        for number in range(most):  # as vLLM's beam search does
            beam = {**engine_input, "prompt_token_ids": [*engine_input["prompt_token_ids"], *([7] * number)]}
            beam.pop("cacheblend_ticket")
            params = SamplingParams(max_tokens=1)
            await asyncio.gather(*(self._generate(beam, params) for _ in range(parsed.n if number else 1)))
        return [""] * parsed.n

    async def _generate(self, prompt: Any, params: SamplingParams) -> list[str]:
        outputs = [output async for output in self.served.generate(prompt, params, "r")]
        return [piece.text for piece in outputs[-1].outputs]

    async def ask(self, tenant: str, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        async with self.app.client() as client, asyncio.timeout(PATIENCE_S):
            path = "/v1/chat/completions" if "messages" in body else path
            return await client.post(path, json=body, headers={"Authorization": f"Bearer {tenant}"})

    def asking(self, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.ask("loud", body))

    async def until(self, sequences: int, tenant: str = "loud") -> None:
        """Wait until the engine computes that many sequences for a tenant."""
        await soon(lambda: self.engine.running[tenant] == sequences)

    def used(self, rate: int) -> int:
        """Return how many tokens have been taken from a full bucket."""
        assert self.admission._bucket is not None
        return rate - round(self.admission._bucket._level)


async def soon(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2, **fields}


def prompt(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Who?", "max_tokens": 2, **fields}


TOO_MANY = [
    prompt(n=5),
    prompt(n=5, use_beam_search=True),
    prompt(prompt=["Who?"] * 5),
    prompt(prompt=[[1, 2]] * 5),
    prompt(prompt=["Who?"] * 3, n=2),
    chat(n=5),
    chat(n=5, use_beam_search=True),
]


@pytest.mark.parametrize("body", TOO_MANY, ids=str)
async def test_a_request_for_more_answers_than_max_concurrent_is_answered_400(body: dict[str, Any]) -> None:
    house = House(Quota(max_concurrent=4))
    refused = await house.ask("loud", body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == (400, "BadRequestError")
    assert "may have 4" in error["message"] and "max_concurrent" in error["message"]
    assert house.engine.most["loud"] == house.admission.serving == 0


@pytest.mark.parametrize("fields", [{"n": 3}, {"prompt": ["Who?"] * 3}, {"n": 3, "use_beam_search": True}], ids=str)
async def test_answers_count_until_they_are_complete_and_another_tenant_is_served_meanwhile(
    fields: dict[str, Any],
) -> None:
    house = House(Quota(max_concurrent=4))
    first = house.asking(prompt(**fields))
    await house.until(1 if "use_beam_search" in fields else 3)
    for body in (prompt(n=2), chat(n=2), prompt(prompt=["a", "b"])):
        refused = await house.ask("loud", body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == 429
    fourth = house.asking(prompt())
    await house.until(2 if "use_beam_search" in fields else 4)
    assert (await house.ask("loud", prompt())).status_code == 429
    quiet = asyncio.create_task(house.ask("quiet", prompt(n=50)))
    await house.until(50, "quiet")
    await house.engine.compute(1000)
    answers = [await task for task in (first, fourth, quiet)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [len(answer.json()["choices"]) for answer in answers] == [3, 1, 50]
    assert (house.engine.most["loud"] <= 4, house.admission.serving) == (True, 0)
    assert (await house.ask("loud", prompt(n=4))).status_code == 200


LONG = "a " * 300


@pytest.mark.parametrize(
    "body",
    [
        prompt(prompt=LONG),
        prompt(prompt=["a " * 60] * 4),
        prompt(max_tokens=250),
        prompt(n=30, max_tokens=10),
        prompt(n=30, max_tokens=10, use_beam_search=True),
        prompt(prompt="a " * 70, prompt_logprobs=1, n=2),
        prompt(prompt="a " * 70, echo=True, logprobs=1, n=2),
        chat(n=5, max_tokens=50),
        chat(max_tokens=None, max_completion_tokens=250),
    ],
    ids=lambda body: str(body)[:60],
)
async def test_a_request_for_more_tokens_than_a_minute_has_is_answered_400(body: dict[str, Any]) -> None:
    house = House(Quota(tokens_per_minute=200))
    refused = await house.ask("loud", body)
    assert refused.status_code == 400
    assert "200 a minute" in refused.json()["error"]["message"]
    assert (house.used(200), house.engine.most["loud"]) == (0, 0)
    await house.engine.compute(1000)
    assert (await house.ask("loud", prompt())).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"prompt_logprobs": -1}, {"echo": True, "logprobs": 1}], ids=str
)
async def test_too_many_prompt_logprobs_are_refused_for_a_tenant_with_a_quota(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.server.keys.MOST_LOGPROBS", 100)
    house = House(Quota(max_concurrent=8))
    refused = await house.ask("loud", prompt(prompt="a " * 70, **fields))
    assert refused.status_code == 400
    assert "log-probabilities of its prompts" in refused.json()["error"]["message"]
    await house.engine.compute(1000)
    assert (await house.ask("loud", prompt(prompt="a " * 70, prompt_logprobs=0))).status_code == 200
    assert (await house.ask("quiet", prompt(prompt="a " * 70, **fields))).status_code == 200


def schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": fields}}}


DEAR = '{"type": "object", "properties": {"a": {"type": "string", "\\u0070attern": "((.?){99}){99}"}}}'


@pytest.mark.parametrize(
    "body",
    [
        prompt(structured_outputs={"regex": "((.?){99}){99}"}),
        prompt(structured_outputs={"grammar": 'root ::= "a"'}),
        prompt(structured_outputs={"json": DEAR}),
        prompt(structured_outputs={"json": {"type": "object", "patternProperties": {"(.?){99}": {}}}}),
        prompt(structured_outputs={"choice": [f"answer {number}" for number in range(2000)]}),
        chat(**schema(type="array", items={"anyOf": [{"type": "string", "pattern": "(.?){99}"}]})),
        chat(**schema(type="object", properties={f"p{number}": {"type": "string"} for number in range(2000)})),
        chat(**schema(type="object", properties={f"p{number}": {"maxLength": 99 + number} for number in range(4)})),
        chat(**schema(type="array", items=[{"minLength": 99, "maxLength": 99.0 + number} for number in range(4)])),
        chat(**schema(anyOf=[{"minLength": -(9**9)}, *({"minLength": 99 + number} for number in range(4))])),
        prompt(structured_outputs={"json": str([{"format": "uri-template"}] * 40).replace("'", '"')}),
        chat(response_format={"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a"'}}),
        chat(
            response_format={
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {"type": "string", "pattern": "a?"}, "end": "</a>"}],
                "triggers": ["<a>"],
            }
        ),
    ],
    ids=lambda body: str(body)[-60:],
)
async def test_an_expensive_output_schema_is_refused_for_a_tenant_with_a_quota(body: dict[str, Any]) -> None:
    house = House(Quota(max_concurrent=8))
    await house.engine.compute(1000)
    refused = await house.ask("loud", body)
    assert (refused.status_code, "is to follow a schema" in refused.text) == (400, True)
    assert house.engine.most["loud"] == 0
    assert (await house.ask("quiet", body)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        chat(**schema(type="object", properties={"pattern": {"type": "string"}, "grammar": {"enum": ["a", "b"]}})),
        chat(**schema(type="object", properties={f"p{number}": {"maxLength": 100} for number in range(50)})),
        chat(**schema(type="array", maxItems=99_999, items={"format": "email", "minLength": 5, "maxLength": 99_999})),
        chat(response_format={"type": "json_object"}),
        prompt(structured_outputs={"choice": ["yes", "no"]}),
    ],
    ids=lambda body: str(body)[-60:],
)
async def test_schemas_and_choices_of_the_usual_size_are_accepted(body: dict[str, Any]) -> None:
    house = House(Quota(max_concurrent=8))
    await house.engine.compute(1000)
    assert (await house.ask("loud", body)).status_code == 200


async def test_an_answer_without_a_limit_is_as_long_as_a_minutes_tokens_allow() -> None:
    house = House(Quota(tokens_per_minute=200))
    await house.engine.compute(10_000)
    assert (await house.ask("loud", chat(max_tokens=None, n=3))).status_code == 200
    assert 190 < house.used(200) <= 200
    house.clock.now += 60
    body = {"input": "Who?", "instructions": "Be brief."}
    assert (await house.ask("loud", body, "/v1/responses")).status_code == 200
    assert house.used(200) == 200


async def test_answer_tokens_count_as_they_are_generated_and_prompts_before_they_are_computed() -> None:
    house = House(Quota(tokens_per_minute=300))
    two = [house.asking(prompt(prompt="a " * 90, max_tokens=60)) for _ in range(2)]
    await house.until(2)
    at_first = house.used(300)
    assert at_first > 2 * 90
    await house.engine.compute(50)
    await soon(lambda: house.used(300) == at_first + 50)
    third = house.asking(prompt(prompt="a " * 90, max_tokens=60))  # the bucket has a token left
    await house.until(3)
    refused = await house.ask("loud", prompt())
    assert (refused.status_code, int(refused.headers["retry-after"]) > 1) == (429, True)
    await house.engine.compute(1000)
    assert [(await task).status_code for task in (*two, third)] == [200] * 3


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["Who?", "Who?"]}], ids=str)
async def test_an_aborted_answer_costs_its_computed_tokens(fields: dict[str, Any]) -> None:
    house = House(Quota(tokens_per_minute=1000))
    asked = house.asking(prompt(max_tokens=300, **fields))
    await house.until(2 if fields else 1)
    prompts = house.used(1000)
    assert 0 < prompts < 20
    await house.engine.compute(40)
    await soon(lambda: not house.engine.allowed)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await house.until(0)
    assert house.used(1000) == prompts + 40 * fields.get("n", 1)
    assert house.admission.serving == 0


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["Who?", "Who?"]}], ids=str)
async def test_a_token_quota_does_not_change_a_whole_answer(fields: dict[str, Any]) -> None:
    answers = []
    for quota in (Quota(tokens_per_minute=1000), Quota()):
        house = House(quota)
        await house.engine.compute(1000)
        answers.append((await house.ask("loud", prompt(**fields))).json())
    assert answers[0] == answers[1]


async def test_a_prompt_counts_once_for_all_beams_and_again_per_answer_with_prompt_logprobs() -> None:
    house = House(Quota(tokens_per_minute=10_000))
    await house.engine.compute(10_000)
    text = "a " * 50

    async def used(**fields: Any) -> int:
        before = house.used(10_000)
        assert (await house.ask("loud", prompt(prompt=text, max_tokens=10, **fields))).status_code == 200
        return house.used(10_000) - before

    plain = await used()
    assert await used(n=3) == plain + 20
    assert await used(n=3, use_beam_search=True) == plain + 18  # the first token has one beam
    assert await used(prompt_logprobs=0) == plain + plain - 10
    assert await used(n=3, prompt_logprobs=0) == plain + 20 + 3 * (plain - 10)


def test_a_request_rendered_repeatedly_is_counted_once() -> None:
    caller = Caller("loud", False, Admission(Quota(max_concurrent=4)))
    for sequences in (1, 3, 3, 1):
        assert caller.count(sequences) is None
    assert caller.admission.serving == 3
    assert caller.count(5) is not None
    caller.end()
    assert caller.admission.serving == 0
