"""A device that takes part in several tasks: a service for each, over one link, in one process.

    DeviceService a ──port──▶ ┐                 ┌─ pause
    DeviceService b ──port──▶ ┴─ SharedLink     ├─ energy of the day    `Household`
             │        │                         └─ training slot
             └────────┴──── log, logbooks, watchdog

Every task has its own folder, run, movements and round. Only one is trained at a time
(`edge_sdk.decide.turns`). The task of the highest priority opens the link, so the link's will is
its own. A task that fails ends alone, and the others go on; the device ends when
all tasks have, with the error of the first that failed. A broker that refuses the device, and
another program with its name, end all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.ending import ReplacedError, ending_of
from edge_sdk.device.service.service import DeviceService
from edge_sdk.device.stores.household import Household
from edge_sdk.program.logs import fact, log_scope, scope_of
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.transport.link import OpenLink
from edge_sdk.transport.opening import open_link as open_mqtt
from edge_sdk.transport.settings import LinkError
from edge_sdk.transport.shared import SharedLink

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the loops of all tasks."""
SILENT_S = 30.0
"""Seconds after which a loop hangs that gives no sign of life; it waits for two at most."""


class SeveralTasks:
    """The tasks of one device. Made once, run once."""

    def __init__(
        self,
        config: DeviceConfig,
        *,
        household: Household | None = None,
        open_link: OpenLink | None = None,
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_link` None: MQTT. `watchdog` as for `DeviceService`, whose errors it raises."""
        opener = partial(open_mqtt, config.broker) if open_link is None else open_link
        self._link = SharedLink(opener)
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._clock = clock
        self._household = household or Household(config.state_dir, config.name, config.priorities())
        self._signs = [_Sign(self._watchdog, clock) for _ in config.by_task()]
        self.services = [
            self._service(each, sign)
            for each, sign in zip(config.by_task(), self._signs, strict=True)
        ]
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._errors: dict[int, BaseException] = {}

    def _service(self, config: DeviceConfig, sign: Watchdog) -> DeviceService:
        try:
            return DeviceService(
                config,
                open_link=self._link.open_link,
                clock=self._clock,
                watchdog=sign,
                household=self._household,
            )
        except ConfigError as error:
            raise type(error)(f"task {config.task}: {error}") from error

    def stop(self) -> None:
        """Let `run` end soon, from any thread or signal handler."""
        for service in self.services:
            service.stop()

    def run(self) -> None:
        """Take part in all tasks until their runs are finished, or `stop` is called. Blocks.

        Raises as `DeviceService.run`, once all tasks have ended.
        """
        threads = [
            Thread(
                target=self._run,
                args=(number,),
                name=f"{service.config.task}-loop",
                daemon=True,
            )
            for number, service in enumerate(self.services)
        ]
        running = set(range(len(threads)))
        try:
            self._start(threads)
            while running:
                now = self._clock()
                if all(self._signs[number].is_alive(now) for number in running):
                    self._watchdog.alive(now)
                try:
                    ended = self._ended.get(
                        timeout=max(0.01, min(LOOK_S, self._watchdog.due_s - now))
                    )
                except Empty:
                    continue
                running.discard(ended)
                self._note_end(ended, others=bool(running))
        except BaseException:
            self.stop()
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self._watchdog.stopping()
        for _, error in sorted(self._errors.items()):
            raise error

    def _start(self, threads: Sequence[Thread]) -> None:
        """Start the loops; the first one opens the link, unless it ends before."""
        first, *others = threads
        first.start()
        while first.is_alive() and not self._link.asked.wait(0.1):
            pass
        for thread in others:
            thread.start()

    def _run(self, number: int) -> None:
        service = self.services[number]
        try:
            with log_scope(task=service.config.task):
                service.run()
        except BaseException as error:
            self._errors[number] = error
        finally:
            self._ended.put(number)

    def _note_end(self, number: int, *, others: bool) -> None:
        error = self._errors.get(number)
        if error is None or not others:
            return
        task = self.services[number].config.task
        if isinstance(error, ReplacedError | LinkError):
            self.stop()
            return
        ending = ending_of(error)
        extra = fact(ending.event, of=task)
        with log_scope(task=task):  # it is the last error of this task
            log.error("task %s ends, the others go on: %s", task, ending.said, extra=extra)


class _Sign(Watchdog):
    """The sign of life of one of several loops; what it says goes to the one of the process."""

    def __init__(self, whole: Watchdog, clock: Callable[[], float]) -> None:
        super().__init__()
        self._whole = whole
        self._heard_s = clock()

    def is_alive(self, now: float) -> bool:
        return now - self._heard_s < SILENT_S

    def ready(self, status: str) -> None:
        self._whole.ready(status)

    def status(self, text: str) -> None:
        self._whole.status(f"{scope_of('task')}: {text}")

    def alive(self, now: float) -> None:
        self._heard_s = now

    def stopping(self) -> None:
        """Say nothing: other tasks may go on."""
