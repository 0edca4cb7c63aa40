"""Tests keys with roles, and the key file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from cacheblend_rag.errors import InputError
from cacheblend_rag.server.keys import Key, Quota, Role, key_of, may, read_keys
from tests.server.test_middleware import App

FILE = f"""
[[key]]
value = "asks"
role = "ask"

[[key]]
sha256 = "{hashlib.sha256(b"writes").hexdigest().upper()}"
role = "write"

[[key]]
value = "runs it"
role = "admin"
"""


def written(directory: Path, text: str) -> Path:
    (directory / "keys.toml").write_text(text)
    return directory / "keys.toml"


def test_plain_and_hashed_keys_are_read_with_their_roles(tmp_path: Path) -> None:
    keys = read_keys(written(tmp_path, FILE)).keys
    found = [key_of(value, keys) for value in ("asks", "writes", "runs it")]
    assert [(key.role, key.tenant) for key in found if key] == [(r, "default") for r in ("ask", "write", "admin")]
    assert [key_of(value, keys) for value in ("", "ask", hashlib.sha256(b"writes").hexdigest())] == [None] * 3
    assert "asks" not in repr(keys)


def test_the_key_file_of_the_guide_has_the_tenants_of_its_text(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/howto/tenants.md").read_text("utf-8")
    first, quotas = (block.split("```")[0] for block in page.split("```toml")[1:])
    found = read_keys(written(tmp_path, first))
    assert [tenant.name for tenant in found.tenants] == ["default", "acme", "globex", "public"]
    assert {tenant.name: tenant.reads for tenant in found.tenants if tenant.reads} == {"acme": ("public",)}
    operator, key = key_of("the operator's key", found.keys), key_of("the key of globex", found.keys)
    assert operator is not None and operator.operator
    assert key is not None and (key.tenant, key.role) == ("globex", "write")
    limited = read_keys(written(tmp_path, quotas)).quotas["acme"]
    assert limited == Quota(100_000, 50 << 30, 200_000, 16, 30 * 86400.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "key"),
        ("[[key]]\nvalue = 'secret'", "key.0.role"),
        ("[[key]]\nvalue = 'secret'\nrole = 'root'", "key.0.role"),
        ("[[key]]\nrole = 'ask'", "either value or sha256"),
        (f"[[key]]\nvalue = 'secret'\nsha256 = '{'0' * 64}'\nrole = 'ask'", "either value or sha256"),
        ("[[key]]\nsha256 = 'secret'\nrole = 'ask'", "key.0.sha256"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\ntenant = 'Acme Inc'", "key.0.tenant"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\ntenant = ''", "key.0.tenant"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\n[[tenant]]\nname = 'a'\nread = ['b']", "tenant.0.read"),
        (
            "[[key]]\nvalue = 'secret'\nrole = 'ask'\n[[tenant]]\nname = 'a'\nreads = ['b']",
            "reads 'b', which has no key",
        ),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\n[[tenant]]\nname = 'a'\nreads = ['a']", "other tenants"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\n" + "[[tenant]]\nname = 'a'\n" * 2, "two tables"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\n" * 2, "twice"),
        ("value = secret", "TOML"),
    ],
)
def test_the_error_for_a_wrong_key_file_names_the_place_and_shows_no_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        read_keys(written(tmp_path, text))
    assert "secret" not in str(refused.value)


def test_a_missing_key_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml"):
        read_keys(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("request_line", "roles"),
    [
        ("POST /v1/chat/completions", "ask write admin"),
        ("POST /v1/completions", "ask write admin"),
        ("GET /v1/models", "ask write admin"),
        ("GET /v1/chunks/stats", "ask write admin"),
        ("GET /v1/chunks", "write admin"),
        ("GET /v1/chunks/docs/a.md", "write admin"),
        ("POST /v1/chunks", "write admin"),
        ("POST /v1/chunks/flush", "write admin"),
        ("DELETE /v1/chunks/policy", "write admin"),
        ("DELETE /v1/chunks?id=policy", "write admin"),
        ("DELETE /v1/chunks?all=true", "admin"),
        ("DELETE /v1/chunks?id=x&all", "admin"),
        ("DELETE /v1/chunks?a%6cl=1", "admin"),
        ("GET /metrics", "admin"),
        ("POST /reset_prefix_cache", "admin"),
        ("GET /v1/responses/resp_1", "admin"),
        ("GET /v1/chat/completions", "admin"),
        ("POST /v1/chunks_of_another_kind", "admin"),
        ("POST /invocations", "admin"),
    ],
)
def test_each_role_may_send_its_requests_and_only_the_operator_manages_the_server(
    request_line: str, roles: str
) -> None:
    method, _, target = request_line.partition(" ")
    path, _, query = target.partition("?")

    def allowed(tenant: str) -> list[str]:
        every: tuple[Role, ...] = ("ask", "write", "admin")
        return [role for role in every if may(Key(b"", role, tenant), method, path, query.encode())]

    assert allowed("default") == roles.split()
    servers = roles == "admin" and path != "/v1/chunks"
    assert allowed("acme") == ([] if servers else roles.split())


async def test_a_key_of_too_small_a_role_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    app = App(read_keys(written(tmp_path, FILE)).keys)
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        for key, chunks, metrics in [
            ("asks", 403, 403),
            ("writes", 200, 403),
            ("runs it", 200, 200),
            ("other", 401, 401),
        ]:
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.post("/v1/chunks", headers=headers)).status_code == chunks
            refused = await client.get("/metrics", headers=headers)
            assert refused.status_code == metrics
            if metrics == 403:
                said = refused.json()["error"]["message"]
                assert said.startswith("GET /metrics takes a key of the role 'admin' of the default tenant.")
                assert f"This key has the role {key.removesuffix('s')!r} of the tenant 'default'" in said
    assert len(app.bodies) == 3


async def test_a_missing_route_is_answered_404_without_asking_for_another_key(tmp_path: Path) -> None:
    async with App(read_keys(written(tmp_path, FILE)).keys).client() as client:
        refused = await client.post("/v1/embeddings", headers={"Authorization": "Bearer asks"})
    message = refused.json()["error"]["message"]
    assert (refused.status_code, message) == (
        404,
        "This server has no POST /v1/embeddings for the model that it serves.",
    )


def test_a_single_key_has_the_operators_rights() -> None:
    key = key_of("only", [Key.of("only")])
    assert key is not None
    assert key.operator
