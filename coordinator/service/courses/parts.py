"""The engine: parts shared by the courses of synchronous and asynchronous runs.

A course is a state machine together with the performer of its effects (`rounds_course.py`,
`fragments_course.py`). It gets a store for the run, an outlet for the model, and the time with
every event. It returns the messages for devices, in order, and its caller sends them. `serve`
supplies a disk, a broker and the wall clock (`service.py`); the in-process federation supplies RAM,
the model itself and a virtual clock (`coordinator/simulate/federation.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.aggregate.model import GlobalModel
from coordinator.rounds import events
from coordinator.rounds.config import RunConfig
from coordinator.rounds.fleet import FleetRecord
from coordinator.rounds.report import RoundReport
from coordinator.rounds.state import Committed
from coordinator.run.folder import Checkpoint
from coordinator.run.steering.orders import OrderedStanding
from coordinator.service.aside import Aside, AtOnce
from coordinator.service.close import RootTrainer
from coordinator.service.outgoing.outlet import ModelOutlet
from coordinator.service.outgoing.rollout import Rollout
from coordinator.service.overview.onlooker import Onlooker
from coordinator.service.store import RunStore, Tally
from coordinator.task.levels import LevelScore, LevelScores, evaluate_levels
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.delivery import CHOICES, Choice
from edge_sdk.protocol.messages.round import Bid, Outcome, Receipt
from edge_sdk.protocol.messages.transfer import Evaluation, Offer
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.train.statistics import LevelRuntime
from edge_sdk.transport.uploads import Upload

log = logging.getLogger(__name__)

Said = events.Broadcast | events.Send | events.Accept
"""Output for devices; an accepted offer gets a credit."""
Evaluate = Callable[[GlobalModel, LevelScores], LevelScores]
"""Returns the levels of a model with the accuracy and the statistics of each."""


LISTED = 5
"""Most names of devices in a line."""
WAIT_S, MAX_WAIT_S = 60.0, 960.0
"""Seconds after which a wait within a round is logged, then twice as many each time."""


PAUSED = "paused"
"""Kind of the wait of a run that an operator paused."""
AT_ONCE = (PAUSED, "devices")
"""Kinds of waits that are logged when they begin."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A reason to wait: its kind in one word, and words to put behind *waiting for*; those of a
    pause stand alone."""

    kind: str
    words: str


def missing_devices(present: int, wanted: int, barred: Collection[str] = ()) -> Wait:
    """Return the wait of a run with too few devices for a round; of those here, some are barred."""
    words = f"devices: {present - len(barred)} of {wanted} are here (round.min_devices)"
    if barred:
        words += f"; quarantined: {listed(barred)} (tessera-coordinator allow)"
    return Wait("devices", words)


def listed(names: Iterable[str]) -> str:
    """Return the first names in order, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - LISTED
    return ", ".join(ordered[:LISTED]) + (f" and {more} more" if more > 0 else "")


class WaitLog:
    """Logs what a run waits for: devices or an operator at once, all else when it takes long."""

    def __init__(self) -> None:
        self._last: Wait | None = None
        self._since = self._due_s = 0.0

    def note(self, wait: Wait | None, now: float) -> str | None:
        """Note what the run waits for at `now` (seconds); returns the words that were logged."""
        last, self._last = self._last, wait
        if wait is None:
            return None
        if last is None or last.kind != wait.kind:
            self._since, self._due_s = now, now + WAIT_S
        if wait.kind in AT_ONCE:
            return self._log(wait.words) if wait != last else None
        if now < self._due_s:
            return None
        waited = now - self._since
        self._due_s = now + min(2 * waited, MAX_WAIT_S)
        return self._log(f"{wait.words}, for {waited:.0f} s now")

    def _log(self, words: str) -> str:
        paused = self._last is not None and self._last.kind == PAUSED
        text = words if paused else f"waiting for {words}"
        log.info("%s", text, extra={"facts": {"event": "waiting"}})
        return text


def judgement_event(judgement: OrderedStanding) -> events.Barred | events.Released:
    """Return an operator's word about a device as an event of the machines."""
    if not judgement.quarantined:
        return events.Released(judgement.device)
    return events.Barred(judgement.device, judgement.words, judgement.round)


