"""Delivery on a device: which level is taken, when, and which models are refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.observer import Observer
from edge_sdk.device.delivering import Delivering, Judgement, judge
from edge_sdk.machine.snapshot import MemoryState, Network, Snapshot
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.transfer import MAX_LOSS
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.train.delivered import Model, read_delivered
from tests.unit.edge_sdk.decide.test_observer import Shown
from tests.unit.edge_sdk.device.test_examining import MAINS, Forward
from tests.unit.edge_sdk.train.handmade import INPUTS, Handmade, Reference, bundle

PLAN, MANIFEST, FILES = bundle(Handmade())
RUN = "0123456789abcdef"
HALF = {"hidden": (0, 2)}
RICH = replace(MAINS, memory=MemoryState(available_bytes=1e9))


def theta(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=PLAN.parameters).astype(np.float32)


def own_data(seed: int = 1) -> ArrayData:
    """Samples whose classes are what the model of this seed says of them."""
    x = np.random.default_rng(7).normal(size=(200, INPUTS)).astype(np.float32)
    weights = {n: a.astype(np.float64) for n, a in PLAN.unflatten(theta(seed)).items()}
    return ArrayData((x,), Reference().logits(weights, x.astype(np.float64)).argmax(1))


@dataclass
class Source:
    """Gives the levels of a model, and counts what is asked for."""

    values: Array
    error: Exception | None = None
    asked: list[float] = field(default_factory=list)

    def fetch_level(self, survey: Survey, number: int) -> tuple[Blocks, dict[str, Array]]:
        self.asked.append(survey.levels[number])
        if self.error is not None:
            raise self.error
        return PLAN.select(self.values, survey.groups[number]), {}


def notice(round: int, **changes: Any) -> ModelNotice:
    usual: dict[str, Any] = {
        "round": round,
        "plan_hash": PLAN.hash,
        "levels": (1.0, 0.5),
        "groups": (PLAN.full_groups(), HALF),
        "accuracies": (None, None),
        "rescale": 0.0,
        "run": RUN,
        "model": Blob(1, (bytes(16),)),
    }
    return ModelNotice(**{**usual, **changes})


class Device:
    """A device that has a model delivered."""

    def __init__(
        self, folder: Path, *, seen: Snapshot = RICH, level: float = 1.0, margin: float = 0.02
    ) -> None:
        self.probe = Shown(seen)
        self.delivering = Delivering(folder, most=level, margin=margin)
        self._observer = Observer(Policy(), self.probe, Forward(joules=None))

    def take(
        self, offered: ModelNotice, source: Source, data: ArrayData | None = None, **options: Any
    ) -> bool:
        return self.delivering.deliver(
            offered,
            task="toy",
            plan=PLAN,
            manifest=options.pop("manifest", MANIFEST),
            graphs=lambda: FILES,
            source=source,
            data=own_data() if data is None else data,
            observer=self._observer,
            should_stop=options.pop("should_stop", lambda: False),
        )

    @property
    def held(self) -> int:
        return read_delivered(self.delivering.path).round


def test_worse_model_is_refused_by_the_margin_and_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = Device(tmp_path)
    assert device.take(notice(1), Source(theta(1)))
    assert device.held == 1
    assert read_delivered(device.delivering.path).own_accuracy == 1.0
    before = device.delivering.path.read_bytes()
    worse = notice(2)
    assert device.delivering.is_due(worse)
    assert device.take(worse, Source(theta(2)))
    assert device.delivering.path.read_bytes() == before
    assert not device.delivering.is_due(worse)  # it is not fetched again and again
    (said,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert said.startswith("keeping the old model: that of round 2, level 1, has accuracy ")
    assert "instead of 100.0% on this device's data (deliver_margin = 0.02)" in said
    slightly = theta(1) + 1e-5
    assert device.take(notice(3), Source(slightly))
    assert device.held == 3
    assert Device(tmp_path, margin=1.0).take(notice(4), Source(theta(2)))
    assert device.held == 4


def test_judgement_is_that_of_the_oracle(tmp_path: Path) -> None:
    device, data = Device(tmp_path), own_data(5)
    assert device.take(notice(1), Source(theta(1)), data)
    weights = {n: a.astype(np.float64) for n, a in PLAN.unflatten(theta(1)).items()}
    x = data.inputs[0].astype(np.float64)
    found = judge(Model(tmp_path, read_delivered(device.delivering.path)), data, lambda: False)
    right = float(np.mean(Reference().logits(weights, x).argmax(1) == data.targets))
    assert found.accuracy == pytest.approx(right)
    assert found.loss == pytest.approx(Reference().loss(weights, x, data.targets), rel=1e-5)


@pytest.mark.parametrize(
    ("new", "old", "worse"),
    [
        (Judgement(0.88, 9.0), Judgement(0.9, 1.0), False),
        (Judgement(0.87, 0.1), Judgement(0.9, 1.0), True),
        (Judgement(None, 1.01), Judgement(None, 1.0), False),
        (Judgement(None, 1.03), Judgement(None, 1.0), True),
        (Judgement(None, float("nan")), Judgement(None, 1.0), True),
        (Judgement(None, 5.0), Judgement(0.9, None), False),
        (Judgement(), Judgement(0.9, 1.0), False),
        (Judgement(None, 9.0), Judgement(None, float("nan")), False),
        (Judgement(0.1, 9.0), Judgement(0.9, float("inf")), False),
        (Judgement(0.9, float("inf")), Judgement(0.1, 9.0), True),
        (Judgement(0.9, float("nan")), None, True),
        (Judgement(0.1, 9.0), None, False),
    ],
)
def test_margin_is_of_accuracy_or_else_of_loss(
    new: Judgement, old: Judgement | None, worse: bool
) -> None:
    assert (new.falls_short(old, 0.02 + 1e-9) is not None) == worse


@pytest.mark.parametrize(
    ("available", "level", "accuracies", "taken"),
    [
        (1e9, 1.0, (None, None), 1.0),
        (1e9, 1.0, (0.7, 0.8), 0.5),  # the most accurate
        (1e9, 1.0, (0.8, 0.8), 0.5),  # the smallest of equals
        (1e9, 1.0, (0.8, 0.7), 1.0),
        (150e6, 1.0, (0.8, 0.7), 0.5),  # memory for half
        (1e9, 0.5, (0.8, 0.7), 0.5),  # the owner's limit
        (1e9, 0.25, (0.8, 0.7), 0.5),  # the smallest there is
    ],
)
def test_level_is_the_best_one_that_the_device_can_afford(
    tmp_path: Path, available: float, level: float, accuracies: Any, taken: float
) -> None:
    seen = replace(MAINS, memory=MemoryState(available_bytes=available))
    device, source = Device(tmp_path, seen=seen, level=level), Source(theta(1))
    assert device.take(notice(1, accuracies=accuracies), source)
    held = read_delivered(device.delivering.path)
    assert (held.level, source.asked) == (taken, [taken])
    groups: Groups = PLAN.full_groups() if taken == 1 else HALF
    expected = PLAN.cut(PLAN.unflatten(theta(1)), groups)
    assert held.weights["w1"].tobytes() == expected["w1"].tobytes()
    assert held.accuracy == accuracies[(1.0, 0.5).index(taken)]


def test_gates_hold_a_delivery_back_until_they_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = Device(tmp_path, seen=replace(RICH, network=Network(metered=True)))
    source = Source(theta(1))
    for _ in range(3):
        assert not device.take(notice(1), source)
    assert source.asked == []
    said = [each.getMessage() for each in caplog.records]
    assert said == ["model of round 1: not fetched now: the network is metered"]
    device.probe.now = RICH
    assert device.take(notice(1), source)
    assert device.held == 1


def test_delivery_that_fails_or_is_stopped_is_tried_again(tmp_path: Path) -> None:
    device = Device(tmp_path)
    assert not device.take(notice(1), Source(theta(1), TesseraError("the chunks did not come")))
    assert not device.take(notice(1), Source(theta(1)), should_stop=lambda: True)
    assert not device.delivering.path.exists()
    assert device.delivering.is_due(notice(1))
    assert device.take(notice(1), Source(theta(1)))


def test_model_survives_a_restart_and_damage_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Device(tmp_path).take(notice(1), Source(theta(1)))
    again = Device(tmp_path).delivering
    assert not again.is_due(notice(1))
    assert again.is_due(notice(2))
    assert again.is_due(notice(1, run="f" * 16))
    assert not again.is_due(None)
    damaged = bytearray(again.path.read_bytes())
    damaged[-100] ^= 1
    again.path.write_bytes(damaged)
    device = Device(tmp_path)
    assert "is damaged" in caplog.text
    assert device.delivering.is_due(notice(1))
    assert device.take(notice(1), Source(theta(1)))
    assert device.held == 1


def test_model_of_no_numbers_is_never_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(tmp_path)
    assert device.take(notice(1), Source(np.full_like(theta(1), np.nan)))
    assert not device.delivering.path.exists()
    assert "keeping no model: that of round 1, level 1, has loss nan" in caplog.text
    assert device.take(notice(2), Source(theta(1)))
    assert device.held == 2


def test_labels_that_are_no_classes_judge_nothing(tmp_path: Path) -> None:
    device, data = Device(tmp_path), own_data()
    data.targets[3] = -100
    targets = replace(MANIFEST.data.targets, highest=None)
    manifest = replace(MANIFEST, data=replace(MANIFEST.data, targets=targets))
    for round in (1, 2):
        assert device.take(notice(round), Source(theta(round)), data, manifest=manifest)
        assert device.held == round


def test_model_that_the_disk_does_not_take_is_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("edge_sdk.device.delivering.write_delivered", full)
        with pytest.raises(OSError, match="No space"):
            device.take(notice(1), Source(theta(1)))
    assert device.delivering.is_due(notice(1))


def test_data_that_does_not_fit_judges_nothing(tmp_path: Path) -> None:
    device = Device(tmp_path)
    odd = ArrayData((np.zeros((5, INPUTS + 1), np.float32),), np.zeros(5, np.int64))
    assert device.take(notice(1), Source(theta(1)), odd)
    assert device.take(notice(2), Source(theta(2)), odd)
    assert device.held == 2
    assert read_delivered(device.delivering.path).own_accuracy is None


# -- models that some devices try -----------------------------------------------------------------


def test_tried_model_is_judged_beside_the_old_one(tmp_path: Path) -> None:
    device = Device(tmp_path, margin=1.0)
    assert device.take(notice(1), Source(theta(1)))
    trial = notice(2, canary=0.5)
    assert device.take(trial, Source(theta(2)))
    assert device.held == 2
    assert device.delivering.tried is not None
    said = device.delivering.tried.evaluation("robot")
    assert (said.canary, said.round, said.samples, said.before_accuracy) == (True, 2, 200, 1.0)
    assert said.accuracy is not None
    assert said.accuracy < 0.9
    # Promoted: it is here. Rolled back: the old one returns, and is then left alone.
    assert not device.delivering.is_due(notice(2, decided=2))
    back = notice(1, decided=2)
    assert device.delivering.is_due(back)
    assert device.take(back, Source(theta(1)))
    assert device.held == 1
    assert not device.delivering.is_due(back)


def test_rollback_is_followed_whatever_the_accuracy_here(tmp_path: Path) -> None:
    device = Device(tmp_path, margin=0.0)
    assert device.take(notice(1), Source(theta(2)))
    assert device.take(notice(2, canary=0.5), Source(theta(1)))  # better, here
    again = Device(tmp_path, margin=0.0)  # even after a restart
    assert again.take(notice(1), Source(theta(2)))
    assert again.held == 2  # the owner's margin: nothing was decided
    assert Device(tmp_path, margin=0.0).take(notice(1, decided=2), Source(theta(2)))
    assert again.held == 1


def test_refused_trial_is_answered_and_the_old_model_stays(tmp_path: Path) -> None:
    device = Device(tmp_path)
    assert device.take(notice(1), Source(theta(1)))
    assert device.take(notice(2, canary=0.5), Source(theta(2)))
    assert device.held == 1
    assert device.delivering.tried is not None
    assert not device.delivering.is_due(notice(2, canary=0.5))
    assert not device.delivering.is_due(notice(1, decided=2))  # it never left


def test_model_that_is_not_finite_gets_the_worst_answer(tmp_path: Path) -> None:
    device = Device(tmp_path)
    broken = theta(2)
    broken[:] = np.nan
    assert device.take(notice(1, canary=0.5), Source(broken))
    assert device.delivering.tried is not None
    said = device.delivering.tried.evaluation("robot")
    assert (said.loss, said.before_loss) == (MAX_LOSS, None)
    assert not device.delivering.path.exists()


def test_device_that_can_judge_nothing_tries_nothing(tmp_path: Path) -> None:
    device = Device(tmp_path)
    nothing = ArrayData((np.zeros((0, INPUTS), np.float32),), np.zeros(0, np.int64))
    trial = notice(2, canary=0.5)
    assert device.take(trial, Source(theta(1)), nothing)
    assert device.delivering.tried is None
    assert not device.delivering.path.exists()
    assert not device.delivering.is_due(trial)
    assert device.delivering.is_due(notice(2, decided=2))  # once it is promoted
