"""A device's part in one run of a task: from the notice that announces it to the last receipt.

Everything here happens in the one thread that fetches and trains. Every message that comes in is of
this run; every message to send is returned, stamped with the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Code
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.delivering import Delivering
from edge_sdk.device.examining import Examiner
from edge_sdk.device.machine import DevicePhase
from edge_sdk.device.service.telling import Telling
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import Logbook
from edge_sdk.device.stores.movements import FolderMovements, StoredMovement
from edge_sdk.device.stores.residuals import FolderStore
from edge_sdk.device.stores.slot import Seat
from edge_sdk.device.transfer.fetching import PulledModel
from edge_sdk.device.weighing import find_board, make_emulation, make_observer
from edge_sdk.machine.snapshot import Probe
from edge_sdk.program.files import write_whole
from edge_sdk.program.logs import fact
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.messages.transfer import Evaluation, TaskNotice
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.graphs import Kind, Manifest
from edge_sdk.train.backend import Backend
from edge_sdk.transport.uploads import Outgoing

if TYPE_CHECKING:
    from edge_sdk.train.inference import Predictor
    from edge_sdk.train.onnx import OnnxBackend

log = logging.getLogger(__name__)

MAX_TASK_BYTES = 2**30
"""Largest plan, manifest or graph; far above any that a device can train."""

NOTICE, OPENED = "task.notice", "round.opened"
"""Files in the device's folder: the task, and the first round that was taken up."""

CONVERTED = "data"
"""Folder, in the device's, for samples that are mapped because memory does not hold them."""

Sent = Bid | Evaluation | SurveyFinding | Condition | Outgoing
"""A message to publish, or an upload to offer."""


