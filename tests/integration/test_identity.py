"""Certificates on a real Mosquitto: who gets in, what they can reach, and what they are told.

The broker runs with what `tessera-coordinator broker-config` wrote, and everybody connects with
what `enroll` wrote. One broker serves the module; the authority's clock is turned back for
certificates that have expired.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.cli import main
from coordinator.operate.broker.embedded import embedded_broker, find_mosquitto
from coordinator.operate.identity.authority import Authority, utc_now
from coordinator.operate.identity.bundles import device_bundle
from coordinator.operate.identity.files import write_bundle
from coordinator.operate.identity.index import BrokerPlace
from coordinator.operate.serve.serving import try_broker
from edge_sdk.device.config import load_config
from edge_sdk.device.service.ending import EXIT_DENIED
from edge_sdk.program.processes import Children
from edge_sdk.program.settings import PREFIX
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Offer, Presence
from edge_sdk.transport.link import Connected, Deliver, Disconnected, Link, LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings, DeniedError
from tests.unit.edge_sdk.scripted import Coordinator, MqttStage, make_data
from tests.waiting import HANGS_S, free_port, listens, until

pytestmark = pytest.mark.skipif(
    find_mosquitto() is None, reason="needs mosquitto, which is not installed"
)

ROOT = Path(__file__).resolve().parents[2]
TASK = "tiny"
TOPICS = Topics(TASK)
HASH = bytes(16)
MARK = b"marker"

TASK_FILE = """\
import torch
from torch import nn

from coordinator.task.task import make_task as task_of


def make_task():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return task_of(model, torch.zeros(2, 4), groups=2)
"""


# -- a deployment ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """An authority, the broker that trusts it, and the bundles of those it enrolled."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def authority(self) -> Path:
        return self.folder / "identity"

    def command(self, *arguments: str) -> None:
        assert main([*arguments, "--dir", str(self.authority)]) == 0

    def enroll(self, name: str, task: str = TASK) -> Path:
        """The configuration in a new device's bundle, unpacked; the broker knows the device."""
        archive = self.folder / f"{name}.tar.gz"
        self.command("enroll", name, "--task", task, "--out", str(archive))
        self.reload()
        with tarfile.open(archive) as bundle:
            bundle.extractall(self.folder, filter="data")
        archive.unlink()
        add_data(self.folder / name)
        return self.folder / name / "device.toml"

    def settings(self, name: str) -> BrokerSettings:
        """How a device that was enrolled before reaches the broker."""
        return load_config(self.folder / name / "device.toml", environment={}).broker

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)


def add_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    (folder / "data").mkdir()
    x, y = rng.random((32, 4), dtype=np.float32), rng.integers(0, 3, 32)
    np.savez(folder / "data" / "own.npz", x=x, y=y)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    port = free_port()
    authority = str(folder / "identity")
    where = ["--dir", authority, "--host", "127.0.0.1", "--port", str(port)]
    user = ["--user", "root"] if os.geteuid() == 0 else []
    assert main(["broker-config", "mosquitto", *where, *user]) == 0
    program = find_mosquitto()
    assert program is not None
    config = folder / "identity" / "mosquitto" / "mosquitto.conf"
    with (folder / "mosquitto.log").open("wb") as log:
        process = subprocess.Popen([program, "-c", str(config)], stdout=log, stderr=log)
    site = Site(folder, port, process)
    try:
        until(lambda: listens(port) or process.poll() is not None)
        assert process.poll() is None
        coordinator = ["enroll", "--coordinator", "--out", str(folder / "coordinator")]
        assert main([*coordinator, "--dir", authority]) == 0
        for name in ("robot", "other"):
            site.enroll(name)
        yield site
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def own(site: Site) -> BrokerSettings:
    """How the coordinator reaches the broker."""
    folder = site.folder / "coordinator"
    return BrokerSettings(
        port=site.port,
        tls=True,
        ca=folder / "ca.pem",
        certificate=folder / "coordinator.pem",
        key=folder / "coordinator.key",
        bulk_certificate=folder / "coordinator-bulk.pem",
        bulk_key=folder / "coordinator-bulk.key",
    )


