"""The app: all routes, and the guard around them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.operate.http.access.door import Door
from coordinator.operate.http.access.guard import Guard
from coordinator.operate.http.access.tokens import Role
from coordinator.operate.http.answers.api import ROOT, Api, Endpoint
from coordinator.operate.http.answers.calls import Calls, to_json
from coordinator.operate.http.answers.events import Streams
from coordinator.operate.http.answers.metrics import make_registry, render_metrics
from coordinator.operate.http.answers.openapi import describe_api
from coordinator.operate.http.answers.shapes import ref
from coordinator.operate.http.pages import PageFile, Pages
from coordinator.operate.http.refusal import RefusalError
from coordinator.operate.http.viewed import ViewedRuns

log = logging.getLogger(__name__)

PACK_BYTES = 1_024
"""Answers of this size and above are compressed."""
ENDED = ("finished", "stopped", "failed")
"""States of a run that needs no broker at present. One that is down keeps no other from work."""
FRESH_S = 1.0
"""Seconds for which an answer about health is given again: it is open to all."""


class App:
    """The app of a process; `asgi` is what the server runs."""

    def __init__(
        self,
        runs: ViewedRuns,
        door: Door,
        *,
        names: Collection[str],
        files: dict[str, PageFile],
        alive_s: float,
        open_metrics: bool,
        device_metrics: bool,
    ) -> None:
        """`names`: those of the page; `files`: the page's; for the others, see `HttpTable`."""
        self.calls = Calls()
        self.streams = Streams(self.calls)
        self._runs, self._door = runs, door
        self._alive_s, self._open_metrics = alive_s, open_metrics
        self._registry = make_registry(runs, self._own, by_device=device_metrics)
        self._fresh: dict[str, tuple[float, str]] = {}
        endpoints = [*Api(runs, door, self.calls, self.streams).endpoints(), *self._others()]
        self._description = to_json(describe_api(endpoints))
        pages = Pages(files)
        app = Starlette(
            routes=[
                *(
                    Route(each.path, each.answer, methods=[each.method], name=each.name)
                    for each in endpoints
                ),
                Route("/", pages.index, methods=["GET"]),
                Route("/page/{path:path}", pages.file, methods=["GET"]),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=PACK_BYTES, compresslevel=1)],
            exception_handlers={
                RefusalError: _refused,
                HTTPException: _no_route,
                ClientDisconnect: _gone,
                Exception: _mistake,
            },
        )
        app.router.redirect_slashes = False
        self.asgi: ASGIApp = Guard(app, names)
        """The app with the guard around it."""

    def _others(self) -> list[Endpoint]:
        """Return the endpoints besides the API's: all but the metrics may anybody ask."""

        def get(
            path: str, name: str, says: str, answer: Callable[[Request], Awaitable[Response]]
        ) -> Endpoint:
            result = {"type": "object"} if name == "getDescription" else ref("Health")
            return Endpoint(
                method="GET",
                path=path,
                name=name,
                says=says,
                answer=answer,
                role=None,
                result=result,
            )

        return [
            get(f"{ROOT}/openapi.json", "getDescription", "This description.", self._describe),
            Endpoint(
                method="GET",
                path="/metrics",
                name="getMetrics",
                says="Metrics for Prometheus, in its text format.",
                answer=self._metrics,
                role=None if self._open_metrics else Role.READ,
                result={"type": "string"},
                text=True,
            ),
            get("/healthz", "getHealth", "200 while the loop of every run goes on.", self._health),
            get(
                "/readyz",
                "getReady",
                "200 while every run is in charge of its task and connected to its broker.",
                self._ready,
            ),
        ]

    async def _describe(self, _request: Request) -> Response:
        return Response(self._description, media_type="application/json")

    async def _health(self, _request: Request) -> Response:
        return await self._say("health", self._illness)

    async def _ready(self, _request: Request) -> Response:
        return await self._say("ready", self._hindrance)

    async def _say(self, name: str, look: Callable[[], str]) -> Response:
        now = time.monotonic()
        when, why = self._fresh.get(name, (-FRESH_S, ""))
        if now - when >= FRESH_S:
            why = await self.calls.read(look)
            self._fresh[name] = now, why
        if why:
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, why)
        return Response(to_json({"ok": True}), media_type="application/json")

    def _illness(self) -> str:
        silent = max((run.silent_s() for run in self._runs.all()), default=0.0)
        return "" if silent <= self._alive_s else f"a run's loop is silent for {silent:.0f} s"

    def _hindrance(self) -> str:
        for run in self._runs.all():
            status = run.overview.status()
            if status["state"] in ENDED:
                continue
            if status["state"] == "starting":
                return "a run is starting"
            if not status["broker_connected"]:
                return "a run is not connected to its broker"
        return ""

    async def _metrics(self, request: Request) -> Response:
        if not self._open_metrics:
            self._door.admit(request, Role.READ)
        accept = request.headers.get("accept", "")
        content, form = await self.calls.read(lambda: render_metrics(self._registry, accept))
        return Response(content, headers={"Content-Type": form})

    def _own(self) -> dict[str, float]:
        return {
            "sessions": len(self._door.sessions),
            "streams": len(self.streams),
            "failures": self._door.failures,
        }


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)  # noqa: S101  it is registered for these
    body = to_json({"error": str(error)})
    return Response(body, error.status, headers=error.headers, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  it is registered for these
    words = {404: "nothing is at this address", 405: f"not with {request.method}"}
    body = to_json({"error": words.get(error.status_code, error.detail)})
    return Response(
        body, error.status_code, headers=dict(error.headers or {}), media_type="application/json"
    )


async def _mistake(_request: Request, _error: Exception) -> Response:
    body = to_json({"error": "the coordinator made a mistake; its log says which"})
    return Response(body, HTTPStatus.INTERNAL_SERVER_ERROR, media_type="application/json")


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
