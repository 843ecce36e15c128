"""Keeps a model of the task ready for inference: fetches, judges and replaces it.

    notice ──▶ level that the device can afford ──▶ fetch ──▶ own evaluation ──▶ kept or refused

The level is the most accurate one of those that the gates, memory, time and energy allow and that
are not above the owner's `level`; the largest of them if accuracies are not known. A new model
replaces the old one only if it is not worse on the device's own data by more than `deliver_margin`.
Both are evaluated on the same samples, at the same time. A model whose loss is not finite is never
taken, and always replaced. Otherwise the first model is taken, and so is one that cannot be
evaluated.

Nothing here is sent to anybody. A model that only some devices try (canary delivery) is taken in
the same way, but only if it can be judged; `tried` then has both judgements, for the coordinator.
If the coordinator rolls it back, the model before returns, whatever its accuracy here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.observer import Observer
from edge_sdk.device.examining import LevelSource
from edge_sdk.program.logs import fact
from edge_sdk.protocol.errors import TensorError, TesseraError, TrainingStopped
from edge_sdk.protocol.messages.delivery import BATCH, ModelNotice
from edge_sdk.protocol.messages.transfer import MAX_LOSS, Evaluation
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.delivered import (
    MODEL_FILE,
    DeliveredModel,
    Model,
    ModelError,
    read_delivered,
    write_delivered,
)
from edge_sdk.train.statistics import survey_rows

log = logging.getLogger(__name__)

MAX_JUDGED = 1024
"""Most samples of the device's own evaluation."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A model's quality on the device's own data; None: it cannot be measured."""

    accuracy: float | None = None
    loss: float | None = None

    def falls_short(self, other: Judgement | None, margin: float) -> str | None:
        """Tell how this model is worse than another by more than a margin; None: it is not.

        A loss that is not finite is worse than any model, and than none (`other` None).
        """
        if not self.is_sound:
            return f"loss {self.loss:.4g}"
        if other is None or not other.is_sound:
            return None
        if self.accuracy is not None and other.accuracy is not None:
            if self.accuracy < other.accuracy - margin:
                return f"accuracy {self.accuracy:.1%} instead of {other.accuracy:.1%}"
            return None
        if self.loss is None or other.loss is None:
            return None
        if self.loss <= other.loss + margin * abs(other.loss):
            return None
        return f"loss {self.loss:.4g} instead of {other.loss:.4g}"

    @property
    def is_sound(self) -> bool:
        """False if the loss is not finite."""
        return self.loss is None or math.isfinite(self.loss)


@dataclass(frozen=True, slots=True)
class Tried:
    """A model that this device tried, beside the one that it had."""

    run: str
    round: int
    samples: int
    new: Judgement
    old: Judgement | None
    """None: it had none, or it cannot be judged."""

    def evaluation(self, device: str) -> Evaluation:
        """Return the answer to the coordinator; a loss that is not finite is the largest one."""
        new, old = self.new, self.old
        told = new.loss if new.loss is not None and new.is_sound else 0.0
        known = old is not None and old.is_sound
        return Evaluation(
            device=device,
            run=self.run,
            round=self.round,
            samples=self.samples,
            loss=min(max(told, -MAX_LOSS), MAX_LOSS) if new.is_sound else MAX_LOSS,
            accuracy=new.accuracy,
            canary=True,
            before_loss=old.loss if known and old is not None else None,
            before_accuracy=old.accuracy if known and old is not None else None,
        )


