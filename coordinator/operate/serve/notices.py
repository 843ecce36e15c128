"""Notices: news of a run, sent to a URL as JSON (`[notify]` in run.toml).

    the run's loop ──round, finished──▶ rules ──▶ bounded queue ──▶ a thread that sends

Nothing here holds up the run: its loop adds to a queue, and the thread waits, sends and tries
again. A receiver that does not answer costs its notices, nothing else. Notices are sent one after
the other, in order; each until a receiver takes it (status 200 to 299), refuses it for good, or has
not taken it after `TRIES` tries. Redirects are refused, certificates are checked. The same notice
may arrive twice: `id` tells.

    POST <url>   Content-Type: application/json
    X-Tessera-Signature: sha256=<HMAC-SHA256 of the body, in hex>    with `signing_key`

    {"v": 1, "id": "3f0a…", "event": "finished", "task": "digits", "run": "0123…", "round": 50,
     "time": 1767225600.0, "text": "the run is complete after round 50", "details": {…}}
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coordinator.errors import ConfigError, CoordinatorError
from coordinator.rounds.report import accuracy_of
from edge_sdk import __version__

if TYPE_CHECKING:
    from coordinator.operate.config import NotifyTable
    from coordinator.rounds.report import RoundReport

log = logging.getLogger(__name__)

VERSION = 1
SIGNATURE = "X-Tessera-Signature"
TIMEOUT_S = 10.0
"""Seconds that a receiver may be silent."""
TRIES = 6
FIRST_S, MAX_S = 1.0, 300.0
"""Seconds until a notice is sent again: at first, and at most. Each wait is four times the last."""
MAX_WAITING = 64
"""Most notices that wait; of more, the oldest are dropped."""
CLOSE_S = 10.0
"""Seconds that the end of a run waits for the last notices."""
LATER = frozenset({408, 425, 429})
"""Statuses below 500 that mean: try again."""


class NoticeError(CoordinatorError):
    """A notice that its receiver did not take."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final
        """True if trying again is of no use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """News of a run."""

    event: str
    text: str
    round: int = 0
    """Newest committed round."""
    details: Mapping[str, Any] = field(default_factory=dict)


class NoticeRules:
    """Tells of every round what of it is worth a notice."""

    def __init__(self, *, fell_points: float, fell_rounds: int) -> None:
        self.round = 0
        self._points, self._rounds = fell_points, fell_rounds
        self._best: tuple[float, int] | None = None
        self._low = 0
        """Rounds in a row whose accuracy was too far below the best."""
        self._quarantined: frozenset[str] = frozenset()

    def after(self, round: int, accuracy: float | None, quarantined: Iterable[str]) -> list[Notice]:
        """Note a round; return the news. A fall is told once, until the accuracy is back."""
        self.round, found = round, []
        if accuracy is not None:
            found += self._fell(accuracy)
        now = frozenset(quarantined)
        for name in sorted(now - self._quarantined):
            text = f"device {name} is quarantined: its bids are declined"
            found.append(
                Notice(event="quarantined", text=text, round=round, details={"device": name})
            )
        self._quarantined = now
        return found

    def _fell(self, accuracy: float) -> list[Notice]:
        if self._best is None or accuracy > self._best[0]:
            self._best = accuracy, self.round
        best, since = self._best
        if 100 * (best - accuracy) <= self._points:
            self._low = 0
            return []
        self._low += 1
        if self._low != self._rounds:
            return []
        text = (
            f"accuracy {accuracy:.2%} has been more than {self._points:g} points below the best, "
            f"{best:.2%} in round {since}, for {self._rounds} rounds"
        )
        details = {"accuracy": accuracy, "best": best, "best_round": since}
        return [Notice(event="accuracy_fell", text=text, round=self.round, details=details)]


def _standing(
    history: Iterable[Mapping[str, Any]],
) -> list[tuple[int, float | None, Sequence[str]]]:
    """Return number, accuracy and quarantined devices of the rounds that no rollback undid."""
    found: list[tuple[int, float | None, Sequence[str]]] = []
    for line in history:
        if (back := line.get("rolled_back")) is not None:
            found = [each for each in found if each[0] <= back["to"]]
        elif "quarantined" in line:
            found.append((line["round"], accuracy_of(line), line["quarantined"]))
    return found


class Notices:
    """Sends the notices of a served run, in a thread of its own. A context manager.

    Leaving it by an exception is a failure of the run, which is told, too.
    """

    def __init__(
        self,
        config: NotifyTable,
        *,
        task: str,
        run: str,
        history: Iterable[Mapping[str, Any]] = (),
        is_quiet: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        first_s: float = FIRST_S,
        timeout_s: float = TIMEOUT_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """`history`: lines of the run so far, of which nothing is told again. `is_quiet`: the run
        stands still on purpose. Raises `ConfigError` for a key that cannot be read.
        """
        self._config, self._task, self._run = config, task, run
        self._receiver = Receiver(config, timeout_s=timeout_s)
        self._rules = NoticeRules(fell_points=config.fell_points, fell_rounds=config.fell_rounds)
        for past in _standing(history):
            self._rules.after(*past)
        self._is_quiet, self._clock = is_quiet, clock
        self._first_s, self._close_s = first_s, close_s
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._until: float | None = None
        """Time to end at; None: the run goes on."""
        self._moved_s = clock()
        """Time of the newest round."""
        self._stalled = False
        self._thread = threading.Thread(target=self._work, name="notices", daemon=True)

    def __enter__(self) -> Notices:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            details = {"error": type(error).__name__}
            self.tell(Notice(event="failed", text=f"the run failed: {error}", details=details))
        with self._changed:
            self._until = self._clock() + self._close_s
            self._changed.notify()
        self._thread.join(self._close_s + 1.0)

    def watch(self, report: RoundReport) -> None:
        """Note a round of the run. Never waits."""
        accuracy = report.accuracy if report.best is None else report.best
        found = self._rules.after(report.round, accuracy, report.quarantined)
        with self._changed:
            self._moved_s, self._stalled = self._clock(), False
            self._changed.notify()
        for each in found:
            self.tell(each)

    def finished(self) -> None:
        """Note that the run is complete."""
        text = f"the run is complete after round {self._rules.round}"
        self.tell(Notice(event="finished", text=text))

    def tell(self, notice: Notice) -> None:
        """Queue a notice, if it is asked for. Never waits."""
        if notice.event not in self._config.events:
            return
        body = encode_notice(
            notice, task=self._task, run=self._run, round=notice.round or self._rules.round
        )
        with self._changed:
            self._waiting.append(body)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft()
                self._dropped += 1
            self._changed.notify()

    # -- the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        tried, due_s = 0, self._clock()
        while True:
            with self._changed:
                now, wait_s = self._clock(), self._stalls_in()
                if wait_s <= 0:
                    self._note_stall()
                    continue
                over = self._until is not None and (not self._waiting or now >= self._until)
                if over:
                    break
                if self._waiting:
                    wait_s = due_s - now
                if self._until is not None:
                    wait_s = min(wait_s, self._until - now)
                if wait_s > 0 or not self._waiting:
                    self._changed.wait(min(wait_s, MAX_S))
                    continue
                body, dropped = self._waiting[0], self._dropped
            done = self._send(body, tried)
            with self._changed:
                if not done and self._dropped == dropped:
                    due_s = self._clock() + min(self._first_s * 4**tried, MAX_S)
                    tried += 1
                    continue
                tried, due_s = 0, self._clock()
                if self._waiting and self._waiting[0] is body:
                    self._waiting.popleft()
        if self._waiting:
            log.warning("%d notices were not sent: the run has ended", len(self._waiting))

    def _stalls_in(self) -> float:
        """Return the seconds until the run counts as stalled; for a lock's holder."""
        if self._stalled or self._until is not None:
            return MAX_S
        return self._moved_s + 60 * self._config.stalled_minutes - self._clock()

    def _note_stall(self) -> None:
        self._moved_s, quiet = self._clock(), self._is_quiet()
        if quiet:
            return
        self._stalled = True
        text = f"no round was committed for {self._config.stalled_minutes:g} minutes"
        self.tell(Notice(event="stalled", text=text))

    def _send(self, body: bytes, tried: int) -> bool:
        """Send a notice; False if it is to be sent again."""
        try:
            self._receiver.send(body)
        except NoticeError as error:
            if error.final or tried + 1 >= TRIES:
                log.warning(
                    "a notice was not taken: %s", error, extra={"facts": {"event": "notice"}}
                )
                return True
            log.info("a notice is sent again: %s", error, extra={"facts": {"event": "notice"}})
            return False
        except Exception:
            log.exception("a notice cannot be sent")
            return True
        return True


