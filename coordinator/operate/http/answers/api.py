"""The API: one table of all endpoints, from which the routes and their description are made.

Reading takes the role `read`, changing `operate`. A body is a JSON object of known keys. What
changes a run is a command of its control socket, called with `by`: the name of the token's holder
and the address, which the audit keeps.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coordinator.operate.http.access.door import Door, address
from coordinator.operate.http.access.sessions import Session
from coordinator.operate.http.access.tokens import Holder, Role
from coordinator.operate.http.answers.calls import Calls, to_json
from coordinator.operate.http.answers.events import StreamPlace, Streams
from coordinator.operate.http.answers.rows import arrange
from coordinator.operate.http.answers.shapes import (
    DEVICE_KEYS,
    EMPTY,
    REASON,
    ROUNDS,
    SETTING,
    STOP,
    TOKEN,
    Shape,
    list_of,
    objection,
    ref,
)
from coordinator.operate.http.refusal import RefusalError
from coordinator.operate.http.viewed import ViewedRun, ViewedRuns
from edge_sdk.program.control import ControlCommand
from edge_sdk.protocol.errors import ConfigError

ROOT = "/api/v1"
RUN = f"{ROOT}/runs/{{task}}"
DEVICE = f"{RUN}/devices/{{device}}"
MOST_ROUNDS = 10_000


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query."""

    name: str
    says: str
    whole: bool = True
    """A number from 0 up; else text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A route: a method and a path, its answer, and all that the description says of it."""

    method: str
    path: str
    name: str
    says: str
    answer: Callable[[Request], Awaitable[Response]]
    role: Role | None = Role.READ
    """None: open to all."""
    parameters: tuple[Parameter, ...] = ()
    body: Shape | None = None
    result: Shape | None = None
    """Of an answer with status 200; None: 204, without content."""
    stream: bool = False
    """The answer is a stream of events, whose `data` has one of the shapes in `result`."""
    text: bool = False
    """The answer is text."""


SINCE = Parameter("since", "Sequence of the newest change that is known; 0: everything.")


