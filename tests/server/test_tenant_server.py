"""Tests tenants of a real server: no tenant finds, deletes or notices another tenant's chunks and requests."""

from __future__ import annotations

import http.client
import json
import re
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.engines.remote import RemoteEngine
from cacheblend_rag.errors import ServerError, UnknownChunkError
from cacheblend_rag.prompts.chunk import make_chunk
from cacheblend_rag.prompts.prompt import BlendPrompt, ChunkRef
from tests.engines.contract import TEXTS
from tests.outcomes import missing_in
from tests.server.running import RunningServer

pytest.importorskip("vllm", reason="vLLM is not installed; make setup installs it")
pytestmark = pytest.mark.slow

KEYS = """
[[key]]
value = "operator"
role = "admin"

[[key]]
value = "acme-key"
tenant = "acme"
role = "admin"

[[key]]
value = "globex-key"
tenant = "globex"
role = "write"

[[key]]
value = "initech-key"
tenant = "initech"
role = "ask"

[[key]]
value = "public-key"
tenant = "public"
role = "write"

[[key]]
value = "small-key"
tenant = "small"
role = "write"

[[key]]
value = "single-key"
tenant = "single"
role = "ask"

[[tenant]]
name = "small"
tokens_per_minute = 60
max_chunks = 1

[[key]]
value = "metered-key"
tenant = "metered"
role = "ask"

[[key]]
value = "brief-key"
tenant = "brief"
role = "ask"

[[tenant]]
name = "brief"
tokens_per_minute = 120
max_concurrent = 1

[[tenant]]
name = "metered"
tokens_per_minute = 300

[[tenant]]
name = "single"
max_concurrent = 1

[[tenant]]
name = "acme"
reads = ["public"]

[[tenant]]
name = "initech"
reads = ["public"]
"""
PLAIN = "\n\n".join([*TEXTS, "Question: Who runs the observatory?"])
PRIVATE = "What Acme pays its director is known to nobody else, and stands in the safe of the harbour office."


