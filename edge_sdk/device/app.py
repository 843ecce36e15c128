"""A device put together: the state machine, and the effects it asks for.

The link, the source of weights and the stores are passed in, so the same app runs in one process
with the coordinator and, as a program, over MQTT. It does everything within the call that asks for
it: fetching and training included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Decision, Policy, decide, gate_code
from edge_sdk.decide.observer import Observer
from edge_sdk.device.machine import (
    Decide,
    Decided,
    DevicePhase,
    DeviceState,
    Effect,
    Event,
    Facts,
    Failed,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Found,
    KeepMovement,
    LinkUp,
    Resend,
    SendMessage,
    SendReplay,
    Train,
    handle,
)
from edge_sdk.device.stores.movements import MemoryMovements, MovementStore
from edge_sdk.device.stores.residuals import ArrayStore, MemoryStore, Residuals
from edge_sdk.program.logs import fact
from edge_sdk.protocol.encoding.codec import decode_blocks, decode_header, encode_blocks
from edge_sdk.protocol.encoding.encoding import available_encodings
from edge_sdk.protocol.errors import ProtocolError, TensorError, TesseraError, TrainingStopped
from edge_sdk.protocol.messages.round import (
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job

log = logging.getLogger(__name__)

Outbound = Bid | Movement | Replay
"""A message of a device to the coordinator."""

RESIDUAL_ROUNDS = 20
"""Rounds after which what top-k left out is forgotten."""


class ModelSource(Protocol):
    """Where the global model's blocks come from."""

    def fetch(self, assignment: Assignment) -> tuple[Blocks, dict[str, Array]]:
        """The blocks and buffers of the assigned groups, as of the assignment's round."""


