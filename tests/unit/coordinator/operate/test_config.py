"""The configuration: what `init` writes works, what is wrong is named, with the nearest key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.errors import ConfigError
from coordinator.operate.config import EXAMPLE, PASSWORD, read_config
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import TesseraError
from edge_sdk.transport.settings import LinkError
from tests.unit.coordinator.service.service_world import PLAN

ROOT = Path(__file__).resolve().parents[4]
TASK = '[task]\nname = "t"\nsource = "task.py:make"\n'
RUN = '[run]\nfolder = "here"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_example_is_what_init_writes_and_works(tmp_path: Path) -> None:
    text = EXAMPLE.format(name="run.toml", source="task.py")
    assert (ROOT / "examples" / "coordinator" / "run.toml").read_text() == text
    config = read_config(write(tmp_path, text))
    machine = config.machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert isinstance(machine.rule, RamFed)
    assert (machine.rounds, machine.min_devices, config.broker.embedded) == (30, 2, True)
    assert config.run.folder == tmp_path / "run"


def test_commented_values_of_the_example_are_the_defaults(tmp_path: Path) -> None:
    text = EXAMPLE.format(name="run.toml", source="task.py")
    shown = re.compile(r"^# (?=\w+ = )(?!.*default: )(?!(name|damping|\w*accuracy)\b)")
    lines = text.partition("[broker]")[0].splitlines()
    uncommented = [shown.sub("", line) for line in lines]
    assert sum(a != b for a, b in zip(lines, uncommented, strict=True)) > 10
    plain = read_config(write(tmp_path, "\n".join(lines)))
    assert read_config(write(tmp_path, "\n".join(uncommented))) == plain


def test_least_that_must_be_said(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, TASK + RUN))
    machine = config.machine(PLAN)
    assert isinstance(machine, RoundsConfig)
    assert machine.rounds == 50
    assert config.down == Encoding()
    assert config.broker_settings().port == 1883


def test_asynchronous_rule_counts_updates(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}updates = 77\nup = "int8"\n[rule]\nname = "fed-raa"\n'
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine, FragmentsConfig)
    assert machine.updates == 77
    assert machine.encoding == Encoding(kind="int8")


def test_options_reach_rule_and_masks(tmp_path: Path) -> None:
    text = f'{TASK}{RUN}[rule]\nname = "ram-fed"\n[rule.options]\ndamping = 0.5\n'
    machine = read_config(write(tmp_path, text)).machine(PLAN)
    assert isinstance(machine.rule, RamFed)
    assert machine.rule.damping == 0.5


def test_password_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, "secret")
    text = f'{TASK}{RUN}[broker]\nhost = "b.example.org"\ntls = true\nusername = "u"\n'
    config = read_config(write(tmp_path, text))
    settings = config.broker_settings()
    assert (settings.password, settings.port) == ("secret", 8883)
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task\n", "not TOML"),
        (TASK, r"\[run\] folder is missing"),
        (RUN, r"\[task\] name is missing"),
        (f"{TASK}{RUN}[rounds]\n", "'rounds' is not known; did you mean 'round'"),
        (f"{TASK}{RUN}learningrate = 1\n", "did you mean 'learning_rate'"),
        (f"{TASK}{RUN}xyzzy = 1\n", "there are folder, rounds"),
        (f"{TASK}{RUN}[round]\nmin_device = 1\n", "did you mean 'min_devices'"),
        (f"{TASK}{RUN}steps = 1.5\n", r"\[run\] steps is a whole number, not 1.5"),
        (f"{TASK}{RUN}steps = true\n", "a whole number, not True"),
        (f"{TASK}{RUN}learning_rate = '1'\n", "is a number"),
        (f"{TASK}{RUN}learning_rate = -1\n", "learning_rate"),
        (f"{TASK}{RUN}steps = 0\n", "steps must be at least 1"),
        (f"{TASK}{RUN}keep_last = 0\n", "keep_last must be at least 1"),
        (f"{TASK}{RUN}up = 'fp31'\n", r"\[run\] up: unknown encoding 'fp31'"),
        (f"{TASK}{RUN}memory_type = 'fp8'\n", "memory_type is one of fp32, fp16, int8"),
        (f"{TASK}{RUN}[rule]\nname = 'fedavgg'\n", "no rule 'fedavgg'"),
        (f"{TASK}{RUN}[rule.options]\ndampin = 1\n", "did you mean 'damping'"),
        (f"{TASK}{RUN}updates = 3\n", "does not go with this rule; it counts rounds"),
        (f"{TASK}{RUN}rounds = 3\n[rule]\nname = 'fed-raa'\n", "it counts updates"),
        (f"{TASK}{RUN}[round]\npatience = 3\n", "evaluation"),
        (f"{TASK}{RUN}[round]\nquorum = 2\n", "quorum"),
        (f"{TASK}{RUN}[broker]\nembedded = true\ntls = true\n", "embedded"),
        (f"{TASK}{RUN}[mask]\nname = 'gre-raa'\n", "gre-raa"),
        ('[task]\nname = "No/Good"\nsource = "x:y"\n' + RUN, r"\[task\] name"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TesseraError, match=said):
        read_config(write(tmp_path, text)).machine(PLAN)


def test_broker_on_another_machine_needs_tls(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="tls"):
        read_config(write(tmp_path, f'{TASK}{RUN}[broker]\nhost = "broker.example.org"\n'))


def test_both_certificates_of_the_coordinator_are_read(tmp_path: Path) -> None:
    files = {name: f"{name}.pem" for name in ("certificate", "key", "bulk_certificate", "bulk_key")}
    lines = "".join(f'{name} = "{file}"\n' for name, file in files.items())
    settings = read_config(write(tmp_path, f"{TASK}{RUN}[broker]\ntls = true\n{lines}"))
    for name, file in files.items():
        assert getattr(settings.broker_settings(), name) == tmp_path / file


def test_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tessera-coordinator init"):
        read_config(tmp_path / "none.toml")
