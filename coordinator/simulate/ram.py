"""A run without disk or broker: kept in RAM, and gone when the process ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.aggregate.arrivals import GroupsByAxis
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import RamMoments, ServerOptimizer
from coordinator.rounds.report import RoundReport
from coordinator.rounds.state import OpenRound
from coordinator.run.folder import Checkpoint
from coordinator.run.journal import Terms
from coordinator.service.store import Tally
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.messages.round import Assignment, Movement, Receipt, Replay, RoundOpen
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.uploads import Upload


@dataclass(slots=True)
class RunInRam:
    """A `RunStore` that stores nothing durably, since such a run is never resumed."""

    opened: int = 0
    save_s: float = 0.0
    """Receipts need not wait, because there are no checkpoints."""
    scratch: None = None
    """Files needed only while a round closes go to the folder for temporary files."""
    reports: list[RoundReport] = field(default_factory=list)
    """Reports that have not been taken yet."""
    levels: LevelScores = field(default_factory=LevelScores)
    """The levels of the newest model, as far as it was evaluated."""

    def note_opened(self, round: int) -> None:
        """Remember the newest round."""
        self.opened = max(self.opened, round)

    def interrupted(self) -> OpenRound | None:
        """Return None: every run is new."""
        return None

    def check_terms(self, terms: Terms) -> None:
        """Do nothing: no round was interrupted."""

    def open_round(self, opened: OpenRound, terms: Terms) -> None:
        """Do nothing: the course has it."""

    def forget_round(self) -> None:
        """Do nothing: nothing was written."""

    def keep(self, upload: Upload | None, device: str, round: int) -> None:
        """Do nothing: the course has it."""

    def kept(self) -> tuple[Movement | Replay, ...]:
        """Return nothing: no earlier process left anything."""
        return ()

    def clear_kept(self) -> None:
        """Do nothing: nothing was written."""

    def knows(self, offer: Offer) -> bool:
        """Return False: nothing is uploaded here."""
        return False

    def settle(self, upload: Upload, receipt: Receipt | None) -> None:
        """Do nothing: nothing is uploaded here."""

    def moments(
        self, plan: ModelPlan, optimizer: ServerOptimizer, checkpoint: Checkpoint
    ) -> RamMoments:
        """Return new moments: every run is new."""
        return RamMoments(optimizer, plan)

    def save(self, checkpoint: Checkpoint) -> None:
        """Hold the levels alone: no process would read the rest."""
        self.levels = checkpoint.levels

    def prune(self) -> None:
        """Do nothing: nothing was written."""

    def record(self, report: RoundReport, tally: Tally, model: GlobalModel) -> None:
        """Hold a report until it is taken."""
        self.reports.append(report)


class DirectOutlet:
    """A `ModelOutlet` that hands the model directly to devices, and their `ModelSource`.

    A device gets the version that was current when its groups were assigned, however long the
    assignment takes to arrive.
    """

    def __init__(self, model: GlobalModel) -> None:
        self._model = model
        self._held: dict[str, tuple[EncodedModel, dict[str, Array]]] = {}
        """Per device, the model at the time of its assignment, until the device has fetched it."""
        self._versions: dict[str, int] = {}
        """Version that each device of an asynchronous run trains from."""
        self._fetched: dict[str, int] = {}
        """Bytes of the blocks that each device last fetched."""

    def publish(self) -> None:
        """Encode the model now, because devices ask for it from several threads."""
        self._model.serve()

    def opening(self, opening: RoundOpen) -> RoundOpen:
        """Return the opening unchanged: the model is not sent."""
        return opening

    def opening_for(self, device: str, opening: RoundOpen) -> RoundOpen:
        """Return the opening unchanged."""
        return opening

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
        self._held[assignment.device] = (model.serve(), model.buffers)

    def lost(self, assignment: Assignment) -> None:
        """Hold nothing for an assignment that never arrives; another one may come."""
        self._held.pop(assignment.device, None)

    def fetch(self, assignment: Assignment) -> tuple[Blocks, dict[str, Array]]:
        """Return the model that a device trains from."""
        device, groups, plan = assignment.device, assignment.groups, self._model.plan
        encoded, buffers = self._held.pop(device)
        message, cut = self._model.reserved(device, assignment.round) or (
            encoded.cut(groups),
            plan.cut_buffers(buffers, groups),
        )
        self._fetched[device] = len(message)
        _, blocks = decode_blocks(plan, message)
        return blocks, {name: array.copy() for name, array in cut.items()}
