"""The control socket: commands about a run that is being served, from the same account.

    <run>/control.sock    a Unix socket, mode 0600; exists while the run is served

Each request and each answer is one line of JSON. A connection may carry several, one after the
other:

    {"v": 1, "command": "codes.revoke", "arguments": {"id": "1f3a9c04"}}
    {"v": 1, "ok": true, "result": {…}}
    {"v": 1, "ok": false, "error": "there is no code '1f3a9c04'; known are …"}

Commands run in the socket's own threads. One that changes the run itself has to hand its work to
the run's loop.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edge_sdk.program.files import remove
from edge_sdk.program.settings.reader import nearest
from edge_sdk.protocol.errors import TesseraError

log = logging.getLogger(__name__)

SOCKET = "control.sock"
VERSION = 1
MAX_LINE_BYTES = 2**20
"""Longest request."""
MAX_ANSWER_BYTES = 2**26
"""Longest answer: the rows of some 60,000 devices, or a map of 300,000 blocks."""
MAX_CONNECTIONS = 16
IDLE_S = 60.0
"""Seconds after which a silent connection is closed."""
ANSWER_S = 30.0
"""Seconds that a command waits for its answer."""

LAST_S = 2.0
"""Seconds that a closing socket waits for answers that are under way."""

ControlCommand = Callable[..., Any]
"""Takes a request's arguments by name and returns a JSON value; `TesseraError` is an answer too."""


class ControlError(TesseraError):
    """A command that the process serving the run refuses, or an answer that cannot be read."""


class NotServedError(ControlError):
    """Nobody serves the run now."""


class ControlSocket:
    """Answers commands on a run's socket, from `start` to `close`."""

    def __init__(self, run: Path, commands: Mapping[str, ControlCommand]) -> None:
        """The run's folder must be locked by this process."""
        self._path, self._commands = run / SOCKET, dict(commands)
        self._listener = socket.socket(socket.AF_UNIX)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._answering, self._answered = 0, threading.Condition()
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        remove(self._path)  # left by a process that was killed
        try:
            with _short(self._path) as address:
                self._listener.bind(address)
            os.chmod(self._path, 0o600)  # nobody can connect before it listens
            self._own = os.stat(self._path).st_ino
            self._listener.listen(MAX_CONNECTIONS)
        except OSError as error:
            self._listener.close()
            with suppress(OSError):
                remove(self._path)
            reason = error.strerror or error  # a path that is too long has no number
            raise ControlError(f"{self._path} cannot be made: {reason}") from error

    def start(self) -> None:
        """Start to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and remove the socket; answers that are under way are given first."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        with suppress(OSError):
            if os.stat(self._path).st_ino == self._own:  # else it is that of a later process
                remove(self._path)
        with self._answered:
            self._answered.wait_for(lambda: not self._answering, LAST_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="control-client", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(IDLE_S)
            with connection, connection.makefile("rwb") as stream:
                while line := stream.readline(MAX_LINE_BYTES):
                    with self._being_answered():
                        stream.write(self._line(line))
                        stream.flush()
        except OSError:
            pass  # it went away
        finally:
            self._slots.release()

    @contextmanager
    def _being_answered(self) -> Iterator[None]:
        with self._answered:
            self._answering += 1
        try:
            yield
        finally:
            with self._answered:
                self._answering -= 1
                self._answered.notify_all()

    def _line(self, line: bytes) -> bytes:
        answer = json.dumps(self._answer(line)).encode() + b"\n"
        if len(answer) <= MAX_ANSWER_BYTES:
            return answer
        error = f"the answer has {len(answer)} bytes, and at most {MAX_ANSWER_BYTES} are sent"
        return json.dumps({"v": VERSION, "ok": False, "error": error}).encode() + b"\n"

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return {"v": VERSION, "ok": True, "result": self._perform(line)}
        except (TesseraError, OSError) as error:
            return {"v": VERSION, "ok": False, "error": str(error)}
        except Exception as error:
            log.exception("a command failed")
            return {"v": VERSION, "ok": False, "error": f"the command failed: {error!r}"}

    def _perform(self, line: bytes) -> Any:
        try:
            request = json.loads(line)
            version, name = request["v"], request["command"]
            arguments = request.get("arguments", {})
            if not isinstance(arguments, dict) or not isinstance(name, str):
                raise TypeError("arguments is not a table, or command no text")
        except (ValueError, KeyError, TypeError) as error:
            raise ControlError(f"the request cannot be read: {error!r}") from error
        if version != VERSION:
            raise ControlError(f"requests here have version {VERSION}, not {version!r}")
        if (command := self._commands.get(name)) is None:
            raise ControlError(f"unknown command {name!r}{nearest(name, self._commands)}")
        try:
            return command(**arguments)
        except TypeError as error:
            raise ControlError(f"{name}: {error}") from error


def ask_run(run: Path, command: str, **arguments: Any) -> Any:
    """Send a command to the process that serves a run, and return its result.

    Raises `NotServedError` if there is none, and `ControlError` with its reason if it refuses.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with _short(run / SOCKET) as address:
                connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotServedError(f"{run} is not being served") from error
        except PermissionError as error:
            raise ControlError(
                f"{run / SOCKET} belongs to another account: run this command as that one"
            ) from error
        request = {"v": VERSION, "command": command, "arguments": arguments}
        try:
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                answer = json.loads(stream.readline(MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            raise ControlError(f"{run}: the process that serves it does not answer") from error
    if not answer.get("ok"):
        raise ControlError(str(answer.get("error")))
    return answer.get("result")


def is_served(run: Path) -> bool:
    """True if a process answers on a run's socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        try:
            with _short(run / SOCKET) as address:
                connection.connect(address)
        except PermissionError:
            return True  # another account serves it
        except OSError:
            return False
    return True


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Give an address for a socket whose path may be too long for one (108 bytes on Linux)."""
    if len(os.fsencode(path)) < 100 or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
