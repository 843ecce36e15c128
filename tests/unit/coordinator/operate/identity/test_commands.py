"""The commands: bundles that work as they are, and words for what cannot be done."""

from __future__ import annotations

import json
import os
import re
import stat
import tarfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.operate.config import read_config
from coordinator.operate.identity.authority import Authority, Passes
from coordinator.operate.identity.bundles import parse_place
from coordinator.operate.identity.errors import IdentityError
from coordinator.operate.identity.index import BrokerPlace
from coordinator.operate.identity.mosquitto import access_rules
from coordinator.operate.identity.takeover import Takeover
from edge_sdk.device.config import load_config
from edge_sdk.program.control import ControlCommand, ControlError, ControlSocket
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.transport.settings import tls_context

USER = ["--user", "root"] if os.geteuid() == 0 else []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def tested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The brokers at which connections were to be ended; those of runs have read the list."""
    tested = list[tuple[str, int]]()

    def end(place: BrokerPlace, passes: Passes, *, within_s: float) -> tuple[Takeover, str]:
        tested.append((place.host, place.port))
        return (Takeover.ENDED if within_s else Takeover.UNREAD), ""

    monkeypatch.setattr("coordinator.operate.identity.takeover.end_connections", end)
    return tested


def test_bundle_of_a_device_is_private_and_works_where_it_is_unpacked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enroll", "robot", "--broker", "b.example.org:1234", "--task", "digits"]) == 0
    said = capsys.readouterr().out
    assert "robot.tar.gz" in said
    assert "tessera-device run --config robot/device.toml" in said
    archive = folder / "robot.tar.gz"
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as bundle:
        modes = {each.name: each.mode for each in bundle.getmembers()}
        bundle.extractall(folder / "elsewhere", filter="data")
    assert modes["robot/robot.key"] == modes["robot/robot-bulk.key"] == 0o600
    assert all(name == "robot" or name.startswith("robot/") for name in modes)
    config = load_config(folder / "elsewhere" / "robot" / "device.toml", environment={})
    assert (config.name, config.task) == ("robot", "digits")
    assert config.broker.address == "b.example.org:1234"
    assert config.state_dir == folder / "elsewhere" / "robot" / "state"
    # The files are there, and each key belongs to its certificate.
    assert tls_context(config.broker) is not None
    assert tls_context(config.broker.for_bulk()) is not None
    assert config.broker.for_bulk() != config.broker


def tasks_now(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str] | None]:
    """The tasks of everybody whose certificates are valid, as `identities` lists them."""
    capsys.readouterr()
    assert main(["identities", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    return {row["name"]: row["tasks"] for row in rows if row["standing"] == "valid"}


def test_tasks_are_granted_narrowed_and_withdrawn(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = ["--broker", "b.example.org"]
    assert main(["enroll", "robot", *broker, "--task", "digits"]) == 0
    assert main(["enroll", "old", *broker]) == 0  # as before: for every task
    assert "may take part in every task" in capsys.readouterr().out
    assert tasks_now(capsys) == {"robot": ["digits"], "old": None}
    assert main(["grant", "robot", "--task", "weather"]) == 0
    assert main(["grant", "old", "--task", "weather", "--only"]) == 0
    assert tasks_now(capsys) == {"robot": ["digits", "weather"], "old": ["weather"]}
    assert main(["enroll", "robot", *broker, "--renew", "--out", "again.tar.gz"]) == 0
    assert tasks_now(capsys)["robot"] == ["digits", "weather"]
    assert main(["withdraw", "robot", "old", "--task", "weather"]) == 0
    assert tasks_now(capsys) == {"robot": ["digits"], "old": []}
    assert main(["grant", "old", "--every-task"]) == 0
    assert tasks_now(capsys)["old"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["grant", "nobody", "--task", "t"], "not an enrolled device"),
        (["grant", "robot", "--task", "T!"], "cannot name a task"),
        (["grant", "robot", "--every-task", "--only"], "contradict each other"),
        (["withdraw", "robot", "--task", "weather"], "its tasks are digits"),
        (["withdraw", "old", "--task", "digits"], "grant DEVICE --task NAME --only"),
        (["withdraw", "robot", "old", "--task", "digits"], "old: it may take part in every task"),
    ],
)
def test_tasks_that_cannot_be_changed_change_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    broker = ["--broker", "b.example.org"]
    assert main(["enroll", "robot", *broker, "--task", "digits"]) == 0
    assert main(["enroll", "old", *broker]) == 0
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert tasks_now(capsys) == {"robot": ["digits"], "old": None}


def test_rules_beside_a_broker_follow_unless_it_lets_everybody_in(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["broker-config", "mosquitto", "--host", "127.0.0.1", "--user", "root"]
    assert main(config) == 0
    assert main(["enroll", "robot", "--task", "digits"]) == 0
    acl = folder / "identity" / "mosquitto" / "acl"
    assert "topic write tessera/v1/digits/up/robot/#" in acl.read_text()
    capsys.readouterr()
    assert main(["grant", "robot", "--task", "weather"]) == 0
    assert "topic write tessera/v1/weather/up/robot/#" in acl.read_text()
    assert "systemctl reload mosquitto" in capsys.readouterr().out
    assert main([*config, "--every-task"]) == 0
    before = acl.read_text()
    assert "pattern write tessera/v1/+/up/%u/#" in before
    assert main(["grant", "robot", "--task", "sounds"]) == 0
    assert acl.read_text() == before


def test_keys_are_in_the_bundle_and_nowhere_else(folder: Path) -> None:
    assert main(["enroll", "robot", "--broker", "b.example.org", "--out", "robot"]) == 0
    keys = {
        path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()
    }
    assert {str(path.relative_to(folder)) for path in keys} == {
        "identity/ca.key",
        "robot/robot.key",
        "robot/robot-bulk.key",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in keys)


def test_bundle_without_a_task_says_that_it_is_missing(folder: Path) -> None:
    assert main(["enroll", "robot", "--broker", "b.example.org", "--out", "robot"]) == 0
    with pytest.raises(ConfigError, match="task is missing"):
        load_config(folder / "robot" / "device.toml", environment={})


def test_table_of_a_coordinator_works_in_a_configuration_beside_it(folder: Path) -> None:
    for extra, name in (([], "coordinator"), (["eu"], "coordinator-eu")):
        assert main(["enroll", "--coordinator", *extra, "--broker", "b.example.org"]) == 0
        table = (folder / f"{name}-identity" / "broker.toml").read_text()
        path = folder / "run.toml"
        path.write_text(f'[task]\nname = "t"\nsource = "a:b"\n[run]\nfolder = "run"\n{table}')
        settings = read_config(path).broker
        assert settings.certificate == folder / f"{name}-identity" / f"{name}.pem"
        assert tls_context(settings) is not None
        assert tls_context(settings.for_bulk()) is not None


def test_broker_is_remembered_by_enroll_and_broker_config(folder: Path) -> None:
    assert (
        main(["broker-config", "mosquitto", "--host", "b.example.org", "--port", "99", *USER]) == 0
    )
    assert main(["enroll", "robot", "--task", "t", "--out", "robot"]) == 0
    config = load_config(folder / "robot" / "device.toml", environment={})
    assert config.broker.address == "b.example.org:99"
    assert main(["broker-config", "mosquitto", *USER]) == 0
    assert "listener 99\n" in (folder / "identity/mosquitto/mosquitto.conf").read_text()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["enroll", "robot"], "--broker is missing"),
        (["enroll", "coordinator", "--broker", "b"], "reserved for coordinators"),
        (["enroll", "Robot", "--broker", "b"], "cannot name a device"),
        (["enroll", "robot", "--broker", "b:x"], "--broker 'b:x'"),
        (["enroll", "robot", "--broker", "mqtt://b"], "--broker 'mqtt://b'"),
        (["enroll", "robot", "--broker", "b", "--days", "0"], "--days 0"),
        (["enroll", "robot", "--broker", "b", "--task", "T"], "--task"),
        (["enroll", "robot", "--broker", "b", "--out", "none/robot"], "is not a folder"),
        (["enroll", "robot", "--broker", "b", "--out", "."], "already exists"),
        (["revoke", "robot"], "holds no authority"),
        (["identities"], "holds no authority"),
        (["authority", "--days", "0"], "--days 0"),
        (["broker-config", "mosquitto"], "--host is missing"),
        (["broker-config", "mosquitto", "--host", "ä.example.org", *USER], "an ASCII name"),
        (["broker-config", "mosquitto", "--host", "b", "--port", "0x"], ""),
        (["broker-config", "mosquitto", "--host", "b", "--out", "a b"], "spaces"),
    ],
)
def test_what_cannot_be_done_is_said(
    command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(command)
    except SystemExit as error:  # argparse
        code = int(str(error.code))
    assert code == 2
    assert words in capsys.readouterr().err


def test_enrolled_revoked_renewed_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    enroll = ["enroll", "robot", "--broker", "b.example.org"]
    assert main([*enroll, "--out", "one"]) == 0
    assert main([*enroll, "--out", "two"]) == 2
    assert "--renew" in capsys.readouterr().err
    assert not Path("two").exists()
    assert main([*enroll, "--out", "two", "--renew"]) == 0
    assert main(["revoke", "robot", "--yes"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"[0-9a-f]{30,}", said)) == 4
    assert "Copy it to the broker" in said
    assert main([*enroll, "--out", "three"]) == 0
    capsys.readouterr()
    assert main(["identities", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["standing"] for row in rows] == ["revoked", "revoked", "valid"]
    assert main(["identities"]) == 0
    assert capsys.readouterr().out.count("robot  revoked") == 2
    assert main(["revoke", "nobody"]) == 2
    assert "not enrolled" in capsys.readouterr().err


def test_revoking_renews_the_list_beside_the_broker(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["broker-config", "mosquitto", "--host", "b.example.org", *USER]) == 0
    assert main(["enroll", "robot"]) == 0
    before = (folder / "identity/mosquitto/crl.pem").read_bytes()
    assert main(["revoke", "robot", "--yes"]) == 0
    after = (folder / "identity/mosquitto/crl.pem").read_bytes()
    assert before != after == (folder / "identity/crl.pem").read_bytes()
    assert "Copy it" not in capsys.readouterr().out


def test_revoking_reaches_every_broker_and_names_those_it_does_not(
    folder: Path, capsys: pytest.CaptureFixture[str], tested: list[tuple[str, int]]
) -> None:
    assert main(["broker-config", "mosquitto", "--host", "b.example.org", *USER]) == 0
    assert main(["enroll", "robot"]) == 0
    runs = [folder / name / "broker" for name in ("one", "two", "gone", "foreign")]
    reloaded = list[str]()
    with Authority(folder / "identity") as authority:
        for number, each in enumerate(runs):
            each.mkdir(parents=True)
            authority.remember_run(BrokerPlace("10.0.0.1", 8885 + number, each))
    runs[2].rmdir()

    def refuse() -> None:
        raise ControlError("the broker of this run is not ours: reload it yourself")

    served: dict[Path, ControlCommand] = {
        runs[1]: lambda: reloaded.append("two"),
        runs[3]: refuse,
    }
    with ExitStack() as stack:
        for run, reload in served.items():
            control = ControlSocket(run.parent, {"broker.reload": reload})
            stack.callback(control.close)
            control.start()
        capsys.readouterr()
        assert main(["revoke", "robot", "--yes"]) == 1
    assert tested == [("10.0.0.1", 8886), ("b.example.org", 8883)]  # not those that are not there
    said = capsys.readouterr().out
    assert reloaded == ["two"]
    crl = (folder / "identity/crl.pem").read_bytes()
    for each in (folder / "identity/mosquitto", runs[0], runs[1], runs[3]):
        assert (each / "crl.pem").read_bytes() == crl
    for words in (
        f"Reached: {folder / 'identity/mosquitto'}. Make the broker read it: systemctl",
        f"Reached: {runs[0]}. The run is not being served; its broker reads it when it starts.",
        f"Reached: {runs[1]}. The run's broker reads it.",
        "The broker at 10.0.0.1:8886 has read it; robot has no connection there.",
        "STILL LET IN: the broker at b.example.org:8883 has not read the list.",
        f"Not there any more: {runs[2]}.",
        f"NOT REACHED: the list is in {runs[3]}, but its broker has not read it: the broker of",
    ):
        assert words in said


def test_broker_that_missed_its_rules_reads_them_when_the_command_is_repeated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder / "run" / "broker"
    place.mkdir(parents=True)
    assert main(["enroll", "robot", "--broker", "b:1", "--task", "digits"]) == 0
    with Authority(Path("identity")) as authority:
        authority.remember_run(BrokerPlace("127.0.0.1", 1, place, by_task=True))
    tries = list[str]()

    def reload() -> None:
        tries.append((place / "acl").read_text())
        if len(tries) == 1:
            raise ControlError("busy")

    control = ControlSocket(place.parent, {"broker.reload": reload})
    control.start()
    try:
        command = ["grant", "robot", "--task", "weather"]
        assert main(command) == 1
        assert "has not read its access rules: busy" in capsys.readouterr().out
        assert main(command) == 0
    finally:
        control.close()
    assert len(tries) == 2
    assert "tessera/v1/weather/up/robot/#" in tries[1]


def test_authority_is_free_while_the_question_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["enroll", "robot", "--broker", "b.example.org"]) == 0

    def answer(_question: str, *, yes: bool) -> None:
        assert not yes
        with Authority(folder / "identity") as authority:
            authority.enroll("other", days=1)

    monkeypatch.setattr("coordinator.operate.identity.commands.confirm", answer)
    assert main(["revoke", "robot"]) == 0


def test_files_for_another_machine_have_its_paths(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--host", "b.example.org", "--at", "/etc/mosquitto/tessera", "--out", "copy"]
    assert main(["broker-config", "mosquitto", *place]) == 0
    assert "Copy them to /etc/mosquitto/tessera" in capsys.readouterr().out
    config = (folder / "copy" / "mosquitto.conf").read_text()
    assert "certfile /etc/mosquitto/tessera/broker.pem" in config
    assert str(folder) not in config
    assert stat.S_IMODE((folder / "copy" / "broker.key").stat().st_mode) == 0o600


def test_authority_lasts_as_long_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["authority", "--days", "10"]) == 0
    assert main(["enroll", "robot", "--broker", "b", "--days", "11"]) == 2
    assert "longer than the authority" in capsys.readouterr().err
    assert main(["authority"]) == 2
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("b.example.org", BrokerPlace("b.example.org", 8883)),
        ("b.example.org:1", BrokerPlace("b.example.org", 1)),
        ("10.0.0.1:8884", BrokerPlace("10.0.0.1", 8884)),
        ("[::1]", BrokerPlace("::1", 8883)),
        ("[fe80::1]:2", BrokerPlace("fe80::1", 2)),
    ],
)
def test_place_of_a_broker_is_read(text: str, place: BrokerPlace) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:b", "a:99999", "::1", "[a]:1", "a b", "a/b"])
def test_other_text_is_no_place(text: str) -> None:
    with pytest.raises(IdentityError):
        parse_place(text)


# -- the access rules, as Mosquitto reads them ---------------------------------------------------


def allowed(rules: str, user: str, access: str, topic: str) -> bool:
    """Mosquitto's rule, in a few lines: the lines of a user, and patterns with %u for all."""
    section, verdict = None, False
    for line in rules.splitlines():
        word, _, rest = line.partition(" ")
        if word == "user":
            section = rest
        elif word in ("topic", "pattern"):
            right, topic_filter = rest.split(" ")
            applies = section == user if word == "topic" else True
            pattern = re.escape(topic_filter.replace("%u", user))
            pattern = pattern.replace(r"\+", "[^/]+").replace(r"\#", ".*").replace("#", ".*")
            if applies and right in (access, "readwrite") and re.fullmatch(pattern, topic):
                verdict = True
    return verdict


