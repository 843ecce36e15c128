"""Configuration: a file, then the environment, then flags; mistakes are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.data.source import open_data
from edge_sdk.decide.decision import Policy
from edge_sdk.device.config import (
    COORDINATOR_TABLES,
    DeviceConfig,
    Emulated,
    default_name,
    load_config,
    write_default,
)
from edge_sdk.program.settings.types import keys, kinds
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.topics import check_device
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.edge_sdk.data.specs import spec_of

FULL = """
task = "digits"
name = "pi-4"
state_dir = "state"
data = "own.py:load"
level = 0.5
participation = 0.25
schedule = "ad-hoc"
phase = "common"
keeps_copy = false
compute = 1e9
bytes_per_s = 2_000_000
seed = 3
threads = 2
providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
cache_mb = 64
evaluate_every = 5
stay = true
connect_s = 30
log_format = "json"
log_level = "debug"
[broker]
host = "broker.example.org"
port = 8883
tls = true
ca = "ca.pem"
certificate = "pi.pem"
key = "/etc/pi.key"
bulk_certificate = "pi-bulk.pem"
bulk_key = "/etc/pi-bulk.key"
username = "pi"
password_file = "secret"
keepalive_s = 15
allow_plaintext = false
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "device.toml"
    path.write_text(text)
    return path


def load(folder: Path, text: str, **more: Any) -> DeviceConfig:
    return load_config(write(folder, text), environment={}, **more)


def test_every_key_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    config = load(tmp_path, FULL)
    assert config == DeviceConfig(
        task="digits",
        name="pi-4",
        state_dir=tmp_path / "state",
        data=f"{tmp_path / 'own.py'}:load",
        policy=Policy(
            level=0.5,
            participation=0.25,
            schedule="ad-hoc",
            phase="common",
            keeps_copy=False,
            compute=1e9,
            bytes_per_s=2e6,
        ),
        seed=3,
        threads=2,
        providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
        cache_mb=64,
        evaluate_every=5,
        stay=True,
        connect_s=30.0,
        log_format="json",
        log_level="debug",
        broker=BrokerSettings(
            host="broker.example.org",
            port=8883,
            tls=True,
            ca=tmp_path / "ca.pem",
            certificate=tmp_path / "pi.pem",
            key=Path("/etc/pi.key"),
            bulk_certificate=tmp_path / "pi-bulk.pem",
            bulk_key=Path("/etc/pi-bulk.key"),
            username="pi",
            password="hush",
            keepalive_s=15,
        ),
    )
    assert "hush" not in repr(config)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'task = "a"\nname = "b"\nlevel = 0.1\nthreads = 3\n[broker]\nport = 1')
    environment = {
        "TESSERA_NAME": "c",
        "TESSERA_LEVEL": "0.2",
        "TESSERA_BROKER_PORT": "2",
        "TESSERA_STAY": "true",
        "TESSERA_PROVIDERS": "A, B",
        "TESSERA_RUN_ROUNDS": "of another program",
        "ROUNDS": "of nobody here",
    }
    config = load_config(path, environment=environment, flags={"level": "0.3", "name": None})
    assert (config.task, config.name, config.policy.level) == ("a", "c", 0.3)
    assert (config.threads, config.broker.port, config.stay) == (3, 2, True)
    assert config.providers == ("A", "B")


