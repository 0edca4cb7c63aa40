"""Tests which requests of browsers and attackers the page answers, and its security headers."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("gradio", reason="Gradio is not installed; make setup installs it")

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cacheblend_rag.ui.guard import Guard
from cacheblend_rag.ui.launch import _uploads
from cacheblend_rag.ui.workspace import Choices
from tests.ui.scripted import ScriptedEngine

OWN = "http://127.0.0.1:7860"
UPLOAD = "/gradio_api/upload"


async def _anything(_: Request) -> PlainTextResponse:
    return PlainTextResponse("done")


def client(**headers: str) -> httpx.AsyncClient:
    routes = [Route("/{path:path}", _anything, methods=["GET", "POST"])]
    app = Starlette(routes=routes, middleware=[Middleware(Guard)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=OWN, headers=headers)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "localhost.evil.example", "10.0.0.1", ""])
async def test_requests_to_another_machines_name_are_refused_on_every_route(host: str) -> None:
    async with client() as page:
        await page.get("/")
        for method, path in (("GET", "/"), ("GET", "/config"), ("POST", UPLOAD)):
            assert (await page.request(method, path, headers={"Host": host})).status_code == 421


@pytest.mark.parametrize("host", ["localhost:7860", "127.0.0.1:7860", "[::1]:7860", "localhost:9000"])
async def test_an_opened_page_may_read_and_upload_under_every_local_host_name(host: str) -> None:
    async with client(Host=host) as page:
        assert (await page.get("/")).status_code == 200
        for told in ({}, {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}):
            assert (await page.post(UPLOAD, headers=told)).text == "done"
            assert (await page.get("/gradio_api/file=x", headers=told)).text == "done"


@pytest.mark.parametrize(
    "told",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
async def test_requests_of_another_sites_page_are_refused_despite_the_token(told: dict[str, str]) -> None:
    async with client() as page:
        await page.get("/")
        assert (await page.post(UPLOAD, headers=told)).status_code == 403
        assert (await page.get("/gradio_api/file=x", headers=told)).status_code == 403


async def test_a_link_on_another_site_opens_the_page_and_no_frame_may_hold_it() -> None:
    async with client() as page:
        followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        opened = await page.get("/", headers=followed)
        assert opened.status_code == 200
        assert "frame-ancestors 'none'" in opened.headers["Content-Security-Policy"]
        assert (await page.get("/config", headers=followed)).status_code == 403


async def test_requests_without_the_pages_token_upload_and_read_nothing() -> None:
    async with client() as stranger, client() as other:
        cookie = (await other.get("/")).headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        name = cookie.partition("=")[0]
        for given in ({}, {"Cookie": f"{name}=guessed"}, {"Cookie": cookie.partition(";")[0]}, {"Cookie": '"'}):
            assert (await stranger.post(UPLOAD, headers=given)).status_code == 403
            assert (await stranger.get("/gradio_api/file=x", headers=given)).status_code == 403
            assert (await stranger.get("/assets/index.js", headers=given)).status_code == 200


async def test_the_content_security_policy_allows_the_page_no_other_origin() -> None:
    async with client() as page:
        policy = (await page.get("/")).headers["Content-Security-Policy"]
        rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split("; ")}
        assert rules["default-src"] == ["'self'"] and "connect-src" not in rules
        assert set(rules["img-src"]) == {"'self'", "data:", "blob:"}


@pytest.mark.slow
def test_a_served_page_refuses_strangers_and_keeps_uploads_from_other_users(serve: Any, tmp_path: Path) -> None:
    store, engine = tmp_path / "store", ScriptedEngine()
    (store / "documents").mkdir(mode=0o755, parents=True)  # the permissions that earlier versions gave it
    url, workspace = serve(Choices(lambda _: engine, lambda: store, lambda *_: ""))
    sent = {"files": ("note.txt", b"The harbour lies below.")}
    with httpx.Client(base_url=url, timeout=60) as page:
        assert page.get("/", headers={"Host": "evil.example"}).status_code == 421
        assert page.post(UPLOAD, files=sent).status_code == 403
        assert not list(Path(_uploads().name).rglob("note.txt"))
        page.get("/")
        assert page.post(UPLOAD, files=sent, headers={"Origin": "http://evil.example"}).status_code == 403
        (uploaded,) = page.post(UPLOAD, files=sent).json()
    assert Path(uploaded).is_relative_to(_uploads().name) and mode(Path(_uploads().name)) == 0o700
    collection = workspace.collection()
    assert [state.state for state in list(collection.add([Path(uploaded)]))[-1]] == ["done"]
    kept = store / "documents"
    assert (mode(kept), mode(kept / "note.txt")) == (0o700, 0o600)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
