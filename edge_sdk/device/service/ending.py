"""The end of a device: its exit code, the words for its own log, and those of its farewell.

    TesseraError
    ├── BrokerError      the broker is not reached in time, or does not let this device take part
    └── ReplacedError    a program that was started later has this device's name

The farewell goes to the coordinator. It never quotes an error about data, which may quote the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_sdk.program.command import EXIT_INTERRUPTED
from edge_sdk.protocol.errors import ConfigError, TesseraError

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_BROKER = 4
EXIT_TASK = 5
EXIT_REPLACED = 6
EXIT_DENIED = 7


class BrokerError(TesseraError):
    """The broker cannot be reached in time, or does not let this device take part."""


class ReplacedError(TesseraError):
    """A program that was started later takes part under this device's name."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a device program."""

    code: int
    """Exit code."""
    event: str
    """Kind of the end, in one word."""
    said: str
    """Words for the device's own log."""
    told: str
    """Words for the coordinator."""


FINISHED = Ending(0, "finished", "the run is finished", "the run is finished")
STOPPED = Ending(0, "stopped", "told to stop", "it was told to stop")
VANISHED = "it vanished without a goodbye: it crashed, or lost its power or its network"
"""Last will of a device, which the broker sends for it."""


def ending_of(error: BaseException) -> Ending:
    """Return how a device ends that fails with this error."""
    from edge_sdk.data.errors import UNFIT, DataError
    from edge_sdk.transport.settings import DeniedError, LinkError

    words = str(error)
    if isinstance(error, KeyboardInterrupt):
        return Ending(EXIT_INTERRUPTED, "interrupted", "interrupted", "it was interrupted (Ctrl-C)")
    if isinstance(error, DataError):
        return Ending(EXIT_DATA, "data", words, UNFIT)
    for kind, before, event, code in (
        (BrokerError, "", "broker", EXIT_BROKER),
        (DeniedError, "", "denied", EXIT_DENIED),
        (ReplacedError, "", "replaced", EXIT_REPLACED),
        (LinkError, "[broker] ", "link", EXIT_CONFIG),
        (ConfigError, "", "config", EXIT_CONFIG),
        (TesseraError, "this device cannot train the task: ", "task", EXIT_TASK),
    ):
        if isinstance(error, kind):
            return Ending(code, event, before + words, before + words)
    if isinstance(error, OSError):
        return Ending(EXIT_FAILED, "files", words, f"a file or its disk failed: {words}")
    name = type(error).__name__
    return Ending(EXIT_FAILED, "fault", words, f"a fault in its program ({name}); see its own log")