class TakingPart:
    """One run, for one device. Messages of the coordinator go in; bids and uploads come out."""

    def __init__(
        self,
        notice: TaskNotice,
        config: DeviceConfig,
        data: ArrayData,
        *,
        task: LoadedTask,
        model: PulledModel,
        folder: Path,
        state: Path,
        probe: Probe | None,
        should_stop: Callable[[], bool],
        fetch: FetchBlob,
        household: Household,
        book: Logbook,
        seat: Seat | None = None,
        overtaken: Callable[[int], bool] = lambda _: False,
        unfit: str | None = None,
    ) -> None:
        """Get ready to train; measures what levels cost, if that is not known yet.

        `folder` belongs to this run alone, `state` to the device. `probe` None: this machine's
        sensors. `should_stop` ends a training, `overtaken` a survey of a round. `fetch` gets the
        graphs that only evaluations and surveys need. `household` is what the device's tasks share,
        `seat` this task's among them, None: it is the only one; `book` takes notes for the owner.
        `unfit`: why the data does not fit the task,
        so that every round is skipped; None: it does. Raises `OSError` when the disk does not let
        us, and `TrainingError` for a task that cannot be trained here.
        """
        config = task.fitted(config)
        self.notice = notice
        self._config = config
        self._data = data
        self._should_stop = should_stop
        self._state = state
        self._backend, self._manifest = task
        self._model = model
        self._fetch = fetch
        self._predictor: Predictor | None = None
        self._bid: Bid | None = None
        """The last offer."""
        self._noted = False
        self._evaluated: tuple[str, int] | None = None
        emulation = make_emulation(config, state)
        self._spend = (lambda _: None) if emulation is None else emulation.trained
        trainer: Backend = self._backend if emulation is None else emulation.emulated(task.backend)
        self._household, self._book, self._seat = household, book, seat
        book.takes_part(notice.run)
        self._observer = make_observer(
            config,
            probe,
            trainer,
            task.manifest,
            state,
            len(data),
            emulation,
            account=household.account,
            may_measure=self._may_measure,
        )
        board = find_board(config) if emulation is None else emulation.board
        profile = None if board is None else board.name
        self._telling = Telling(config, self._observer, profile=profile, clock=time.monotonic)
        self._app = DeviceApp(
            config.name,
            backend=trainer,
            data=data,
            policy=config.policy,
            source=model,
            seed=config.seed,
            store=FolderStore(folder / "residuals"),
            variates=FolderStore(folder / "variates"),
            movements=FolderMovements(folder / "movements"),
            observer=self._observer,
            emulation=emulation,
            examiner=Examiner(
                config.name,
                data,
                model,
                self._make_predictor,
                evaluates=config.evaluate_every > 0,
                spend=self._spend,
            ),
            unfit=unfit,
            pause=household.pause,
            seat=seat,
            book=book,
            tells_energy=config.share_condition,
            overtaken=overtaken,
            clock=time.perf_counter if emulation is None else emulation.clock,
            should_stop=should_stop,
        )

    def _may_measure(self) -> bool:
        """Tell if costs may be measured now: unpaused, and while no other task can train."""
        mine = self._seat is None or self._seat.holds
        return mine and not self._household.pause.active

    @property
    def unfit(self) -> str | None:
        """The reason why this device can never train in this run; None: it can."""
        return self._app.unfit

    def describe(self) -> str:
        """Describe the task and the backend, for the log."""
        plan = self._backend.plan
        providers = ", ".join(self._backend.providers)
        return (
            f"task {self.notice.task}, run {self.notice.run}: {plan.parameters} parameters, "
            f"plan {plan.hash[:12]}…, onnx backend on {providers}, {self._backend.precision}"
        )

    def resume(self) -> list[Sent]:
        """Return the uploads that an earlier start of this program left without a receipt.

        The condition of the device goes in front, so that the coordinator knows who joined.
        """
        return [*self._telling.due(), *self._stamp(self._app.connected())]

    def receive(
        self, message: RoundOpen | Assignment | Receipt | RoundClosed | Survey
    ) -> list[Sent]:
        """Work through a message of this run, training included; return what to send."""
        if isinstance(message, Receipt):
            self._book.receipt(message)
            log.info(
                "round %d: %s%s",
                message.round,
                message.outcome.value,
                f" ({message.reason})" if message.reason else "",
                extra=fact(
                    "receipt",
                    run=message.run,
                    round=message.round,
                    outcome=message.outcome.value,
                ),
            )
        return self._stamp(self._app.receive(message))

    def withdraw(self, reason: str, code: Code) -> list[Sent]:
        """Take back an offer that has no assignment yet; return what to send."""
        return self._stamp(self._app.withdraw(reason, code))

    def start_over(self, opened: RoundOpen | None) -> list[Sent]:
        """Begin again with a coordinator that was started again; return what to send.

        `opened` is the round heard of last. See `machine.Restarted`.
        """
        self._evaluated = None
        self._telling.again()
        return [*self._telling.due(), *self._stamp(self._app.restarted(opened))]

    def _note(self, opened: RoundOpen) -> None:
        """Keep the task and a round for `tessera-device explain`."""
        try:
            write_whole(self._state / NOTICE, encode_message(self.notice))
            write_whole(self._state / OPENED, encode_message(opened))
        except OSError as error:
            log.warning("cannot keep the task for explain: %s", error, extra=fact("disk"))

    @property
    def awaits_assignment(self) -> bool:
        """True while a bid has no answer."""
        return self._bid is not None and self._app.phase is DevicePhase.BIDDING

    def repeat_bid(self) -> list[Sent]:
        """Return a bid that was not answered, because it may be lost."""
        if self._bid is None or not self.awaits_assignment:
            return [*self._telling.due()]
        log.info("round %d: repeating the bid", self._bid.round, extra=fact("bid_again"))
        return [*self._telling.due(), self._bid]

    def evaluate_if_due(self) -> list[Sent]:
        """Evaluate the round's model on this device's data, if the device is idle and it is due.

        Not on a mere announcement: an invitation may follow at once, and must not wait.
        """
        every, opened = self._config.evaluate_every, self._app.newest
        if not every or opened is None or self._app.phase is not DevicePhase.IDLE:
            return []
        if opened.by_invitation or opened.round % every or self._should_stop():
            return []
        if self.is_held_back:
            return []
        if self._evaluated == (opened.run, opened.round):
            return []
        self._evaluated = (opened.run, opened.round)  # once, even if it fails
        try:
            return [self._evaluation(opened)]
        except TesseraError as error:
            log.info("round %d: not evaluated: %s", opened.round, error, extra=fact("evaluation"))
            return []

    def deliver(
        self, delivering: Delivering, notice: ModelNotice, should_stop: Callable[[], bool]
    ) -> bool:
        """Take the model of a notice for inference; returns False if it has to be tried again.

        Raises `OSError` where the disk does.
        """
        if notice.plan_hash != self._backend.plan.hash:
            return False
        model = self._model.until(should_stop)
        return delivering.deliver(
            notice,
            task=self.notice.task,
            plan=self._backend.plan,
            manifest=self._manifest,
            graphs=lambda: fetch_graphs(self.notice, self._manifest, FORWARD, model.fetch_blob),
            source=model,
            data=self._data,
            observer=self._observer,
            should_stop=should_stop,
            spend=self._spend,
        )

    @property
    def is_held_back(self) -> bool:
        """True while the owner's pause, or another task's training, leaves it nothing to do."""
        trains = self._seat is not None and self._seat.disturbs
        return trains or self._household.pause.active

    @property
    def costs_are_off(self) -> bool:
        """True if the costs of levels are to be measured again, when there is time for that."""
        return self._observer.is_off

    def renew_costs(self, should_stop: Callable[[], bool]) -> list[Sent]:
        """Measure the costs of levels again: seconds, for an idle device. Sends nothing."""
        self._observer.renew(lambda: should_stop() or self._should_stop() or self.is_held_back)
        return []

    @property
    def costs_are_kept(self) -> bool:
        """True if all that rounds taught of costs is on disk."""
        return self._observer.is_kept

    def keep_costs(self, *, always: bool = False) -> list[Sent]:
        """Write what rounds taught of costs; not `always`: unless their file was just written.

        Sends nothing.
        """
        self._observer.keep(always=always)
        return []

    @property
    def is_idle(self) -> bool:
        """True while the device neither decides nor waits for an assignment."""
        return self._app.phase is DevicePhase.IDLE

    def _evaluation(self, opened: RoundOpen) -> Evaluation:
        from edge_sdk.train.evaluation import evaluate

        plan, predictor = self._backend.plan, self._make_predictor()
        groups = plan.full_groups()
        blocks, buffers = self._model.fetch_groups(opened, groups)
        if opened.statistics is not None:
            buffers |= self._model.fetch_statistics(opened, {1.0: groups}).get(1.0, {})
        weights = plan.assemble(blocks, groups)
        scores = evaluate(predictor, weights, buffers, self._data, self._manifest.loss)
        return Evaluation(
            device=self._config.name,
            run=self.notice.run,
            round=opened.round,
            samples=scores.samples,
            loss=scores.loss,
            accuracy=scores.accuracy,
        )

    def _make_predictor(self) -> Predictor:
        """Return what runs the model forward; its graphs are fetched on the first call.

        Raises as `load_task`.
        """
        from edge_sdk.train.inference import Predictor

        if self._predictor is None:
            files = fetch_graphs(self.notice, self._manifest, FORWARD, self._fetch)
            self._predictor = Predictor(
                self._backend.plan,
                self._manifest,
                files,
                providers=self._config.providers,
                threads=self._config.threads,
            )
        return self._predictor

    def _stamp(self, messages: list[Bid | SurveyFinding | Movement | StoredMovement]) -> list[Sent]:
        """Return the messages as they leave: with the run, movements as uploads."""
        if not self._noted and self._app.newest is not None:
            self._noted = True
            self._note(self._app.newest)
        sent: list[Sent] = []
        for message in messages:
            if isinstance(message, Bid):
                sent += self._telling.due(message)
            sent.append(self._stamped(message))
        return sent

    def _stamped(self, message: Bid | SurveyFinding | Movement | StoredMovement) -> Sent:
        match message:
            case Bid():
                return self._log_bid(replace(message, run=self.notice.run))
            case SurveyFinding():
                return replace(message, run=self.notice.run)
            case _:
                return self._upload(message)

    def _log_bid(self, bid: Bid) -> Bid:
        if bid.level is not None:
            self._bid = bid
        self._book.bid(bid)
        wrong = bid.code == "plan"
        log.log(
            logging.WARNING if wrong else logging.INFO,
            "round %d: %s",
            bid.round,
            bid.reason,
            extra=fact("wrong_plan" if wrong else "bid", round=bid.round, level=bid.level),
        )
        return bid

    def _upload(self, movement: Movement | StoredMovement) -> Outgoing:
        answers, sha256 = None, None
        if isinstance(movement, StoredMovement):
            data, answers, sha256 = movement.data, movement.answers, movement.sha256
        else:  # the disk had no room for it
            data = memoryview(encode_movement(movement))
        return Outgoing(
            data,
            device=self._config.name,
            run=self.notice.run,
            round=movement.round,
            answers=answers,
            chunk_bytes=self.notice.chunk_bytes,
            sha256=sha256,
        )


