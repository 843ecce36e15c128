"""A run without disk or broker: kept in RAM, and gone when the process ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from coordinator.aggregate.arrivals import GroupsByAxis
from coordinator.aggregate.model import GlobalModel
from coordinator.rounds.report import RoundReport
from coordinator.run.folder import Checkpoint
from coordinator.service.outgoing.outlet import LevelStatistics
from coordinator.service.store import RunStore
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.encoding.codec import decode_blocks, encoded_size
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.delivery import Choice
from edge_sdk.protocol.messages.round import Assignment, RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array


class RunInRam(RunStore):
    """Stores nothing but the reports that have not been taken yet."""

    def __init__(self) -> None:
        self.reports: list[RoundReport] = []
        self.levels = LevelScores()
        """The levels of the newest model, as far as it was evaluated."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Hold the levels alone: no process would read the rest."""
        self.levels = checkpoint.levels

    def record(self, report: RoundReport, line: Mapping[str, Any] | None) -> None:
        """Hold a report until it is taken."""
        self.reports.append(report)


class DirectOutlet:
    """A `ModelOutlet` that hands the model directly to devices, and their `ModelSource`.

    A device gets the version that was current when its groups were assigned, however long the
    assignment takes to arrive.
    """

    def __init__(self, model: GlobalModel) -> None:
        self._model = model
        self._held: dict[str, tuple[Assignment, EncodedModel, dict[str, Array]]] = {}
        """Per device, its assignment and the model at that time, until it has fetched that."""
        self._controls: dict[str, EncodedModel] = {}
        """Per device, the global variate that goes with its assignment, likewise."""
        self._versions: dict[str, int] = {}
        """Version that each device of an asynchronous run trains from."""
        self._fetched: dict[str, int] = {}
        """Bytes of the blocks that each device last fetched."""
        self._surveyed: tuple[EncodedModel, dict[str, Array]]
        """The model at the time of the last survey."""
        self._statistics: LevelStatistics = {}
        self._sizes: dict[tuple[object, ...], int] = {}
        """Bytes of submodels, by their groups."""

    @property
    def version(self) -> tuple[int, int]:
        """Number of times the model has changed, and of movements that wait to change it."""
        pending = self._model.pending
        return self._model.version, 0 if pending is None else pending.number

    def publish(self) -> None:
        """Encode the model now, because devices ask for it from several threads."""
        self._model.serve()
        self._model.serve_control()

    def pack(self) -> Callable[[], None]:
        """Encode the model now; there is nothing left to do."""
        self.publish()
        return lambda: None

    def opening(self, opening: RoundOpen, device: str | None = None) -> RoundOpen:
        """Return the opening unchanged: the model is not sent."""
        return opening

    def survey(self, survey: Survey) -> Survey:
        """Return the survey unchanged; holds the current version for its devices."""
        self._surveyed = (self._model.serve(), self._model.buffers)
        return survey

    def publish_statistics(self, levels: LevelStatistics) -> None:
        """Hold the statistics for the devices of the next survey."""
        self._statistics = levels

    def deliver(
        self, choices: Collection[Choice], round: int, scores: LevelScores, *, final: bool = False
    ) -> bool:
        """Do nothing, and the like below: devices in this process only train."""
        return False

    def deliver_earlier(
        self, choices: Collection[Choice], model: GlobalModel, round: int, scores: LevelScores
    ) -> None:
        """See `deliver`."""

    def deliver_none(self, choice: Choice) -> None:
        """See `deliver`."""

    def reserve(self, device: str, round: int, groups: GroupsByAxis) -> None:
        """Keep these groups of the current version."""
        self._versions[device] = self._model.version
        self._model.reserve(device, round, groups)

    def fetched_bytes(self, device: str, groups: GroupsByAxis) -> int:
        """Bytes that a device last fetched."""
        return self._fetched.get(device, 0)

    def applied(self, device: str, groups: GroupsByAxis) -> int:
        """Number of updates since these groups were reserved."""
        return self._model.version - self._versions.pop(device)

    def left(self, device: str) -> None:
        """Do nothing: an absent device evaluates nothing here."""

    # -- for devices ------------------------------------------------------------------------

    def assigned(self, assignment: Assignment) -> None:
        """Hold the current version until the device has fetched its part."""
        model = self._model
        self._held[assignment.device] = (assignment, model.serve(), model.buffers)
        if (control := model.serve_control()) is not None:
            self._controls[assignment.device] = control

    def lost(self, assignment: Assignment) -> None:
        """Hold nothing for an assignment that never arrives; another one may come."""
        self._held.pop(assignment.device, None)
        self._controls.pop(assignment.device, None)

    def fetch_level(self, survey: Survey, number: int) -> tuple[Blocks, dict[str, Array], int]:
        """Return a surveyed level, and the bytes of its blocks."""
        plan, groups = self._model.plan, survey.groups[number]
        encoded, buffers = self._surveyed
        message = encoded.cut(groups)
        cut = {name: array.copy() for name, array in plan.cut_buffers(buffers, groups).items()}
        if survey.wants == "evaluation":
            cut |= self._statistics[survey.levels[number]]
        return decode_blocks(plan, message)[1], cut, len(message)

    def fetch(self, assignment: Assignment) -> tuple[Blocks, dict[str, Array]]:
        """Return the model that a device trains from."""
        device, groups, plan = assignment.device, assignment.groups, self._model.plan
        _, encoded, buffers = self._held.pop(device)
        message, cut = self._model.reserved(device, assignment.round) or (
            encoded.cut(groups),
            plan.cut_buffers(buffers, groups),
        )
        self._fetched[device] = len(message)
        _, blocks = decode_blocks(plan, message)
        return blocks, {name: array.copy() for name, array in cut.items()}

    def fetch_control(self, assignment: Assignment) -> Blocks:
        """Return the global variate of a device's blocks, and count its bytes."""
        message = self._control_of(assignment)
        del self._controls[assignment.device]
        self._fetched[assignment.device] += len(message)
        return decode_blocks(self._model.plan, message)[1]

    def control_of(self, assignment: Assignment) -> Blocks:
        """Return the same for a device whose model is taken elsewhere; `pass_by` counts it."""
        return decode_blocks(self._model.plan, self._control_of(assignment))[1]

    def _control_of(self, assignment: Assignment) -> bytes:
        encoded = self._controls.get(assignment.device)
        if encoded is None:
            raise StateError(f"there is no control variate for {assignment.device!r}")
        return encoded.cut(assignment.groups)

    @property
    def waiting(self) -> list[tuple[Assignment, EncodedModel, dict[str, Array]]]:
        """Assignments whose devices have not fetched yet, and the model that each will get.

        In an asynchronous run a device gets what is `reserved` for it.
        """
        return list(self._held.values())

    def reserved(self, assignment: Assignment) -> tuple[bytes, dict[str, Array]] | None:
        """Return the blocks and buffers that are kept for a device; None: it gets the model's."""
        return self._model.reserved(assignment.device, assignment.round)

    def pass_by(self, assignment: Assignment) -> int:
        """Fetch nothing, for a device whose model is taken elsewhere; return the bytes it gets."""
        device, groups = assignment.device, assignment.groups
        self._held.pop(device)
        key = tuple(groups.items())
        size = self._sizes.get(key)
        if size is None:
            encoding = self._model.encoding
            size = self._sizes[key] = encoded_size(self._model.plan, groups, encoding)
        if self._controls.pop(device, None) is not None:
            size *= 2  # the global variate is as large
        self._fetched[device] = size
        return size
