"""A device put together: the state machine, and the performer of its effects.

The source of weights and the stores are passed in, so the same app runs in one process with the
coordinator and, as a program, over MQTT. Every call does all the work it leads to, fetching and
training included, and returns the messages to send.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import UNFIT
from edge_sdk.decide.budget import OFTEN, outlived_share
from edge_sdk.decide.decision import Code, Decision, Policy, decide, gate_code
from edge_sdk.decide.observer import Observer
from edge_sdk.device.examining import Examiner, UnfetchedError
from edge_sdk.device.machine import (
    Decide,
    Decided,
    DevicePhase,
    DeviceState,
    Effect,
    Event,
    Examine,
    Examined,
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
    Restarted,
    SendMessage,
    SendReplay,
    Train,
    Withdrawn,
    handle,
)
from edge_sdk.device.stores import pause, slot
from edge_sdk.device.stores.logbook import Logbook
from edge_sdk.device.stores.movements import MovementStore
from edge_sdk.device.stores.pause import Pause
from edge_sdk.device.stores.residuals import ArrayStore, Residuals
from edge_sdk.device.stores.slot import Seat
from edge_sdk.device.stores.variates import Variates
from edge_sdk.program.logs import fact
from edge_sdk.protocol.encoding.codec import (
    decode_blocks,
    decode_header,
    encode_arrays,
    encode_blocks,
)
from edge_sdk.protocol.encoding.encoding import usable
from edge_sdk.protocol.encoding.top_k import RESIDUAL_ROUNDS
from edge_sdk.protocol.errors import (
    GroupError,
    ProtocolError,
    TensorError,
    TesseraError,
    TrainingError,
    TrainingStopped,
)
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import (
    MAX_JOULES,
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array, Raw
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job

if TYPE_CHECKING:
    from edge_sdk.decide.emulation.emulation import Emulation

log = logging.getLogger(__name__)

K = TypeVar("K")

REREAD_BYTES = 2**22
"""Size of a submodel from which its weights are read again, rather than kept beside the trained
ones: reading a small one takes longer than copying it.
"""


class ModelSource(Protocol):
    """The origin of the global model's blocks."""

    def fetch(self, assignment: Assignment, opened: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        """Return the blocks and buffers of the assigned groups, as of this round."""

    def fetch_control(self, assignment: Assignment, opened: RoundOpen) -> Blocks:
        """Return the global variate of the same blocks. Asked after `fetch`, where the round has
        variates.
        """


@runtime_checkable
class RereadSource(ModelSource, Protocol):
    """A source that keeps nothing of the blocks it returns, as they have a room, and that can
    return them again: a training then needs no copy of what it began with.
    """

    def fetch_again(self, assignment: Assignment, opened: RoundOpen, room: Raw | None) -> Blocks:
        """Return the blocks of an earlier `fetch`. `room`: memory for them, if large enough."""


class DeviceApp(Generic[K]):
    """One device: takes messages, works through them and returns what to send.

    `K` is the form in which its store gives kept movements. A `Movement` that is sent for the first
    time comes in this form too, except when the disk had no room for it.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: Backend,
        data: ArrayData,
        policy: Policy,
        source: ModelSource,
        seed: int,
        movements: MovementStore[K],
        store: ArrayStore | None = None,
        variates: ArrayStore | None = None,
        observer: Observer | None = None,
        emulation: Emulation | None = None,
        examiner: Examiner | None = None,
        unfit: str | None = None,
        pause: Pause | None = None,
        seat: Seat | None = None,
        book: Logbook | None = None,
        tells_energy: bool = True,
        overtaken: Callable[[int], bool] = lambda _: False,
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`movements` keeps movements until their receipt, `store` the values that top-k leaves
        out, `variates` the device's control variate (None: in memory). The app resumes from what is
        in them.

        `observer` tells what the device can afford; None: all that its owner allows. `emulation` is
        the device it pretends to be, whose time passes from round to round; None: this machine.

        `examiner` runs levels for surveys; None: this device answers that it cannot. `unfit` is why
        the device can never train, if that is known; every round is then skipped. `overtaken`
        tells if something newer than this round waits, which ends a survey of it.

        `pause` is the owner's; None: there is none. `seat` is this task's among those of the
        device; None: it is the only one. `book` takes notes for the owner. `tells_energy`: the
        coordinator may know what training took.
        """
        self.name = name
        self._movements = movements
        self._state = DeviceState(
            name, backend.plan.hash, unreceipted=movements.waiting, copy=movements.copy
        )
        self._backend = backend
        self._data = data
        self._policy = policy
        self._source = source
        self._seed = seed
        self._residuals = Residuals(
            backend.plan, ArrayStore() if store is None else store, forget_after=RESIDUAL_ROUNDS
        )
        self._variates = Variates(backend.plan, ArrayStore() if variates is None else variates)
        self.unfit = unfit or self._misfit()
        """The reason why this device can never train; None: its data fits the task. It may quote
        the data and is not sent."""
        self._unsettled: dict[int, bool] = {}
        """Receipts that are not in residuals and variates yet, because the disk was full."""
        self._facts = Facts(len(data), policy.compute, policy.bytes_per_s)
        self._observer = Observer(policy) if observer is None else observer
        self._emulation = emulation
        self._examiner = examiner
        self._pause = pause
        self._seat = seat
        self._book = book
        self._tells_energy = tells_energy
        self._overtaken = overtaken
        self._should_stop = should_stop
        self._clock = clock
        self._warned_of_age = False

    def _misfit(self) -> str | None:
        """Return the reason why the data does not fit the task; None: it does."""
        try:
            if self._backend.data is not None:
                self._backend.data.check(self._data)
        except TensorError as error:
            extra = fact("data")
            log.warning("%s: the data does not fit the task: %s", self.name, error, extra=extra)
            return str(error)
        return None

    @property
    def phase(self) -> DevicePhase:
        """The step of a round that the device has reached."""
        return self._state.phase

    @property
    def newest(self) -> RoundOpen | None:
        """The newest round; None: none was opened yet."""
        return self._state.newest

    def connected(self) -> list[Bid | SurveyFinding | Movement | K]:
        """Return every movement that has no receipt yet: the link is up, perhaps again."""
        return self._handle(LinkUp())

    def restarted(self, opened: RoundOpen | None) -> list[Bid | SurveyFinding | Movement | K]:
        """Begin again with a coordinator that was started again; return what to send.

        `opened` is the round heard of last, which is answered again. See `Restarted`.
        """
        return self._handle(Restarted(opened))

    def withdraw(self, reason: str, code: Code) -> list[Bid | SurveyFinding | Movement | K]:
        """Take back an offer that has no assignment yet; return what to send."""
        return self._handle(Withdrawn(f"skip: {reason}", code))

    def receive(
        self, message: RoundOpen | Assignment | Receipt | RoundClosed | Survey
    ) -> list[Bid | SurveyFinding | Movement | K]:
        """Work through a message of the coordinator; return what to send, in order."""
        return self._handle(message)

    def _handle(self, event: Event) -> list[Bid | SurveyFinding | Movement | K]:
        try:
            return self._handled(event)
        except BaseException:
            # Else no other task could ever train.
            if self._seat is not None and self._state.phase is not DevicePhase.BIDDING:
                self._seat.release()
            raise

    def _handled(self, event: Event) -> list[Bid | SurveyFinding | Movement | K]:
        events, sent = [event], list[Bid | SurveyFinding | Movement | K]()
        while events:
            self._state, effects = handle(self._state, events.pop(0))
            self._note_phase()
            for effect in effects:
                match effect:
                    case SendMessage(Movement() as made):
                        sent += self._again(made.round) or [made]
                    case SendMessage(message):
                        sent.append(message)
                    case Resend(round):
                        sent += self._again(round)
                    case SendReplay(round, made):
                        sent += self._again(made, answers=round)
                    case _:
                        answer = self._perform(effect)
                        if answer is not None:
                            events.append(answer)
        return sent

    def _note_phase(self) -> None:
        """Note the step of the round that is reached; give the turn back when it is over."""
        phase, opened = self._state.phase, self._state.opened
        if self._book is not None:
            self._book.phase(phase, 0 if opened is None else opened.round)
        if self._seat is not None and phase in (DevicePhase.IDLE, DevicePhase.EXAMINING):
            self._seat.release()

    def _again(self, round: int, answers: int | None = None) -> list[K]:
        """Return the kept movement of this round; nothing if it is not kept or not readable."""
        try:
            return [self._movements.again(round, answers=answers)]
        except KeyError:  # the disk had no room for it
            return []
        except (OSError, ProtocolError) as error:
            self._complain(round, f"cannot send the movement: {error}")
            return []

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case Decide(opened):
                if self._emulation is not None:
                    self._emulation.round_opened(opened.round)
                return Decided(opened.round, self._answer(opened), self._facts)
            case Fetch(opened, assignment):
                round = assignment.round
                log.info("round %d: assigned", round, extra=fact("assigned", round=round))
                return self._attempt(round, lambda: self._fetch(assignment, opened))
            case Train(opened):
                extra = fact("training", round=opened.round, steps=opened.steps)
                log.info("round %d: training, %d steps", opened.round, opened.steps, extra=extra)
                return self._attempt(opened.round, lambda: self._train(effect))
            case Examine(survey):
                found = [self._examine(survey, number) for number in range(len(survey.levels))]
                return Examined(tuple(each for each in found if each is not None))
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

    def _fetch(self, assignment: Assignment, opened: RoundOpen) -> Fetched | Found | Failed:
        if self._was_made(assignment):
            round = assignment.round
            log.info("round %d: was trained before", round, extra=fact("found", round=round))
            return Found()
        if self._seat is not None and not self._seat.begin():
            return Failed(f"skip: {slot.ANOTHER}", "task")
        self._check_widths(assignment)
        blocks, buffers = self._source.fetch(assignment, opened)
        # From here on there are arrays alone: a large model is in memory as few times as possible.
        weights = self._backend.plan.assemble(blocks, assignment.groups)
        control = self._source.fetch_control(assignment, opened) if opened.variates else None
        return Fetched(weights, buffers, control, blocks.room)

    def _check_widths(self, assignment: Assignment) -> None:
        """Raise `GroupError` unless each width lies within the one before."""
        outer = assignment.groups
        for number, width in enumerate(assignment.widths, 1):
            try:
                self._backend.plan.places_within(outer, width)
            except GroupError as error:
                raise GroupError(f"narrower width {number} of the assignment: {error}") from error
            outer = width

    def _was_made(self, assignment: Assignment) -> bool:
        """Tell if the movement of this round and these groups waits for its receipt."""
        if assignment.round not in self._movements.waiting:
            return False
        try:
            payload = self._movements.payload(assignment.round)
            made = decode_header(self._backend.plan, payload).groups
        except (OSError, ProtocolError) as error:
            self._complain(assignment.round, f"cannot read the kept movement: {error}")
            return False
        return made == {axis: tuple(groups) for axis, groups in assignment.groups.items()}

    def _keep(self, movement: Movement) -> None:
        if self._book is not None:
            self._book.made(movement)
        try:
            self._movements.keep(movement)
        except OSError as error:
            # It can still be sent from memory, but not one that was made for other groups before.
            with suppress(OSError):
                self._movements.forget(movement.round, rejected=True)
            self._complain(
                movement.round,
                f"cannot keep the movement ({error}): it is lost if this program stops before the "
                "receipt",
            )

    def _complain(self, round: int, problem: str) -> None:
        """Log an error of the disk, which does not end the round."""
        extra = fact("disk", round=round)
        log.error("%s: round %d: %s", self.name, round, problem, extra=extra)

    def _settle(self) -> bool:
        """Note the receipts in residuals and variates; False while the disk is full."""
        try:
            for round, used in list(self._unsettled.items()):
                self._residuals.settle(round, used=used)
                self._variates.settle(round, used=used)
                del self._unsettled[round]
        except OSError as error:
            for round in self._unsettled:
                self._complain(round, f"cannot note yet that its receipt came: {error}")
            return False
        return True

    def _answer(self, opened: RoundOpen) -> Decision:
        """Decide on a round: alike when it is heard of again, and a skip if that fails."""
        if self._is_paused:
            self._observer.passed_over(opened)
            return Decision(None, f"skip: {pause.REASON}", "paused")
        if self._seat is not None and self._seat.claim(opened.bid_s, self._is_interrupted):
            self._observer.passed_over(opened)
            return Decision(None, f"skip: {slot.ANOTHER}", "task")
        decision = self._observer.recalled(opened) or self._considered(opened)
        if decision.level is not None and self._seat is not None:
            self._seat.offer(opened.bid_s)
        return decision

    def _considered(self, opened: RoundOpen) -> Decision:
        """Decide on a round that was not heard of before; a skip if that fails."""
        try:
            return self._decide(opened)
        except TesseraError as error:
            log.warning("%s: %s", self.name, error, extra=fact("failed", round=opened.round))
            return Decision(None, f"skip: {error}"[:MAX_REASON_CHARACTERS], "failed")

    def _decide(self, opened: RoundOpen) -> Decision:
        if self.unfit is not None:
            return Decision(None, f"skip: {UNFIT}", "data")
        decision = decide(
            self._policy,
            self._observer.look(opened),
            self._observer.history,
            device=self.name,
            round=opened.round,
            seed=self._seed,
        )
        self._observer.decided(opened, decision)
        self._warn_of_age(opened, decision.share)
        return decision

    def _warn_of_age(self, opened: RoundOpen, share: float) -> None:
        """Say once that this device trains so rarely that its replays are often too old."""
        if self._warned_of_age or not (self._policy.keeps_copy and opened.replay_within):
            return
        even = self._policy.schedule == "round-robin"
        lost = outlived_share(share, opened.replay_within, even=even) if 0 < share < 1 else 0.0
        if lost < OFTEN:
            return
        self._warned_of_age = True
        log.warning(
            "this device trains in %.0f %% of rounds, and replays count for %d rounds: about %.0f "
            "%% of its skips have nothing to replay; the coordinator's horizon should be several "
            "times %.0f",
            *(100 * share, opened.replay_within, 100 * lost, 1 / share),
            extra=fact("horizon", round=opened.round, within=opened.replay_within),
        )

    def _attempt(self, round: int, work: Callable[[], Event]) -> Event:
        """Do the work and return its event; an error fails this round, never the device."""
        try:
            return work()
        except TrainingStopped as error:
            if self._is_paused:
                return self._failed_by_pause(round)
            gate = self._observer.closed_gate()
            reason = str(error) if gate is None else f"{gate.reason}; {error}"
            log.warning("round %d: given up: %s", round, reason, extra=fact("failed", round=round))
            code = "failed" if gate is None else gate_code(gate)
            return Failed(f"skip: {reason}", code)
        except TesseraError as error:
            if self._is_paused:  # which ended a fetch
                return self._failed_by_pause(round)
            extra = fact("failed", round=round)
            log.warning("%s: round %d: given up: %s", self.name, round, error, extra=extra)
            return Failed(f"skip: {error}")
        except Exception as error:
            log.exception("%s: unexpected error; the round is skipped", self.name)
            return Failed(f"skip: {type(error).__name__}: {error}")

    def _failed_by_pause(self, round: int) -> Failed:
        extra = fact("failed", round=round)
        log.info("round %d: given up: %s", round, pause.REASON, extra=extra)
        return Failed(f"skip: {pause.REASON}", "paused")

    @property
    def _is_paused(self) -> bool:
        return self._pause is not None and self._pause.active

    def _is_interrupted(self) -> bool:
        """Tell if the wait for the turn is useless."""
        return self._should_stop() or self._is_paused

    def _train(self, work: Train) -> Finished:
        opened, groups, plan = work.opened, work.assignment.groups, self._backend.plan
        assert not isinstance(work.weights, Blocks)  # noqa: S101  see _fetch
        job = Job(
            groups=groups,
            weights=work.weights,
            owned=True,
            spare=work.spare,
            subtract_start=self._subtract_start(work),
            buffers=work.buffers,
            rule=opened.local_rule,
            mask_stream=stream(self._seed, self.name, opened.round, "dropout"),
            widths=work.assignment.widths,
            width_stream=stream(self._seed, self.name, opened.round, "widths"),
            passes=work.passes,
            classes=self._classes(opened.local_rule),
            correction=self._correction(work),
        )
        batches = self._data.batches(
            opened.steps,
            opened.batch_size,
            stream(self._seed, self.name, opened.round, "batches"),
        )
        started = self._clock()
        if self._book is not None:
            batches = self._book.steps(batches, opened.steps)
        with self._observer.training(opened, work.level, job):
            trained = self._backend.train(job, batches, should_stop=self._must_stop)
        took, joules = self._clock() - started, self._observer.joules
        if joules is not None and not 0 <= joules <= MAX_JOULES:
            joules = None
        payload = self._encode(opened, groups, trained.movement, trained.spare)
        self._keep_variate(work, payload)
        return Finished(
            Movement(
                device=self.name,
                round=opened.round,
                plan_hash=plan.hash,
                payload=payload,
                statistics=trained.statistics,
                learning_rate=opened.local_rule.learning_rate,
                level=work.level,
                samples=len(self._data),
                loss=trained.metrics.mean_loss,
                train_s=took,
                keeps_copy=self._policy.keeps_copy and opened.replay_within > 0,
                energy_j=joules if self._tells_energy else None,
            )
        )

    def _subtract_start(
        self, work: Train
    ) -> Callable[[Mapping[str, Array], Raw | None], None] | None:
        """Return what subtracts the weights of the assignment, read again; None: they are kept.

        A variate that was fetched after them may have taken their place in the cache.
        """
        source, plan, assignment = self._source, self._backend.plan, work.assignment
        if work.control is not None or not isinstance(source, RereadSource):
            return None
        if work.spare is None or len(work.spare) < REREAD_BYTES:
            return None

        def subtract(arrays: Mapping[str, Array], room: Raw | None) -> None:
            blocks = source.fetch_again(assignment, work.opened, room)
            plan.subtract(arrays, blocks, assignment.groups)

        return subtract

    def _correction(self, work: Train) -> Mapping[str, Array] | None:
        """Return what is added to every gradient; None in a round without variates."""
        if work.control is None:
            return None
        self._settle()
        correction = self._variates.correction(work.opened.round, work.control)
        return self._backend.plan.assemble(correction, work.assignment.groups)

    def _keep_variate(self, work: Train, payload: bytes | memoryview) -> None:
        """Keep the change of the own variate until the verdict.

        Raises `TrainingError` if the disk is full: a movement that counted without it would leave
        the coordinator with another variate than the device's.
        """
        if work.control is None:
            return
        opened, plan = work.opened, self._backend.plan
        try:
            self._variates.keep(
                opened.round,
                work.control,
                decode_blocks(plan, payload)[1],
                steps=opened.steps,
                learning_rate=opened.local_rule.learning_rate,
            )
        except OSError as error:
            raise TrainingError(f"the control variate has no room on the disk: {error}") from error

    def _classes(self, rule: LocalRule) -> tuple[int, ...]:
        """Return the classes of the device's samples, if the rule asks for them."""
        return () if rule.classes == "all" else tuple(np.unique(self._data.targets).tolist())

    def _examine(self, survey: Survey, number: int) -> SurveyFinding | None:
        """Run a survey's level, or tell why not; an error is a reason, never the device's end.

        None: the level did not come, which may have passed when the coordinator asks again.
        """
        level, round, reason = survey.levels[number], survey.round, None
        try:
            reason = self._objection(survey, number)
            if reason is None and self._examiner is not None:
                with self._observer.training(None, level):
                    found = self._examiner.find(
                        survey, number, lambda: self._must_stop() or self._overtaken(round)
                    )
                words = "survey of round %d: %s of level %g from %d samples"
                extra = fact("survey", round=round, level=level, samples=found.samples)
                log.info(words, round, survey.wants, level, found.samples, extra=extra)
                return found
        except UnfetchedError as error:
            extra = fact("survey", round=round, level=level)
            log.warning("survey of round %d: level %g: %s", round, level, error, extra=extra)
            return None
        except TrainingStopped:
            gate = self._observer.closed_gate()
            reason = "something newer came" if gate is None else gate.reason
            reason = pause.REASON if self._is_paused else reason
        except TesseraError as error:
            reason = str(error)
        except Exception as error:
            log.exception("%s: unexpected error; the level is not examined", self.name)
            reason = f"{type(error).__name__}: {error}"
        extra = fact("survey", round=round, level=level, samples=0)
        log.info("survey of round %d: not level %g: %s", round, level, reason, extra=extra)
        return SurveyFinding(
            device=self.name,
            round=round,
            wants=survey.wants,
            level=level,
            samples=0,
            run=survey.run,
            reason=(reason or "")[:MAX_REASON_CHARACTERS],
        )

    def _objection(self, survey: Survey, number: int) -> str | None:
        """Return why this device does not run a survey's level; None: it does."""
        if self.unfit is not None:
            return UNFIT
        if self._examiner is None:
            return "this device runs no levels"
        if (refusal := self._examiner.refusal(survey)) is not None:
            return refusal
        if self._is_paused:
            return pause.REASON
        if self._seat is not None and self._seat.disturbs:
            return slot.ANOTHER
        if self._should_stop() or self._overtaken(survey.round):
            return "something newer came"
        samples = min(survey.samples, len(self._data))
        return self._observer.objection(survey, number, samples)

    def _must_stop(self) -> bool:
        if self._should_stop() or self._is_paused:
            return True
        return self._observer.closed_gate() is not None

    def _encode(
        self,
        opened: RoundOpen,
        groups: Groups,
        arrays: Mapping[str, Array],
        room: Raw | None,
    ) -> bytes | memoryview:
        """Encode a movement; values that top-k leaves out are kept for later. `room`: memory for
        it.
        """
        plan, round = self._backend.plan, opened.round
        random = stream(self._seed, self.name, round, "encoding")
        encoding = usable(opened.up)
        if encoding.kind != "top-k" or not self._settle():
            return encode_arrays(plan, groups, arrays, encoding, random, room)
        movement = plan.scatter(arrays, groups)
        corrected = self._residuals.corrected(round, movement)
        payload = encode_blocks(plan, groups, corrected, encoding, random)
        try:
            self._residuals.keep(round, movement, decode_blocks(plan, payload)[1])
        except OSError as error:
            # Values that were held back must not be sent without a note, or they would be sent
            # twice: this round goes without them.
            self._complain(
                round,
                f"values that top-k leaves out have no room on the disk and are lost: {error}",
            )
            random = stream(self._seed, self.name, round, "encoding")
            return encode_blocks(plan, groups, movement, encoding, random)
        return payload
