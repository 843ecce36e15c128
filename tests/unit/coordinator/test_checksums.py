"""Checksums: no flipped bit and no cut goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load

from coordinator.checksums import (
    DamagedBytes,
    RunningChecksum,
    check_arrays,
    checksum,
    open_json,
    open_sealed,
    open_versioned,
    save_arrays,
    seal_json,
)

ARRAYS: dict[str, NDArray[Any]] = {
    "theta": np.arange(5, dtype=np.float32),
    "check": np.zeros(3, dtype=np.uint8),
}


def damaged(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        for bit in range(8):
            yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
    for size in range(len(data)):
        yield data[:size]
    yield data + b"\n"


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (seal_json({"round": 3, "level": 0.25, "name": "ü"}), open_json),
        (b"movement" + checksum(b"movement"), open_sealed),
        (b"".join(map(bytes, save_arrays(ARRAYS))), check_arrays),
    ],
)
def test_every_damage_is_noticed(data: bytes, read: Callable[[bytes], object]) -> None:
    read(data)
    for each in damaged(data):
        with pytest.raises(DamagedBytes):
            read(each)


def test_sealed_files_are_what_they_say_to_other_readers() -> None:
    content = {"round": 3, "level": 0.5, "none": None}
    assert open_json(seal_json(content)) == content
    assert json.loads(seal_json(content)).items() >= content.items()
    several = {
        **ARRAYS,
        "empty": np.zeros((0, 3), dtype=np.int64),
        "number": np.array(7, dtype=np.int64),
        "flags ü": np.array([[True], [False]]),
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    }
    data = b"".join(map(bytes, save_arrays(several)))
    check_arrays(data)
    arrays = load(data)
    assert arrays.keys() == several.keys()
    for name, array in several.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_only_the_version_before_may_lack_a_checksum() -> None:
    assert open_versioned(seal_json({"version": 2, "a": 1}), 2) == {"version": 2, "a": 1}
    assert open_versioned(b'{"version": 1, "a": 1}', 2) == {"version": 2, "a": 1}
    for data in (b'{"version": 2, "a": 1}', b"{}", b"[]", b'{"a": 1'):
        with pytest.raises(ValueError):  # noqa: PT011  of json, too
            open_versioned(data, 2)


def test_running_checksum_is_that_of_all_bytes() -> None:
    running = RunningChecksum()
    for part in (b"one", b"", b"two"):
        running.add(part)
    assert (running.size, running.hex) == (6, checksum(b"onetwo").hex())
