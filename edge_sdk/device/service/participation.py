"""A device's part in one run of a task: from the notice that announces it to the last receipt.

Everything here happens in the one thread that fetches and trains. What leaves is stamped with the
run; what comes is of this run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_sdk.data.arrays import ArrayData
from edge_sdk.device.app import DeviceApp, Outbound
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.machine import DevicePhase
from edge_sdk.device.stores.movements import FolderMovements
from edge_sdk.device.stores.residuals import FolderStore
from edge_sdk.device.transfer.fetching import Fetcher, PulledModel
from edge_sdk.device.weighing import make_emulation, make_observer
from edge_sdk.machine.snapshot import Probe
from edge_sdk.program.files import write_whole
from edge_sdk.program.logs import fact
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.transfer import Evaluation, TaskNotice
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Backend
from edge_sdk.transport.uploads import Outgoing

if TYPE_CHECKING:
    from edge_sdk.train.inference import Predictor
    from edge_sdk.train.onnx import OnnxBackend

log = logging.getLogger(__name__)

MAX_TASK_BYTES = 2**30
"""Of a plan, a manifest or a graph; far above any that can be trained on a device."""

NOTICE, OPENED = "task.notice", "round.opened"
"""Files in the device's folder: the task, and its first round that was taken up."""

Sender = Callable[[Bid | Evaluation | Outgoing], None]