def test_no_file_is_needed() -> None:
    config = load_config(None, environment={"TESSERA_TASK": "digits"}, flags={"data": "here"})
    assert config.task == "digits"
    assert config.data == "here"
    assert config.name == default_name()


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_TASK", "digits")
    assert load_config(None).task == "digits"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("levle = 0.5", "levle is not a known key; did you mean 'level'?"),
        ("[broker]\nhots = 'x'", "broker.hots is not a known key; did you mean 'host'?"),
        ("hosst = 'x'", "hosst is not a known key; did you mean 'host' in [broker]?"),
        ("[brokre]\nhost = 'x'", "brokre is not a known key; did you mean 'broker'?"),
        ("zzz = 1", "zzz is not a known key; known are task, name"),
        ("level = 2", "level = 2: must be above 0 and at most 1"),
        ("level = 'much'", "level = 'much': must be a number"),
        ("level = '0.5'", "level = '0.5': must be a number"),
        ("levels = [1, 2]", "levels = [1, 2]: must be a list, each item above 0 and at most"),
        ("levels = []", "levels = (): must be shares"),
        ("levels = 1", "levels = 1: must be a list"),
        ("participation = 0", "participation = 0: must be above 0"),
        ("threads = 1.5", "threads = 1.5: must be a whole number"),
        ("threads = true", "threads = True: must be a whole number"),
        ("threads = 0", "threads = 0: must be at least 1"),
        ("cache_mb = 0", "cache_mb = 0: must be at least 1"),
        ("seed = -1", "seed = -1: must be at least 0"),
        ("max_gap = 0", "max_gap = 0: must be at least 1"),
        ("compute = 0", "compute = 0: must be above 0"),
        ("name = 3", "name = 3: must be a text in quotes"),
        ("name = 'Pi 4'", "'Pi 4' cannot name a device"),
        ("stay = 'maybe'", "stay = 'maybe': must be true or false"),
        ("providers = 'a'\nproviders_ = 1", "did you mean 'providers'?"),
        ("providers = []", "providers = []: name one"),
        ("phase = 'mine'", "phase = 'mine': must be one of own, common"),
        ("schedule = 'never'", "schedule = 'never': must be one of round-robin, ad-hoc"),
        ("prefer = 1", "prefer = 1: must be one of smaller, rarer"),
        ("probe = 'mac'", "probe = 'mac': must be one of linux, raspberry-pi, jetson"),
        ("board = 3", "board = 3: must be the name of a profile, or a file"),
        (
            "data = 3",
            "data = 3: must be a folder, a file, file.py:function or package.module:function",
        ),
        ("state_dir = ''", "state_dir = '': must be a text in quotes"),
        ("log_format = 'xml'", "log_format = 'xml': must be one of text, json"),
        ("connect_s = -1", "connect_s = -1: must be at least 0"),
        ("connect_s = nan", "connect_s = nan: must be a finite number"),
        ("[limits]\nbattery_floor = 101", "limits.battery_floor = 101: must be from 0 to 100"),
        ("[limits]\nquiet_hours = '22-7'", "limits.quiet_hours = '22-7': must be hours of the"),
        ("[limits]\nmemory_shre = 1", "limits.memory_shre is not a known key; did you mean 'memo"),
        ("[emulate]\nfleet = 'f.toml'", "emulate.member is missing"),
        ("[broker]\nport = 70000", "broker.port = 70000: must be from 0 to 65535"),
        ("[broker]\nhost = 'far.example'", "broker.host = 'far.example' is another machine"),
        ("[broker]\nhost = 'mqtt://far'", "broker.host = 'mqtt://far': give a name or an address"),
        ("broker = 'x'", "broker = 'x': must be a table"),
        ("[broker]\nusername='a'\npassword='b'\npassword_file='c'", "are both set; give one"),
        ("[broker]\nusername='a'\npassword_file='nowhere'", "broker.password_file cannot be read"),
        ("[broker]\nusername='a'\npassword=1234", "broker.password: must be a text in quotes"),
        ("[broker]\nca='ca.pem'", "broker.ca is set but tls is off"),
        ("level = ", "device.toml cannot be read: it is not TOML"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f'task = "digits"\n{text}')
    assert advice in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "device.toml"))
    assert "\n" not in str(error.value)


