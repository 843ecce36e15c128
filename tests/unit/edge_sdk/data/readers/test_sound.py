"""Sound: samples against the struct module, log-mel frames against a naive DFT."""

from __future__ import annotations

import cmath
import math
import struct
import wave
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.readers.mel import log_mels
from edge_sdk.data.source import open_data
from edge_sdk.protocol.plan.layout import Array
from tests.unit.edge_sdk.data.specs import spec_of

CLASSES = ("no", "other", "yes")
RATE = 8000


def save(
    path: Path, frames: list[list[int]], *, width: int = 2, rate: int = RATE, channels: int = 1
) -> Path:
    """Write whole numbers, a list for each frame, as PCM."""
    path.parent.mkdir(exist_ok=True)
    data = b""
    for frame in frames:
        for value in frame:
            data += bytes([value + 128]) if width == 1 else struct.pack("<i", value)[:width]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width_are_shares_of_the_full_scale(tmp_path: Path, width: int) -> None:
    full = 2 ** (8 * width - 1)
    values = [0, full - 1, -full, full // 2, -full // 4]
    save(tmp_path / "yes" / "a.wav", [[value] for value in values], width=width)
    read = open_data(str(tmp_path)).read(spec_of(5, classes=CLASSES, sample_rate=RATE))
    expected = np.array([value / full for value in values], np.float32)
    np.testing.assert_array_equal(read.data.inputs[0][0], expected)
    assert read.data.targets.tolist() == [2]
    scaled = open_data(str(tmp_path)).read(spec_of(1, 5, classes=CLASSES, range=(0.0, 1.0)))
    np.testing.assert_allclose(scaled.data.inputs[0][0, 0], (expected + 1) / 2, atol=1e-6)


def test_long_files_are_cut_and_short_ones_filled_up(tmp_path: Path) -> None:
    save(tmp_path / "no" / "long.wav", [[256 * value] for value in range(10)])
    save(tmp_path / "yes" / "short.wav", [[256], [512]])
    read = open_data(str(tmp_path), DataFormat(stride=3)).read(spec_of(4, classes=CLASSES))
    assert (read.data.inputs[0] * 128).tolist() == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
        [1, 2, 0, 0],
    ]
    assert read.data.targets.tolist() == [0, 0, 0, 2]


def test_channels_are_averaged_or_kept(tmp_path: Path) -> None:
    save(tmp_path / "no" / "a.wav", [[0, 8192], [-8192, 8192], [16384, 0]], channels=2)
    one = open_data(str(tmp_path)).read(spec_of(1, 3, classes=CLASSES))
    assert one.data.inputs[0].tolist() == [[[0.125, 0, 0.25]]]
    two = open_data(str(tmp_path)).read(spec_of(2, 3, classes=CLASSES))
    assert two.data.inputs[0].tolist() == [[[0, -0.25, 0.5], [0.25, 0.25, 0]]]
    with pytest.raises(DataError, match=r"a\.wav has 2 channels, the task wants 3"):
        open_data(str(tmp_path)).read(spec_of(3, 3, classes=CLASSES, window=3))


def naive_log_mels(samples: list[float], rate: int, frame: int, hop: int, mels: int) -> Array:
    """The definition, with loops: DFT by its sum, triangles point by point."""

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    def hertz(value: float) -> float:
        return 700 * (10 ** (value / 2595) - 1)

    edges = [hertz(mel(rate / 2) * step / (mels + 1)) for step in range(mels + 2)]
    columns = []
    for start in range(0, len(samples) - frame + 1, hop):
        power = []
        for line in range(frame // 2 + 1):
            total = 0j
            for n in range(frame):
                window = 0.5 - 0.5 * math.cos(2 * math.pi * n / frame)
                total += samples[start + n] * window * cmath.exp(-2j * math.pi * line * n / frame)
            power.append(abs(total) ** 2)
        column = []
        for band in range(mels):
            low, centre, high = edges[band : band + 3]
            energy = 0.0
            for line, value in enumerate(power):
                at = line * rate / frame
                if low < at <= centre:
                    energy += value * (at - low) / (centre - low)
                elif centre < at < high:
                    energy += value * (high - at) / (high - centre)
            column.append(math.log(max(energy, 1e-10)))
        columns.append(column)
    frames: Array = np.array(columns).T
    return frames


def test_log_mel_frames_are_those_of_a_naive_dft(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    wave_of = np.sin(np.arange(80) * 0.7) * 9000 + random.normal(size=80) * 500
    values = wave_of.astype(int).tolist()
    save(tmp_path / "yes" / "a.wav", [[value] for value in values])
    expected = naive_log_mels([value / 32768 for value in values], RATE, 32, 16, 6)
    assert expected.shape == (6, 4)
    np.testing.assert_allclose(
        log_mels(np.array(values) / 32768, RATE, 32, 16, 6), expected, atol=1e-9
    )
    sound: dict[str, Any] = {"sample_rate": RATE, "frame": 32, "hop": 16, "mels": 6}
    read = open_data(str(tmp_path)).read(spec_of(1, 6, 4, classes=CLASSES, **sound))
    np.testing.assert_allclose(read.data.inputs[0][0, 0], expected, atol=1e-5)
    turned = open_data(str(tmp_path)).read(
        spec_of(4, 6, classes=CLASSES, mean=(-5.0,), deviation=(2.0,), **sound)
    )
    np.testing.assert_allclose(turned.data.inputs[0][0], (expected.T + 5) / 2, atol=1e-5)
    for shape, values in (((6, 4, 1), expected), ((4, 6, 1), expected.T)):
        read = open_data(str(tmp_path)).read(spec_of(*shape, classes=CLASSES, **sound))
        np.testing.assert_allclose(read.data.inputs[0][0, ..., 0], values, atol=1e-5)


def test_what_is_wrong_with_sound_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "yes" / "a.wav", [[1]] * 8)
    with pytest.raises(
        DataError, match=r"a\.wav has 8000 samples per second, the task wants 16000"
    ):
        open_data(str(tmp_path)).read(spec_of(4, classes=CLASSES, sample_rate=16_000))
    with pytest.raises(DataError, match=r"has sound, but the task's input is 3×4×4"):
        open_data(str(tmp_path)).read(spec_of(3, 4, 4, classes=CLASSES))
    with pytest.raises(DataError, match=r"a\.wav lies in no class folder"):
        open_data(str(tmp_path / "yes")).read(spec_of(4, classes=CLASSES))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"a\.wav"):
        open_data(str(tmp_path)).read(spec_of(40, classes=CLASSES))
    save(path, [])
    with pytest.raises(DataError, match=r"a\.wav is empty"):
        open_data(str(tmp_path)).read(spec_of(4, classes=CLASSES))
    path.write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"a\.wav cannot be read as sound"):
        open_data(str(tmp_path)).read(spec_of(4, classes=CLASSES))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 60),
)
def test_bad_bytes_raise_one_error(tmp_path: Path, flips: list[tuple[int, int]], cut: int) -> None:
    path = save(tmp_path / "yes" / "a.wav", [[value] for value in range(10)])
    data = bytearray(path.read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    path.write_bytes(bytes(data[: len(data) - cut]))
    with suppress(DataError):
        open_data(str(tmp_path)).read(spec_of(4, classes=CLASSES))
