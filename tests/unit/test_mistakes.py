"""Wrong configurations and data sets: each gives one clear line, which this table shows.

A row is what somebody wrote or has, and the line that answers. The line is the only one that is
bad, stands on one line, and names the key or the file with what was found and what is wanted.
"""

from __future__ import annotations

import re
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.operate.config import read_config
from edge_sdk.device.advice.checking import check_data, check_start
from edge_sdk.device.config import load_config
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.task.data_spec import DataSpec
from tests.unit.edge_sdk.data.specs import spec_of

GOOD = 'task = "t"\nname = "pi"\ndata = "own.npz"\n'

DEVICE_FILES = [
    ("", "device.toml: task is missing; set it in the file, or as TESSERA_TASK"),
    ('task = "a b"\n', "'a b' cannot name a task: use 1 to 64 of a-z"),
    ('task = "t"\nname = "Küche"\n', "'Küche' cannot name a device: use 1 to 64 of a-z"),
    ('task = "t"\nname = "coordinator"\n', "'coordinator'"),
    ("task = t\n", "device.toml cannot be read: it is not TOML"),
    (GOOD + 'dta = "x"\n', "dta is not a known key; did you mean 'data'?"),
    (GOOD + "level = 2\n", "level = 2: must be above 0 and at most 1"),
    (GOOD + "threads = 0\n", "threads = 0: must be at least 1"),
    (GOOD + 'weigh = "yes"\n', "weigh = 'yes': must be true or false"),
    (GOOD + 'log_level = "loud"\n', "log_level = 'loud': must be one of debug, info"),
    (GOOD + "providers = []\n", "providers = []: name one"),
    (GOOD + 'providers = ["CUDA"]\n', "this onnxruntime has no provider 'CUDA'"),
    (GOOD + 'state_dir = "own.npz/state"\n', "own.npz is a file"),
    (GOOD + '[format]\nlable = "y"\n', "format.lable is not a known key; did you mean 'label'?"),
    (GOOD + "[format]\nrange = [1]\n", "format.range = [1.0]: give the lowest and highest value"),
    (GOOD + "[format]\nlabel = 3\n", "format.label = 3: must be the name of a column, or a list"),
    (GOOD + '[format]\nwindow_label = "mean"\n', "must be one of majority, last, same"),
    (GOOD + '[broker]\nhost = "mqtt://b"\n', "broker.host = 'mqtt://b': give a name or an address"),
    (GOOD + '[broker]\nhost = "b.org"\n', "is another machine and tls is off"),
    (GOOD + "[broker]\nport = 70000\n", "broker.port = 70000: must be from 0 to 65535"),
    (GOOD + '[broker]\nca = "ca.pem"\n', "ca is set but tls is off"),
    (GOOD + '[broker]\npassword_file = "none"\n', "password_file cannot be read"),
]

RUN = '[task]\nname = "t"\nsource = "t.py:f"\n[run]\nfolder = "run"\n'
RUN_FILES = [
    ('[task]\nname = "t"\n', "task.source is missing"),
    (RUN + "rounds = 0\n", "run.rounds = 0: must be at least 1"),
    (RUN + '[rule]\nname = "fedavgg"\n', "there is no rule 'fedavgg'; did you mean"),
    (RUN + "[inputs]\nmean = [0.5]\n", "inputs.mean has 1 numbers and deviation 0: give both"),
    (RUN + "[inputs]\nrange = [1.0, 0.0]\n", "inputs.range = [1.0, 0.0]: give the lowest"),
    (RUN + "[inputs]\nmels = 40\n", "log-mel frames need all of sample_rate, mels, frame and hop"),
    (RUN.replace("[run]", 'classes = ["a", "a"]\n[run]'), "task.classes: 'a' occurs twice"),
    (RUN + "[round]\npatience = 3\n", "give test data in task.evaluation"),
]


def one_line(text: str) -> str:
    assert "\n" not in text
    return text


def complaint_about(path: Path) -> str:
    """The error of a device's file, or else the only bad line of the checks before a start."""
    try:
        config = load_config(path, environment={})
    except ConfigError as error:
        return str(error)
    (bad,) = [line for line in check_start(config) if line.verdict == "bad"]
    assert bad.advice
    return bad.text


@pytest.mark.parametrize(("text", "said"), DEVICE_FILES, ids=range(len(DEVICE_FILES)))
def test_wrong_device_file_gives_one_line(tmp_path: Path, text: str, said: str) -> None:
    np.savez(tmp_path / "own.npz", x=np.zeros((2, 4)), y=np.arange(2))
    (tmp_path / "device.toml").write_text(text, encoding="utf-8")
    assert said in one_line(complaint_about(tmp_path / "device.toml"))


@pytest.mark.parametrize(("text", "said"), RUN_FILES, ids=range(len(RUN_FILES)))
def test_wrong_run_file_gives_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(tmp_path / "run.toml", environment={}).make_rule()
    assert said in one_line(str(error.value))
    assert str(error.value).startswith(str(tmp_path / "run.toml"))


# -- data -----------------------------------------------------------------------------------------

TABLE = spec_of(2, classes=("cold", "warm", "hot"), features=("t", "h"))
IMAGES = spec_of(3, 4, 4, classes=("cat", "dog", "hen"))
SOUND = spec_of(8, classes=("no", "yes", "other"), sample_rate=8000)
SERIES = spec_of(2, 3, window=3, features=("u", "v"))
Fill = Callable[[Path], None]