class TakingPart:
    """One run, for one device. Messages of the coordinator go in; bids and uploads come out."""

    def __init__(
        self,
        notice: TaskNotice,
        config: DeviceConfig,
        data: ArrayData,
        folder: Path,
        fetcher: Fetcher,
        *,
        state: Path,
        probe: Probe | None,
        send: Sender,
        should_stop: Callable[[], bool],
        overtaken: Callable[[int], bool],
    ) -> None:
        """Fetch the task and make ready to train; `folder` is of this run alone, `state` of the
        device. What levels cost is measured, if it has to be. `probe` None: this machine's own.

        `should_stop` ends a training, `overtaken` what is fetched for a round.
        Raises `FetchError` and `OSError`, which may pass, when the task does not come or has no
        room on the disk, and `GraphError`, `PlanError` or `TrainingError` when it cannot be
        trained here, which will not.
        """
        self.notice = notice
        self._config = config
        self._data = data
        self._send = send
        self._should_stop = should_stop
        self._state = state
        self._backend, self._manifest, self._files = load_task(notice, config, fetcher.fetch_blob)
        self._model = PulledModel(self._backend.plan, fetcher, overtaken=overtaken)
        self._residuals = FolderStore(folder / "residuals")
        self._movements = FolderMovements(folder / "movements")
        self._emulation = make_emulation(config, state)
        self._trainer: Backend = self._backend
        if self._emulation is not None:
            self._trainer = self._emulation.emulated(self._backend)
        self._observer = make_observer(
            config, probe, self._trainer, self._manifest, state, len(data), self._emulation
        )
        self._predictor: Predictor | None = None
        self._bid: Bid | None = None
        self._opened: RoundOpen | None = None
        self._may_go_back = False
        self._evaluated = 0
        self._app = self._new_app()

    @property
    def unfit(self) -> str | None:
        """Why this device can never train in this run; None: it can."""
        return self._app.unfit

    def describe(self) -> str:
        """What is trained and with what, for the log."""
        plan = self._backend.plan
        providers = ", ".join(self._backend.providers)
        return (
            f"task {self.notice.task}, run {self.notice.run}: {plan.parameters} parameters, "
            f"plan {plan.hash[:12]}…, onnx backend on {providers}"
        )

    def resume(self) -> None:
        """Offer the movements that an earlier start of this program left without a receipt."""
        self._send_out(self._app.connected())

    def receive(self, message: RoundOpen | Assignment | Receipt | RoundClosed) -> None:
        """Deal with a message of this run, to the end; training is part of it."""
        match message:
            case RoundOpen() if message.plan_hash != self._backend.plan.hash:
                self._refuse(message)
                return
            case RoundOpen():
                self._take_up(message)
            case Receipt():
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
        self._send_out(self._app.receive(message))

    def start_over(self, opened: RoundOpen | None) -> None:
        """The coordinator was started again, and knows nothing of the bids for the open round.

        `opened` is the round heard of last, which is answered anew. It may be of before, and the
        next one have a lower number: a coordinator can be told to go back.
        """
        self._renew()
        if opened is not None:
            self.receive(opened)
        self._may_go_back = True

    def _take_up(self, message: RoundOpen) -> None:
        last = self._opened
        if last is not None and message.round <= last.round:
            if not self._may_go_back or message == last:
                return
            self._renew()
        self._may_go_back = False
        if last is None:
            self._note(message)
        self._opened = message
        self._model.opened(message)
        if self._emulation is not None:
            self._emulation.round_opened(message.round)

    def _note(self, opened: RoundOpen) -> None:
        """Keep what is trained and how, for `tessera-device explain`."""
        try:
            write_whole(self._state / NOTICE, encode_message(self.notice))
            write_whole(self._state / OPENED, encode_message(opened))
        except OSError as error:
            log.warning("what rounds are like is not kept: %s", error, extra=fact("disk"))

    def _refuse(self, message: RoundOpen) -> None:
        """Skip a round for another plan than the task's, and do not take it for the newest."""
        theirs, ours = message.plan_hash[:12], self._backend.plan.hash[:12]
        reason = f"skip: the round is for plan {theirs}…, the task has {ours}…"
        extra = fact("wrong_plan", round=message.round)
        log.warning("round %d: %s", message.round, reason, extra=extra)
        bid = Bid(device=self._config.name, round=message.round, level=None, reason=reason)
        self._send(replace(bid, run=self.notice.run))

    def _renew(self) -> None:
        """Forget the rounds heard of, but nothing that is kept on disk."""
        self._opened, self._evaluated = None, 0
        self._app = self._new_app()
        self.resume()

    @property
    def awaits_assignment(self) -> bool:
        """Whether a bid has no answer yet."""
        return self._bid is not None and self._app.phase is DevicePhase.BIDDING

    def repeat_bid(self) -> None:
        """A bid that was not answered may be lost."""
        if self._bid is not None and self.awaits_assignment:
            log.info("round %d: the bid again", self._bid.round, extra=fact("bid_again"))
            self._send(self._bid)

    def evaluate_if_due(self) -> None:
        """When there is nothing else to do: see how good the round's model is on our data."""
        every, opened = self._config.evaluate_every, self._opened
        if not every or opened is None or self._app.phase is not DevicePhase.IDLE:
            return
        if opened.round % every or opened.round <= self._evaluated or self._should_stop():
            return
        # Once, whatever comes of it.
        self._evaluated = opened.round
        try:
            self._send(self._evaluation(opened.round))
        except TesseraError as error:
            log.info("round %d is not evaluated: %s", opened.round, error, extra=fact("evaluation"))

    def _evaluation(self, round: int) -> Evaluation:
        from edge_sdk.train.evaluation import evaluate
        from edge_sdk.train.inference import Predictor

        plan = self._backend.plan
        if self._predictor is None:
            self._predictor = Predictor(
                plan,
                self._manifest,
                self._files,
                providers=self._config.providers,
                threads=self._config.threads,
            )
        groups = plan.all_groups()
        blocks, buffers = self._model.fetch_groups(round, groups)
        weights = plan.assemble(blocks, groups)
        scores = evaluate(self._predictor, weights, buffers, self._data, self._manifest.loss)
        return Evaluation(
            device=self._config.name,
            run=self.notice.run,
            round=round,
            samples=scores.samples,
            loss=scores.loss,
            accuracy=scores.accuracy,
        )

    def _new_app(self) -> DeviceApp:
        return DeviceApp(
            self._config.name,
            backend=self._trainer,
            data=self._data,
            policy=self._config.policy,
            source=self._model,
            seed=self._config.seed,
            store=self._residuals,
            movements=self._movements,
            observer=self._observer,
            clock=time.perf_counter if self._emulation is None else self._emulation.clock,
            should_stop=self._should_stop,
        )

    def _send_out(self, messages: list[Outbound]) -> None:
        for message in messages:
            match message:
                case Bid():
                    self._bid = replace(message, run=self.notice.run)
                    log.info(
                        "round %d: %s",
                        message.round,
                        message.reason,
                        extra=fact("bid", round=message.round, level=message.level),
                    )
                    self._send(self._bid)
                case Movement():
                    self._send(self._upload(message, None))
                case Replay():
                    self._send(self._upload(message.movement, message.round))

    def _upload(self, movement: Movement, answers: int | None) -> Outgoing:
        try:
            data: bytes | memoryview = self._movements.read_bytes(movement.round)
        except KeyError:  # the disk is full
            data = encode_movement(movement)
        return Outgoing(
            data,
            device=self._config.name,
            run=self.notice.run,
            round=movement.round,
            answers=answers,
            chunk_bytes=self.notice.chunk_bytes,
        )


def load_task(
    notice: TaskNotice, config: DeviceConfig, fetch: Callable[[Blob, int, str], bytes]
) -> tuple[OnnxBackend, Manifest, dict[str, bytes]]:
    """What is needed to train: the plan and the graphs, checked against each other.

    `fetch` gives a blob's bytes; it is told the most they may be, and what they are.
    """
    from edge_sdk.train.onnx import OnnxBackend

    plan = decode_plan(fetch(notice.plan, MAX_TASK_BYTES, "the plan"))
    manifest = decode_manifest(fetch(notice.manifest, MAX_TASK_BYTES, "the manifest"))
    kinds = {"gradient", "evaluate"} if config.evaluate_every else {"gradient"}
    files = {
        entry.sha256: fetch(notice.graphs[entry.sha256], MAX_TASK_BYTES, str(entry))
        for entry in manifest.graphs
        if entry.kind in kinds and entry.sha256 in notice.graphs
    }
    backend = OnnxBackend(plan, manifest, files, providers=config.providers, threads=config.threads)
    return backend, manifest, files
