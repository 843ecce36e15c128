"""Uploads on disk: limits, what is left behind, and that bytes are what was offered."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from coordinator.checksums import checksum
from coordinator.run.errors import RunError
from coordinator.service.receiving import Receiving, UploadFile, largest_movement, read_upload
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Movement, Outcome, Receipt, Replay
from edge_sdk.protocol.messages.transfer import Credit
from edge_sdk.transport.uploads import Outgoing, Upload, UploadLimits
from tests.messages import make_movement, make_outgoing
from tests.unit.coordinator.service.service_world import PLAN


def movement(device: str = "a", round: int = 3, encoding: Encoding | None = None) -> Movement:
    values = np.arange(PLAN.parameters, dtype=np.float32)
    return make_movement(PLAN, None, values, encoding=encoding, device=device, round=round)


ROUNDS = range(1, 81)


class Bench:
    def __init__(self, folder: Path, limits: UploadLimits | None = None) -> None:
        self.uploads, self.movements = folder / "uploads", folder / "movements"
        self.receiving = Receiving(self.uploads, self.movements, limits or UploadLimits())

    def offer(self, data: bytes, **changes: int | None) -> tuple[Outgoing, Credit | Receipt]:
        outgoing = make_outgoing(data, **{"device": "a", "round": 3, **changes})
        return outgoing, self.receiving.offered("a", outgoing.make_offer(0.0), 0.0)

    def send(self, data: bytes, **changes: int | None) -> Upload:
        outgoing, answer = self.offer(data, **changes)
        assert isinstance(answer, Credit)
        waiting = outgoing.credited(answer, 0.0)
        while waiting:
            progress = self.receiving.received("a", waiting.pop(0), 0.0)
            if progress.upload is not None:
                return progress.upload
            if progress.credit is not None:
                waiting += outgoing.credited(progress.credit, 0.0)
        raise AssertionError("it never became complete")


def test_upload_becomes_a_movement_or_a_replay(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    sent = movement()
    read = read_upload(bench.send(encode_movement(sent)))
    assert isinstance(read, Movement)
    assert read.payload == sent.payload
    replay = read_upload(bench.send(encode_movement(sent), answers=5))
    assert isinstance(replay, Replay)
    assert (replay.round, replay.movement.round) == (5, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode_movement(movement(device="b")), "'b'"),
        (encode_movement(movement(round=4)), "round 4"),
        (b"\0" * 3000, "not a movement"),
    ],
)
def test_upload_that_is_not_what_was_offered_is_refused(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    upload = Bench(tmp_path).send(data)
    with pytest.raises(MessageError, match=reason):
        read_upload(upload)


def test_kept_upload_stays_until_cleared_and_others_go(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    data = encode_movement(movement())
    upload = bench.send(data)
    assert len(os.listdir(bench.uploads)) == 1
    bench.receiving.keep(upload, "a", 3)
    del upload
    assert os.listdir(bench.uploads) == []
    assert (bench.movements / "00000003-a").read_bytes() == data + checksum(data)
    bench.send(encode_movement(movement()), answers=9)  # not kept: gone with its object
    assert os.listdir(bench.uploads) == []
    bench.receiving.clear_kept()
    assert os.listdir(bench.movements) == []


def test_round_may_have_more_movements_than_the_usual_limit_of_open_files(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        bench = Bench(tmp_path)
        uploads = [bench.send(encode_movement(movement(round=each)), round=each) for each in ROUNDS]
        for upload in uploads:
            bench.receiving.keep(upload, "a", upload.offer.round)
        assert [each.round for each in map(read_upload, uploads)] == list(ROUNDS)
        assert len(list(bench.receiving.kept())) == len(ROUNDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_idle_upload_is_dropped_with_its_file(tmp_path: Path) -> None:
    bench = Bench(tmp_path, UploadLimits(idle_s=10))
    bench.offer(bytes(5000))
    assert len(os.listdir(bench.uploads)) == 1
    assert bench.receiving.drop_idle(9.0) == []
    assert len(bench.receiving.drop_idle(11.0)) == 1
    assert os.listdir(bench.uploads) == []


def test_receipt_is_remembered_for_the_same_bytes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    data = encode_movement(movement())
    receipt = Receipt(device="a", round=3, outcome=Outcome.REJECTED, reason="no")
    bench.receiving.settle(bench.send(data), receipt)
    assert bench.offer(data)[1] == receipt
    # Without a receipt it may be sent again.
    other = encode_movement(movement())
    bench.receiving.settle(bench.send(other, answers=7), None)
    answer = bench.offer(other, answers=7)[1]
    assert isinstance(answer, Credit)
    assert answer.window


def test_full_disk_makes_a_device_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    answer = bench.offer(bytes(5000))[1]
    assert isinstance(answer, Credit)
    assert (answer.window, answer.refused) == (0, False)
    assert "no space left on the disk: 5,000 bytes are needed" in answer.reason
    assert bench.receiving.full is not None
    assert bench.receiving.full.path.parent == bench.uploads
    assert os.listdir(bench.uploads) == []


def test_half_uploads_of_an_earlier_process_are_deleted_and_what_was_kept_is_read(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    (bench.uploads / "9.part").write_bytes(b"old")
    sent = movement()
    data = encode_movement(sent)
    for name in (f"{sent.round:08}-a", "00000004-a"):
        (bench.movements / name).write_bytes(data + checksum(data))
    again = Bench(tmp_path)
    assert os.listdir(bench.uploads) == []
    fresh, replay = again.receiving.kept()
    assert isinstance(fresh, Movement)
    assert encode_movement(fresh) == data
    assert isinstance(replay, Replay)
    assert (replay.round, replay.movement.round) == (4, sent.round)
    again.receiving.clear_kept()
    assert os.listdir(bench.movements) == []


def test_kept_movement_that_is_damaged_missing_or_misnamed_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.receiving.keep(bench.send(encode_movement(movement())), "a", 3)
    path = bench.movements / "00000003-a"
    whole = path.read_bytes()
    for data in (b"", whole[:-1], whole[:-9] + b"!" + whole[-8:]):
        path.write_bytes(data)
        with pytest.raises(RunError, match="00000003-a is damaged"):
            list(Bench(tmp_path).receiving.kept())
    path.write_bytes(whole)
    path.rename(bench.movements / "00000003-b")
    with pytest.raises(RunError, match="00000003-a is missing"):
        list(Bench(tmp_path).receiving.kept())
    bench.receiving.clear_kept()
    assert list(Bench(tmp_path).receiving.kept()) == []


def test_movement_whose_name_cannot_be_noted_is_kept_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "movements.jsonl").mkdir()
    bench.receiving.keep(bench.send(encode_movement(movement())), "a", 3)
    (tmp_path / "movements.jsonl").rmdir()
    assert "cannot note" in caplog.text
    assert len(list(Bench(tmp_path).receiving.kept())) == 1


@pytest.mark.parametrize("text", ["fp32", "fp16", "int8", "top-k:1.0", "fp32+zstd"])
def test_no_movement_is_larger_than_the_largest(text: str) -> None:
    encoding = Encoding.parse(text)
    size = len(encode_movement(movement(encoding=encoding)))
    assert size <= largest_movement(PLAN, encoding)


def test_upload_file_refuses_a_name_that_is_taken(tmp_path: Path) -> None:
    first = UploadFile(tmp_path / "x", 10)
    with pytest.raises(FileExistsError):
        UploadFile(tmp_path / "x", 10)
    first[0:4] = b"data"
    first.keep(tmp_path / "y")
    del first
    whole = b"data" + bytes(6)
    assert (tmp_path / "y").read_bytes() == whole + checksum(whole)