class DeviceApp:
    """One device: give it messages; it works through them and returns what to send."""

    def __init__(
        self,
        name: str,
        *,
        backend: Backend,
        data: ArrayData,
        policy: Policy,
        source: ModelSource,
        seed: int,
        store: ArrayStore | None = None,
        movements: MovementStore | None = None,
        observer: Observer | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`store` keeps what top-k leaves out, `movements` what has no receipt yet.

        None: in memory, gone with the process. What is in them is taken up again. `observer` tells
        what the device can afford; None: whatever its owner allows.
        """
        self.name = name
        self._movements = MemoryMovements() if movements is None else movements
        self._state = DeviceState(
            name, unreceipted=self._movements.waiting, copy=self._movements.copy
        )
        self._backend = backend
        self._data = data
        self._policy = policy
        self._source = source
        self._seed = seed
        self._residuals = Residuals(
            backend.plan, MemoryStore() if store is None else store, forget_after=RESIDUAL_ROUNDS
        )
        self.unfit = _unfit(backend, data)
        """Why this device can never train; None: its data is what the task wants."""
        self._unsettled: dict[int, bool] = {}
        """Receipts that the residuals, for want of room on the disk, do not know of yet."""
        self._facts = Facts(len(data), policy.compute, policy.bytes_per_s)
        self._observer = Observer(policy) if observer is None else observer
        self._should_stop = should_stop
        self._clock = clock

    @property
    def phase(self) -> DevicePhase:
        """What the device is doing."""
        return self._state.phase

    def connected(self) -> list[Outbound]:
        """Take up the link again; returns every movement that has no receipt yet."""
        return self._handle(LinkUp())

    def receive(self, message: RoundOpen | Assignment | Receipt | RoundClosed) -> list[Outbound]:
        """Work through a message of the coordinator; returns what to send, in order."""
        return self._handle(message)

    def _handle(self, event: Event) -> list[Outbound]:
        events, sent = [event], list[Outbound]()
        while events:
            self._state, effects = handle(self._state, events.pop(0))
            for effect in effects:
                match effect:
                    case SendMessage(message):
                        sent.append(message)
                    case Resend(round):
                        sent += self._again(round)
                    case SendReplay(round, made):
                        sent += (Replay(round=round, movement=each) for each in self._again(made))
                    case _:
                        answer = self._perform(effect)
                        if answer is not None:
                            events.append(answer)
        return sent

    def _again(self, round: int) -> list[Movement]:
        """Return the movement kept of this round; none if it cannot be read."""
        try:
            return [self._movements.read(round)]
        except (KeyError, OSError, ProtocolError) as error:
            log.warning(
                "%s: the movement of round %d cannot be sent again: %s", self.name, round, error
            )
            return []

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case Decide(opened):
                return Decided(opened.round, self._answer(opened), self._facts)
            case Fetch(_, assignment):
                round = assignment.round
                log.info("round %d: assigned", round, extra=fact("assigned", round=round))
                return self._attempt(round, lambda: self._fetch(assignment))
            case Train(opened):
                log.info(
                    "round %d: training, %d steps",
                    opened.round,
                    opened.steps,
                    extra=fact("training", round=opened.round, steps=opened.steps),
                )
                return self._attempt(opened.round, lambda: self._train(effect))
            case KeepMovement(movement):
                log.info(
                    "round %d: movement of %d bytes, loss %.4f, %.2f s of training",
                    movement.round,
                    len(movement.payload),
                    movement.loss,
                    movement.train_s,
                    extra=fact("movement", round=movement.round, bytes=len(movement.payload)),
                )
                self._keep(movement)
            case Forget(round, outcome):
                self._unsettled[round] = outcome in (Outcome.COUNTED, Outcome.MEMORY)
                self._settle()
                self._movements.forget(round, rejected=outcome is Outcome.REJECTED)
        return None

    def _fetch(self, assignment: Assignment) -> Fetched | Found:
        if self._was_made(assignment):
            round = assignment.round
            log.info("round %d: was trained before", round, extra=fact("found", round=round))
            return Found()
        return Fetched(*self._source.fetch(assignment))

    def _was_made(self, assignment: Assignment) -> bool:
        """Whether the movement of this round and these groups waits for its receipt."""
        if assignment.round not in self._movements.waiting:
            return False
        try:
            payload = self._movements.read(assignment.round).payload
            made = decode_header(self._backend.plan, payload).groups
        except (OSError, ProtocolError) as error:
            log.warning("%s: what is kept of round %d: %s", self.name, assignment.round, error)
            return False
        return made == {axis: tuple(groups) for axis, groups in assignment.groups.items()}

    def _keep(self, movement: Movement) -> None:
        try:
            self._movements.keep(movement)
        except OSError as error:
            # It can still be sent, from memory; a full disk is no reason to throw it away.
            log.error(
                "%s: the movement of round %d cannot be kept (%s): it is lost if this program "
                "stops before the receipt",
                self.name,
                movement.round,
                error,
                extra=fact("disk", round=movement.round),
            )

    def _settle(self) -> bool:
        """Tell the residuals of the receipts; False while the disk does not let us."""
        try:
            for round, used in list(self._unsettled.items()):
                self._residuals.settle(round, used=used)
                del self._unsettled[round]
        except OSError as error:
            rounds = ", ".join(map(str, self._unsettled))
            log.error(
                "%s: what top-k left out in round %s cannot be noted yet: %s",
                self.name,
                rounds,
                error,
                extra=fact("disk"),
            )
            return False
        return True

    def _answer(self, opened: RoundOpen) -> Decision:
        """The decision; the same when a round is heard of again. What fails is a skip."""
        if (before := self._observer.recalled(opened)) is not None:
            return before
        try:
            return self._decide(opened)
        except TesseraError as error:
            log.warning("%s: %s", self.name, error, extra=fact("failed", round=opened.round))
            return Decision(None, f"skip: {error}"[:MAX_REASON_CHARACTERS], "failed")

    def _decide(self, opened: RoundOpen) -> Decision:
        if self.unfit is not None:
            return Decision(None, self.unfit, "data")
        ours = self._backend.plan.hash
        if opened.plan_hash != ours:
            theirs = opened.plan_hash[:12]
            reason = f"skip: the round is for plan {theirs}…, here is {ours[:12]}…"
            return Decision(None, reason, "plan")
        decision = decide(
            self._policy,
            self._observer.look(opened),
            self._observer.history,
            device=self.name,
            round=opened.round,
            seed=self._seed,
        )
        self._observer.decided(opened, decision)
        return decision

    def _attempt(self, round: int, work: Callable[[], Event]) -> Event:
        """What the work answers, or that it failed: no error of one round ends the device."""
        try:
            return work()
        except TrainingStopped as error:
            gate = self._observer.closed_gate()
            reason = str(error) if gate is None else f"{gate.reason}; {error}"
            log.warning(
                "round %d is given up: %s", round, reason, extra=fact("failed", round=round)
            )
            code = "failed" if gate is None else gate_code(gate)
            return Failed(f"skip: {reason}", code)
        except TesseraError as error:
            extra = fact("failed", round=round)
            log.warning("%s: round %d is given up: %s", self.name, round, error, extra=extra)
            return Failed(f"skip: {error}")
        except Exception as error:
            log.exception("%s: unexpected error; the round is skipped", self.name)
            return Failed(f"skip: {type(error).__name__}: {error}")

    def _train(self, work: Train) -> Finished:
        opened, groups, plan = work.opened, work.assignment.groups, self._backend.plan
        job = Job(
            groups=groups,
            weights=plan.assemble(work.blocks, groups),
            buffers=work.buffers,
            rule=opened.rule,
            mask_stream=stream(self._seed, self.name, opened.round, "dropout"),
        )
        batches = self._data.batches(
            opened.steps,
            opened.batch_size,
            stream(self._seed, self.name, opened.round, "batches"),
        )
        started = self._clock()
        with self._observer.training(opened, work.level):
            trained = self._backend.train(job, batches, should_stop=self._must_stop)
        took = self._clock() - started
        return Finished(
            Movement(
                device=self.name,
                round=opened.round,
                plan_hash=plan.hash,
                payload=self._encode(opened, groups, plan.scatter(trained.movement, groups)),
                statistics=trained.statistics,
                learning_rate=opened.rule.learning_rate,
                level=work.level,
                samples=len(self._data),
                loss=trained.metrics.mean_loss,
                train_s=took,
                keeps_copy=self._policy.keeps_copy and opened.replay_within > 0,
            )
        )

    def _must_stop(self) -> bool:
        return self._should_stop() or self._observer.closed_gate() is not None

    def _encode(self, opened: RoundOpen, groups: Groups, movement: Blocks) -> bytes:
        """The movement as it travels; what top-k leaves out of it is kept for later."""
        plan, round = self._backend.plan, opened.round
        random = stream(self._seed, self.name, round, "encoding")
        encoding = opened.encoding.agreed(available_encodings())
        if encoding.kind != "top-k" or not self._settle():
            return encode_blocks(plan, groups, movement, encoding, random)
        corrected = self._residuals.corrected(round, movement)
        payload = encode_blocks(plan, groups, corrected, encoding, random)
        try:
            self._residuals.keep(round, movement, decode_blocks(plan, payload)[1])
        except OSError as error:
            # Sent and not noted, what is held would be sent twice: this time it is left out.
            log.error(
                "%s: what top-k leaves out in round %d has no room on the disk and is lost: %s",
                self.name,
                round,
                error,
                extra=fact("disk", round=round),
            )
            random = stream(self._seed, self.name, round, "encoding")
            return encode_blocks(plan, groups, movement, encoding, random)
        return payload


def _unfit(backend: Backend, data: ArrayData) -> str | None:
    """Why this device can never train: its data is not what the task wants."""
    try:
        if backend.data is not None:
            backend.data.check(data)
    except TensorError as error:
        return f"skip: {error}"[:MAX_REASON_CHARACTERS]
    return None
