"""A run in RAM goes the way of a run on disk, and leaves nothing behind."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.rounds.events import Broadcast, Joined, Send
from coordinator.rounds.fleet import new_fleet
from coordinator.run.folder import MOVEMENTS, ROUND, UPLOADS, About, Checkpoint, Run, create_run
from coordinator.run.journal import Journal
from coordinator.service.courses.parts import Parts, Said, make_model
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.service.receiving import Receiving
from coordinator.service.store import Keeping, RunOnDisk, RunStore
from coordinator.simulate.ram import DirectOutlet, RunInRam
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Assignment, Bid, Movement, RoundClosed
from edge_sdk.transport.uploads import Upload, UploadLimits
from tests.messages import make_movement
from tests.unit.coordinator.service.service_world import (
    PLAN,
    rounds_config,
    saved_model,
)


class LooseRun(RunOnDisk):
    """A run on disk whose movements come in no upload."""

    def keep(self, upload: Upload | None, device: str, round: int) -> None:
        """There is nothing to make durable."""


@pytest.fixture
def on_disk(tmp_path: Path) -> Any:
    about = About(task="tiny", run="0" * 16, source="t.py:f", batch_size=4)
    create_run(tmp_path / "run", about, saved_model())
    with Run(tmp_path / "run") as run:
        folder = run.folder
        receiving = Receiving(folder / UPLOADS, folder / MOVEMENTS, UploadLimits())
        yield LooseRun(run, Journal(folder / ROUND), receiving, Keeping())


def start() -> Checkpoint:
    saved = saved_model()
    return Checkpoint(
        round=0,
        committed=0,
        version=0,
        theta=PLAN.flatten(saved.weights),
        buffers=saved.buffers,
        fleet=new_fleet(PLAN),
    )


def movement(assignment: Assignment) -> Movement:
    made = make_movement(PLAN, assignment.groups, 0.01, statistic=0.01, samples=10)
    return replace(made, device=assignment.device, round=assignment.round)


def drive(store: RunStore) -> tuple[list[object], GlobalModel]:
    """A whole run, with two devices that answer at once; all that was said, and the model."""
    config = rounds_config(rounds=3)
    model = make_model(PLAN, start(), Encoding(), 0)
    course = RoundsCourse(config, Parts(store, model, DirectOutlet(model)), start(), None, 0.0)
    heard: list[object] = []
    pending: list[Any] = [Joined("a"), Joined("b")]
    while pending:
        said: list[Said] = [*course.handle(pending.pop(0), 0.0), *course.proceed(0.0)]
        for each in said:
            heard.append(each)
            if isinstance(each, Send) and isinstance(each.message, Assignment):
                pending.append(movement(each.message))
            elif isinstance(each, Broadcast) and not isinstance(each.message, RoundClosed):
                round = each.message.round
                said_so = Bid(device="a", round=round, level=1.0, reason="so", samples=10)
                pending += [said_so, replace(said_so, device="b")]
    assert course.finished
    course.kill()
    return heard, model


def test_run_in_ram_goes_as_on_disk(on_disk: RunOnDisk) -> None:
    store = RunInRam()
    heard, model = drive(store)
    heard_too, model_too = drive(on_disk)
    assert heard == heard_too
    assert model.digest == model_too.digest
    assert [report.round for report in store.reports] == [1, 2, 3]
    assert store.opened == on_disk.opened == 3


def test_run_in_ram_has_nothing_to_go_on_with() -> None:
    store = RunInRam()
    drive(store)
    assert store.interrupted() is None
    assert list(store.kept()) == []


def test_device_gets_the_version_that_it_was_assigned() -> None:
    model = make_model(PLAN, start(), Encoding(), 0)
    outlet = DirectOutlet(model)
    assignment = Assignment(device="a", round=1, groups={"hidden": (1, 3)})
    before = model.theta
    outlet.assigned(assignment)
    model.commit(np.ones_like(before), [])
    blocks, _ = outlet.fetch(assignment)
    assert np.array_equal(blocks.values, PLAN.select(before, assignment.groups).values)
    assert outlet.fetched_bytes("a", assignment.groups) > 4 * len(blocks.values)


def test_nothing_is_held_for_an_assignment_that_never_arrives() -> None:
    model = make_model(PLAN, start(), Encoding(), 0)
    outlet = DirectOutlet(model)
    assignment = Assignment(device="a", round=1, groups={"hidden": (1, 3)})
    held = weakref.ref(model.theta)
    outlet.assigned(assignment)
    model.commit(np.zeros_like(model.theta), [])
    assert held() is not None
    outlet.lost(assignment)
    assert held() is None


def test_age_counts_the_updates_since_the_fragment_was_reserved() -> None:
    model = make_model(PLAN, start(), Encoding(), 0)
    outlet = DirectOutlet(model)
    ages = []
    for updates in (0, 3):
        outlet.reserve("a", 1, {"hidden": (0,)})
        for _ in range(updates):
            model.commit(np.zeros_like(model.theta), [])
        ages.append(outlet.applied("a", {"hidden": (0,)}))
    assert ages == [0, 3]