def npz(**arrays: Any) -> Fill:
    def fill(folder: Path) -> None:
        np.savez(folder / "a.npz", **arrays)

    return fill


def text(content: str, name: str = "a.csv") -> Fill:
    def fill(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return fill


def wav(name: str, rate: int, samples: int) -> Fill:
    def fill(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(struct.pack("<h", 5) * samples)

    return fill


def nothing(folder: Path) -> None:
    """An empty folder."""


X, Y = np.ones((4, 3), np.float32), np.array([0, 1, 2, 0])
PLAIN = spec_of(3)
HEAD = "t,h,class\n"

DATA_SETS: list[tuple[str, Fill, DataSpec, str]] = [
    ("", nothing, PLAIN, "has no file that is one of those that can be read: .npz or .npy arrays"),
    ("", text("x", "a.txt"), PLAIN, "has no file that is one of those that can be read"),
    ("none", nothing, PLAIN, "none is not there; data is a folder or a file"),
    ("", npz(x=X), PLAIN, "a.npz has no targets: name them y"),
    ("", npz(data=X, y=Y), PLAIN, "'data' is neither an input nor the targets: name inputs x"),
    ("", npz(x=X[:, :2], y=Y), PLAIN, "a.npz, sample 0: x0 is float32 2, the task wants float32 3"),
    (
        "",
        npz(x=X * np.nan, y=Y),
        PLAIN,
        "a.npz, sample 0, x0[0]: nan (not a number): must be a fini",
    ),
    ("", npz(x=X * np.inf, y=Y), PLAIN, "a.npz, sample 0, x0[0]: inf: must be a finite"),
    ("", npz(x=X, y=Y + 1), PLAIN, "a.npz, sample 2, y: label 3: the task has 3 classes, 0 to 2"),
    ("", npz(x=X, y=Y[:3]), PLAIN, "every array needs as many samples as the others, not 3 and 4"),
    ("", npz(x=X[:0], y=Y[:0]), PLAIN, "is empty: it has no samples"),
    ("", npz(x=X * 999, y=Y), spec_of(3, range=(0.0, 1.0)), "must be values from 0 to 1; give the"),
    ("", text("", "a.npz"), PLAIN, "a.npz cannot be read as plain numpy arrays"),
    ("", text(""), TABLE, "a.csv is empty"),
    ("", text(HEAD), TABLE, "a.csv is empty: it has no rows"),
    (
        "",
        text(HEAD + "1,2,hot\n3,oops,hot\n"),
        TABLE,
        "a.csv, row 3, column 'h': 'oops': must be a n",
    ),
    (
        "",
        text(HEAD + "1,nan,hot\n"),
        TABLE,
        "a.csv, row 2, column 'h': nan (not a number): must be",
    ),
    ("", text(HEAD + "1,,hot\n"), TABLE, "a.csv, row 2, column 'h': empty: must be a number"),
    (
        "",
        text(HEAD + "1,2,hott\n"),
        TABLE,
        "a.csv, row 2, column 'class': 'hott' is not a class of",
    ),
    ("", text(HEAD + "1,2\n"), TABLE, "a.csv, row 2 has 2 values, not 3"),
    (
        "",
        text("t,hh,class\n1,2,hot\n"),
        TABLE,
        "has no column 'h' (a feature that the task names); di",
    ),
    (
        "",
        text("t,h,kind\n1,2,hot\n"),
        TABLE,
        "no column called label, class, target or y: say which",
    ),
    ("", text("u,v,y\n1,2,0\n"), SERIES, "no series is as long as the task's window of 3 rows"),
    ("", text("x", "cat/a.png"), IMAGES, "cat/a.png cannot be read as an image"),
    ("", text("x", "a.png"), IMAGES, "a.png lies in no class folder: put the images of each class"),
    ("", text("x", "cat/a.wav"), IMAGES, "has sound, but the task's input is 3×4×4"),
    (
        "",
        wav("yes/a.wav", 44_100, 9),
        SOUND,
        "yes/a.wav has 44100 samples per second, the task wan",
    ),
    ("", wav("yse/a.wav", 8000, 9), SOUND, "'yse' is not a class of the task; did you mean 'yes'?"),
    ("", wav("yes/a.wav", 8000, 0), SOUND, "yes/a.wav is empty"),
    (
        "own.py:load",
        text("def load():\n    return 3\n", "own.py"),
        PLAIN,
        "own.py:load returned int",
    ),
    ("own.py:lod", text("def load():\n    return 3\n", "own.py"), PLAIN, "has no function 'lod'"),
]


@pytest.mark.parametrize(("place", "fill", "spec", "said"), DATA_SETS, ids=range(len(DATA_SETS)))
def test_wrong_data_gives_one_line(
    tmp_path: Path, place: str, fill: Fill, spec: DataSpec, said: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    fill(folder)
    where = f"data/{place}".rstrip("/")
    (tmp_path / "device.toml").write_text(f'task = "t"\nname = "pi"\ndata = "{where}"\n')
    config = load_config(tmp_path / "device.toml", environment={})
    line, samples = check_data(config, spec)
    assert (line.verdict, line.code, samples) == ("bad", 3, 0)
    assert said in one_line(line.text)
    assert line.advice
    shown = list(line.lines())
    assert len(shown) == 2
    assert re.match(r"✗ data +\S", shown[0])


def test_table_has_at_least_forty_rows() -> None:
    assert len(DEVICE_FILES) + len(RUN_FILES) + len(DATA_SETS) >= 40
