"""Real training of a simulated fleet: cohorts of devices, spread over an engine's processes.

When the first of several assigned devices needs its movement, all of them are trained: virtual
time decides when a movement arrives, and nothing of its content. The assigned devices are put in
order of their names and cut into cohorts of a fixed size before the work is spread, so the cut does
not depend on the number of processes.

Within a cohort, devices are trained one after the other. Training them together, with stacked
weights and batched products, was measured and is slower here (docs/fleets.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from coordinator.errors import ConfigError, CoordinatorError
from coordinator.simulate.fleet.engines.engine import (
    PendingCohort,
    Submit,
    TrainingEngine,
    TrainingKit,
)
from coordinator.simulate.fleet.engines.local import local_engine
from coordinator.simulate.fleet.hands import Cohort, CohortTerms, DeviceOrder
from coordinator.simulate.fleet.shared import DealtData, Trays, view_of
from coordinator.simulate.fleet.training import MadeMovement
from coordinator.simulate.ram import DirectOutlet
from edge_sdk.device.machine import Train
from edge_sdk.device.stores.residuals import ArrayStore
from edge_sdk.device.stores.variates import Variates
from edge_sdk.protocol.encoding.codec import decode_blocks, encoded_size
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.messages.round import Assignment, RoundOpen
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest

if TYPE_CHECKING:
    from multiprocessing.shared_memory import SharedMemory

    from typing_extensions import Self

COHORT = 10
"""Devices of a cohort."""
TRAY_BYTES = 32 * 2**20
"""Largest shared memory for a cohort's movements; larger ones come through a pipe."""


