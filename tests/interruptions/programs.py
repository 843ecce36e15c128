"""Programs that are started, watched by their log, ended and started again."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.operate.broker.embedded import find_mosquitto
from edge_sdk.program.settings import PREFIX
from tests.waiting import HANGS_S, free_port, listens, until

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02
TAIL_LINES = 25


SKEWED = """\
import time
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {skew_s}
time.time_ns = lambda: real_ns() + {skew_s} * 10**9
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log: its number, and its content if it is JSON (`message` alone if not)."""

    number: int
    content: Mapping[str, Any]

    def fits(self, event: str | None, match: str | None, facts: Mapping[str, Any]) -> bool:
        """Whether it is of this event, matches, and has these facts."""
        content = self.content
        return (
            event in (None, content.get("event"))
            and (match is None or re.search(match, str(content.get("message"))) is not None)
            and all(content.get(name) == value for name, value in facts.items())
        )


class Program:
    """One of our programs. All its lives write to one log."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        """Beside that of the tests."""
        self.before: Callable[[], None] | None = None
        """Called in the new process before the program begins."""
        self._command = list(command)

    def start(self) -> None:
        """Start it, or start it again."""
        assert not self.running, f"{self.name} runs already"
        environment = {key: text for key, text in os.environ.items() if not key.startswith(PREFIX)}
        environment |= {"OMP_NUM_THREADS": "1", "TESSERA_WEIGH": "false", **self.environment}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=ROOT,
                preexec_fn=self.before,
            )

    def skew_clock(self, skew_s: int) -> None:
        """Let its clock be so much ahead, from its next start on."""
        folder = self.log.with_suffix(".clock")
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SKEWED.format(skew_s=skew_s))
        # Without compiled copies: of two files of one second, the older one's would be taken.
        self.environment |= {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """`kill -9`."""
        assert self.running, f"{self.name} has ended"
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ask it to stop (SIGTERM), once it has said something; its exit code."""
        self.wait_for()
        assert self.process is not None
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = 2 * HANGS_S) -> int:
        """Its exit code, when it has ended."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.tail()}") from None

    def end(self) -> None:
        """However it is: it has ended afterwards."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def lines(self) -> list[Line]:
        """What it has said so far, whole lines only."""
        if not self.log.exists():
            return []
        text = self.log.read_text(errors="replace")
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [Line(number, _content(line)) for number, line in enumerate(whole)]

    def find(
        self,
        event: str | None = None,
        *,
        match: str | None = None,
        after: Line | None = None,
        **facts: Any,
    ) -> Iterator[Line]:
        """The lines of an event, behind another, that match and have these facts."""
        first = 0 if after is None else after.number + 1
        return (line for line in self.lines[first:] if line.fits(event, match, facts))

    def last(self) -> Line | None:
        """The last line so far, to look for what comes after it."""
        lines = self.lines
        return lines[-1] if lines else None

    def wait_for(
        self,
        event: str | None = None,
        *,
        match: str | None = None,
        after: Line | None = None,
        **facts: Any,
    ) -> Line:
        """The first such line, as soon as it is there (see `find`). Fails if it ends without."""
        by = time.monotonic() + HANGS_S
        while True:
            ended = not self.running  # asked first: no line is missed
            found = next(self.find(event, match=match, after=after, **facts), None)
            if found is not None:
                return found
            wanted = f"{event or ''} {match or ''} {facts or ''}".strip()
            assert not ended, f"{self.name} ended without: {wanted}\n{self.tail()}"
            assert time.monotonic() < by, f"{self.name} never said: {wanted}\n{self.tail()}"
            time.sleep(POLL_S)

    def peak_mb(self) -> float:
        """The most memory it had so far, as the system counts it."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- {self.name}", *lines[-TAIL_LINES:]])


class Mosquitto:
    """A real broker on loopback that comes back on the same port."""

    def __init__(self, folder: Path, *, persistent: bool) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port()
        self.persistent = persistent
        self._process: subprocess.Popen[bytes] | None = None
        lines = [
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            "user root",
            "log_dest stderr",
            "sys_interval 0",
            "set_tcp_nodelay true",
            "max_packet_size 327680",
            "max_inflight_messages 20",
            "max_queued_messages 10000",
            "max_queued_bytes 67108864",
            f"persistence {str(persistent).lower()}",
            f"persistence_location {folder}/",
            "autosave_interval 1",
        ]
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        """Start it, and return when it listens."""
        program = find_mosquitto()
        assert program is not None
        with (self.folder / "mosquitto.log").open("ab") as output:
            self._process = subprocess.Popen(
                [program, "-c", str(self.folder / "mosquitto.conf")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        process = self._process
        until(lambda: listens(self.port) or process.poll() is not None)
        assert process.poll() is None, (self.folder / "mosquitto.log").read_text()[-2000:]

    def stop(self) -> None:
        """End it as its operator would; a persistent one saves what it has."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(HANGS_S)

    def kill(self) -> None:
        """`kill -9`: a persistent one comes back with what it saved last."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop and start it."""
        self.stop()
        self.start()


def _content(line: str) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    return content if isinstance(content, dict) else {"message": line}