# -- what those who got in can reach -----------------------------------------------------------


class Peer:
    def __init__(self, settings: BrokerSettings, name: str) -> None:
        self.events: list[LinkEvent] = []
        self.link = open_link(settings, name=name, deliver=self.events.append)

    @property
    def topics(self) -> list[str]:
        return [event.topic for event in self.events if isinstance(event, Received)]

    @property
    def heard(self) -> set[tuple[str, bytes]]:
        return {(e.topic, e.payload) for e in self.events if isinstance(e, Received)}

    @property
    def payloads(self) -> set[bytes]:
        """Of the messages that were not there before."""
        messages = [event for event in self.events if isinstance(event, Received)]
        return {event.payload for event in messages if not event.retained}

    def came(self, kind: type[LinkEvent]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def listen(self, *filters: str) -> None:
        """Subscribe over both connections."""
        for topic_filter in filters:
            self.link.subscribe(topic_filter)
            self.link.subscribe(topic_filter, bulk=True)


@contextmanager
def peers(*settings: tuple[BrokerSettings, str]) -> Iterator[list[Peer]]:
    """Links that are up, in this order."""
    opened: list[Peer] = []
    try:
        for each, name in settings:
            opened.append(Peer(each, name))
            until(lambda: opened[-1].came(Connected))
        yield opened
    finally:
        for one in opened:
            one.link.kill()


def test_device_writes_only_what_is_its_own(site: Site, own: BrokerSettings) -> None:
    forbidden = [
        TOPICS.up_control("other"),
        TOPICS.up_chunk("other"),
        TOPICS.presence("other"),
        TOPICS.down_control("robot"),
        TOPICS.down_control("other"),
        TOPICS.epoch,
        TOPICS.echo,
        TOPICS.task,
        TOPICS.round,
        TOPICS.coordinator,
        TOPICS.chunk(HASH),
        "tessera/v1/elsewhere/up/other/control",
    ]
    with peers((own, "coordinator-tiny"), (site.settings("robot"), "robot")) as (boss, robot):
        boss.link.subscribe("tessera/v1/#")
        mark(boss)
        for topic in forbidden:
            for bulk in (False, True):
                robot.link.publish(topic, b"forged", bulk=bulk)
                robot.link.publish(topic, b"forged", retain=True, bulk=bulk)
        # The control connection does not write where only the other one may, and vice versa.
        robot.link.publish(TOPICS.up_chunk("robot"), b"forged")
        robot.link.publish(TOPICS.up_control("robot"), b"forged", bulk=True)
        allowed = [TOPICS.up_control("robot"), TOPICS.presence("robot")]
        for topic in allowed:
            robot.link.publish(topic, b"mine")
        robot.link.publish(TOPICS.up_chunk("robot"), b"mine", bulk=True)
        allowed.append(TOPICS.up_chunk("robot"))
        # What was sent before over the same connections has been judged once these are there.
        until(lambda: set(allowed) <= set(boss.topics))
        assert boss.payloads - {MARK} == {b"mine"}
        assert not robot.came(Disconnected)


def test_device_reads_only_what_is_its_own(site: Site, own: BrokerSettings) -> None:
    with peers((own, "coordinator-tiny"), (site.settings("robot"), "robot")) as (boss, robot):
        robot.listen("tessera/v1/#", "#", TOPICS.down_control("other"), TOPICS.presences)
        robot.listen(TOPICS.up_controls, TOPICS.down_control("robot"), TOPICS.down_chunks("robot"))
        robot.link.subscribe(TOPICS.presence("robot"))
        robot.link.publish(TOPICS.presence("robot"), b"here", retain=True)
        until(lambda: TOPICS.presence("robot") in robot.topics)
        mine = [TOPICS.down_control("robot"), TOPICS.down_chunk("robot", HASH), TOPICS.task]

        def reached() -> bool:
            for topic in mine:
                boss.link.publish(topic, b"for robot")
            return set(mine) <= set(robot.topics)

        until(reached)  # over both connections, so all that it asked for is in place
        for topic in (
            TOPICS.down_control("other"),
            TOPICS.down_chunk("other", HASH),
            TOPICS.up_control("other"),
            TOPICS.presence("other"),
        ):
            boss.link.publish(topic, b"not for robot")
        for topic in mine:
            boss.link.publish(topic, b"behind it")
        last = {Received(topic, b"behind it", False) for topic in mine}
        until(lambda: last <= {each for each in robot.events if isinstance(each, Received)})
        assert robot.payloads == {b"here", b"for robot", b"behind it"}
        robot.link.publish(TOPICS.presence("robot"), b"", retain=True)
        until(lambda: any(isinstance(e, Received) and not e.payload for e in robot.events))


def test_device_of_a_task_has_no_part_in_another_until_it_is_granted(
    site: Site, own: BrokerSettings
) -> None:
    """Without a restart of the broker, and without an end of anybody's connection."""
    other = Topics("weather")
    mine = [TOPICS.up_control("robot"), TOPICS.presence("robot")]
    theirs = [other.up_control("robot"), other.presence("robot")]
    theirs_bulk = other.up_chunk("robot")
    reads = [other.task, other.chunk(HASH), other.down_control("robot")]

    def try_all(boss: Peer, robot: Peer, mark: bytes) -> None:
        """Send everything in both directions; return when all of it was judged."""
        for topic in theirs:
            robot.link.publish(topic, mark)
        robot.link.publish(theirs_bulk, mark, bulk=True)
        robot.link.publish(TOPICS.up_chunk("robot"), mark, bulk=True)
        robot.link.publish(mine[0], mark)
        sent = {(mine[0], mark), (TOPICS.up_chunk("robot"), mark)}
        until(lambda: sent <= boss.heard)
        for topic in (*reads, other.down_chunk("robot", HASH)):
            boss.link.publish(topic, mark, retain=topic == other.chunk(HASH))
        for topic in (TOPICS.down_control("robot"), TOPICS.down_chunk("robot", HASH)):
            boss.link.publish(topic, mark)
        got = {(TOPICS.down_control("robot"), mark), (TOPICS.down_chunk("robot", HASH), mark)}
        until(lambda: got <= robot.heard)

    ends = ((own, "coordinator-tiny"), (site.settings("robot"), "robot"))
    with peers(*ends, (site.settings("other"), "other")) as (boss, robot, third):
        boss.link.subscribe("tessera/v1/#")
        robot.listen("tessera/v1/weather/#", *(t for t in reads if "down" not in t))
        robot.link.subscribe(other.down_control("robot"))
        robot.link.subscribe(TOPICS.down_control("robot"))
        robot.link.subscribe(other.down_chunks("robot"), bulk=True)
        robot.link.subscribe(TOPICS.down_chunks("robot"), bulk=True)
        settle(robot)
        try_all(boss, robot, b"before")
        assert not [each for each in boss.topics if "weather" in each and "/up/" in each]
        assert not [each for each in robot.topics if "weather" in each]

        site.command("grant", "robot", "--task", "weather")
        site.reload()
        until(lambda: opened(boss, robot, other))
        try_all(boss, robot, b"after")
        wanted = {(topic, b"after") for topic in (*theirs, theirs_bulk)}
        until(lambda: wanted <= boss.heard)
        wanted = {(topic, b"after") for topic in (*reads, other.down_chunk("robot", HASH))}
        until(lambda: wanted <= robot.heard)

        site.command("withdraw", "robot", "--task", "weather")
        site.reload()
        until(lambda: not opened(boss, robot, other))
        try_all(boss, robot, b"again")
        assert not [one for one in boss.heard if one[1] == b"again" and one[0] in theirs]
        assert not [one for one in robot.heard if one[1] == b"again" and "weather" in one[0]]
        mark(third, TOPICS.presence("other"))
        assert not any(each.came(Disconnected) for each in (boss, robot, third))
        boss.link.publish(other.chunk(HASH), b"", retain=True)
        until(lambda: (other.chunk(HASH), b"") in boss.heard)


def settle(peer: Peer) -> None:
    """Return when all subscriptions of a link are in place, on both connections."""
    mark(peer, TOPICS.presence("robot"))
    until(lambda: peer.link.acknowledged(bulk=True))


def opened(boss: Peer, robot: Peer, topics: Topics) -> bool:
    """True if the broker takes what a device sends for a task."""
    number = str(len(boss.events)).encode()
    robot.link.publish(topics.up_control("robot"), b"probe" + number)
    robot.link.publish(TOPICS.up_control("robot"), b"behind" + number)
    until(lambda: (TOPICS.up_control("robot"), b"behind" + number) in boss.heard)
    return (topics.up_control("robot"), b"probe" + number) in boss.heard


def test_device_cannot_evict_the_coordinator_or_another_device(
    site: Site, own: BrokerSettings
) -> None:
    robot = site.settings("robot")
    claims = replace(robot, username="coordinator", password="guess")
    with peers((own, "coordinator-tiny"), (site.settings("other"), "other")) as (boss, other):
        for name in ("coordinator-tiny", "coordinator", "other"):
            with peers((claims, name)) as (thief,):
                # It is in, as robot: neither the id nor the user name that it claims counts.
                boss.link.subscribe("tessera/v1/#")
                mark(boss)
                before = len(boss.topics)
                thief.link.publish(TOPICS.task, b"forged", retain=True)
                thief.link.publish(TOPICS.up_control("robot"), b"mine")
                until(lambda n=before: len(boss.topics) > n)  # type: ignore[misc]
                assert boss.topics[before:] == [TOPICS.up_control("robot")]
        mark(other, TOPICS.presence("other"))
        assert not boss.came(Disconnected)
        assert not other.came(Disconnected)


def mark(peer: Peer, topic: str = "tessera/v1/marker") -> None:
    """Return when all that a link sent over its control connection has been handled."""
    before = peer.topics.count(topic)
    peer.link.subscribe(topic)
    peer.link.publish(topic, MARK)
    until(lambda: peer.topics.count(topic) > before)


def test_second_program_with_a_certificate_takes_the_place_of_the_first(site: Site) -> None:
    robot = site.settings("robot")
    with peers((robot, "robot"), (robot, "robot")) as (first, _):
        until(lambda: first.came(Disconnected))


def test_one_certificate_for_both_connections_is_explained(site: Site) -> None:
    settings = replace(site.settings("robot"), bulk_certificate=None, bulk_key=None)
    peer = Peer(settings, "robot")
    try:
        until(lambda: peer.came(Disconnected))
        (event, *_) = (each for each in peer.events if isinstance(each, Disconnected))
        assert "is bulk_certificate missing?" in event.reason
    finally:
        peer.link.kill()


def test_broker_can_be_tried_out_with_bound_client_ids(own: BrokerSettings) -> None:
    import threading

    facts = try_broker(own, threading.Event())
    assert facts is not None
    assert all(finding.verdict == "good" for finding in facts.findings()), facts


# -- who does not get in, and what they are told -------------------------------------------------


@contextmanager
def program(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {key: text for key, text in os.environ.items() if not key.startswith(PREFIX)}
    environment |= {"PYTHONPATH": str(ROOT), "TESSERA_WEIGH": "false"}
    with Children() as children:
        arguments = [sys.executable, "-m", *map(str, command)]
        yield children.start(log.stem, arguments, log, environment).process


def bundle_of(authority: Authority, site: Site, name: str, folder: Path) -> Path:
    """The configuration in a bundle of any authority's, for the broker of the site."""
    pair = authority.enroll(name, days=10)
    place = BrokerPlace("127.0.0.1", site.port)
    write_bundle(folder / name, device_bundle(authority, pair, place, (TASK,)))
    add_data(folder / name)
    return folder / name / "device.toml"


def test_refusals_are_explained_to_the_owner_of_the_device(site: Site, tmp_path: Path) -> None:
    """All at once: each is a program that tries a few times."""
    with Authority(site.authority, clock=lambda: utc_now() - timedelta(days=20)) as past:
        expired = bundle_of(past, site, "late", tmp_path)
    with Authority(tmp_path / "foreign", create_days=100) as foreign:
        stranger = bundle_of(foreign, site, "stranger", tmp_path)
        alien = bundle_of(foreign, site, "alien", tmp_path)
    # It trusts our broker, but was not enrolled here; `alien` does not even trust it.
    shutil.copy(site.authority / "ca.pem", stranger.parent / "ca.pem")
    revoked = site.enroll("gone")
    site.command("revoke", "gone", "--yes")
    site.reload()
    wait_for_denial(site.settings("gone"), "gone")
    nameless = site.enroll("nameless")
    text = nameless.read_text()
    nameless.write_text(text[: text.index("certificate")])
    half = site.enroll("half")
    for ending in ("pem", "key"):
        shutil.copy(
            stranger.parent / f"stranger-bulk.{ending}", half.parent / f"half-bulk.{ending}"
        )
    cases = {
        "late": (expired, "expired on"),
        "stranger": (stranger, "does not know the authority of our certificate"),
        "gone": (revoked, "was revoked; ask the operator for a new one"),
        "nameless": (nameless, "asks for a client certificate; set certificate"),
        "half": (half, "half-bulk.pem"),
    }
    with ExitStack() as stack, embedded_broker(tmp_path / "broker", kind="mosquitto") as settings:
        wrong = add_password_device(tmp_path, settings)
        cases["wrong"] = (wrong, "user name or password are wrong")

        def start(name: str, config: Path) -> subprocess.Popen[bytes]:
            command = ("edge_sdk.cli", "run", "--config", config)
            return stack.enter_context(program(tmp_path / f"{name}.log", *command))

        running = {name: start(name, config) for name, (config, _) in cases.items()}
        start("alien", alien)  # no denial, so it tries on
        not_accepted = "the broker's certificate was not accepted"
        until(lambda: not_accepted in (tmp_path / "alien.log").read_text())
        for name, (_, words) in cases.items():
            result = running[name].wait(HANGS_S)
            log = (tmp_path / f"{name}.log").read_text()
            assert result == EXIT_DENIED, f"{name}: {result}\n{log}"
            assert words in log.splitlines()[-1]
            assert "refused this device 3 times" in log.splitlines()[-1]


def add_password_device(folder: Path, settings: BrokerSettings) -> Path:
    add_data(folder)
    config = folder / "device.toml"
    config.write_text(
        f'task = "{TASK}"\nname = "wrong"\ndata = "data"\nstate_dir = "state"\n[broker]\n'
        f'port = {settings.port}\nusername = "{settings.username}"\npassword = "not it"\n'
    )
    return config


def wait_for_denial(settings: BrokerSettings, name: str) -> str:
    """Connect until the broker refuses it, as it does when it has read its files again; why."""
    denied: list[Disconnected] = []

    def is_denied() -> bool:
        late = Peer(settings, name)
        try:
            until(lambda: bool(late.events))
            denied.extend(e for e in late.events if isinstance(e, Disconnected) and e.denials)
        finally:
            late.link.kill()
        return bool(denied)

    until(is_denied)
    return denied[0].reason


def test_revoked_device_loses_its_connections_once_the_broker_has_the_list(
    site: Site, own: BrokerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    site.enroll("brief")
    settings = site.settings("brief")
    everybody = (own, "coordinator-tiny"), (settings, "brief"), (site.settings("other"), "other")
    with peers(*everybody) as (boss, brief, other):
        boss.link.subscribe("tessera/v1/#")
        brief.listen(TOPICS.down_control("brief"), TOPICS.task)
        site.command("revoke", "brief", "--yes")
        assert "STILL LET IN" in capsys.readouterr().out  # it has not been told to read the list
        site.reload()
        assert "was revoked" in wait_for_denial(settings, "brief")
        site.command("revoke", "brief", "--yes")
        said = capsys.readouterr().out
        assert f"127.0.0.1:{site.port} has read it; brief has no connection there" in said
        until(lambda: any(isinstance(e, Disconnected) and e.denials for e in brief.events))
        before = len(brief.events)
        brief.link.publish(TOPICS.up_control("brief"), b"after")
        brief.link.publish(TOPICS.up_chunk("brief"), b"after", bulk=True)
        for topic in (TOPICS.down_control("brief"), TOPICS.task):
            boss.link.publish(topic, b"after")
        mark(boss)
        mark(other, TOPICS.presence("other"))
        assert not other.came(Disconnected)
        assert not boss.came(Disconnected)
        assert not {TOPICS.up_control("brief"), TOPICS.up_chunk("brief")} & set(boss.topics)
        assert not any(isinstance(event, Received) for event in brief.events[before:])
    archive = site.folder / "again.tar.gz"
    site.command("enroll", "brief", "--task", TASK, "--out", str(archive))
    with tarfile.open(archive) as bundle:
        bundle.extractall(site.folder / "again", filter="data")
    again = load_config(site.folder / "again" / "again" / "device.toml", environment={})
    with peers((again.broker, "brief")):
        pass  # it is up: new certificates of a name that was revoked


def test_coordinator_that_is_refused_says_why_and_stops(site: Site, own: BrokerSettings) -> None:
    import threading

    settings = replace(own, certificate=None, key=None, bulk_certificate=None, bulk_key=None)
    with pytest.raises(DeniedError, match="asks for a client certificate"):
        try_broker(settings, threading.Event())


# -- and those who do ----------------------------------------------------------------------------


def test_programs_with_certificates_finish_a_run(site: Site, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK_FILE)
    identity = tmp_path / "coordinator-identity"
    site.command("enroll", "--coordinator", "--renew", "--out", str(identity))
    (tmp_path / "run.toml").write_text(
        f'[task]\nname = "{TASK}"\nsource = "task.py:make_task"\n'
        '[run]\nfolder = "run"\nrounds = 2\nsteps = 2\nbatch_size = 8\n'
        "[round]\nmin_devices = 2\nbid_s = 600\ntrain_deadline_s = 600\n"
        + (identity / "broker.toml").read_text()
    )
    with ExitStack() as stack:
        serve = ("coordinator.cli", "serve", "--config", tmp_path / "run.toml")
        running = {
            "coordinator": stack.enter_context(program(tmp_path / "coordinator.log", *serve))
        }
        for name in ("first", "second"):
            config = site.enroll(name)
            run = ("edge_sdk.cli", "run", "--config", config)
            running[name] = stack.enter_context(program(tmp_path / f"{name}.log", *run))
        for name, process in running.items():
            code = process.wait(HANGS_S)
            assert code == 0, f"{name}: {code}\n{(tmp_path / f'{name}.log').read_text()}"
    assert "the run is complete" in (tmp_path / "coordinator.log").read_text()


# -- one device in several tasks -------------------------------------------------------------------


class ManyCoordinators(MqttStage):
    """A broker on which every coordinator has certificates of its own."""

    def __init__(self, by_name: dict[str, BrokerSettings]) -> None:
        super().__init__(next(iter(by_name.values())))
        self._by_name = by_name

    def open_peer(self, *, name: str, deliver: Deliver) -> Link:
        self._settings = self._by_name[name]
        return super().open_peer(name=name, deliver=deliver)


def enroll_coordinator(site: Site, name: str, folder: Path) -> BrokerSettings:
    site.command("enroll", "--coordinator", name, "--out", str(folder))
    full = f"coordinator-{name}"
    return BrokerSettings(
        port=site.port,
        tls=True,
        ca=folder / "ca.pem",
        certificate=folder / f"{full}.pem",
        key=folder / f"{full}.key",
        bulk_certificate=folder / f"{full}-bulk.pem",
        bulk_key=folder / f"{full}-bulk.key",
    )


def test_device_in_two_tasks_keeps_one_pair_of_connections_and_loses_no_movement(
    site: Site, tmp_path: Path
) -> None:
    """Its certificates may connect once each; it is killed while both tasks owe it a receipt."""
    names = ("high", "low")
    settings = {
        f"coordinator-{name}": enroll_coordinator(site, name, tmp_path / name) for name in names
    }
    bundle = site.folder / "both"
    tasks = [word for name in names for word in ("--task", name)]
    site.command("enroll", "both", *tasks, "--out", str(bundle))
    add_data(bundle)
    config = bundle / "device.toml"
    user = ["--user", "root"] if os.geteuid() == 0 else []
    where = ["--host", "127.0.0.1", "--port", str(site.port), *user]
    site.command("broker-config", "mosquitto", *where)  # lets the new coordinators write
    site.reload()
    data = make_data()
    np.savez(config.parent / "data" / "own.npz", x=data.inputs[0], y=data.targets)
    stage = ManyCoordinators(settings)
    high, low = (Coordinator(stage, task=name, device="both") for name in names)
    run = ("edge_sdk.cli", "run", "--config", config)

    def bid_of(coordinator: Coordinator, round: int) -> Bid:
        return stage.until(
            lambda: coordinator.last(Bid, lambda bid: bid.round == round and bid.level is not None)
        )

    assert load_config(config, environment={}).priorities() == {"high": 1, "low": 2}
    for coordinator in (high, low):
        coordinator.answers_offers = False
        coordinator.present()
        coordinator.announce()
    log = tmp_path / "device.log"
    with program(log, *run) as device:
        low.open(1)
        bid_of(low, 1)
        high.open(1)  # goes first, and an offer is no training
        bid_of(high, 1)
        skip = stage.until(lambda: low.last(Bid, lambda bid: bid.level is None))
        assert skip.code == "task"
        high.assign(1)
        offers = [stage.until(lambda: high.last(Offer))]
        low.open(2)
        bid_of(low, 2)
        low.assign(2)
        offers.append(stage.until(lambda: low.last(Offer)))
        device.kill()
        stage.until(lambda: high.last(Presence, lambda each: not each.online))
    assert "no connection" not in log.read_text()
    kept = sorted(path.name for path in config.parent.rglob("*.movement"))
    assert kept == ["1.movement", "2.movement"]
    assert {row["task"]: row["waiting"] for row in status_of(config)["tasks"]} == {
        "high": [1],
        "low": [2],
    }
    for coordinator in (high, low):
        coordinator.answers_offers = True
    again = tmp_path / "again.log"
    with program(again, *run) as device:
        for coordinator, offer in zip((high, low), offers, strict=True):
            stage.until(partial(getattr, coordinator, "movements"))
            assert coordinator.movements[0][0] == offer
            coordinator.receipt(offer.round)
            coordinator.finish(offer.round)
        stage.until(lambda: device.poll() is not None)
        assert device.returncode == 0, again.read_text()
    assert "no connection" not in again.read_text()
    assert not list(config.parent.rglob("*.movement"))
    for coordinator in (high, low):
        coordinator.close()


def status_of(config: Path) -> dict[str, Any]:
    """What the owner sees of a device that does not run."""
    found = subprocess.run(
        [sys.executable, "-m", "edge_sdk.cli", "status", "--json", "--config", str(config)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={key: text for key, text in os.environ.items() if not key.startswith(PREFIX)},
    )
    standing: dict[str, Any] = json.loads(found.stdout)
    assert not standing["running"]
    return standing
