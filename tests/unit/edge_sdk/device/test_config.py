"""Configuration: a file, then the environment, then flags; mistakes are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.decide.decision import Policy
from edge_sdk.device.config import (
    KEYS,
    ConfigError,
    DeviceConfig,
    Emulated,
    default_name,
    load_config,
    write_default,
)
from edge_sdk.protocol.messages.topics import check_device
from edge_sdk.transport.settings import BrokerSettings

FULL = """
task = "digits"
name = "pi-4"
state_dir = "state"
data = "own.py:load"
level = 0.5
participation = 0.25
schedule = "ad-hoc"
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
        "TESSERA_ROUNDS": "of another program",
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
        ("levle = 0.5", "unknown key 'levle'; did you mean 'level'?"),
        ("[broker]\nhots = 'x'", "unknown key 'broker.hots'; did you mean 'host' in [broker]?"),
        ("hosst = 'x'", "did you mean 'host' in [broker]?"),
        ("[brokre]\nhost = 'x'", "unknown key 'brokre'"),
        ("zzz = 1", "known are task, name"),
        ("level = 2", "level is a share in (0, 1], not 2.0"),
        ("level = 'much'", "level = 'much': must be a number"),
        ("threads = 1.5", "threads = 1.5: must be a whole number"),
        ("threads = true", "threads = True: must be a whole number"),
        ("threads = 0", "threads = 0: must be at least 1"),
        ("name = 3", "name = 3: must be a text"),
        ("name = 'Pi 4'", "'Pi 4' cannot name a device"),
        ("stay = 'maybe'", "stay = 'maybe': must be true or false"),
        ("providers = 'a'\nproviders_ = 1", "did you mean 'providers'?"),
        ("providers = []", "providers = []: name one"),
        ("schedule = 'never'", "schedule is one of"),
        ("log_format = 'xml'", "log_format = 'xml': must be one of text, json"),
        ("connect_s = -1", "connect_s = -1.0"),
        ("connect_s = nan", "connect_s = nan"),
        ("[broker]\nport = 0", "[broker] port = 0"),
        ("[broker]\nhost = 'far.example'", "[broker] host 'far.example' is another machine"),
        ("broker = 'x'", "unknown key 'broker'"),
        ("[broker]\nusername='a'\npassword='b'\npassword_file='c'", "are both set; give one"),
        ("[broker]\nusername='a'\npassword_file='nowhere'", "broker.password_file cannot be read"),
        ("level = ", "device.toml cannot be read"),
    ],
)
def test_mistake_is_named(tmp_path: Path, text: str, advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, f'task = "digits"\n{text}')
    assert advice in str(error.value)


def test_wrong_variable_and_flag_are_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TESSERA_BROKER_PORT = 'x'"):
        load_config(None, environment={"TESSERA_BROKER_PORT": "x"})
    with pytest.raises(ConfigError, match="--evaluate-every = 'x'"):
        load_config(None, environment={}, flags={"evaluate_every": "x"})


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
    assert config.data == str(tmp_path / "data")
    text = path.read_text()
    optional = {"compute", "bytes_per_s", "broker.password"}
    for key in KEYS.keys() - optional:
        assert f"{key.rpartition('.')[2]} = " in text, key
    with pytest.raises(ConfigError, match="is left as it is"):
        write_default(path)


def test_defaults_that_the_file_shows_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    write_default(path)
    no_default = {"ca", "certificate", "key", "username", "password_file"}
    no_default |= {"bulk_certificate", "bulk_key"}
    no_default |= {"max_gap", "board", "probe", "energy_wh_per_day", "quiet_hours"}
    no_default |= {"fleet", "member"}
    text = path.read_text()
    for key in {key.rpartition(".")[2] for key in KEYS} - no_default:
        text = text.replace(f"# {key} = ", f"{key} = ")
    assert text != path.read_text()
    written = tmp_path / "all.toml"
    written.write_text(text)
    by_hand = load_config(written, environment={})
    assert by_hand.state_dir == tmp_path / "tessera-state"
    default = load_config(path, environment={}, flags={"state_dir": str(by_hand.state_dir)})
    assert by_hand == default


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
    monkeypatch.setattr("edge_sdk.device.config.sys.version_info", (3, 10, 0))
    with pytest.raises(ConfigError, match="pip install tomli"):
        load_config(path, environment={})
    assert load_config(None, environment={"TESSERA_TASK": "digits"}).task == "digits"