class Tenants:
    """Sends requests with the key of a tenant."""

    def __init__(self, server: RunningServer):
        self.server = server

    def request(self, tenant: str, method: str, path: str, **arguments: Any) -> httpx.Response:
        key = "operator" if tenant == "operator" else f"{tenant}-key"
        return self.server.request(method, path, headers={"Authorization": f"Bearer {key}"}, **arguments)

    def register(self, tenant: str, *texts: str) -> dict[str, Any]:
        answer = self.request(tenant, "POST", "/v1/chunks", json={"texts": list(texts)})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, tenant: str, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        answer = self.request(tenant, "POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def reuse(self, tenant: str, prompt: str, **fields: Any) -> dict[str, Any]:
        """Return the reuse report of an answer, without times."""
        usage = self.ask(tenant, prompt, **fields)["usage"]
        timed = ("load_s", "blend_s", "header", "reads", "prefill_s", "expected_s")
        told = {name: value for name, value in usage["cacheblend"].items() if name not in timed}
        for chunk in told["chunks"]:
            del chunk["load"]
        return told

    def cached(self, tenant: str, prompt: str, **fields: Any) -> int:
        return int(self.ask(tenant, prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def clear(self) -> None:
        for tenant in ("acme", "globex", "public"):
            listed = self.request(tenant, "GET", "/v1/chunks").json()["data"]
            for chunk in listed:
                assert self.request(tenant, "DELETE", f"/v1/chunks/{chunk['id']}").status_code == 200
        assert self.request("operator", "POST", "/reset_prefix_cache").json()["success"]


@pytest.fixture(scope="module")
def running(server_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    directory = tmp_path_factory.mktemp("tenants")
    (directory / "keys.toml").write_text(KEYS)
    flags = ("--keys", str(directory / "keys.toml"), "--served-model-name", "harbour")
    with RunningServer(server_model, directory / "store", *flags, key=None) as server:
        yield Tenants(server)


@pytest.fixture
def tenants(running: Tenants) -> Tenants:
    running.clear()
    return running


def test_a_text_stored_by_one_tenant_is_new_to_another_tenant(tenants: Tenants) -> None:
    never = tenants.reuse("globex", PLAIN)
    assert (never["mode"], never["reason"], never["reused_tokens"]) == ("prefill", "no known chunk in the prompt", 0)
    first = tenants.register("acme", *TEXTS)
    assert first["report"]["computed"] == len(TEXTS)
    blended = tenants.reuse("acme", PLAIN)
    assert (blended["mode"], missing_in(blended)) == ("blend", [])
    assert tenants.request("operator", "POST", "/reset_prefix_cache").json()["success"]
    assert tenants.reuse("globex", PLAIN) == never
    again = tenants.register("globex", *TEXTS)
    assert {**again["report"], "seconds": 0} == {**first["report"], "seconds": 0}
    assert tenants.reuse("globex", PLAIN) == blended


def test_no_salt_gives_a_tenant_access_to_the_prefix_cache_of_another_tenant(tenants: Tenants) -> None:
    prompt = "A long question that knows no chunk, and that two of them ask word for word. " * 3
    assert tenants.cached("acme", prompt) == 0
    assert tenants.cached("acme", prompt) > 0
    for salt in ("tenant:acme", "client:tenant:acme", "acme", None):
        fields = {} if salt is None else {"cache_salt": salt}
        assert tenants.cached("globex", prompt, **fields) == 0
    assert tenants.cached("operator", prompt, cache_salt="tenant:acme") == 0
    assert tenants.cached("operator", prompt) == 0
    assert tenants.cached("acme", prompt, cache_salt="mine") == 0
    assert tenants.cached("globex", prompt, cache_salt="mine") == 0
    assert tenants.cached("globex", prompt, cache_salt="mine") > 0


def test_blended_prompts_of_two_tenants_share_no_blocks(tenants: Tenants) -> None:
    for tenant in ("acme", "globex"):
        tenants.register(tenant, *TEXTS)
    prompt = f"{PLAIN} " + "Who was it before, and who before that? " * 8  # fills a block of vLLM's
    first = tenants.reuse("acme", prompt, cacheblend={"ratio": 0.3})
    assert tenants.reuse("globex", prompt, cacheblend={"ratio": 0.3}) == first
    assert tenants.reuse("acme", prompt, cacheblend={"ratio": 0.3})["computed_tokens"] < first["computed_tokens"]


def test_an_id_of_another_tenant_is_unknown_on_every_route(tenants: Tenants) -> None:
    secret = tenants.register("acme", PRIVATE)["data"][0]["id"]

    def said(tenant: str, name: str) -> list[tuple[int, str]]:
        body = {"prompt": "Who?", "max_tokens": 2, "chunk_ids": [name]}
        block = [{"type": "text", "text": "", "id": name}]
        chat = {"messages": [{"role": "user", "content": block}], "max_tokens": 2}
        answers = [
            tenants.request(tenant, "GET", f"/v1/chunks/{name}"),
            tenants.request(tenant, "DELETE", f"/v1/chunks/{name}"),
            tenants.request(tenant, "DELETE", f"/v1/chunks?id={name}"),
            tenants.request(tenant, "POST", "/v1/completions", json=body),
            tenants.request(tenant, "POST", "/v1/chat/completions", json=chat),
        ]
        return [(answer.status_code, answer.text.replace(name, "ID")) for answer in answers]

    assert said("globex", secret) == said("globex", "0" * 32)
    assert [status for status, _ in said("globex", secret)] == [404, 404, 200, 400, 400]
    assert tenants.request("acme", "GET", f"/v1/chunks/{secret}").json()["text"] == PRIVATE
    assert tenants.request("globex", "GET", "/v1/chunks").json()["data"] == []
    assert tenants.request("operator", "GET", "/v1/chunks").json()["data"] == []


def test_deleting_a_tenants_copy_of_a_text_keeps_the_kv_of_another_tenant(tenants: Tenants) -> None:
    for tenant in ("acme", "globex"):
        tenants.register(tenant, *TEXTS)
    want = tenants.reuse("acme", PLAIN)
    for chunk in tenants.request("globex", "GET", "/v1/chunks").json()["data"]:
        tenants.request("globex", "DELETE", f"/v1/chunks/{chunk['id']}")
    assert tenants.reuse("globex", PLAIN)["reason"] == "no known chunk in the prompt"
    assert tenants.request("operator", "POST", "/reset_prefix_cache").json()["success"]
    assert tenants.reuse("acme", PLAIN) == want
    assert tenants.request("acme", "DELETE", "/v1/chunks?all=true").status_code == 200


def test_chunks_of_a_shared_tenant_are_blended_for_its_readers_and_not_deleted_by_them(tenants: Tenants) -> None:
    ids = [chunk["id"] for chunk in tenants.register("public", *TEXTS)["data"]]
    for reader in ("acme", "initech"):
        report = tenants.reuse(reader, PLAIN, cacheblend={"ratio": 0.3})
        assert (report["mode"], missing_in(report)) == ("blend", [])
        named = tenants.reuse(reader, "Who?", chunk_ids=ids[:2], cacheblend={"ratio": 0.0})
        assert named["mode"] == "blend"
    assert tenants.reuse("globex", PLAIN)["reason"] == "no known chunk in the prompt"
    assert tenants.request("acme", "DELETE", f"/v1/chunks/{ids[0]}").status_code == 409
    assert tenants.request("acme", "DELETE", "/v1/chunks?all=true").json()["data"] == []
    private = tenants.register("acme", PRIVATE)["report"]
    assert private["computed"] == 1
    both = tenants.reuse("acme", f"{PRIVATE}\n\n{PLAIN}", cacheblend={"ratio": 0.3})
    assert (both["reason"], missing_in(both)) == (f"stored KV for {len(TEXTS) + 1} of {len(TEXTS) + 1} chunks", [])


def test_ratio_1_over_own_and_shared_chunks_equals_the_full_prefill(tenants: Tenants) -> None:
    tenants.register("public", *TEXTS)
    tenants.register("acme", PRIVATE)
    prompt, fields = f"{PRIVATE}\n\n{PLAIN}", {"max_tokens": 8, "return_token_ids": True}
    full = tenants.ask("acme", prompt, cacheblend={"quality": "full"}, **fields)
    blended = tenants.ask("acme", prompt, cacheblend={"ratio": 1.0}, **fields)
    assert blended["usage"]["cacheblend"]["mode"] == "blend"
    assert blended["choices"][0]["token_ids"] == full["choices"][0]["token_ids"]


def test_chunks_are_ranked_for_their_own_tenant_and_used_by_its_readers(tenants: Tenants) -> None:
    for tenant in ("public", "globex"):
        tenants.register(tenant, *TEXTS)

    def policy(tenant: str) -> str:
        found = tenants.reuse(tenant, PLAIN, cacheblend={"ratio": 0.3, "policy": "static"})
        tenants.request(tenant, "POST", "/v1/chunks/flush")
        assert tenants.request("operator", "POST", "/reset_prefix_cache").json()["success"]
        return str(found["policy"])

    # Chunks are ranked at once, since the default policy needs ranks.
    assert [policy("acme"), policy("public"), policy("globex")] == ["static"] * 3
    entries = tenants.request("operator", "GET", "/v1/chunks/stats").json()["kv"]["entries"]
    assert [policy("acme"), policy("public"), policy("globex")] == ["static"] * 3
    assert tenants.request("operator", "GET", "/v1/chunks/stats").json()["kv"]["entries"] == entries


def test_chunks_of_prompts_are_written_back_only_for_their_tenant(tenants: Tenants) -> None:
    block = {"type": "text", "text": PRIVATE, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [block, {"type": "text", "text": "Who?"}]}], "max_tokens": 2}

    def mode(tenant: str) -> str:
        answer = tenants.request(tenant, "POST", "/v1/chat/completions", json=body).json()
        tenants.request(tenant, "POST", "/v1/chunks/flush")
        return str(answer["usage"]["cacheblend"]["mode"])

    assert [mode("acme"), mode("acme")] == ["prefill", "blend"]
    assert [mode("globex"), mode("globex")] == ["prefill", "blend"]


def test_the_model_list_shows_the_models_path_only_to_the_operator(tenants: Tenants, server_model: Path) -> None:
    def root(tenant: str) -> str:
        return str(tenants.request(tenant, "GET", "/v1/models").json()["data"][0]["root"])

    assert [root("operator"), root("acme"), root("initech")] == [str(server_model), "harbour", "harbour"]


def test_a_remote_engine_needs_only_its_tenants_key(tenants: Tenants) -> None:
    url = f"{tenants.server.url}/v1"
    with RemoteEngine(url, api_key="acme-key") as acme, RemoteEngine(url, api_key="globex-key") as globex:
        chunks = [make_chunk(text, acme.tokenizer) for text in TEXTS]
        assert acme.precompute(chunks).computed == len(TEXTS)
        assert acme.generate(PLAIN).mode == "blend"
        assert globex.generate(PLAIN).mode == "prefill"
        assert globex.forget(chunks) == 0
        named = BlendPrompt((ChunkRef(chunks[0].id), "Who?"))
        assert acme.generate(named).mode == "blend"
        with pytest.raises(UnknownChunkError):
            globex.generate(named)


def test_a_tenant_that_has_used_its_tokens_gets_the_seconds_to_wait(tenants: Tenants) -> None:
    body = {"prompt": "Who?", "max_tokens": 2}
    for more in ({"prompt": "far more tokens than a minute has " * 9}, {"max_tokens": 70}, {"n": 30}):
        refused = tenants.request("small", "POST", "/v1/completions", json={**body, **more})
        assert (refused.status_code, "60 a minute" in refused.json()["error"]["message"]) == (400, True)
    for _ in range(20):
        used = tenants.request("small", "POST", "/v1/completions", json={"prompt": "Who?", "max_tokens": 50})
        if used.status_code == 429:
            break
    refused = tenants.request("small", "POST", "/v1/completions", json=body)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert tenants.request("small", "POST", "/v1/chunks", json={"texts": TEXTS}).status_code == 429
    assert tenants.request("small", "GET", "/v1/chunks").status_code == 200
    url = f"{tenants.server.url}/v1"
    with (
        RemoteEngine(url, api_key="small-key", max_retries=0) as engine,
        pytest.raises(ServerError, match="60 tokens a minute"),
    ):
        engine.generate("Who?")
    assert tenants.request("acme", "POST", "/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Who?", "n": 2}),
        ("/v1/completions", {"prompt": "Who?", "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": "Who?", "n": 2, "use_beam_search": True}),
        ("/v1/completions", {"prompt": ["Who?", "When?"]}),
        ("/v1/completions", {"prompt": [[5, 6], [7, 8]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], "n": 2}),
    ],
)
def test_answers_beyond_max_concurrent_are_refused_before_any_begins(
    tenants: Tenants, path: str, body: dict[str, Any]
) -> None:
    refused = tenants.request("single", "POST", path, json={"max_tokens": 2, **body})
    assert refused.status_code == 400
    assert "max_concurrent" in refused.json()["error"]["message"]
    assert tenants.request("acme", "POST", path, json={"max_tokens": 2, **body}).status_code == 200
    refused = tenants.request("acme", "POST", path, json={"max_tokens": 2, **body, "n": 4000})
    assert (refused.status_code, "at most 128" in refused.json()["error"]["message"]) == (400, True)


