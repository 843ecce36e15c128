"""Data sets: what is read is what is in the files, and what is wrong with them is said."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.data import Dataset, DatasetError, fit_images, load_data
from benchmarks.data.cifar10 import load_cifar10, read_records
from benchmarks.data.idx import load_idx, read_idx
from benchmarks.data.npz import read_npz
from benchmarks.data.uci_har import held_out, load_uci_har
from edge_sdk.data.arrays import ArrayData

FUZZ = settings(max_examples=60)

# -- files as their makers write them ------------------------------------------------------------


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(struct.pack(">I", n) for n in values.shape)
    return header + values.tobytes()


def some_images(count: int, seed: int, side: int = 5) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), dtype=np.uint8)


def write_mnist(folder: Path, separator: str = "-", ending: str = "") -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if ending else bytes
    for which, count in (("train", 6), ("t10k", 4)):
        images, labels = some_images(count, count), np.arange(count, dtype=np.uint8)
        for kind, values in (("images", images), ("labels", labels)):
            name = f"{which}-{kind}{separator}idx{values.ndim}-ubyte{ending}"
            (folder / name).write_bytes(pack(idx_bytes(values)))


def cifar_records(count: int, seed: int) -> bytes:
    rows = np.random.default_rng(seed).integers(0, 256, (count, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


CIFAR = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def write_cifar(folder: Path, ending: str = "", records: int = 3) -> None:
    packers: dict[str, Callable[[bytes], bytes]]
    packers = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
    pack = packers[ending]
    for seed, name in enumerate(CIFAR):
        (folder / (name + ending)).write_bytes(pack(cifar_records(records, seed)))


def har_arrays() -> dict[str, NDArray[Any]]:
    """Two people, two activities, three segments of each; k windows in a row have k + 1 halves."""
    random = np.random.default_rng(0)
    rows, y, subject, segment, halves = [], [], [], [], 0
    number = 0
    for person in (3, 8):
        for activity in (0, 4):
            for windows in (3, 2, 2):
                for _ in range(windows):
                    rows.append((halves, halves + 1))
                    halves += 1
                    y.append(activity)
                    subject.append(person)
                    segment.append(number)
                halves += 1
                number += 1
    return {
        "halves": random.normal(5, 3, (halves, 9, 64)).astype(np.float32),
        "window_halves": np.array(rows, np.int32),
        "y": np.array(y, np.uint8),
        "subject": np.array(subject, np.uint8),
        "segment": np.array(segment, np.int16),
    }


def write_har(folder: Path, **changed: Any) -> Path:
    path = folder / "uci_har.npz"
    arrays = {key: value for key, value in (har_arrays() | changed).items() if value is not None}
    np.savez_compressed(path, **arrays)
    return path


# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["-", "."])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_under_all_their_names(
    tmp_path: Path, separator: str, ending: str
) -> None:
    write_mnist(tmp_path, separator, ending)
    data = load_data(tmp_path)
    assert (data.name, data.format, data.classes) == (tmp_path.name, "idx", 10)
    assert data.shape == (1, 5, 5)
    for split, count in ((data.train, 6), (data.test, 4)):
        assert split.targets.tolist() == list(range(count))
        assert split.inputs[0].dtype == np.float32
        raw = some_images(count, count)
        assert split.inputs[0][2, 0, 3, 1] == np.float32(raw[2, 3, 1]) / np.float32(255)
        np.testing.assert_allclose(split.inputs[0][:, 0] * 255, raw, rtol=1e-6)


@pytest.mark.parametrize("ending", ["", ".xz", ".gz"])
def test_cifar_records_are_planar_and_scaled_by_the_training_images(
    tmp_path: Path, ending: str
) -> None:
    write_cifar(tmp_path, ending)
    data = load_cifar10(tmp_path, records=3)
    assert (data.format, data.shape, len(data.train), len(data.test)) == (
        "cifar-10",
        (3, 32, 32),
        15,
        3,
    )
    train = b"".join(cifar_records(3, seed) for seed in range(5))
    green = [
        train[record * 3073 + 1 + 1024 + pixel] for record in range(15) for pixel in range(1024)
    ]
    mean, deviation = np.mean(green), np.std(green)
    # The second record of the test file, green, row 7, column 20; then the same record's label.
    byte = cifar_records(3, 5)[3073 + 1 + 1024 + 7 * 32 + 20]
    assert data.test.inputs[0][1, 1, 7, 20] == pytest.approx((byte - mean) / deviation, abs=1e-5)
    assert data.test.targets[1] == cifar_records(3, 5)[3073]
    np.testing.assert_allclose(data.train.inputs[0].mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(data.train.inputs[0].std(axis=(0, 2, 3)), 1, atol=1e-5)


def test_har_keeps_the_last_segment_of_each_activity_for_testing(tmp_path: Path) -> None:
    write_har(tmp_path)
    data, raw = load_data(tmp_path), har_arrays()
    assert (data.format, data.classes, data.shape) == ("uci-har", 6, (9, 128))
    assert data.owners is not None
    # Of 7 windows of a person's activity the last 2 are its third segment.
    last = [row for start in range(0, 28, 7) for row in (start + 5, start + 6)]
    rest = [row for row in range(28) if row not in last]
    assert data.test.targets.tolist() == raw["y"][last].tolist()
    assert data.train.targets.tolist() == raw["y"][rest].tolist()
    assert data.owners.tolist() == raw["subject"][rest].tolist()
    windows = [
        np.concatenate([raw["halves"][a], raw["halves"][b]], 1) for a, b in raw["window_halves"]
    ]
    trained = np.array([windows[row] for row in rest], np.float64)
    for row, seen in zip(last, data.test.inputs[0], strict=True):
        for channel in range(9):
            scaled = (windows[row][channel] - trained[:, channel].mean()) / trained[
                :, channel
            ].std()
            np.testing.assert_allclose(seen[channel], scaled, atol=1e-4)


def test_lone_segment_of_an_activity_is_trained() -> None:
    subject = np.array([1, 1, 1, 2, 2])
    y = np.array([0, 0, 5, 0, 0])
    segment = np.array([0, 1, 2, 3, 3])
    assert held_out(y, subject, segment).tolist() == [False, True, False, False, False]


def test_digits_are_split_by_the_seed_and_none_is_lost() -> None:
    from sklearn.datasets import load_digits

    one, same, other = load_data(None, seed=4), load_data(None, seed=4), load_data(None, seed=5)
    assert one.shape == (1, 8, 8)
    assert (len(one.train), len(one.test)) == (1437, 360)
    np.testing.assert_array_equal(one.test.inputs[0], same.test.inputs[0])
    assert not np.array_equal(one.test.inputs[0], other.test.inputs[0])
    pixels, labels = load_digits(return_X_y=True)

    def rows(images: NDArray[Any], targets: NDArray[Any]) -> list[tuple[float, ...]]:
        return sorted(
            (*image.ravel().tolist(), int(t)) for image, t in zip(images, targets, strict=True)
        )

    seen = rows(
        np.concatenate([one.train.inputs[0], one.test.inputs[0]]) * 16,
        np.concatenate([one.train.targets, one.test.targets]),
    )
    assert seen == rows(pixels, labels)


def test_data_is_read_without_torch() -> None:
    code = (
        "import sys; import benchmarks.data; "
        "print(*sorted({'torch', 'sklearn', 'onnxruntime'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == ""


# -- what is wrong with them ---------------------------------------------------------------------


def test_unknown_folders_are_told_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere is not a directory .*uci_har.npz"):
        load_data(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"nothing at all; looked for: MNIST .*test_batch.bin"):
        load_data(tmp_path)
    file = tmp_path / "train.csv"
    file.touch()
    with pytest.raises(DatasetError, match=r"only train.csv; looked for"):
        load_data(tmp_path)
    with pytest.raises(DatasetError, match="not a directory"):
        load_data(file)
    write_har(tmp_path)
    (tmp_path / "test_batch.bin").touch()
    with pytest.raises(DatasetError, match="holds cifar-10 and uci-har"):
        load_data(tmp_path)


@pytest.mark.parametrize("lost", ["train-images", "train-labels", "t10k-images", "t10k-labels"])
def test_missing_idx_file_is_named(tmp_path: Path, lost: str) -> None:
    write_mnist(tmp_path, ending=".gz")
    (file,) = tmp_path.glob(f"{lost}*")
    file.unlink()
    with pytest.raises(DatasetError, match=rf"{lost}-idx\d-ubyte is missing.*{file.name}"):
        load_data(tmp_path)


def test_missing_cifar_file_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path, ".xz")
    (tmp_path / "data_batch_4.bin.xz").unlink()
    with pytest.raises(DatasetError, match=r"data_batch_4.bin is missing.*data_batch_4.bin.xz"):
        load_cifar10(tmp_path, records=3)


GOOD = idx_bytes(some_images(6, 6))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00\x09\x03" + GOOD[4:], "begins with 00 00 09 03"),
        (idx_bytes(np.arange(6, dtype=np.uint8)), "begins with 00 00 08 01"),
        (GOOD[:10], "ends within its header"),
        (GOOD[:-1], "should have 150 bytes of values and has 149 bytes"),
        (GOOD + b"x", "should have 150 bytes of values and has more"),
        (GOOD[:4] + struct.pack(">3I", 0, 5, 5), "claims to have 0 × 5 × 5 values"),
        (GOOD[:4] + struct.pack(">3I", 10**4, 10**4, 10**4), "claims to have 10000 × 10000"),
        (GOOD[:4] + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), "claims to have 42949"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_damaged_idx_file_is_refused(
    tmp_path: Path, content: bytes, complaint: str, ending: str
) -> None:
    write_mnist(tmp_path, ending=ending)
    path = tmp_path / f"train-images-idx3-ubyte{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    with pytest.raises(DatasetError, match=complaint) as error:
        load_idx(tmp_path)
    assert str(path) in str(error.value)


def test_idx_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(5, np.uint8)))
    with pytest.raises(DatasetError, match=r"6 images, .* has 5 labels"):
        load_idx(tmp_path)
    labels.write_bytes(idx_bytes(np.array([0, 1, 10, 3, 4, 5], np.uint8)))
    with pytest.raises(
        DatasetError, match=r"train-labels.*label 2 is 10, and there are only 0 to 9"
    ):
        load_idx(tmp_path)
    write_mnist(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(some_images(4, 0, side=6)))
    with pytest.raises(DatasetError, match=r"\(1, 5, 5\), test images \(1, 6, 6\)"):
        load_idx(tmp_path)


def test_truncated_archives_are_refused(tmp_path: Path) -> None:
    for name, pack in (("a.gz", gzip.compress), ("a.xz", lzma.compress)):
        path = tmp_path / name
        path.write_bytes(pack(cifar_records(3, 0))[:-40])
        with pytest.raises(DatasetError, match=rf"{name} cannot be read \(.*cut off"):
            read_records(path, 3)
        path.write_bytes(b"not packed at all")
        with pytest.raises(DatasetError, match=rf"{name} cannot be read"):
            read_records(path, 3)


def test_damaged_cifar_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    good = cifar_records(3, 0)
    path.write_bytes(good[:-1])
    with pytest.raises(DatasetError, match=r"should have 9,219 bytes .* and has 9,218"):
        read_records(path, 3)
    path.write_bytes(good + good)
    with pytest.raises(DatasetError, match="and has more"):
        read_records(path, 3)
    path.write_bytes(good[:3073] + b"\x0a" + good[3074:])
    with pytest.raises(DatasetError, match="label of record 1 is 10"):
        read_records(path, 3)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"segment": None}, "has no 'segment'; it should have halves, window_halves, y"),
        ({"halves": np.zeros((30, 9, 63), np.float32)}, r"halves is \(30, 9, 63\)"),
        ({"halves": np.zeros((), np.float32)}, r"halves is \(\)"),
        ({"halves": np.zeros((40, 9, 64), np.int32)}, "halves is int32"),
        ({"halves": np.full((40, 9, 64), np.nan, np.float32)}, "not numbers"),
        ({"y": np.zeros(27, np.uint8)}, r"should be \(27, 2\)"),
        ({"y": np.zeros((), np.uint8)}, "should be"),
        ({"y": np.full(28, 6, np.uint8)}, "y has 6, and there are only 0 to 5"),
        ({"window_halves": np.full((28, 2), -1)}, "window_halves has -1"),
        ({"window_halves": np.full((28, 2), 10**6)}, "window_halves has 1000000"),
        ({"window_halves": np.zeros((28, 2), np.int32)}, "share 1 halves"),
        ({"segment": np.zeros(28, np.int16)}, "no subject has two segments"),
        ({"subject": np.array([None] * 28, object)}, "holds pickled objects"),
    ],
)
def test_har_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    path = write_har(tmp_path, **changed)
    with pytest.raises(DatasetError, match=complaint) as error:
        load_uci_har(tmp_path)
    assert str(path) in str(error.value)


def npy_bytes(header: str, values: bytes) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values


def write_npz(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("y.npy", content)


def test_npz_that_claims_more_than_it_has_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (250000000000,), }"
    write_npz(path, npy_bytes(header, b"1234"))
    with pytest.raises(DatasetError, match="claims 1,000,000,000,000 bytes of values and has 4"):
        read_npz(path, ("y",))


def test_pickles_are_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(marker),))

    header = "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    path = tmp_path / "a.npz"
    write_npz(path, npy_bytes(header, pickle.dumps([Evil()])))
    with pytest.raises(DatasetError, match="pickled objects"):
        read_npz(path, ("y",))
    assert not marker.exists()


# -- any bytes at all ----------------------------------------------------------------------------


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    """Bytes of a good file with some of them changed, cut off or put in; or any bytes."""

    def change(edits: list[tuple[int, bytes, int]]) -> bytes:
        content = bytearray(good)
        for place, new, gone in edits:
            at = place % (len(content) + 1)
            content[at : at + gone] = new
        return bytes(content)

    edit = st.tuples(st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 8))
    cut = st.integers(0, len(good)).map(lambda size: good[:size])
    return st.lists(edit, min_size=1, max_size=4).map(change) | cut | st.binary(max_size=200)


def npz_content() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, y=np.arange(4, dtype=np.uint8), halves=np.zeros((2, 3), np.float32))
    return file.getvalue()


@FUZZ
@given(content=damaged(GOOD) | damaged(gzip.compress(GOOD, mtime=0)))
def test_any_idx_file_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ("a.gz" if content[:2] == b"\x1f\x8b" else "a")
    path.write_bytes(content)
    try:
        values = read_idx(path, 3)
    except DatasetError:
        return
    assert idx_bytes(values) == (gzip.decompress(content) if path.suffix else content)


@FUZZ
@given(content=damaged(lzma.compress(cifar_records(2, 0)[: 2 * 3073])))
def test_any_packed_records_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.xz"
    path.write_bytes(content)
    try:
        rows = read_records(path, 2)
    except DatasetError:
        return
    assert rows.shape == (2, 3073)
    assert rows[:, 0].max() < 10


@FUZZ
@given(content=damaged(npz_content()))
def test_any_npz_file_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    try:
        arrays = read_npz(path, ("y", "halves"))
    except DatasetError:
        return
    assert arrays.keys() == {"y", "halves"}


@FUZZ
@given(
    header=damaged(b"{'descr': '|u1', 'fortran_order': False, 'shape': (4,), }"),
    values=st.binary(max_size=6),
)
def test_any_array_header_is_read_or_refused(tmp_path: Path, header: bytes, values: bytes) -> None:
    path = tmp_path / "a.npz"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + values
    write_npz(path, content)
    try:
        arrays = read_npz(path, ("y",))
    except DatasetError:
        return
    assert arrays["y"].nbytes == len(values)


# -- images that fit -----------------------------------------------------------------------------


def dataset(images: NDArray[np.float32]) -> Dataset:
    labels = np.zeros(len(images), np.int64)
    part = ArrayData((images,), labels)
    return Dataset("some", "idx", part, part, 10)


def naive_fit(image: NDArray[np.float32], shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """Pixel by pixel: where in the original each wanted pixel comes from, if from anywhere."""
    channels, height, width = shape
    k = max(1, min(height // image.shape[1], width // image.shape[2]))
    tall, wide = k * image.shape[1], k * image.shape[2]
    out = np.zeros(shape, np.float32)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                # Cut off or pad half of the difference, rounded down, before the first pixel.
                from_y = y + (tall - height) // 2 if tall >= height else y - (height - tall) // 2
                from_x = x + (wide - width) // 2 if wide >= width else x - (width - wide) // 2
                if 0 <= from_y < tall and 0 <= from_x < wide:
                    pixel = image[:, from_y // k, from_x // k]
                    out[c, y, x] = (
                        pixel[c]
                        if len(pixel) == channels
                        else pixel[0]
                        if len(pixel) == 1
                        else sum(pixel) / len(pixel)
                    )
    return out


@settings(max_examples=50)
@given(
    channels=st.sampled_from([(1, 1), (1, 3), (3, 1), (3, 3)]),
    sides=st.tuples(*[st.integers(1, 9)] * 4),
    seed=st.integers(0, 99),
)
def test_fitted_images_are_those_of_a_pixel_by_pixel_loop(
    channels: tuple[int, int], sides: tuple[int, int, int, int], seed: int
) -> None:
    height, width, wanted_height, wanted_width = sides
    images = np.random.default_rng(seed).random((2, channels[0], height, width), np.float32)
    shape = (channels[1], wanted_height, wanted_width)
    fitted = fit_images(dataset(images), shape)
    assert fitted.shape == shape
    for split in (fitted.train, fitted.test):
        assert split.inputs[0].dtype == np.float32
        for image, seen in zip(images, split.inputs[0], strict=True):
            np.testing.assert_allclose(seen, naive_fit(image, shape), rtol=1e-6)


def test_digits_serve_larger_models() -> None:
    data = load_data(None)
    for shape, factor, border in (((1, 28, 28), 3, 2), ((3, 32, 32), 4, 0)):
        image = fit_images(data, shape).train.inputs[0][7]
        inner = image[:, border : border + 8 * factor, border : border + 8 * factor]
        assert inner.sum() == pytest.approx(image.sum())
        np.testing.assert_array_equal(inner[0, ::factor, ::factor], data.train.inputs[0][7, 0])


def test_what_is_no_image_does_not_fit_and_what_fits_is_left_alone() -> None:
    windows = dataset(np.zeros((2, 9, 128), np.float32))
    assert fit_images(windows, (9, 128)) is windows
    with pytest.raises(
        DatasetError, match=r"\(9, 128\), the model takes \(1, 28, 28\): only images"
    ):
        fit_images(windows, (1, 28, 28))
    with pytest.raises(DatasetError, match=r"the model takes \(9, 128\)"):
        fit_images(dataset(np.zeros((2, 1, 8, 8), np.float32)), (9, 128))
    with pytest.raises(DatasetError, match="2 channels, the model takes 3"):
        fit_images(dataset(np.zeros((2, 2, 8, 8), np.float32)), (3, 8, 8))


# -- the real ones, where they are ---------------------------------------------------------------

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data"


def real(name: str) -> Path:
    """A folder of TESSERA_DATA, or of what lies beside the project."""
    folder = Path(os.environ.get("TESSERA_DATA") or SHARED) / name
    if not folder.is_dir():
        pytest.skip(f"real data: no {folder}; set TESSERA_DATA to a directory that has {name}")
    return folder


@pytest.mark.parametrize(("name", "mean"), [("mnist", 0.1307), ("fashion_mnist", 0.2860)])
def test_real_mnist_has_the_mean_that_is_known_of_it(name: str, mean: float) -> None:
    data = load_data(real(name))
    assert data.train.inputs[0].shape == (60_000, 1, 28, 28)
    assert len(data.test) == 10_000
    assert data.train.inputs[0].mean(dtype=np.float64) == pytest.approx(mean, abs=5e-5)
    assert np.bincount(data.test.targets).sum() == 10_000


def test_real_cifar_batch_has_a_thousand_of_each_class() -> None:
    rows = read_records(real("cifar10") / "test_batch.bin.xz", 10_000)
    assert np.bincount(rows[:, 0]).tolist() == [1000] * 10
    # The means of CIFAR-10's channels are about 0.49, 0.48, 0.45 of full brightness.
    means = rows[:, 1:].reshape(-1, 3, 1024).mean(axis=(0, 2)) / 255
    np.testing.assert_allclose(means, (0.494, 0.485, 0.450), atol=2e-3)


def test_real_har_shares_no_half_window_between_training_and_test() -> None:
    folder = real("uci_har")
    data = load_data(folder)
    assert data.owners is not None
    assert set(data.owners.tolist()) == set(range(1, 31))
    assert len(data.train) + len(data.test) == 10_299
    assert 0.2 < len(data.test) / 10_299 < 0.3
    assert np.bincount(data.test.targets, minlength=6).min() > 200

    def halves(windows: NDArray[Any]) -> set[bytes]:
        """By what is in them: scaling is the same for all, so equal halves are equal bytes."""
        return {
            np.ascontiguousarray(part).tobytes() for w in windows for part in (w[:, :64], w[:, 64:])
        }

    trained, tested = halves(data.train.inputs[0]), halves(data.test.inputs[0])
    assert not trained & tested
    with np.load(folder / "uci_har.npz") as raw:
        assert len(trained | tested) == len(raw["halves"])
