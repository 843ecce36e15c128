"""The coordinator that a device obeys, by itself: no broker, no clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.device.service.allegiance import PATIENCE_S, Allegiance
from edge_sdk.device.stores.movements import DeviceFolder
from edge_sdk.protocol.messages.epoch import Epoch

A, B, C = (Epoch(counter, letter * 16) for counter, letter in ((1, "f"), (2, "0"), (2, "1")))
NOW = 1000.0
EPOCHS = st.sampled_from([None, A, B, C])


def make(epoch: Epoch | None = None) -> tuple[Allegiance, list[Epoch | None]]:
    kept: list[Epoch | None] = []
    return Allegiance(epoch, kept.append), kept


def hear(
    allegiance: Allegiance, epoch: Epoch | None, now: float = NOW, *, retained: bool = False
) -> bool:
    """A message that coordinators hear, too."""
    return allegiance.hear(epoch, now, alive=not retained, contested=not retained)


@given(st.lists(EPOCHS, min_size=1))
def test_largest_epoch_is_obeyed_and_kept(heard: list[Epoch | None]) -> None:
    allegiance, kept = make()
    largest: Epoch | None = None
    for each in heard:
        expected = largest is None or (each is not None and each >= largest)
        assert hear(allegiance, each) is expected
        largest = max(filter(None, (largest, each)), default=None)
        assert allegiance.epoch == largest
    assert kept == sorted({each for each in kept if each is not None})
    assert (kept or [None])[-1] == largest


def test_smaller_epoch_is_obeyed_when_the_larger_one_stays_silent() -> None:
    allegiance, kept = make(C)
    assert not hear(allegiance, A)
    assert not hear(allegiance, B, NOW + 1)
    assert not hear(allegiance, A, NOW + 2)
    assert allegiance.due_s == NOW + PATIENCE_S
    assert not allegiance.give_up(NOW + PATIENCE_S - 1)
    assert allegiance.give_up(NOW + PATIENCE_S)
    assert kept == [B]  # the largest of those that spoke
    assert hear(allegiance, B, NOW + 100)
    assert not allegiance.give_up(1e9)
    assert hear(allegiance, C, NOW + 200)


def test_larger_epoch_that_contradicts_keeps_its_devices() -> None:
    allegiance, kept = make(C)
    assert not hear(allegiance, A)
    assert hear(allegiance, C, NOW + 30)
    assert not allegiance.give_up(1e9)
    assert kept == []


def test_retained_message_of_the_larger_epoch_contradicts_nobody() -> None:
    allegiance, _ = make(C)
    assert not hear(allegiance, A)
    assert hear(allegiance, C, retained=True)
    assert allegiance.give_up(NOW + PATIENCE_S)


def test_leftovers_of_a_smaller_epoch_prove_nothing() -> None:
    allegiance, _ = make(C)
    assert not hear(allegiance, A, retained=True)
    assert not allegiance.give_up(1e9)


def test_version_without_epochs_is_obeyed_until_an_epoch_is_heard_and_after_one_fell_silent() -> (
    None
):
    allegiance, kept = make()
    assert hear(allegiance, None)
    assert hear(allegiance, A)
    assert not hear(allegiance, None)
    assert allegiance.give_up(NOW + PATIENCE_S)
    assert hear(allegiance, None)
    assert kept == [A, None]


def test_epoch_outlives_a_restart_of_the_device(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "toy", "pi")
    assert folder.read_epoch() is None
    folder.keep_epoch(B)
    assert DeviceFolder(tmp_path, "toy", "pi").read_epoch() == B
    folder.keep_epoch(None)
    assert folder.read_epoch() is None


@pytest.mark.parametrize("content", ["", "7", "x y", "0 " + "f" * 16, "7 g", "7 f f"])
def test_damaged_epoch_is_forgotten(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = DeviceFolder(tmp_path, "toy", "pi")
    (folder.path / "epoch").write_text(content)
    assert folder.read_epoch() is None
    assert "any coordinator is obeyed" in caplog.text