def test_requests_of_each_kind_are_served_within_quotas_up_to_a_minutes_tokens(tenants: Tenants) -> None:
    said = [{"role": "user", "content": "Who?"}]
    model = tenants.request("single", "GET", "/v1/models").json()["data"][0]["id"]
    for path, body in [
        ("/v1/chat/completions", {"messages": said, "max_tokens": 2, "stream": True}),
        ("/v1/completions", {"prompt": "Who?", "max_tokens": 2, "prompt_logprobs": 1}),
        ("/v1/responses", {"input": "Who?", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": said, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": said}),
        ("/tokenize", {"prompt": "Who?"}),
    ]:
        answer = tenants.request("single", "POST", path, json={"model": model, **body})
        assert answer.status_code == 200, (path, answer.text)
    endless = {"messages": said, "ignore_eos": True}
    answer = tenants.request("brief", "POST", "/v1/chat/completions", json=endless)
    assert (answer.status_code, answer.json()["usage"]["total_tokens"]) == (200, 120)


def test_answers_delayed_for_another_tenant_equal_answers_given_alone(tenants: Tenants) -> None:
    blended, long = PLAIN, "The keeper of the harbour wrote down what he saw. " * 12
    tenants.register("acme", *TEXTS)
    with ThreadPoolExecutor(3) as asking:
        beside = [
            asking.submit(tenants.ask, "acme", prompt, max_tokens=40, ignore_eos=True) for prompt in (long, blended)
        ]
        short = asking.submit(lambda: [tenants.ask("globex", f"Question {n}: who?")["choices"] for n in range(12)])
        answers = [each.result()["choices"][0]["text"] for each in beside]
    assert tenants.request("operator", "POST", "/reset_prefix_cache").json()["success"]
    alone = [tenants.ask("acme", prompt, max_tokens=40, ignore_eos=True) for prompt in (long, blended)]
    assert answers == [each["choices"][0]["text"] for each in alone]
    assert alone[1]["usage"]["cacheblend"]["mode"] == "blend"
    assert short.result() == [tenants.ask("globex", f"Question {n}: who?")["choices"] for n in range(12)]


