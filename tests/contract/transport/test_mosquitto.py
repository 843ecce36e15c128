"""What only a real broker with rules of its own can show: TLS, limits, access rights."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from coordinator.operate.broker.embedded import find_mosquitto
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent, Received, Refused
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.probe import probe_broker, probe_links
from edge_sdk.transport.settings import BrokerSettings, LinkError
from tests.waiting import HANGS_S, free_port, listens, until


@contextmanager
def mosquitto(folder: Path, *lines: str) -> Iterator[int]:
    """Mosquitto with a configuration of the test's; the port is put in place of PORT."""
    program = find_mosquitto()
    if program is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    config = folder / "mosquitto.conf"
    text = "\n".join([f"listener {port} 127.0.0.1", "user root", *lines])
    config.write_text(text + "\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdout=log, stderr=log)
    try:
        until(lambda: listens(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait()


class Peer:
    def __init__(self, settings: BrokerSettings, name: str = "peer") -> None:
        self.events: list[LinkEvent] = []
        self.link = open_link(settings, name=name, deliver=self.events.append)

    def until(self, holds: Callable[[LinkEvent], bool]) -> LinkEvent:
        until(lambda: any(map(holds, self.events)), lambda: self.events)
        return next(filter(holds, self.events))


@contextmanager
def peer(settings: BrokerSettings) -> Iterator[Peer]:
    one = Peer(settings)
    try:
        yield one
    finally:
        one.link.kill()


def reason(settings: BrokerSettings) -> str:
    with peer(settings) as one:
        event = one.until(lambda event: isinstance(event, Disconnected | Connected))
        assert isinstance(event, Disconnected)
        return event.reason


def test_message_the_broker_will_not_take_is_given_up_and_others_go_on(tmp_path: Path) -> None:
    with (
        mosquitto(tmp_path, "allow_anonymous true", "max_packet_size 10000") as port,
        peer(BrokerSettings(port=port)) as one,
    ):
        one.link.subscribe("t", bulk=True)
        one.until(lambda event: isinstance(event, Connected))
        for number in range(10):
            payload = bytes(20_000) if number == 4 else bytes([number])
            assert one.link.publish("t" if number != 4 else "large", payload, bulk=True)
        refused = one.until(lambda event: isinstance(event, Refused))
        one.until(lambda event: event == Received("t", b"\x09", False))
        assert isinstance(refused, Refused)
        assert refused.topic == "large"
        assert "20000 bytes" in refused.reason
        arrived = [event.payload for event in one.events if isinstance(event, Received)]
        assert list(dict.fromkeys(arrived)) == [bytes([n]) for n in range(10) if n != 4]


def patient(holds: Callable[[], bool], most_s: float) -> bool:
    """For the probe: as long as it takes, for what should come."""
    by = time.monotonic() + (HANGS_S if most_s >= 1 else most_s)
    while not holds() and time.monotonic() < by:
        time.sleep(0.005)
    return holds()


def test_probe_finds_the_limit_of_a_real_broker(tmp_path: Path) -> None:
    with mosquitto(tmp_path, "allow_anonymous true", "max_packet_size 100000") as port:
        settings = BrokerSettings(port=port)
        facts = probe_links(
            partial(open_link, settings), patient, name="probe", chunk_bytes=settings.chunk_bytes
        )
    assert facts.chunk_bytes == 98_304
    assert facts.retained_chunks


def test_probe_says_why_there_is_no_connection(tmp_path: Path) -> None:
    with (
        mosquitto(tmp_path, "allow_anonymous false") as port,
        pytest.raises(LinkError, match="does not let this user connect"),
    ):
        probe_broker(BrokerSettings(port=port))


def test_probe_of_a_user_without_rights_says_what_to_allow(tmp_path: Path) -> None:
    (tmp_path / "acl").write_text("topic read nothing\n")
    with mosquitto(tmp_path, "allow_anonymous true", f"acl_file {tmp_path / 'acl'}") as port:
        facts = probe_broker(BrokerSettings(port=port))
    assert facts.refusal is not None
    assert "tessera/v1/#" in facts.refusal


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, certificates for the broker and a device, and a CA that nobody trusts."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("authority")
    run = partial(subprocess.run, check=True, capture_output=True, cwd=folder)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for ca in ("ca", "rogue"):
        new = [program, "req", "-x509", *key, "-days", "2", "-subj", f"/CN={ca}"]
        run([*new, "-keyout", f"{ca}.key", "-out", f"{ca}.crt"])
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name, ca in (("broker", "ca"), ("device", "ca"), ("stranger", "rogue")):
        asked = [program, "req", *key, "-subj", f"/CN={name}"]
        run([*asked, "-keyout", f"{name}.key", "-out", f"{name}.csr"])
        sign = [program, "x509", "-req", "-in", f"{name}.csr", "-days", "2", "-CAcreateserial"]
        names = ["-extfile", "names"] if name == "broker" else []
        issuer = ["-CA", f"{ca}.crt", "-CAkey", f"{ca}.key"]
        run([*sign, *issuer, *names, "-out", f"{name}.crt"])
    return folder


@contextmanager
def tls_broker(folder: Path, authority: Path, *lines: str) -> Iterator[BrokerSettings]:
    tls = [f"{name} {authority / file}" for name, file in TLS_FILES]
    with mosquitto(folder, "allow_anonymous true", *tls, *lines) as port:
        yield BrokerSettings(port=port, tls=True, ca=authority / "ca.crt")


TLS_FILES = (("cafile", "ca.crt"), ("certfile", "broker.crt"), ("keyfile", "broker.key"))


def test_tls_link_carries_chunks(tmp_path: Path, authority: Path) -> None:
    with tls_broker(tmp_path, authority) as settings, peer(settings) as one:
        one.link.subscribe("t", bulk=True)
        chunks = [bytes([number]) * 262_144 for number in range(8)]
        for chunk in chunks:
            assert one.link.publish("t", chunk, bulk=True)
        one.until(lambda event: event == Received("t", chunks[-1], False))
        assert [e.payload for e in one.events if isinstance(e, Received)] == chunks


def test_tls_broker_of_another_authority_is_not_trusted(tmp_path: Path, authority: Path) -> None:
    with tls_broker(tmp_path, authority) as settings:
        said = reason(replace(settings, ca=authority / "rogue.crt"))
    assert "certificate was not accepted" in said
    assert "rogue.crt" in said


def test_tls_broker_of_another_name_is_not_trusted(tmp_path: Path, authority: Path) -> None:
    with tls_broker(tmp_path, authority) as settings:
        assert "certificate was not accepted" in reason(replace(settings, host="localhost"))


def test_plaintext_to_a_tls_port_is_explained(tmp_path: Path, authority: Path) -> None:
    with tls_broker(tmp_path, authority) as settings:
        assert "TLS" in reason(replace(settings, tls=False, ca=None))


@pytest.mark.parametrize("name", [None, "stranger", "device"])
def test_client_certificate_decides_who_connects(
    tmp_path: Path, authority: Path, name: str | None
) -> None:
    with tls_broker(tmp_path, authority, "require_certificate true") as settings:
        if name is not None:
            files = authority / f"{name}.crt", authority / f"{name}.key"
            settings = replace(settings, certificate=files[0], key=files[1])
        if name == "device":
            with peer(settings) as one:
                one.until(lambda event: isinstance(event, Connected))
        else:
            assert "certificate" in reason(settings)


def test_encrypted_key_is_refused_instead_of_asked_for(tmp_path: Path, authority: Path) -> None:
    locked = tmp_path / "locked.key"
    program = shutil.which("openssl")
    assert program is not None
    source = ["-in", str(authority / "device.key"), "-out", str(locked)]
    subprocess.run(
        [program, "ec", "-aes256", "-passout", "pass:x", *source], check=True, capture_output=True
    )
    settings = BrokerSettings(
        tls=True, ca=authority / "ca.crt", certificate=authority / "device.crt", key=locked
    )
    with pytest.raises(LinkError, match="without a passphrase"):
        open_link(settings, name="x", deliver=lambda event: None)