def judged(fleet: FleetRecord, judgement: OrderedStanding) -> FleetRecord:
    """Return the record after an operator's word about a device."""
    if not judgement.quarantined:
        return fleet.released(judgement.device)
    return fleet.shut_out(judgement.device, judgement.round, judgement.words)


class Evaluator:
    """Measures every level's accuracy on test data, and computes its statistics from the inputs."""

    def __init__(
        self, runtime: LevelRuntime, data: ArrayData, *, own: Sequence[Indices] = ()
    ) -> None:
        """`own`: for each device, the rows of the data that are its own test data.

        With it (`own_test_parts` makes it), reports have the deviation between devices.
        """
        self._runtime = runtime
        self._data = data
        self._own = own

    def __call__(self, model: GlobalModel, levels: LevelScores) -> LevelScores:
        """See `Evaluate`."""
        choices = {each.level: each.groups for each in levels.levels}
        weights, buffers, rescale = model.weights, model.buffers, levels.rescale
        return evaluate_levels(
            self._runtime, weights, buffers, choices, self._data, rescale=rescale, own=self._own
        )


@dataclass(slots=True)
class Parts:
    """Tools of a course."""

    store: RunStore
    model: GlobalModel
    outlet: ModelOutlet
    evaluate: Evaluate | None = None
    surveys: bool = False
    """True if devices can compute statistics and accuracies of levels: without `evaluate`, they
    are asked to."""
    threads: int = 1
    """Threads that a rule may use when a round closes."""
    partial: bool = False
    """True if fragments leave blocks out for ever."""
    root: RootTrainer | None = None
    """Makes the movement that those of devices are compared with (`robust = "root"`)."""
    tally: Tally = field(default_factory=Tally)
    watch: Callable[[RoundReport], object] | None = None
    """Is shown every report, once it is stored."""
    rollout: Rollout | None = None
    """Lets some devices try a model before all get it; None: all get every model at once."""
    history: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    """Reads the lines of the run's history."""
    onlooker: Onlooker = field(default_factory=Onlooker)
    """Is told what happens."""
    aside: Aside = field(default_factory=AtOnce)
    """Does what takes long."""

    def score(self, config: RunConfig) -> LevelScores:
        """Return the run's levels, evaluated if there is data for it."""
        levels = config.unscored()
        return levels if self.evaluate is None else self.evaluate(self.model, levels)

    @property
    def asks_devices(self) -> bool:
        """True if the levels of some models are surveyed by devices."""
        return self.surveys and self.evaluate is None

    def deliver_kept(self, checkpoint: Checkpoint, *, current: bool = True) -> None:
        """Offer the models that the store keeps for inference, after a start.

        `current` is False if the checkpoint's scores may be of an earlier model than its own: then
        its model is offered without them.
        """
        if self.rollout is not None:
            levels = self.trained(checkpoint.levels, checkpoint.fleet)
            if not current:
                levels = _unscored(levels)
            self.rollout.resume(
                checkpoint,
                levels,
                self.model,
                self.store.checkpoint,
                self.trained,
                self.history(),
            )
            return
        outlet, best = self.outlet, self.store.best()
        for choice in CHOICES:
            outlet.deliver_none(choice)
        is_best = best is not None and best.round == checkpoint.round
        choices: set[Choice] = {"latest", "best"} if is_best else {"latest"}
        levels = self.trained(checkpoint.levels, checkpoint.fleet)
        # The best checkpoint's scores are its own: it is the earliest with this accuracy.
        if not current and not is_best:
            levels = _unscored(levels)
        offered = outlet.deliver(choices, checkpoint.round, levels)
        if best is not None and not is_best:
            self.deliver_best(best, {"latest", "best"} if current and not offered else {"best"})

    def deliver(
        self,
        choices: Collection[Choice],
        round: int,
        levels: LevelScores,
        *,
        final: bool = False,
    ) -> bool:
        """Offer the current model, which this round made, for inference: to some devices first, if
        the run is so configured. See `ModelOutlet.deliver`.
        """
        if self.rollout is not None:
            return self.rollout.made(round, levels, final=final)
        return self.outlet.deliver(choices, round, levels, final=final)

    @property
    def needed(self) -> Collection[int]:
        """Rounds whose checkpoints the trial of a model needs."""
        return () if self.rollout is None else self.rollout.rounds

    def prune(self) -> None:
        """Drop checkpoints that nobody needs, now that the newest one is complete."""
        self.store.prune(self.needed)

    def deliver_best(self, best: Checkpoint, choices: Collection[Choice]) -> None:
        """Offer the model of the best checkpoint for inference."""
        if best.round > 0:
            earlier = self.model.at(best.theta, best.buffers, best.version)
            levels = self.trained(best.levels, best.fleet)
            self.outlet.deliver_earlier(choices, earlier, best.round, levels)

    def trained(self, scores: LevelScores, fleet: FleetRecord) -> LevelScores:
        """Return the levels of which every block was trained.

        If fragments leave blocks out for ever: all levels, if none is complete.
        """
        plan, known = self.model.plan, fleet.last_covered > 0
        held = {each.level: plan.covers(plan.choose(each.groups)) for each in scores.levels}
        whole = tuple(each for each in scores.levels if known[held[each.level]].all())
        return scores if self.partial and not whole else replace(scores, levels=whole)

    def heard(self, device: str, evaluation: Evaluation) -> None:
        """Remember a device's evaluation of the model for the next report."""
        if self.rollout is not None:
            self.rollout.heard(device, evaluation)
        if not evaluation.canary:
            self.tally.evaluations[device] = evaluation

    def give(
        self, receipt: Receipt, event: object, upload: Upload | None, *, count: bool = True
    ) -> None:
        """Record the receipt that an event produced for the movement in an upload.

        `count` is False if a report already includes it. A movement that is kept is counted when
        its round closes.
        """
        if self.is_news(receipt, event):
            # A bid that is declined is no movement.
            if count and receipt.outcome is not Outcome.KEPT and not isinstance(event, Bid):
                self.tally.note(receipt)
            log_receipt(receipt)
            if not isinstance(event, Bid):
                self.onlooker.verdict(receipt)
        if upload is not None:
            self.store.settle(upload, receipt)

    def is_news(self, receipt: Receipt, event: object) -> bool:
        """True if the receipt that an event produced was not given before."""
        if receipt.outcome in (Outcome.LATE, Outcome.REJECTED):
            return not (isinstance(event, Offer) and self.store.knows(event))
        return isinstance(event, (events.Kept, Committed))

    def describe(self, report: RoundReport) -> Mapping[str, Any] | None:
        """Return a report's line of history, with the evaluations and outcomes since the last."""
        tally, self.tally = self.tally, Tally()
        return self.store.describe(report, tally, self.model)

    def record(self, report: RoundReport, line: Mapping[str, Any] | None) -> None:
        """Store a report of the newest round, which `describe` made this line of."""
        self.store.record(report, line)
        if line is not None:
            self.onlooker.line(line)
        if self.watch is not None:
            self.watch(report)


