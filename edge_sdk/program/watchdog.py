"""Tells systemd that a program is ready, alive, or about to stop.

    systemd ──NOTIFY_SOCKET, WATCHDOG_USEC──▶ Watchdog ◀──alive(now)── the program's loop

Signs of life come from the loop itself, in every iteration, never from a separate thread or timer:
a loop that hangs falls silent, and systemd restarts the program (`WatchdogSec=` of its unit).
Without systemd, nothing is sent. If systemd does not listen, the program only logs a warning:
nothing here blocks or raises.

It speaks for the whole process, so a program makes one, and a library none: see `sd_notify(3)`.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds until a failed sign of life is tried again."""


class Watchdog:
    """Speaks for one program; used by one thread, its loop.

    `due_s` is the time of the next call to `alive`, on the clock that the loop passes to it: a loop
    must not wait longer. Infinite while nobody waits for signs of life.
    """

    def __init__(self, address: str | None = None, timeout_s: float = math.inf) -> None:
        """`address` None: say nothing. `timeout_s`: longest silence that systemd tolerates."""
        self._address = address
        self.period_s = timeout_s / 2
        """Longest time between two signs of life of the loop."""
        self._warned = False
        self.due_s = math.inf if math.isinf(timeout_s) or address is None else -math.inf

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> Watchdog:
        """Make the watchdog that systemd asked for; silent if it did not.

        None: the process's environment. The variables are removed, or programs that we start, such
        as Mosquitto, would speak for us.
        """
        found = os.environ if environment is None else environment
        address = found.pop("NOTIFY_SOCKET", "")
        ours = found.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = found.pop("WATCHDOG_USEC", "0")
        if not address:
            return cls()
        if address[0] not in "/@":
            log.warning("NOTIFY_SOCKET = %r is not a Unix socket: not notifying systemd", address)
            return cls()
        if not ours:
            return cls(address)  # the watchdog is for a parent process
        if not (microseconds.isascii() and microseconds.isdigit()):
            log.warning("WATCHDOG_USEC = %r is not a number: no signs of life", microseconds)
            return cls(address)
        return cls(address, int(microseconds) / 1e6 or math.inf)

    def ready(self, status: str) -> None:
        """Report that the program has started; from now on systemd counts."""
        self._say("READY=1", _status(status))

    def status(self, text: str) -> None:
        """Report what the program is doing, for `systemctl status`."""
        self._say(_status(text))

    def alive(self, now: float) -> None:
        """Note that the loop ran at `now`, in seconds; report it when due."""
        if now >= self.due_s:
            said = self._say("WATCHDOG=1")
            self.due_s = now + (self.period_s if said else min(RETRY_S, self.period_s))

    def stopping(self) -> None:
        """Report that the program is about to end."""
        self._say("STOPPING=1")

    def _say(self, *lines: str) -> bool:
        """Send lines; True if that worked."""
        if self._address is None:
            return True
        name = self._address
        target = "\0" + name[1:] if name[0] == "@" else name  # an abstract name
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.sendto("\n".join(lines).encode(), target)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("cannot tell systemd %s at %s: %s", lines[0], name, error)
            return False
        return True


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())
