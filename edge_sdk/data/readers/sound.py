"""WAV files as raw samples or log-mel frames, with the standard library and numpy.

Files are uncompressed PCM of 8, 16, 24 or 32 bits, at the task's sample rate. A file that is longer
than a sample of the task is cut into several, `[format] stride` samples apart; a shorter one is
filled up with silence. Several channels are averaged where the task wants one.
"""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge_sdk.data.block import Block
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.readers.files import FoundFiles
from edge_sdk.data.readers.mel import log_mels
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec

_BROKEN = (wave.Error, EOFError, ValueError, RuntimeError, OSError)
"""Errors of the standard library for files that are not sound; chunks of a wrong length are its
bare `RuntimeError`."""
SAMPLES = 64
"""Samples of the task that are handed on at once."""


def read_sound(
    found: FoundFiles, spec: DataSpec, format: DataFormat, *, labelled: bool
) -> Iterator[Block]:
    """Yield samples cut out of all files. Raises `DataError`."""
    if labelled and found.files[0].label is None:
        raise DataError(
            f"{found.files[0].path} lies in no class folder: put the recordings of each class into "
            "a folder with its name"
        )
    shape, described = spec.inputs[0].shape, spec.first
    channels, length, time_last = _layout(spec, found.root)
    arrays: list[Array] = []
    labels: list[str] = []
    places: list[str] = []

    def block() -> Block:
        made = Block(
            (np.stack(arrays),),
            np.array(labels) if labels else None,
            list(places).__getitem__,
            "sound" if described.mels is None else "mels",
        )
        for each in (arrays, labels, places):
            each.clear()
        return made

    for file in found.files:
        name = found.name_of(file.path)
        rate, cuts = _cuts(file.path, name, length, format.stride or length, described.sample_rate)
        for start, sound in cuts:
            mixed = _mixed(sound, channels, name)
            if described.mels is not None and described.frame and described.hop:
                frames = log_mels(mixed[0], rate, described.frame, described.hop, described.mels)
                arrays.append((frames if time_last else frames.T).reshape(shape))
            else:
                arrays.append((mixed if time_last else mixed.T).reshape(shape))
            places.append(f"{name}, from {start / rate:.2f} s")
            if file.label is not None:
                labels.append(file.label)
            if len(arrays) == SAMPLES:
                yield block()
    if arrays:
        yield block()


def _layout(spec: DataSpec, root: Path) -> tuple[int, int, bool]:
    """Return channels, samples of sound in a sample of the task, and if time is last."""
    shape, described = spec.inputs[0].shape, spec.first
    if described.mels is not None and described.frame and described.hop:
        frames = int(np.prod(shape)) // described.mels
        bands_first = [size for size in shape if size != 1] == [described.mels, frames]
        return 1, described.frame + (frames - 1) * described.hop, bands_first
    if not 1 <= len(shape) <= 2:
        wanted = "×".join(map(str, shape)) or "single numbers"
        raise DataError(f"{root} has sound, but the task's input is {wanted}")
    if len(shape) == 1:
        return 1, shape[0], True
    time_last = shape[1] >= shape[0] if described.window is None else shape[1] == described.window
    return (shape[0], shape[1], True) if time_last else (shape[1], shape[0], False)


def _mixed(sound: Array, channels: int, name: str) -> Array:
    """Return the sound with the task's number of channels."""
    if len(sound) == channels:
        return sound
    if channels == 1:
        mean: Array = sound.mean(axis=0, keepdims=True)
        return mean
    raise DataError(f"{name} has {len(sound)} channels, the task wants {channels}")


def _cuts(
    path: Path, name: str, length: int, stride: int, wanted_rate: int | None
) -> tuple[int, Iterator[tuple[int, Array]]]:
    """Return the sample rate, and (start, channels × length) of every cut of a file."""
    try:
        with wave.open(str(path), "rb") as file:
            rate, total = file.getframerate(), file.getnframes()
            width, channels = file.getsampwidth(), file.getnchannels()
    except _BROKEN as error:
        raise _broken(name, error) from error
    if width not in (1, 2, 3, 4) or rate < 1 or channels < 1:
        raise DataError(f"{name}: {8 * width} bits a sample are not known: save 16 bits")
    if wanted_rate is not None and rate != wanted_rate:
        raise DataError(
            f"{name} has {rate} samples per second, the task wants {wanted_rate}: convert it, for "
            f"example with ffmpeg -i IN -ar {wanted_rate} OUT"
        )
    if total < 1:
        raise DataError(f"{name} is empty: it has no samples")
    return rate, _read_cuts(path, name, total, length, stride)


def _read_cuts(
    path: Path, name: str, total: int, length: int, stride: int
) -> Iterator[tuple[int, Array]]:
    with wave.open(str(path), "rb") as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        for start in range(0, max(1, total - length + 1), stride):
            try:
                file.setpos(start)
                sound = _decoded(file.readframes(length), width, channels)
            except _BROKEN as error:
                raise _broken(name, error) from error
            if sound.shape[1] < min(length, total - start):
                raise DataError(f"{name} ends too early: it is damaged, or not complete")
            if sound.shape[1] < length:
                sound = np.pad(sound, ((0, 0), (0, length - sound.shape[1])))
            yield start, sound


def _broken(name: str, error: Exception) -> DataError:
    said = (error.strerror if isinstance(error, OSError) else str(error)) or "it is damaged"
    return DataError(f"{name} cannot be read as sound: {said}; save it as uncompressed PCM WAV")


def _decoded(data: bytes, width: int, channels: int) -> Array:
    """Return PCM samples from −1 to 1: channels × samples, float64."""
    data = data[: len(data) - len(data) % (width * channels)]
    if width == 1:
        values = (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    elif width == 3:
        bytes_of = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.int32)
        whole = (bytes_of[:, 0] << 8) | (bytes_of[:, 1] << 16) | (bytes_of[:, 2] << 24)
        values = whole.astype(np.float64) / 2**31
    else:
        values = np.frombuffer(data, f"<i{width}").astype(np.float64) / 2 ** (8 * width - 1)
    samples: Array = values.reshape(-1, channels).T
    return samples
