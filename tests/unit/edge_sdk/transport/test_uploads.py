"""Both ends of uploads, driven against each other over a link that does its worst."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.chunks import MAX_CHUNK_BYTES
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.transfer import Credit, Offer
from edge_sdk.transport.uploads import (
    MAX_RETRY_S,
    PATIENCE_S,
    REMEMBERED,
    RETRY_S,
    WINDOW,
    Outgoing,
    Upload,
    UploadLimits,
    Uploads,
    allowed,
    pack_chunk,
    parse_chunk,
)
from tests.messages import make_outgoing

RUN = "0123456789abcdef"
CHUNK = 1024

law = settings(max_examples=100)


def random_bytes(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def outgoing(data: bytes, device: str = "pi", round: int = 3, **changes: int) -> Outgoing:
    return make_outgoing(data, device=device, run=RUN, round=round, **changes)


class Link:
    """Both directions of a link for one device, which lose, double and mix what is sent."""

    def __init__(self, device: Outgoing, uploads: Uploads, seed: int, *, fair: bool) -> None:
        self.device = device
        self.uploads = uploads
        self.rng = np.random.default_rng(seed)
        self.fair = fair
        self.now = 0.0
        self.flying: list[Offer | Credit | bytes] = []
        self.sent: list[int] = []
        """The numbers of all chunks sent, in order."""
        self.done: list[Upload] = []

    def send(self, *messages: Offer | Credit | bytes) -> None:
        for message in messages:
            if self.fair:
                self.flying.append(message)
                continue
            for _ in range(int(self.rng.choice([0, 1, 1, 1, 2]))):
                at = int(self.rng.integers(max(0, len(self.flying) - 3), len(self.flying) + 1))
                self.flying.insert(at, message)

    def offer(self, *, lost: bool = False) -> None:
        self.send(self.device.make_offer(self.now, lost=lost))

    def step(self) -> None:
        """Deliver the next message, or let time pass until the device offers again."""
        if not self.flying:
            self.now = max(self.now, self.device.due_s)
            self.offer()
            return
        self.now += 0.01
        match self.flying.pop(0):
            case Offer() as offer:
                self.send(self.uploads.offered("pi", offer, self.now))
            case Credit() as credit:
                chunks = self.device.credited(credit, self.now)
                numbers = [parse_chunk(chunk)[1] for chunk in chunks]
                assert set(numbers) <= set(allowed(credit))
                assert len(numbers) <= credit.window
                self.sent += numbers
                self.send(*chunks)
            case bytes() as chunk:
                progress = self.uploads.received("pi", chunk, self.now)
                if progress.upload is not None:
                    self.done.append(progress.upload)
                if progress.credit is not None:
                    self.send(progress.credit)

    @property
    def ended(self) -> bool:
        return self.device.complete or self.device.refused is not None

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if self.ended:
                return
            self.step()
        raise AssertionError("the upload did not end")


# -- over a good link ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 8 * CHUNK, 8 * CHUNK + 1, 100 * CHUNK + 7])
def test_upload_over_a_good_link_sends_every_chunk_once_in_order(size: int) -> None:
    data = random_bytes(size)
    link = Link(outgoing(data), Uploads(), 1, fair=True)
    link.run()
    assert link.device.complete
    assert [bytes(done.data) for done in link.done] == [data]
    assert link.sent == list(range(-(-size // CHUNK)))
    assert link.done[0].offer == link.device.offer
    assert link.now < RETRY_S, "nothing waited for a timer"
    assert link.uploads.open_bytes == 0


def test_window_is_never_exceeded_and_never_empty_over_a_good_link() -> None:
    link = Link(outgoing(random_bytes(50 * CHUNK)), Uploads(), 1, fair=True)
    link.offer()
    most = 0
    while not link.ended:
        link.step()
        chunks = sum(isinstance(each, bytes) for each in link.flying)
        assert link.flying or link.ended
        most = max(most, chunks)
    assert most == WINDOW


# -- over a bad one ------------------------------------------------------------------------------


@law
@given(size=st.integers(1, 60 * CHUNK), seed=st.integers(0, 2**32 - 1))
def test_upload_over_a_bad_link_ends_with_the_same_bytes_once(size: int, seed: int) -> None:
    data = random_bytes(size, seed)
    link = Link(outgoing(data), Uploads(), seed, fair=False)
    link.run()
    assert link.device.complete
    assert [bytes(done.data) for done in link.done] == [data]


@law
@given(cut=st.integers(1, 150), seed=st.integers(0, 2**32 - 1), fresh=st.booleans())
def test_resume_sends_only_what_is_missing(cut: int, seed: int, fresh: bool) -> None:
    """The connection breaks; the device goes on, or starts again with the same bytes."""
    data = random_bytes(60 * CHUNK + 5, seed)
    uploads = Uploads()
    before = Link(outgoing(data), uploads, seed, fair=True)
    for _ in range(cut):
        if not before.ended:
            before.step()
    arrived = {n for n in before.sent if pack_of(before.device, data, n) not in before.flying}
    after = Link(outgoing(data) if fresh else before.device, uploads, seed, fair=True)
    after.now = before.now
    after.offer(lost=True)
    after.run()
    assert sorted(after.sent) == sorted(set(range(61)) - arrived)
    assert [bytes(done.data) for done in [*before.done, *after.done]] == [data]


def pack_of(device: Outgoing, data: bytes, number: int) -> bytes:
    return pack_chunk(device.offer.upload, number, data[number * CHUNK : (number + 1) * CHUNK])


@law
@given(cut=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_coordinator_that_starts_anew_gets_everything_again(cut: int, seed: int) -> None:
    data = random_bytes(30 * CHUNK, seed)
    link = Link(outgoing(data), Uploads(), seed, fair=False)
    for _ in range(cut):
        if not link.ended:
            link.step()
    link.uploads = Uploads()
    link.done = []
    while not link.done:  # also where an old credit says that all was there
        link.step()
    link.run()
    assert [bytes(done.data) for done in link.done] == [data]


def test_complete_upload_is_offered_now_and_then_until_its_receipt() -> None:
    link = Link(outgoing(random_bytes(CHUNK)), Uploads(), 1, fair=True)
    link.run()
    assert link.device.due_s == link.now + MAX_RETRY_S
    late = link.uploads.offered("pi", link.device.offer, link.now)
    assert link.device.credited(late, link.now) == []
    link.uploads = Uploads()
    link.offer(lost=True)
    assert not link.device.complete
    link.run()
    assert len(link.done) == 2


def numbers_of(chunks: list[bytes]) -> list[int]:
    return [parse_chunk(chunk)[1] for chunk in chunks]


def test_slow_link_does_not_make_the_device_send_twice() -> None:
    """A chunk takes 50 s, control messages no time: the device offers in between."""
    device, uploads = outgoing(random_bytes(20 * CHUNK)), Uploads()
    queue = device.credited(uploads.offered("pi", device.make_offer(0.0), 0.0), 0.0)
    sent, arrives_s, now = numbers_of(queue), 50.0, 0.0
    while not device.complete:
        now = min(device.due_s, arrives_s)
        if arrives_s <= now:
            credit = uploads.received("pi", queue.pop(0), now).credit
            arrives_s = now + 50.0
        else:
            credit = uploads.offered("pi", device.make_offer(now), now)
        if credit is not None:
            chunks = device.credited(credit, now)
            sent += numbers_of(chunks)
            queue += chunks
    assert sorted(sent) == list(range(20))


def test_lost_chunk_is_sent_again_as_soon_as_a_later_one_has_arrived() -> None:
    device, uploads = outgoing(random_bytes(40 * CHUNK)), Uploads()
    chunks = device.credited(uploads.offered("pi", device.make_offer(0.0), 0.0), 0.0)
    for number in (0, 2, 3, 4):
        credit = uploads.received("pi", chunks[number], 1.0).credit
    assert credit is not None
    assert numbers_of(device.credited(credit, 1.0)) == [1, 8, 9, 10, 11]
    assert device.credited(credit, 1.0) == [], "the same credit, doubled by the link"


def test_chunk_lost_without_a_sign_is_sent_again_with_growing_patience() -> None:
    device, uploads = outgoing(random_bytes(2 * CHUNK)), Uploads()
    credit = uploads.offered("pi", device.make_offer(0.0), 0.0)
    times: list[float] = []
    now = 0.0
    while len(times) < 4:
        if device.credited(credit, now):
            times.append(now)
        now += 1.0
    assert times == [0, PATIENCE_S, 3 * PATIENCE_S, 7 * PATIENCE_S]


def test_silence_makes_the_device_offer_again_later_and_later() -> None:
    device = outgoing(random_bytes(10))
    assert device.due_s == -np.inf
    now, waits = 0.0, []
    for _ in range(6):
        device.make_offer(now)
        waits.append(device.due_s - now)
        now = device.due_s
    assert waits == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S, MAX_RETRY_S, MAX_RETRY_S]
    device.credited(Uploads().offered("pi", device.offer, now), now)
    assert device.due_s == now + RETRY_S


def test_complete_upload_offered_again_is_complete_until_it_is_forgotten() -> None:
    data = random_bytes(3 * CHUNK)
    link = Link(outgoing(data), Uploads(), 1, fair=True)
    link.run()
    offer = link.device.offer
    assert link.uploads.offered("pi", offer, 9.0).complete
    assert link.uploads.received("pi", pack_of(link.device, data, 0), 9.0).credit is None
    link.uploads.forget("pi", offer.upload)
    assert link.uploads.offered("pi", offer, 9.0).missing == ((0, 3),)
    assert len(link.done) == 1


def test_upload_id_follows_from_bytes_and_purpose() -> None:
    data = random_bytes(100)
    assert outgoing(data).offer == outgoing(data).offer
    others = [
        outgoing(random_bytes(100, 2)),
        outgoing(data, round=4),
        outgoing(data, device="pi2"),
        outgoing(data, answers=4),
        outgoing(data, answers=5),
    ]
    assert len({each.offer.upload for each in [outgoing(data), *others]}) == 6


def test_upload_can_be_put_together_in_a_mapped_file() -> None:
    data = random_bytes(5 * CHUNK + 3)
    uploads = Uploads(allocate=lambda size: mmap.mmap(-1, size))
    link = Link(outgoing(data), uploads, 1, fair=True)
    link.run()
    assert bytes(link.done[0].data) == data


# -- limits --------------------------------------------------------------------------------------


def test_too_large_upload_is_refused_with_a_reason_before_room_is_made() -> None:
    def allocate(size: int) -> bytearray:
        raise AssertionError("room was made")

    uploads = Uploads(UploadLimits(max_bytes=2 * CHUNK), allocate=allocate)
    device = outgoing(random_bytes(2 * CHUNK + 1))
    for _ in range(2):
        credit = uploads.offered("pi", device.make_offer(0.0), 0.0)
        assert credit.refused
        assert not credit.complete
    assert device.credited(credit, 0.0) == []
    assert device.refused == "2049 bytes are too many: at most 2048"
    assert device.due_s == np.inf


def test_third_upload_of_a_device_waits_for_one_to_end() -> None:
    uploads = Uploads(UploadLimits(max_uploads=2))
    first, second, third = (outgoing(random_bytes(CHUNK, n), round=n) for n in (1, 2, 3))
    assert uploads.offered("pi", first.make_offer(0.0), 0.0).window
    assert uploads.offered("pi", second.make_offer(0.0), 0.0).window
    waiting = uploads.offered("pi", third.make_offer(0.0), 0.0)
    assert (waiting.window, waiting.missing, waiting.refused) == (0, ((0, 1),), False)
    assert waiting.reason == "at most 2 uploads at a time"
    assert third.credited(waiting, 0.0) == []
    assert not third.complete
    assert third.due_s == 2 * RETRY_S
    assert uploads.offered("pi2", replace(third.offer, device="pi2"), 0.0).window
    (chunk,) = first.credited(uploads.offered("pi", first.offer, 0.0), 0.0)
    assert uploads.received("pi", chunk, 0.0).upload is not None
    assert uploads.offered("pi", third.make_offer(5.0), 5.0).window


def test_uploads_of_all_devices_together_wait_for_room() -> None:
    uploads = Uploads(UploadLimits(max_open_bytes=3 * CHUNK))
    large = outgoing(random_bytes(4 * CHUNK), device="a")
    assert uploads.offered("a", large.offer, 0.0).window, "a single one always fits"
    small = outgoing(random_bytes(10), device="b")
    assert "cannot hold any more" in uploads.offered("b", small.offer, 0.0).reason
    assert uploads.drop_idle(601.0) == [large.offer]
    assert uploads.offered("b", small.offer, 601.0).window


def test_other_bytes_for_the_same_round_replace_the_upload() -> None:
    uploads = Uploads(UploadLimits(max_uploads=1))
    old, new = (outgoing(random_bytes(CHUNK, n)) for n in (1, 2))
    replay = outgoing(random_bytes(CHUNK, 3), answers=7)
    uploads.offered("pi", old.offer, 0.0)
    assert uploads.offered("pi", new.offer, 0.0).window
    assert uploads.open_bytes == CHUNK
    assert not uploads.offered("pi", replay.offer, 0.0).window


def test_idle_upload_is_dropped_and_may_be_offered_again() -> None:
    uploads = Uploads(UploadLimits(idle_s=60.0))
    device = outgoing(random_bytes(2 * CHUNK))
    (chunk, _) = device.credited(uploads.offered("pi", device.offer, 0.0), 0.0)
    uploads.received("pi", chunk, 50.0)
    assert uploads.drop_idle(110.0) == []
    assert uploads.drop_idle(110.1) == [device.offer]
    assert uploads.received("pi", chunk, 111.0).credit is None
    assert uploads.offered("pi", device.offer, 111.0).missing == ((0, 2),)


def test_upload_that_is_only_offered_holds_its_room_no_longer_than_others() -> None:
    uploads = Uploads(UploadLimits(idle_s=60.0))
    device = outgoing(random_bytes(2 * CHUNK))
    (chunk, _) = device.credited(uploads.offered("pi", device.offer, 0.0), 0.0)
    uploads.received("pi", chunk, 10.0)
    uploads.offered("pi", device.offer, 60.0)
    assert not uploads.received("pi", chunk, 65.0).new
    assert uploads.drop_idle(70.0) == []
    assert uploads.drop_idle(70.1) == [device.offer]
    assert uploads.open_bytes == 0


def test_only_the_last_ended_uploads_are_remembered() -> None:
    uploads = Uploads()
    devices = [outgoing(b"%d" % n, round=n) for n in range(1, REMEMBERED + 2)]
    for device in devices:
        (chunk,) = device.credited(uploads.offered("pi", device.offer, 0.0), 0.0)
        assert uploads.received("pi", chunk, 0.0).upload is not None
    assert uploads.offered("pi", devices[1].offer, 0.0).complete
    assert not uploads.offered("pi", devices[0].offer, 0.0).complete


# -- senders that lie ----------------------------------------------------------------------------


def test_bytes_with_another_sha256_are_asked_for_once_more_then_refused() -> None:
    uploads = Uploads()
    device = outgoing(random_bytes(3 * CHUNK))
    lie = replace(device.offer, sha256=hashlib.sha256(b"other").digest())
    chunks = device.credited(uploads.offered("pi", lie, 0.0), 0.0)
    for chunk in chunks:
        progress = uploads.received("pi", chunk, 0.0)
    assert progress.credit is not None
    assert progress.upload is None
    assert progress.credit.missing == ((0, 3),)
    for chunk in chunks:
        progress = uploads.received("pi", chunk, 0.0)
    assert progress.credit is not None
    assert progress.upload is None
    assert progress.credit.refused
    assert "SHA-256" in progress.credit.reason
    assert uploads.open_bytes == 0


def test_damaged_chunk_is_made_good_by_sending_again() -> None:
    uploads = Uploads()
    data = random_bytes(3 * CHUNK)
    device = outgoing(data)
    first, *others = device.credited(uploads.offered("pi", device.offer, 0.0), 0.0)
    for chunk in [first[:-1] + bytes([first[-1] ^ 1]), *others]:
        progress = uploads.received("pi", chunk, 0.0)
    assert progress.credit is not None
    assert device.credited(progress.credit, 1.0) == []
    for chunk in device.credited(progress.credit, PATIENCE_S):
        progress = uploads.received("pi", chunk, PATIENCE_S)
    assert progress.upload is not None
    assert bytes(progress.upload.data) == data


def test_offer_of_another_device_is_refused() -> None:
    uploads = Uploads()
    device = outgoing(random_bytes(10))
    with pytest.raises(MessageError, match="'pi' on the topic of 'thief'"):
        uploads.offered("thief", device.offer, 0.0)
    (chunk,) = device.credited(uploads.offered("pi", device.offer, 0.0), 0.0)
    assert uploads.received("thief", chunk, 0.0).upload is None
    assert uploads.received("pi", chunk, 0.0).upload is not None


def test_two_offers_with_one_id_are_refused() -> None:
    uploads = Uploads()
    offer = outgoing(random_bytes(10)).offer
    uploads.offered("pi", offer, 0.0)
    with pytest.raises(MessageError, match="two different offers"):
        uploads.offered("pi", replace(offer, size=11), 0.0)


@pytest.mark.parametrize(
    ("index", "size", "text"),
    [
        (3, 100, "chunk 3 of an upload of 3 chunks"),
        (2**32 - 1, 100, "of an upload of 3 chunks"),
        (0, CHUNK - 1, "1023 bytes, not 1024"),
        (0, CHUNK + 1, "1025 bytes, not 1024"),
        (2, CHUNK, "1024 bytes, not 100"),
    ],
)
def test_chunk_that_does_not_fit_is_refused(index: int, size: int, text: str) -> None:
    uploads = Uploads()
    device = outgoing(random_bytes(2 * CHUNK + 100))
    uploads.offered("pi", device.offer, 0.0)
    with pytest.raises(MessageError, match=text):
        uploads.received("pi", pack_chunk(device.offer.upload, index, bytes(size)), 0.0)


@pytest.mark.parametrize("size", [0, 19, 20, 21 + MAX_CHUNK_BYTES])
def test_bytes_that_are_no_chunk_are_refused(size: int) -> None:
    with pytest.raises(MessageError, match="not a chunk of an upload"):
        parse_chunk(bytes(size))


def test_credit_that_does_not_fit_is_refused() -> None:
    device = outgoing(random_bytes(3 * CHUNK))
    credit = Uploads().offered("pi", device.offer, 0.0)
    for other in (
        replace(credit, missing=((0, 4),)),
        replace(credit, device="pi2"),
        replace(credit, upload=bytes(16)),
    ):
        with pytest.raises(MessageError, match="a credit for"):
            device.credited(other, 0.0)
    assert len(device.credited(credit, 0.0)) == 3


def test_missing_ranges_are_the_first_64_gaps() -> None:
    uploads, data = Uploads(), random_bytes(200 * CHUNK)
    device = outgoing(data)
    uploads.offered("pi", device.offer, 0.0)
    for number in range(1, 200, 2):
        uploads.received("pi", pack_of(device, data, number), 0.0)
    credit = uploads.offered("pi", device.offer, 0.0)
    assert credit.missing == tuple((n, n + 1) for n in range(0, 128, 2))
    assert allowed(credit) == list(range(0, 16, 2))


def test_many_uploads_have_narrow_windows_and_none_stands_still() -> None:
    limits = UploadLimits(max_flight_bytes=20 * 1024)
    uploads = Uploads(limits)
    sending = [outgoing(random_bytes(30_000, seed), device=f"d{seed}") for seed in range(10)]
    waiting: list[tuple[Outgoing, Credit]] = [
        (each, uploads.offered(each.offer.device, each.make_offer(0.0), 0.0)) for each in sending
    ]
    windows = [credit.window for _, credit in waiting]
    assert windows == sorted(windows, reverse=True)
    assert windows[-1] == max(1, 20 // 10 * 1024 // sending[0].offer.chunk_bytes)
    done = 0
    while waiting:
        each, credit = waiting.pop(0)
        for chunk in each.credited(credit, 0.0):
            progress = uploads.received(each.offer.device, chunk, 0.0)
            if progress.credit is not None:
                waiting.append((each, progress.credit))
            done += progress.upload is not None
    assert done == 10
    assert all(each.complete for each in sending)


def test_progress_tells_chunks_that_nobody_waits_for() -> None:
    uploads = Uploads()
    sent = outgoing(random_bytes(9_000))
    first, *_ = sent.credited(uploads.offered("pi", sent.make_offer(0.0), 0.0), 0.0)
    assert uploads.received("pi", first, 0.0).new
    assert not uploads.received("pi", first, 0.0).new
    assert not uploads.received("other", first, 0.0).new
    assert uploads.knows(sent.offer)
    assert not uploads.knows(replace(sent.offer, upload=bytes(16)))
