"""`tessera-device check`: a line for everything, good or bad, and what to do."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from edge_sdk.cli import main
from edge_sdk.data.drawing import draw_image, is_drawable
from edge_sdk.data.source import open_data
from edge_sdk.device.advice import checking
from edge_sdk.device.advice.checking import (
    CheckLine,
    check_device,
    check_known_data,
    check_start,
    raise_bad,
)
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.participation import NOTICE, OPENED
from edge_sdk.device.stores.movements import device_path
from edge_sdk.program.files import held_folder
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.edge_sdk.data.specs import spec_of
from tests.unit.edge_sdk.scripted import DEVICE, TASK, Coordinator, Stage


def config_of(folder: Path, **changes: Any) -> DeviceConfig:
    random = np.random.default_rng(0)
    x = random.normal(size=(20, 4))
    np.savez(folder / "own.npz", x=x, y=np.arange(20) % 3)
    given: dict[str, Any] = {
        "task": TASK,
        "name": DEVICE,
        "data": str(folder / "own.npz"),
        "state_dir": folder / "state",
        "weigh": False,
        "broker": BrokerSettings(port=9),  # nobody listens there
    }
    return DeviceConfig(**{**given, **changes})


def lines_of(stage: Stage, config: DeviceConfig) -> dict[str, CheckLine]:
    found: list[CheckLine] = []

    def work() -> None:
        found.extend(check_device(config, open_link=stage.open_link))

    thread = Thread(target=work, daemon=True)
    thread.start()
    stage.until(lambda: not thread.is_alive() or None)
    return {line.name: line for line in found}


def test_device_that_can_take_part_has_only_good_lines(tmp_path: Path) -> None:
    stage = Stage()
    coordinator = Coordinator(stage)
    coordinator.announce()
    lines = lines_of(stage, config_of(tmp_path))
    assert list(lines) == [
        "configuration",
        "backend",
        "disk",
        "clock",
        "broker",
        "task",
        "plan",
        "data",
        "memory",
    ]
    assert {line.verdict for line in lines.values()} == {"good"}
    assert lines["data"].text == "20 samples; 0: 7, 1: 7, 2: 6"
    assert lines["data"].more == ("x0 is float64 and rounded to float32",)
    assert lines["plan"].text.startswith(f"{coordinator.plan.parameters:,} parameters")
    assert lines["task"].text == f"{TASK}, run {coordinator.run}, offered"


def test_memory_of_each_level_is_told(tmp_path: Path) -> None:
    stage = Stage()
    coordinator = Coordinator(stage)
    coordinator.announce()
    config = config_of(tmp_path, weigh=True)
    text = lines_of(stage, config)["memory"].text
    assert text.startswith("estimate for batches of 32: 100% ")
    assert text.endswith(" MB; measured when the device first takes part")
    coordinator.open(1)
    line = lines_of(stage, config)["memory"]
    assert line.verdict == "good"
    for level in ("100%", "75%", "50%", "25%"):
        assert f"{level} " in line.text
    assert "MB free" in line.text


@pytest.mark.parametrize(("threads", "words"), [(1, ", 1 thread"), (2, ", 2 threads")])
def test_threads_of_the_backend_are_told(tmp_path: Path, threads: int, words: str) -> None:
    backend = next(check_start(config_of(tmp_path, threads=threads)))
    assert backend.text.endswith(words)


def test_bad_data_and_a_task_that_nobody_offers_are_told(tmp_path: Path) -> None:
    stage = Stage()
    coordinator = Coordinator(stage)
    coordinator.announce()
    config = config_of(tmp_path)
    np.savez(tmp_path / "own.npz", x=np.full((3, 4), np.nan), y=np.zeros(3))
    line = lines_of(stage, config)["data"]
    assert (line.verdict, line.code) == ("bad", 3)
    assert line.text == "own.npz, sample 0, x0[0]: nan (not a number): must be a finite number"
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 4)), y=np.zeros(3))
    assert lines_of(stage, config)["data"].verdict == "odd"  # one class
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_sdk.device.advice.reaching.TASK_S", 0.1)
        lines = lines_of(stage, config_of(tmp_path, task="toyy"))
    assert lines["task"].verdict == "odd"
    assert lines["task"].text == "nobody offers 'toyy' on this broker; did you mean 'toy'?"
    assert lines["data"].text.endswith("own.npz; read when the task is known")


def test_broker_that_is_away_is_told(tmp_path: Path) -> None:
    found = {line.name: line for line in check_device(config_of(tmp_path), wait_s=0.05)}
    assert (found["broker"].verdict, found["broker"].code) == ("bad", 4)
    assert found["broker"].advice
    assert found["task"].text.startswith("not known yet")


def keep_task(coordinator: Coordinator, config: DeviceConfig) -> None:
    """Leave the files of a device that took part before."""
    folder = device_path(config.state_dir, config.task, config.name)
    (folder / "chunks").mkdir(parents=True)
    (folder / NOTICE).write_bytes(encode_message(coordinator.notice()))
    (folder / OPENED).write_bytes(encode_message(coordinator.opening(1)))
    for hash, chunk in coordinator.chunks.items():
        (folder / "chunks" / hash.hex()).write_bytes(chunk)


def test_task_is_known_as_it_was_last_seen(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    source = open_data(str(tmp_path / "own.npz"))
    assert check_known_data(config, source) is None  # nothing is known yet
    keep_task(Coordinator(Stage()), config)
    found = {line.name: line for line in check_device(config, wait_s=0.05)}
    assert found["task"].text.endswith("as last seen")
    assert found["data"].text == "20 samples; 0: 7, 1: 7, 2: 6"
    assert check_known_data(config, source) is None
    np.savez(tmp_path / "own.npz", x=np.zeros((2, 7)), y=np.zeros(2))
    said = check_known_data(config, open_data(str(tmp_path / "own.npz")))
    assert said is not None
    assert said.startswith("the data does not fit the task as it was last seen: own.npz, sample 0")


def test_wrong_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "device.toml").write_text('task = "t"\ndatta = "x"\n')
    assert main(["check", "--config", str(tmp_path / "device.toml")]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("✗ configuration")
    assert "did you mean 'data'?" in line


def test_checks_before_a_start_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert raise_bad(config_of(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"no provider 'NoProvider'; set providers to some of"):
        raise_bad(config_of(tmp_path, providers=("NoProvider",)))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file is a file; name a folder in state_dir"):
        raise_bad(config_of(tmp_path, state_dir=tmp_path / "file" / "state"))
    monkeypatch.setattr(checking, "LEAST_BYTES", 2**60)
    (full,) = raise_bad(config_of(tmp_path))  # a device goes on with a full disk
    assert "MB are free" in full.text


def test_clock_in_the_past_is_odd(tmp_path: Path) -> None:
    lines = check_start(config_of(tmp_path), now=lambda: 86_400.0 * 365)
    (clock,) = [line for line in lines if line.name == "clock"]
    assert clock.verdict == "odd"
    assert "1971-01-01" in clock.text
    assert "timedatectl" in clock.advice


def test_image_is_drawn_and_nothing_else() -> None:
    spec = spec_of(1, 3, 4, range=(-1.0, 1.0))
    sample = np.full((1, 3, 4), -1.0)
    sample[0, 1] = 1
    assert is_drawable(spec)
    assert list(draw_image(sample, spec)) == ["", "████████", ""]
    large = np.zeros((3, 64, 64))
    large[:, :32] = 1
    assert [len(line) for line in draw_image(large, spec_of(3, 64, 64))] == [42] * 10 + [42] + [
        0
    ] * 10
    for other in (spec_of(4), spec_of(9, 128), spec_of(1, 40, 98, sample_rate=16_000)):
        assert not is_drawable(other)


def test_running_device_keeps_its_connection(tmp_path: Path) -> None:
    """A broker allows a certificate one connection: a check would end the device's own."""
    stage = Stage()
    Coordinator(stage).announce()
    own = tmp_path / "own.pem"
    broker = BrokerSettings(port=9, tls=True, certificate=own, key=own)
    config = config_of(tmp_path, broker=broker)
    folder = device_path(config.state_dir, config.task, config.name)
    assert lines_of(stage, config)["broker"].verdict == "good"
    with held_folder(folder):
        line = lines_of(stage, config)["broker"]
    assert line.verdict == "odd"
    assert line.text == f"not tried: {DEVICE} runs, and would lose its own connection"
    assert lines_of(stage, config)["broker"].verdict == "good"