def _unscored(levels: LevelScores) -> LevelScores:
    """Return levels without what is known of them, which may be of an earlier model."""
    unscored = tuple(LevelScore(each.level, each.groups) for each in levels.levels)
    return replace(levels, levels=unscored)


def upload_of(event: object) -> Upload | None:
    """Return the upload that an event is about; None if there is none."""
    return event.upload if isinstance(event, events.Uploaded) else None


def log_receipt(receipt: Receipt) -> None:
    """Log the outcome of a movement."""
    if not log.isEnabledFor(logging.INFO):
        return
    outcome, reason = receipt.outcome.value, receipt.reason
    facts = {"event": "movement", "device": receipt.device, "round": receipt.round}
    log.info(
        "movement from %s for round %d: %s%s",
        receipt.device,
        receipt.round,
        outcome,
        f" ({reason})" if reason else "",
        extra={"facts": {**facts, "outcome": outcome}},
    )


def make_model(
    plan: ModelPlan, checkpoint: Checkpoint, encoding: Encoding, seed: int
) -> GlobalModel:
    """Make the model stored in a checkpoint."""
    weights, buffers = plan.unflatten(checkpoint.theta), checkpoint.buffers
    model = GlobalModel(plan, weights, buffers, encoding=encoding, seed=seed)
    model.version, model.pending = checkpoint.version, checkpoint.pending
    return model
