"""Keys with roles, and the file that they are in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from cacheblend_rag.errors import InputError
from cacheblend_rag.server.keys import Key, may, read_keys, role_of
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


def test_keys_are_read_with_their_roles_as_they_are_or_hashed(tmp_path: Path) -> None:
    keys = read_keys(written(tmp_path, FILE))
    assert [role_of(value, keys) for value in ("asks", "writes", "runs it")] == ["ask", "write", "admin"]
    assert [role_of(value, keys) for value in ("", "ask", hashlib.sha256(b"writes").hexdigest())] == [None] * 3
    assert "asks" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "key"),
        ("[[key]]\nvalue = 'secret'", "key.0.role"),
        ("[[key]]\nvalue = 'secret'\nrole = 'root'", "key.0.role"),
        ("[[key]]\nrole = 'ask'", "either value or sha256"),
        (f"[[key]]\nvalue = 'secret'\nsha256 = '{'0' * 64}'\nrole = 'ask'", "either value or sha256"),
        ("[[key]]\nsha256 = 'secret'\nrole = 'ask'", "key.0.sha256"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\ntenant = 'acme'", "key.0.tenant"),
        ("[[key]]\nvalue = 'secret'\nrole = 'ask'\n" * 2, "twice"),
        ("value = secret", "TOML"),
    ],
)
def test_a_file_that_is_not_right_says_where_and_shows_no_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        read_keys(written(tmp_path, text))
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
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
def test_a_role_may_what_is_listed_and_what_the_lesser_may(request_line: str, roles: str) -> None:
    method, _, target = request_line.partition(" ")
    path, _, query = target.partition("?")
    assert [role for role in ("ask", "write", "admin") if may(role, method, path, query.encode())] == roles.split()  # type: ignore[arg-type]


async def test_a_key_of_too_small_a_role_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    app = App(read_keys(written(tmp_path, FILE)))
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
                assert "role" in refused.json()["error"]["message"]
    assert len(app.bodies) == 3


def test_a_key_that_is_given_alone_is_good_for_everything() -> None:
    assert role_of("only", [Key.of("only")]) == "admin"