class CohortTraining:
    """A `FleetTraining` on real data. Use it in a `with` block, which ends its engine."""

    def __init__(
        self,
        plan: ModelPlan,
        manifest: Manifest,
        files: Mapping[str, bytes],
        dealt: DealtData,
        names: Mapping[str, int],
        *,
        seed: int,
        processes: int = 1,
        cohort: int = COHORT,
        engine: TrainingEngine | None = None,
    ) -> None:
        """`manifest` and `files` are those of the task's compiled graphs.

        `names` are the devices' places in `dealt`. `processes` 1 trains in this process; more need
        a program whose main module can be imported (`if __name__ == "__main__":`). An `engine`
        trains elsewhere, such as `RayEngine`, and then `processes` is not for this. Equal seeds
        give equal bits, whatever `processes`, `cohort` and `engine` are. Raises `ConfigError`.
        """
        if cohort < 1:
            raise ConfigError(f"cohort must be at least 1, not {cohort}")
        if len(names) != len(dealt.ends):
            raise ConfigError(f"data is dealt to {len(dealt.ends)} devices; there are {len(names)}")
        if engine is not None and processes != 1:
            raise ConfigError("processes are those of this machine; an engine has its own")
        self.cohort = cohort
        """Devices of a cohort."""
        self._engine = local_engine(processes) if engine is None else engine
        self._plan = plan
        self._kit = TrainingKit(plan, manifest, files, dealt, seed)
        self._names = names
        self._made: dict[tuple[str, int], tuple[_Handed, int]] = {}
        """Per device and round, what its cohort hands over, and the device's place in it."""
        self._variates: dict[str, Variates] = {}
        """Control variates of devices, in a run that has them: as much RAM as their models."""
        self._controls: dict[tuple[str, int], Blocks] = {}
        """Per device and round, the global variate that it trains with, until it is done."""
        self._stack = ExitStack()
        self._submit: Submit | None = None
        self._trays: Trays | None = None

    def __enter__(self) -> Self:
        """Start the engine when it is first needed."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine and give the shared memory back."""
        self._submit = None
        self._stack.close()

    def fetch(self, opened: RoundOpen, assignment: Assignment, outlet: DirectOutlet) -> int:
        """See `FleetTraining`; the training of all devices that are assigned begins."""
        if (assignment.device, assignment.round) not in self._made:
            self._order(opened, outlet)
        return outlet.pass_by(assignment)

    def make(self, work: Train) -> MadeMovement:
        """See `FleetTraining`."""
        assignment, opened = work.assignment, work.opened
        handed, place = self._made.pop((assignment.device, assignment.round))
        control = self._controls.pop((assignment.device, assignment.round), None)
        with _explained():
            made = handed.take(place)
        if isinstance(made, str):
            raise TrainingError(made)
        if control is not None:
            self._variates[assignment.device].keep(
                opened.round,
                control,
                decode_blocks(self._plan, made.payload)[1],
                steps=opened.steps,
                learning_rate=opened.local_rule.learning_rate,
            )
        return made

    def settle(self, device: str, round: int, *, used: bool) -> None:
        """See `FleetTraining`."""
        if device in self._variates:
            self._variates[device].settle(round, used=used)

    def _order(self, opened: RoundOpen, outlet: DirectOutlet) -> None:
        """Begin the training of every device that has an assignment and none of this yet."""
        if opened.up.kind == "top-k":
            raise CoordinatorError(
                "top-k keeps values back on the device, which simulated devices cannot do: use "
                "another encoding, or a Federation"
            )
        terms = CohortTerms(opened.local_rule, opened.steps, opened.batch_size, opened.up)
        waiting = {(each[0].device, each[0].round): each for each in outlet.waiting}
        for key in [key for key in self._made if key not in waiting]:
            handed, _ = self._made.pop(key)
            handed.leave()
            self._controls.pop(key, None)
        new = [each for key, each in waiting.items() if key not in self._made]
        new.sort(key=lambda each: (id(each[1]), each[0].device))
        for _, alike in groupby(new, key=lambda each: id(each[1])):
            jobs = list(alike)
            _, encoded, buffers = jobs[0]
            theta = encoded.decoded
            for first in range(0, len(jobs), self.cohort):
                cut = jobs[first : first + self.cohort]
                orders = tuple(self._ordered(job[0], opened, outlet) for job in cut)
                handed = self._hand_out(Cohort(terms, theta, buffers, orders))
                for place, order in enumerate(orders):
                    self._made[order.device, order.round] = handed, place

    def _hand_out(self, cohort: Cohort) -> _Handed:
        """Give a cohort to a process, with a tray for what it makes."""
        submit, tray = self._begin(), None
        size = encoded_size(self._plan, self._plan.all_groups(), cohort.terms.up)
        if self._engine.trays and self.cohort * size <= TRAY_BYTES:
            if self._trays is None:
                self._trays = Trays(self.cohort * size)
                self._stack.callback(self._trays.close)
            tray = self._trays.take()
            cohort = replace(cohort, tray=tray.name)
        with _explained():
            return _Handed(submit(cohort), len(cohort.orders), tray, self._trays)

    def _ordered(
        self, assignment: Assignment, opened: RoundOpen, outlet: DirectOutlet
    ) -> DeviceOrder:
        device, reserved = assignment.device, outlet.reserved(assignment)
        return DeviceOrder(
            device,
            self._names[device],
            assignment.round,
            assignment.groups,
            assignment.widths,
            None if reserved is None else reserved[0],
            None if reserved is None else reserved[1],
            self._correction(assignment, outlet) if opened.variates else None,
        )

    def _correction(self, assignment: Assignment, outlet: DirectOutlet) -> Float32:
        device, round = assignment.device, assignment.round
        control = self._controls[device, round] = outlet.control_of(assignment)
        if device not in self._variates:
            self._variates[device] = Variates(self._plan, ArrayStore())
        return self._variates[device].correction(round, control).values

    def _begin(self) -> Submit:
        """Return what takes a cohort, made on the first call."""
        if self._submit is None:
            self._submit = self._stack.enter_context(self._engine.started(self._kit))
        return self._submit


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise CoordinatorError(
            "a process that trains has died, perhaps for want of memory: use fewer processes"
        ) from error


class _Handed:
    """Movements that a cohort hands over, until every device has taken its own or left it."""

    def __init__(
        self,
        future: PendingCohort,
        count: int,
        tray: SharedMemory | None,
        trays: Trays | None,
    ) -> None:
        self._future, self._left = future, count
        self._tray, self._trays = tray, trays

    def take(self, place: int) -> MadeMovement | str:
        """Return the movement at a place, or why there is none."""
        result = self._future.result()
        made = result.made[place]
        if self._tray is not None and isinstance(made, MadeMovement):
            start = result.ends[place - 1] if place else 0
            made = replace(made, payload=bytes(view_of(self._tray)[start : result.ends[place]]))
        self.leave()
        return made

    def leave(self) -> None:
        """Note that one device has no more need of it."""
        self._left -= 1
        # A tray that a process may still write to is not used again.
        if not self._left and self._tray is not None and self._trays and self._future.done():
            self._trays.give_back(self._tray)
            self._tray = None
