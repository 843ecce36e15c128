"""Calls that may take a while, made outside the server's loop, so that it goes on answering.

Reads and commands have threads of their own: commands may wait for the run's loop, and reads then
still answer. What waits too long, or finds too many waiting, is refused as busy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

from coordinator.operate.http.refusal import RefusalError
from coordinator.service.admission.requests import BusyError
from edge_sdk.protocol.errors import ConfigError, TesseraError

log = logging.getLogger(__name__)

THREADS = 4
MAX_WAITING = 32
ANSWER_S = 28.0
"""Seconds that a request waits: a little longer than a command waits for the run's loop."""
BUSY = "the coordinator is busy and did not answer in time: try again"

_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))
"""Answers are made of new values, none of which contains itself."""

T = TypeVar("T")


class Calls:
    """Threads for reads and for commands, from the making to `close`. For the server's loop."""

    def __init__(self, *, wait_s: float = ANSWER_S) -> None:
        self._wait_s = wait_s
        self._reads = ThreadPoolExecutor(THREADS, "http-read")
        self._commands = ThreadPoolExecutor(THREADS, "http-command")
        self._waiting = 0

    async def read(self, work: Callable[[], T]) -> T:
        """Do what only reads. Raises `RefusalError`."""
        return await self._call(self._reads, work, HTTPStatus.NOT_FOUND)

    async def command(self, work: Callable[[], T]) -> T:
        """Do what changes something. Raises `RefusalError`."""
        return await self._call(self._commands, work, HTTPStatus.BAD_REQUEST)

    async def _call(self, pool: ThreadPoolExecutor, work: Callable[[], T], wrong: HTTPStatus) -> T:
        """`wrong`: the status for a value that is wrong or unknown."""
        if self._waiting >= MAX_WAITING:
            raise RefusalError(HTTPStatus.SERVICE_UNAVAILABLE, BUSY, retry_s=1)
        self._waiting += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, work)
            return await asyncio.wait_for(future, self._wait_s)
        except (asyncio.TimeoutError, BusyError) as error:
            raise RefusalError(
                HTTPStatus.SERVICE_UNAVAILABLE, str(error) or BUSY, retry_s=5
            ) from error
        except RefusalError:
            raise
        except ConfigError as error:
            raise RefusalError(wrong, str(error)) from error
        except (TesseraError, OSError) as error:
            raise RefusalError(HTTPStatus.CONFLICT, str(error)) from error
        except Exception as error:
            log.exception("a request failed")
            raise RefusalError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the coordinator made a mistake; its log says which",
            ) from error
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads; what waits for one is dropped."""
        for pool in (self._reads, self._commands):
            pool.shutdown(wait=False, cancel_futures=True)


def to_json(value: Any) -> bytes:
    """Write JSON as browsers read it: a number that is not finite is null."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        text = _ENCODER.encode(_finite(value))
    return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