def test_access_rules_give_each_connection_its_own_topics_only() -> None:
    devices = {"pi": ("t",), "other": ("t",)}
    rules = access_rules(["coordinator", "coordinator-eu"], devices)
    topics, hash = Topics("t"), bytes(16)
    everything = {
        topics.task,
        topics.round,
        topics.coordinator,
        topics.chunk(hash),
        *(
            topic
            for name in ("pi", "other")
            for topic in (
                topics.down_control(name),
                topics.down_chunk(name, hash),
                topics.up_control(name),
                topics.up_chunk(name),
                topics.presence(name),
            )
        ),
    }
    public = {topics.task, topics.round, topics.coordinator, topics.chunk(hash)}
    rights = {
        ("pi", "read"): {*public, topics.down_control("pi"), topics.presence("pi")},
        ("pi", "write"): {topics.up_control("pi"), topics.presence("pi")},
        ("pi-bulk", "read"): {*public, topics.down_chunk("pi", hash)},
        ("pi-bulk", "write"): {topics.up_chunk("pi")},
    }
    for name in ("coordinator", "coordinator-bulk", "coordinator-eu", "coordinator-eu-bulk"):
        rights |= {(name, access): everything for access in ("read", "write")}
    for (user, access), wanted in rights.items():
        assert {topic for topic in everything if allowed(rules, user, access, topic)} == wanted