class Api:
    """Answers of the API, for the server's loop."""

    def __init__(self, runs: ViewedRuns, door: Door, calls: Calls, streams: Streams) -> None:
        self._runs, self._door, self._calls, self._streams = runs, door, calls, streams

    def endpoints(self) -> list[Endpoint]:
        """Return all endpoints."""
        return [*self._session_endpoints(), *self._reading(), *self._steering()]

    def _session_endpoints(self) -> list[Endpoint]:
        path = f"{ROOT}/session"
        return [
            Endpoint(
                method="POST",
                path=path,
                name="signIn",
                says="Sign in with a token, or with the ticket of a link, which works once. The "
                "answer sets a cookie.",
                answer=self._sign_in,
                role=None,
                body=TOKEN,
                result=ref("Session"),
            ),
            Endpoint(
                method="GET",
                path=path,
                name="getSession",
                says="The one who sends this request.",
                answer=self._session,
                result=ref("Session"),
            ),
            Endpoint(
                method="DELETE",
                path=path,
                name="signOut",
                says="Sign out: the session ends.",
                answer=self._sign_out,
                role=None,
            ),
        ]

    def _reading(self) -> list[Endpoint]:
        def get(
            path: str,
            name: str,
            says: str,
            answer: Callable[[Request], Awaitable[Response]],
            result: Shape,
            *more: Parameter,
        ) -> Endpoint:
            return Endpoint(
                method="GET",
                path=path,
                name=name,
                says=says,
                answer=answer,
                parameters=more,
                result=result,
            )

        order = Parameter("sort", "A key of the rows; - before it turns it round.", False)
        wanted = Parameter(
            "filter",
            "Terms with commas between them, all of which must fit: `KEY=VALUE` (or `KEY:VALUE`), "
            "`KEY<NUMBER`, `KEY>NUMBER`, `label.NAME=VALUE`, or a part of the device's name.",
            False,
        )
        last = Parameter("rounds", "Number of rounds; 60 if it is missing.")
        after = Parameter("since", "Rounds above this one; 0: all.")
        return [
            get(
                f"{ROOT}/runs",
                "listRuns",
                "The runs that are served.",
                self._all,
                list_of("Status"),
            ),
            get(RUN, "getRun", "The state of a run.", self._status, ref("Status")),
            get(
                f"{RUN}/devices",
                "listDevices",
                "The devices of a run.",
                self._devices,
                list_of("Device"),
                SINCE,
                order,
                wanted,
            ),
            get(
                DEVICE,
                "getDevice",
                "A device with its last rounds.",
                self._device,
                ref("DeviceWithRounds"),
            ),
            get(
                f"{RUN}/rounds",
                "listRounds",
                "The rounds of a run.",
                self._rounds,
                list_of("Round"),
                after,
            ),
            get(f"{RUN}/blocks", "getBlocks", "The model's blocks.", self._blocks, ref("Blocks")),
            get(
                f"{RUN}/strip",
                "getStrip",
                "One character per device and round.",
                self._strip,
                ref("Strip"),
                last,
            ),
            get(
                f"{RUN}/audit",
                "listAudit",
                "Changes by people.",
                self._audit,
                list_of("Audit"),
                Parameter("since", "Number of the newest entry that is known; 0: everything."),
            ),
            Endpoint(
                method="GET",
                path=f"{RUN}/events",
                name="watchRun",
                says="Changes of a run as server-sent events: `status` (a state), `devices` (rows "
                "that changed) and `rounds` (new rounds), at most one of each a second. "
                "`Last-Event-ID` resumes a stream; without it and without `since`, the first "
                "events contain everything.",
                answer=self._events,
                parameters=(SINCE, Parameter("round", "The newest round that is known.")),
                result={"anyOf": [ref("Status"), list_of("Device"), list_of("Round")]},
                stream=True,
            ),
        ]

    def _steering(self) -> list[Endpoint]:
        def post(path: str, name: str, says: str, command: str, body: Shape) -> Endpoint:
            return Endpoint(
                method="POST",
                path=path,
                name=name,
                says=says,
                answer=self._steer(command, body),
                role=Role.OPERATE,
                body=body,
                result=ref("Done"),
            )

        return [
            post(f"{RUN}/pause", "pause", "Open no round until it is resumed.", "pause", EMPTY),
            post(f"{RUN}/resume", "resume", "Resume a paused run.", "resume", EMPTY),
            post(f"{RUN}/stop", "stop", "Stop the run; it can be served again.", "stop", STOP),
            post(f"{RUN}/rounds", "addRounds", "Let the run go on longer.", "rounds.add", ROUNDS),
            post(
                f"{RUN}/settings",
                "set",
                "Change a setting from the next round on.",
                "set",
                SETTING,
            ),
            post(
                f"{DEVICE}/quarantine",
                "quarantine",
                "Decline a device's bids.",
                "quarantine.add",
                REASON,
            ),
            post(
                f"{DEVICE}/allow",
                "allow",
                "Release a device from quarantine.",
                "quarantine.allow",
                EMPTY,
            ),
            post(
                f"{DEVICE}/forget",
                "forget",
                "Delete what the run keeps of a device.",
                "forget",
                EMPTY,
            ),
        ]

    # -- sessions ------------------------------------------------------------------------------

    async def _sign_in(self, request: Request) -> Response:
        body = await _body(request, TOKEN)
        name, session = self._door.sign_in(request, body["token"])
        secure = _is_secure(request)
        answer = self._describe(session.holder, session)
        answer.set_cookie(
            self._door.cookie,
            name,
            max_age=int(self._door.sessions.lasts_s),
            path="/",
            secure=secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    async def _session(self, request: Request) -> Response:
        holder = self._door.admit(request, Role.READ)
        return self._describe(holder, self._door.session(request))

    async def _sign_out(self, request: Request) -> Response:
        self._door.sign_out(request)
        answer = Response(status_code=HTTPStatus.NO_CONTENT)
        answer.delete_cookie(
            self._door.cookie,
            path="/",
            secure=_is_secure(request),
            httponly=True,
            samesite="strict",
        )
        return answer

    def _describe(self, holder: Holder, session: Session | None) -> Response:
        return _answer(
            {
                "role": holder.role.value,
                "name": holder.name,
                "until": None if session is None else session.until,
                "runs": [run.task for run in self._runs.all()],
            }
        )

    # -- reading -------------------------------------------------------------------------------

    async def _all(self, request: Request) -> Response:
        self._door.admit(request, Role.READ)
        return await self._read(lambda: [run.overview.status() for run in self._runs.all()])

    async def _status(self, request: Request) -> Response:
        run = self._run(request)
        return await self._read(run.overview.status)

    async def _devices(self, request: Request) -> Response:
        run, query = self._run(request), request.query_params
        since = _whole(request, "since", 0)
        order, wanted = query.get("sort", ""), query.get("filter", "")

        def rows() -> list[dict[str, Any]]:
            found = run.overview.devices(since if since <= run.overview.sequence else 0)
            return arrange(found, DEVICE_KEYS, wanted=wanted, order=order)

        return await self._read(rows)

    async def _device(self, request: Request) -> Response:
        run, name = self._run(request), request.path_params["device"]
        return await self._read(lambda: run.overview.device(name))

    async def _rounds(self, request: Request) -> Response:
        run, since = self._run(request), _whole(request, "since", 0)
        return await self._read(lambda: run.overview.rounds(since))

    async def _blocks(self, request: Request) -> Response:
        run = self._run(request)
        return await self._read(run.overview.blocks)

    async def _strip(self, request: Request) -> Response:
        run = self._run(request)
        rounds = min(max(1, _whole(request, "rounds", 60)), MOST_ROUNDS)
        return await self._read(lambda: run.overview.strip(rounds))

    async def _audit(self, request: Request) -> Response:
        run, since = self._run(request), _whole(request, "since", 0)
        command = _command(run, "audit")
        return await self._read(lambda: command(since=since))

    async def _events(self, request: Request) -> Response:
        run = self._run(request)
        start = self._streams.place(request.headers.get("last-event-id")) or StreamPlace(
            _whole(request, "since", 0), _whole(request, "round", 0)
        )
        by_cookie = "authorization" not in request.headers

        def may() -> bool:
            if by_cookie and self._door.session(request) is None:
                return False  # it has ended, or somebody has signed out
            return run in self._runs.all()

        return StreamingResponse(
            self._streams.open(run, start, may), media_type="text/event-stream"
        )

    def _run(self, request: Request, role: Role = Role.READ) -> ViewedRun:
        self._door.admit(request, role)
        try:
            return self._runs.get(request.path_params["task"])
        except ConfigError as error:
            raise RefusalError(HTTPStatus.NOT_FOUND, str(error)) from error

    async def _read(self, work: Callable[[], Any]) -> Response:
        body = await self._calls.read(lambda: to_json(work()))
        return Response(body, media_type="application/json")

    # -- steering ------------------------------------------------------------------------------

    def _steer(self, name: str, shape: Shape) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            run = self._run(request, Role.OPERATE)
            holder = self._door.admit(request, Role.OPERATE)
            command, body = _command(run, name), await _body(request, shape)
            arguments = {_ARGUMENTS.get((name, key), key): value for key, value in body.items()}
            if "device" in request.path_params:
                arguments["device"] = request.path_params["device"]
            by = f"{holder.name} at {address(request)}"
            result = await self._calls.command(lambda: to_json(command(**arguments, by=by)))
            return Response(b'{"result":%s}' % result, media_type="application/json")

        return answer


_ARGUMENTS = {("rounds.add", "add"): "rounds"}
"""Names of a command's arguments that are not those of the body."""


def _command(run: ViewedRun, name: str) -> ControlCommand:
    if (command := run.commands.get(name)) is None:
        raise RefusalError(HTTPStatus.NOT_IMPLEMENTED, f"this run has no command {name!r}")
    return command


def _answer(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _whole(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise RefusalError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number, 0 or more")
    return int(text)


async def _body(request: Request, shape: Shape) -> Any:
    """Read a request's body. Raises `RefusalError`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusalError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, and Content-Type: application/json"
        )
    try:
        body = json.loads(await request.body(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusalError(HTTPStatus.BAD_REQUEST, "the body is not JSON") from error
    if (why := objection(body, shape)) is not None:
        raise RefusalError(HTTPStatus.BAD_REQUEST, why)
    return body


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _is_secure(request: Request) -> bool:
    """True if the browser came by TLS, to us or to a proxy in front."""
    origin = request.headers.get("origin", "")
    return request.url.scheme == "https" or origin.lower().startswith("https://")
