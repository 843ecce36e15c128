"""Performs canary delivery: keeps its state on disk, announces models, and takes answers.

    delivery.json    the state (`canary.py`), and the last line of history that it made

State is written before anything is announced, and announced again by every start; so a process
that is killed at any instruction goes on with the same trial and ends with the same decision. The
newest line of history is in the state, too, and has an id: a start appends it if it is not there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.aggregate.model import GlobalModel
from coordinator.checksums import DamagedBytes, open_json
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.folder import DELIVERY, Checkpoint, write_json
from coordinator.service.outgoing import canary
from coordinator.service.outgoing.canary import CanarySettings, CanaryState, CanaryVerdict
from coordinator.service.outgoing.outlet import BrokerOutlet
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.delivery import CHOICES, Choice
from edge_sdk.protocol.messages.transfer import Evaluation

log = logging.getLogger(__name__)

LATEST: tuple[Choice, ...] = ("latest",)
LATEST_AND_BEST: tuple[Choice, ...] = ("latest", "best")
TRIAL: tuple[Choice, ...] = ("canary",)

ANSWERS_S = 150.0
"""Seconds without an answer after which a complete run lets its devices go: a device fetches a
model for inference at most once a minute."""
UNHEARD_S = 20.0
"""The same if no device here has judged anything yet: perhaps no owner allows it."""
NO_JUDGES = (
    "no device here has judged a model yet, so nobody decides on the trial: set `evaluate_every` "
    'and `deliver = "latest"` in device.toml of some devices'
)

Deliverable = Callable[[LevelScores, Any], LevelScores]
"""Returns the levels that can be delivered, as `Parts.trained`."""


class Rollout:
    """The models for inference of a served run, each tried by some devices before all get it."""

    def __init__(
        self,
        settings: CanarySettings,
        *,
        path: Path,
        run: str,
        outlet: BrokerOutlet,
        devices: Callable[[], Collection[str]],
        record: Callable[[Mapping[str, Any]], None],
        wall: Callable[[], float],
        note: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """`devices` returns those that are present and trusted, `record` appends to the history,
        and `note` takes what operators see (`shown`) after every change.

        Raises `RunError` if the state cannot be read.
        """
        self._settings, self._path, self._run = settings, path, run
        self._outlet, self._devices, self._record, self._wall = outlet, devices, record, wall
        self._note = note
        self._able: set[str] = set()
        """Devices that sent an evaluation since the start: their owners allow that."""
        self._newest: tuple[int, LevelScores, int, bool] | None = None
        """The newest model without a trial: its round, scores and version; True: none follows."""
        self.state, self._line = _read(path)
        self._note(self.shown())

    @property
    def rounds(self) -> frozenset[int]:
        """Rounds whose checkpoints are needed."""
        return self.state.rounds

    @property
    def undecided(self) -> bool:
        """True while a model is tried."""
        return self.state.trial is not None

    @property
    def patience_s(self) -> float:
        """Seconds without an answer that a complete run waits for the decision on its model."""
        if not self.undecided:
            return 0.0
        return ANSWERS_S if self._able & set(self._devices()) else UNHEARD_S

    @property
    def judged(self) -> bool:
        """True if any device has judged a model since the start."""
        return bool(self._able)

    def shown(self) -> dict[str, Any]:
        """Return what operators see."""
        judges = len(self._able & set(self._devices()))
        stuck = self.undecided and not judges
        return canary.shown_trial(self.state, judges, NO_JUDGES if stuck else None)

    # -- starts -------------------------------------------------------------------------------

    def resume(
        self,
        checkpoint: Checkpoint,
        levels: LevelScores,
        model: GlobalModel,
        read: Callable[[int], Checkpoint | None],
        trained: Deliverable,
        lines: Iterable[Mapping[str, Any]],
    ) -> None:
        """Announce again what was announced before this start.

        `levels` are the scores of the newest checkpoint, whose model is current; `read` returns
        other checkpoints that are kept.
        """
        if self._line is not None and self._line not in [each.get("canary") for each in lines]:
            self._record(_entry(self._line))
        for choice in CHOICES:
            self._outlet.deliver_none(choice)
        kept = {number: read(number) for number in self.state.rounds}
        self._forget({number for number, found in kept.items() if found is None})
        self._outlet.decided = self.state.decided
        state = self.state
        wanted: list[tuple[Choice, int | None]] = [
            ("latest", state.promoted),
            ("best", None if state.best is None else state.best[0]),
            ("canary", None if state.trial is None else state.trial.round),
        ]
        self._outlet.canary = None if state.trial is None else state.trial.share
        for choice, number in wanted:
            found = None if number is None else kept[number]
            if found is None or number is None:
                continue
            if number == checkpoint.round:
                self._outlet.deliver((choice,), number, levels)
                continue
            earlier = model.at(found.theta, found.buffers, found.version)
            scores = trained(found.levels, found.fleet)
            self._outlet.deliver_earlier((choice,), earlier, number, scores)
        # Its trial begins once there are devices.
        self._newest = checkpoint.round, levels, self._outlet.version, False

    def _forget(self, gone: Collection[int]) -> None:
        """Let go of models whose checkpoints a rollback of the run removed."""
        if not gone:
            return
        state = self.state
        if state.promoted in gone:
            state = replace(state, promoted=None)
        if state.best is not None and state.best[0] in gone:
            state = replace(state, best=None)
        if state.trial is not None and state.trial.round in gone:
            state = replace(state, trial=None)
        self._keep(state, self._line)

    # -- events -------------------------------------------------------------------------------

    def made(self, round: int, scores: LevelScores, *, final: bool = False) -> bool:
        """Note a committed model, which is current; True if its trial begins.

        `final`: no other model follows.
        """
        self._newest = round, scores, self._outlet.version, final
        begun = self._begin()
        self._note(self.shown())  # who is here changes, too
        return begun

    def complete(self) -> None:
        """Note that no model follows: a trial of an earlier one without answers is given up."""
        if self.state.trial is not None and not self.state.trial.votes:
            self.skip_ahead()

    def skip_ahead(self) -> bool:
        """Give up a trial for the newest model, if that is a later one; True if its trial began."""
        if self._newest is None or self.state.trial is None:
            return False
        round, scores, version, _ = self._newest
        if version != self._outlet.version or not scores.levels or round <= self.state.trial.round:
            return False
        words = f"given up for the model of round {round}, as answers do not come"
        self._end(CanaryVerdict(promoted=False, words=words))
        return self._begin()

    def heard(self, device: str, found: Evaluation) -> None:
        """Note a device's evaluation, of a model that it tries or of the round's."""
        if device not in self._able:
            self._able.add(device)
            self._note(self.shown())
        if not found.canary or device not in self._devices():
            return
        after = canary.vote(self._settings, self.state, self._run, device, found)
        if after is not self.state:
            self._keep(after, self._line)
            good = after.trial is not None and after.trial.votes[device]
            log.info(
                "%s finds the model of round %d %s",
                *(device, found.round, "no worse" if good else "worse"),
                extra={"facts": {"event": "canary", "device": device, "good": good}},
            )

    def tick(self) -> None:
        """Decide, if it is time to."""
        found = canary.verdict(self._settings, self.state, self._wall())
        if found is not None:
            self._end(found)
        if self.state.trial is None and self._newest is not None:
            self._begin()

    # -- effects ------------------------------------------------------------------------------

    def _begin(self) -> bool:
        if self._newest is None or self.state.trial is not None:
            return False
        round, scores, version, final = self._newest
        if version != self._outlet.version or round <= self.state.decided or not scores.levels:
            self._newest = None  # the model has moved on; the next one is tried
            return False
        here = self._devices()
        if not here or round < 1:
            return False
        able = [name for name in here if name in self._able]
        among = able if len(able) >= self._settings.min_devices else here
        after = canary.begin(
            self._settings, self.state, self._run, round, scores.best, among, self._wall()
        )
        trial = after.trial
        if trial is None:
            return False
        self._outlet.canary = trial.share
        before, last = self.state, self._line
        words = (
            f"the model of round {round} is tried by some devices first: {trial.members} expected, "
            f"draws below {trial.share:.2f}"
        )
        self._keep(after, self._news("started", round, words))
        self._newest = None
        if not self._outlet.deliver(TRIAL, round, scores, final=final):
            self._keep(before, last)  # no level is ready, or it is not published: the next one
            return False
        self._tell()
        if not self._able:
            log.warning("delivery: %s", NO_JUDGES, extra={"facts": {"event": "canary"}})
        return True

    def _end(self, verdict: CanaryVerdict) -> None:
        trial = self.state.trial
        if trial is None:
            return
        before, after = self.state, canary.ended(self.state, verdict)
        if verdict.promoted:
            what, words = "promoted", f"the model of round {trial.round} goes to all devices"
        else:
            back = before.promoted
            to = "there is none before it" if back is None else f"devices return to round {back}"
            what, words = "rolled_back", f"the model of round {trial.round} is rolled back; {to}"
        line = self._news(what, trial.round, f"{words}: {verdict.words}")
        self._keep(after, line)
        self._outlet.decided = after.decided
        if verdict.promoted:
            is_best = after.best is not None and after.best[0] == trial.round
            self._outlet.promote(LATEST_AND_BEST if is_best else LATEST)
        else:
            self._outlet.announce_again("latest")
        self._outlet.deliver_none("canary")
        self._tell()

    def _news(self, what: str, round: int, words: str) -> dict[str, Any]:
        return {
            "what": what,
            "round": round,
            "words": words,
            "id": secrets.token_hex(4),
            "time": _milliseconds(self._wall()),
        }

    def _tell(self) -> None:
        """Append the newest line to the history."""
        if self._line is not None:
            facts = {"event": "canary", **self._line}
            log.info("delivery: %s", self._line["words"], extra={"facts": facts})
            self._record(_entry(self._line))

    def _keep(self, state: CanaryState, line: Mapping[str, Any] | None) -> None:
        """Write the state to disk."""
        write_json(self._path, {"state": canary.pack_state(state), "line": line})
        self.state, self._line = state, line
        self._note(self.shown())


def _milliseconds(seconds: float) -> float:
    """Return Unix seconds with milliseconds."""
    return round(seconds, 3)


def _entry(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of history."""
    return {"time": line["time"], "event": line["words"], "canary": dict(line)}


def read_trial(folder: Path) -> dict[str, Any] | None:
    """Return what operators see of a run that is not served; None: it tries no models.

    Raises `RunError` if that cannot be read.
    """
    path = folder / DELIVERY
    return canary.shown_trial(_read(path)[0], 0) if path.exists() else None


def _read(path: Path) -> tuple[CanaryState, Mapping[str, Any] | None]:
    try:
        content = open_json(path.read_bytes())
        return canary.unpack_state(content["state"]), content["line"]
    except FileNotFoundError:
        return CanaryState(), None
    except (DamagedBytes, KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{path} is damaged ({error}): {repair_advice(path.parent)}") from error
