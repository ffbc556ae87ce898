"""The client of the API server against a server that is none: what it sends, and what becomes of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web

from sm70_operator.act.client import ApiError, ApiServer, Authorization


class Spy:
    """Remembers requests; answers with `status` and `body`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, Any]] = []
        self.status, self.body = 200, json.dumps({"items": [{"kind": "Pod"}]})

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(
            (request.method, request.path_qs, request.headers.get("Authorization", ""), await request.text())
        )
        return web.Response(status=self.status, text=self.body)


@pytest.fixture
def spy() -> Spy:
    return Spy()


class Clock:
    now = 0.0


@pytest.fixture
async def api(spy: Spy) -> AsyncIterator[tuple[ApiServer, Clock]]:
    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", spy.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    clock, tokens = Clock(), iter(["first", "second"])
    server = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    authorization = Authorization(
        lambda: kopf.ConnectionInfo(server=server, token=next(tokens)), clock=lambda: clock.now
    )
    api = ApiServer(aiohttp.ClientSession(), server, authorization, timeout_seconds=5)
    yield api, clock
    await api.close()
    await runner.cleanup()


async def test_a_selector_reaches_the_server_as_it_is(api: tuple[ApiServer, Clock], spy: Spy) -> None:
    found = await api[0].list("Pod", "serving", labelSelector="inference.sm70.io/service=a,b in (c)")
    assert found == [{"kind": "Pod"}]
    assert spy.seen[0][1] == ("/api/v1/namespaces/serving/pods?labelSelector=inference.sm70.io/service%3Da,b+in+(c)")


async def test_a_token_that_the_kubelet_replaced_is_used_within_a_minute(
    api: tuple[ApiServer, Clock], spy: Spy
) -> None:
    for now in (0.0, 59.0, 60.0):
        api[1].now = now
        await api[0].get("ConfigMap", "serving", "mine")
    assert [one[2] for one in spy.seen] == ["Bearer first", "Bearer first", "Bearer second"]


async def test_what_goes_wrong_is_one_error_with_the_servers_words(api: tuple[ApiServer, Clock], spy: Spy) -> None:
    spy.status, spy.body = 422, json.dumps({"message": "spec.replicas: no\nsuch number"})
    with pytest.raises(ApiError, match=r"spec\.replicas: no such number") as caught:
        await api[0].create("Service", "serving", {"metadata": {"name": "x"}})
    assert caught.value.refused
    spy.status = 404
    assert await api[0].get("Service", "serving", "x") is None


async def test_no_answer_is_an_error_too() -> None:
    info = kopf.ConnectionInfo(server="http://127.0.0.1:9")
    api = ApiServer(aiohttp.ClientSession(), info.server, Authorization(lambda: info), timeout_seconds=5)
    with pytest.raises(ApiError) as caught:
        await api.get("Service", "serving", "x")
    assert caught.value.code == 0
    await api.close()