def test_an_aborted_answer_without_streaming_costs_its_computed_tokens(tenants: Tenants) -> None:
    def generated() -> float:
        text = tenants.request("operator", "GET", "/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_t"))

    body = {"prompt": "Who?", "max_tokens": 290, "ignore_eos": True}
    for _ in range(20):
        before = generated()
        connection = http.client.HTTPConnection(tenants.server.url.removeprefix("http://"))
        headers = {"Authorization": "Bearer metered-key", "Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answered = False
        while not answered and generated() < before + 150:
            answered = bool(select.select([connection.sock], [], [], 0)[0])
        connection.close()
        refused = tenants.request("metered", "POST", "/v1/completions", json={"prompt": "Who?", "max_tokens": 1})
        if refused.status_code == 429:
            break
    assert refused.status_code == 429
    assert "300 tokens a minute" in refused.json()["error"]["message"]


def test_an_aborted_stream_frees_its_place_in_the_quota(tenants: Tenants) -> None:
    body = {"prompt": "Who?", "max_tokens": 900, "ignore_eos": True, "stream": True}
    headers, url = {"Authorization": "Bearer single-key"}, f"{tenants.server.url}/v1/completions"
    for _ in range(20):  # on a busy machine the stream may end before the other request is checked
        with httpx.stream("POST", url, json=body, headers=headers, timeout=600) as answer:
            arriving = answer.iter_lines()
            next(arriving)
            refused = tenants.request("single", "POST", "/v1/completions", json={"prompt": "Who?", "max_tokens": 2})
        if refused.status_code == 429:
            break
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    deadline = time.monotonic() + 60
    while (
        tenants.request("single", "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 429
    ):
        assert time.monotonic() < deadline


def test_metrics_are_counted_by_tenant_and_shown_only_to_the_operator(tenants: Tenants) -> None:
    def counted(tenant: str) -> float:
        text = tenants.request("operator", "GET", "/metrics").text
        found = re.findall(rf'^cacheblend_requests_total{{[^}}]*tenant="{tenant}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return sum(map(float, found))

    before = {name: counted(name) for name in ("acme", "globex")}
    tenants.reuse("acme", "Who?")
    assert (counted("acme"), counted("globex")) == (before["acme"] + 1, before["globex"])
    for tenant in ("acme", "globex", "public"):
        assert tenants.request(tenant, "GET", "/metrics").status_code == 403
        assert tenants.request(tenant, "POST", "/reset_prefix_cache").status_code == 403