class Delivering:
    """The model that one device keeps for one task, across runs and restarts."""

    def __init__(self, folder: Path, *, most: float, margin: float) -> None:
        """`folder` is the device's, `most` the largest level to keep, `margin` as configured."""
        self.path = folder / MODEL_FILE
        self._most = most
        self._margin = margin
        self._settled: tuple[str, int] | None = None
        """Run and round of the notice that needs no more work: taken or refused."""
        self._said: tuple[str, int, str] | None = None
        self._passed: tuple[str, int] | None = None
        """Run and round of the trial that this device has no part in: it can judge nothing."""
        self.tried: Tried | None = None
        """Outcome of the newest trial."""
        self._held: tuple[str, int] | None = None
        """Run and round of the model that is kept."""
        try:
            held = read_delivered(self.path) if self.path.exists() else None
        except ModelError as error:
            log.warning("%s", error, extra=fact("delivery"))
            held = None
        if held is not None:
            self._settled = self._held = held.run, held.round

    def is_due(self, notice: ModelNotice | None) -> bool:
        """Tell if a notice asks for work."""
        if notice is None or (notice.run, notice.round) in (self._settled, self._held):
            return False
        return notice.canary is None or (notice.run, notice.round) != self._passed

    def has(self, notice: ModelNotice) -> bool:
        """Tell if the model of a notice is the one that is kept, or was refused last."""
        return (notice.run, notice.round) == self._settled

    def deliver(
        self,
        notice: ModelNotice,
        *,
        task: str,
        plan: ModelPlan,
        manifest: Manifest,
        graphs: Callable[[], Mapping[str, bytes]],
        source: LevelSource,
        data: ArrayData,
        observer: Observer,
        should_stop: Callable[[], bool],
        spend: Callable[[float], object] = lambda _: None,
    ) -> bool:
        """Fetch and judge the model of a notice; returns False if it has to be tried again.

        `graphs` returns the files that run a model forward, by SHA-256. Raises `OSError` where the
        disk does; the old model is then unchanged.
        """
        samples = min(len(data), MAX_JUDGED)
        survey = notice.as_survey(max(1, samples))
        number, reason = self._pick(notice, lambda each: observer.objection(survey, each, samples))
        if number is None:
            self._say_once(notice, f"not fetched now: {reason}")
            return False
        level, groups = notice.levels[number], notice.groups[number]
        try:
            with observer.training(None, level):
                blocks, buffers = source.fetch_level(survey, number)
                new = DeliveredModel(
                    task=task,
                    run=notice.run,
                    round=notice.round,
                    level=level,
                    groups=groups,
                    rescale=notice.rescale,
                    plan=plan,
                    manifest=manifest,
                    graphs=_forward(plan, manifest, graphs(), groups),
                    weights=plan.assemble(blocks, groups),
                    buffers=buffers,
                    accuracy=notice.accuracies[number],
                )
                stop = lambda: should_stop() or observer.closed_gate() is not None  # noqa: E731
                worse, judged, old = self._judge(new, data, stop)
                spend(2 * samples * plan.submodel_macs(groups))
        except TrainingStopped:
            return False
        except TesseraError as error:
            self._say_once(notice, f"not delivered yet: {error}")
            return False
        known = notice.run, notice.round
        if notice.canary is not None:
            if judged.loss is None and judged.accuracy is None:
                self._passed = known
                self._say_once(notice, "not tried: this device has no data to judge it by")
                return True
            self.tried = Tried(*known, samples, judged, old)
        elif self._is_back(notice) and judged.is_sound:
            worse = None
        if worse is not None:
            self._settled = known
            kept = "the old model" if self.path.exists() else "no model"
            log.warning(
                "keeping %s: that of round %d, level %g, has %s on this device's data "
                "(deliver_margin = %g)",
                *(kept, notice.round, level, worse, self._margin),
                extra=fact("model_refused", round=notice.round, level=level),
            )
            return True
        write_delivered(self.path, replace(new, own_accuracy=judged.accuracy))
        self._settled = self._held = known
        own = "" if judged.accuracy is None else f", accuracy {judged.accuracy:.1%} on own data"
        log.info(
            "the model of round %d, level %g, is ready for inference%s",
            *(notice.round, level, own),
            extra=fact("model", round=notice.round, level=level, accuracy=judged.accuracy),
        )
        return True

    def _is_back(self, notice: ModelNotice) -> bool:
        """True if the model that is kept was rolled back to that of a notice."""
        if self._held is None or self._held[0] != notice.run:
            return False
        return notice.round < self._held[1] <= notice.decided

    def _pick(
        self, notice: ModelNotice, objection: Callable[[int], str | None]
    ) -> tuple[int | None, str]:
        """Return the number of the level to take, or None and the reason."""
        levels = notice.levels
        allowed = [n for n, level in enumerate(levels) if level <= self._most] or [len(levels) - 1]
        known = [n for n in allowed if notice.accuracies[n] is not None]
        # The most accurate one, the smallest of equals; else the largest.
        order = sorted(known, key=lambda n: (-(notice.accuracies[n] or 0.0), levels[n]))
        reason = ""
        for number in [*order, *(n for n in allowed if n not in known)]:
            why = objection(number)
            if why is None:
                return number, ""
            reason = why
        return None, reason

    def _judge(
        self, new: DeliveredModel, data: ArrayData, should_stop: Callable[[], bool]
    ) -> tuple[str | None, Judgement, Judgement | None]:
        """Evaluate the new model and the old one; tell how the new one is worse, if it is."""
        try:
            new.manifest.data.check(data)
        except TensorError:
            return None, Judgement(), None
        found = judge(Model(self.path, new), data, should_stop)
        try:
            old = Model(self.path, read_delivered(self.path)) if self.path.exists() else None
            if old is None:
                return found.falls_short(None, self._margin), found, None
            old.delivered.manifest.data.check(data)
            before = judge(old, data, should_stop)
            return found.falls_short(before, self._margin), found, before
        except TrainingStopped:
            raise
        except TesseraError as error:
            log.info("the old model cannot be evaluated: %s", error, extra=fact("delivery"))
            return found.falls_short(None, self._margin), found, None

    def _say_once(self, notice: ModelNotice, reason: str) -> None:
        said = notice.run, notice.round, reason
        if said != self._said:
            self._said = said
            extra = fact("delivery", round=notice.round)
            log.info("model of round %d: %s", notice.round, reason, extra=extra)