class LoadedTask(NamedTuple):
    """A task that can be trained here: its plan and graphs fit each other."""

    backend: OnnxBackend
    manifest: Manifest

    def fitted(self, config: DeviceConfig) -> DeviceConfig:
        """Return the configuration with each level rounded down to one that has a graph."""
        plan, policy = self.backend.plan, config.policy
        level, *levels = (
            self.manifest.level_within(plan, each) for each in (policy.level, *policy.levels)
        )
        return replace(config, policy=replace(policy, level=level, levels=tuple(levels)))


FetchBlob = Callable[[Blob, int, str], bytes]
"""Takes a blob, the most bytes it may have and its name for errors, and returns its bytes."""

FORWARD: tuple[Kind, ...] = ("evaluate", "statistics")
"""Graphs that are needed for evaluations and surveys."""


def load_task(notice: TaskNotice, config: DeviceConfig, fetch: FetchBlob) -> LoadedTask:
    """Fetch a task and check its plan and graphs against each other.

    Raises what `fetch` raises, and `GraphError`, `PlanError` or `TrainingError` for a task that
    cannot be trained here.
    """
    from edge_sdk.train.onnx import OnnxBackend, gradient_kind

    plan = decode_plan(fetch(notice.plan, MAX_TASK_BYTES, "the plan"))
    manifest = decode_manifest(fetch(notice.manifest, MAX_TASK_BYTES, "the manifest"))
    kind = gradient_kind(manifest, config.providers, config.precision)
    files = fetch_graphs(notice, manifest, (kind, "distillation"), fetch)
    backend = OnnxBackend(
        plan,
        manifest,
        files,
        providers=config.providers,
        threads=config.threads,
        precision=config.precision,
        lean=config.emulate is None,
    )
    return LoadedTask(backend, manifest)


def fetch_graphs(
    notice: TaskNotice, manifest: Manifest, kinds: Collection[Kind], fetch: FetchBlob
) -> dict[str, bytes]:
    """Fetch a task's graphs of these kinds, by SHA-256. Raises what `fetch` raises."""
    return {
        entry.sha256: fetch(notice.graphs[entry.sha256], MAX_TASK_BYTES, str(entry))
        for entry in manifest.graphs
        if entry.kind in kinds and entry.sha256 in notice.graphs
    }