def encode_notice(notice: Notice, *, task: str, run: str, round: int) -> bytes:
    """Write a notice as JSON."""
    content = {
        "v": VERSION,
        "id": secrets.token_hex(8),
        "event": notice.event,
        "task": task,
        "run": run,
        "round": round,
        "time": time.time(),
        "text": notice.text,
        "details": dict(notice.details),
    }
    return json.dumps(content).encode()


class Receiver:
    """The URL that notices are sent to."""

    def __init__(self, config: NotifyTable, *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises `ConfigError` if no URL is set, or key or certificate cannot be read."""
        if config.url is None:
            raise ConfigError("notify.url is not set: name the URL that notices are sent to")
        self._url, self._timeout_s = urlsplit(config.url), timeout_s
        self._key = None if config.signing_key is None else _read_key(config.signing_key)
        self._tls: ssl.SSLContext | None = None
        if self._url.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=config.ca)
            except OSError as error:
                raise ConfigError(f"notify.ca: {config.ca} cannot be read: {error}") from error

    @property
    def name(self) -> str:
        """Scheme and host: the rest of the URL may be secret."""
        return f"{self._url.scheme}://{self._url.netloc}"

    def send(self, body: bytes) -> int:
        """Send a body once; returns the status. Raises `NoticeError`."""
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"tessera-fl/{__version__}",
            "Connection": "close",
        }
        if self._key is not None:
            digest = hmac.new(self._key, body, "sha256").hexdigest()
            headers[SIGNATURE] = f"sha256={digest}"
        target = (self._url.path or "/") + (f"?{self._url.query}" if self._url.query else "")
        connection = self._connect()
        try:
            connection.request("POST", target, body, headers)
            status = connection.getresponse().status
        except ssl.SSLCertVerificationError as error:
            reason = f"{self.name}: its certificate is not valid: {error.verify_message}"
            raise NoticeError(reason, final=False) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = f"{self.name} does not answer: {error or type(error).__name__}"
            raise NoticeError(reason, final=False) from error
        finally:
            connection.close()
        if 200 <= status < 300:
            return status
        if 300 <= status < 400:
            reason = f"{self.name} redirects (status {status}), which is refused: set the new URL"
            raise NoticeError(reason, final=True)
        final = status < 500 and status not in LATER
        raise NoticeError(f"{self.name} answers with status {status}", final=final)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "", self._url.port
        if self._tls is not None:
            return http.client.HTTPSConnection(
                host, port, timeout=self._timeout_s, context=self._tls
            )
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)


def _read_key(path: Path) -> bytes:
    """Read a key, without spaces and newlines around it. Raises `ConfigError`."""
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"notify.signing_key: {path} cannot be read: {error.strerror}") from error
    if not found:
        raise ConfigError(f"notify.signing_key: {path} is empty")
    return found


def try_receiver(config: NotifyTable, task: str) -> dict[str, Any]:
    """Send a notice with the event `test`, once; returns the receiver's status, or what is wrong.

    Raises `ConfigError`.
    """
    receiver = Receiver(config)
    body = encode_notice(Notice(event="test", text="a test of notices"), task=task, run="", round=0)
    found: dict[str, Any] = {"receiver": receiver.name, "status": None, "error": None}
    try:
        found["status"] = receiver.send(body)
    except NoticeError as error:
        found["error"] = str(error)
    return found