def judge(model: Model, data: ArrayData, should_stop: Callable[[], bool]) -> Judgement:
    """Evaluate a model on some fixed samples, if their labels are classes of the model.

    Raises `TrainingStopped` when told to stop.
    """
    # Imported here: they load onnxruntime, which is optional and slow to load.
    from edge_sdk.train.evaluation import LOSSES
    from edge_sdk.train.inference import accuracy

    rows = survey_rows(len(data), MAX_JUDGED)
    loss = LOSSES.get(model.delivered.manifest.loss)
    total, right, labels = 0.0, 0.0, 0
    for at in range(0, len(rows), BATCH):
        if should_stop():
            raise TrainingStopped(at // BATCH)
        part = rows[at : at + BATCH]
        outputs, targets = model(*(each[part] for each in data.inputs)), data.targets[part]
        try:
            share = accuracy(outputs, targets)
            if loss is not None:
                total += float(loss(outputs.astype(np.float64), targets).sum())
        except TensorError:
            return Judgement()
        if share is not None:
            right, labels = right + share * targets.size, labels + targets.size
    return Judgement(
        right / labels if labels else None,
        total / len(rows) if loss is not None and len(rows) else None,
    )


def _forward(
    plan: ModelPlan,
    manifest: Manifest,
    files: Mapping[str, bytes],
    groups: Mapping[str, tuple[int, ...]],
) -> dict[str, bytes]:
    """Return the graphs that run this submodel forward."""
    kept = plan.kept_atoms(plan.choose(groups))
    return {
        entry.sha256: files[entry.sha256]
        for entry in manifest.graphs
        if entry.kind == "evaluate" and entry.fits(kept) and entry.sha256 in files
    }