def test_wrong_variable_and_flag_are_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TESSERA_BROKER_PORT = 'x'"):
        load_config(None, environment={"TESSERA_TASK": "t", "TESSERA_BROKER_PORT": "x"})
    with pytest.raises(ConfigError, match="--evaluate-every = 'x'"):
        load_config(None, environment={}, flags={"task": "t", "evaluate_every": "x"})


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        (
            "TESSERA_LEVLE",
            "1",
            "TESSERA_LEVLE is not a known variable; did you mean 'TESSERA_LEVEL'",
        ),
        ("TESSERA_BROKER_HOTS", "x", "did you mean 'TESSERA_BROKER_HOST'?"),
        ("TESSERA_XYZ", "x", "TESSERA_XYZ is not a known variable"),
        ("TESSERA_LEVEL", "2", "TESSERA_LEVEL = '2': must be above 0 and at most 1"),
        ("TESSERA_LEVEL", "nan", "TESSERA_LEVEL = 'nan': must be a finite number"),
        ("TESSERA_THREADS", "1.5", "TESSERA_THREADS = '1.5': must be a whole number"),
        ("TESSERA_STAY", "maybe", "TESSERA_STAY = 'maybe': must be true or false"),
        ("TESSERA_LEVELS", "1,two", "TESSERA_LEVELS = '1,two': must be a list, each item a"),
        ("TESSERA_SCHEDULE", "x", "TESSERA_SCHEDULE = 'x': must be one of round-robin, ad-hoc"),
    ],
)
def test_wrong_variable_is_one_clear_line(variable: str, value: str, advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, environment={"TESSERA_TASK": "digits", variable: value})
    assert advice in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_task_and_missing_file_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task is missing"):
        load(tmp_path, "")
    with pytest.raises(ConfigError, match="tessera-device init"):
        load_config(tmp_path / "none.toml", environment={})


@pytest.mark.parametrize(
    ("data", "read"),
    [("package.module:load", "package.module:load"), ("/data", "/data"), ("/a.py:f", "/a.py:f")],
)
def test_data_that_is_no_relative_path_is_left_alone(tmp_path: Path, data: str, read: str) -> None:
    assert load(tmp_path, f'task = "t"\ndata = "{data}"').data == read


def test_default_file_can_be_read_and_names_every_key(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    write_default(path)
    config = load_config(path, environment={})
    assert config.task == "digits"
    assert config.data == str(tmp_path / "digits.csv")
    assert len(open_data(config.data, config.format).read(spec_of(1, 8, 8, highest=9)).data) == 60
    text = path.read_text()
    for key in keys(DeviceConfig):
        assert f"{key.path[-1]} = " in text, key.dotted
    with pytest.raises(ConfigError, match="is left as it is"):
        write_default(path)


def test_file_may_be_given_as_text(tmp_path: Path) -> None:
    path = write(tmp_path, 'task = "digits"\ndata = "here"')
    assert load_config(str(path), environment={}) == load_config(path, environment={})


def test_device_knows_the_variables_of_the_coordinator() -> None:
    pytest.importorskip("xxhash", reason="needs the coordinator")
    from coordinator.operate.config import ServeConfig

    tables = {name for name, kind in kinds(ServeConfig).items() if kind.table is not None}
    assert set(COORDINATOR_TABLES) == tables - {"broker", "format"}  # these are the device's too


def test_emulated_device_is_named_by_fleet_and_member(tmp_path: Path) -> None:
    emulate = load(tmp_path, 'task = "t"\n[emulate]\nfleet = "f.toml"\nmember = "pixel-4"').emulate
    assert emulate == Emulated(fleet=tmp_path / "f.toml", member="pixel-4")
    with pytest.raises(ConfigError, match=r"emulate\.member is missing"):
        load(tmp_path, 'task = "t"\n[emulate]\nfleet = "f.toml"')


def test_default_name_fits_into_a_topic() -> None:
    check_device(default_name())


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Pi 4.local", "pi-4.local"),
        ("x" * 70, "x" * 59),
        ("coordinator", "device-coordinator"),
        ("coordinator-3", "device-coordinator-3"),
        ("store-bulk-bulk", "store"),
        ("x" * 54 + "-bulk-2", "x" * 54),
        ("___", "device"),
    ],
)
def test_default_name_is_one_that_devices_may_have(
    monkeypatch: pytest.MonkeyPatch, host: str, name: str
) -> None:
    monkeypatch.setattr("platform.node", lambda: host)
    assert check_device(default_name()) == name


def test_python_without_a_toml_reader_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 'task = "digits"')
    monkeypatch.setitem(sys.modules, "tomli", None)
    monkeypatch.setattr("edge_sdk.program.settings.reader.sys.version_info", (3, 10, 0))
    with pytest.raises(ConfigError, match="pip install tomli"):
        load_config(path, environment={})
    assert load_config(None, environment={"TESSERA_TASK": "digits"}).task == "digits"
