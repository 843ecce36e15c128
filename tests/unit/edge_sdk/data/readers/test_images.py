"""Images in class folders, against Pillow itself."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.data.errors import DataError
from edge_sdk.data.readers import images
from edge_sdk.data.source import open_data
from edge_sdk.protocol.plan.layout import Array
from tests.unit.edge_sdk.data.specs import spec_of

Image: Any = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
CLASSES = ("cat", "dog", "hen")


def save(folder: Path, label: str, name: str, pixels: Array) -> Path:
    (folder / label).mkdir(exist_ok=True)
    path = folder / label / name
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    save(tmp_path, "dog", "b.png", random.integers(0, 256, (7, 9, 3), np.uint8))
    save(tmp_path, "cat", "a.PNG", random.integers(0, 256, (4, 4, 3), np.uint8))
    save(tmp_path, "dog", "a.bmp", random.integers(0, 256, (6, 5), np.uint8))
    (tmp_path / "dog" / "notes.txt").write_text("a good dog")
    (tmp_path / ".DS_Store").write_text("")
    return tmp_path


ORDER = ("cat/a.PNG", "dog/a.bmp", "dog/b.png")


@pytest.mark.parametrize(
    ("shape", "mode"),
    [((3, 4, 6), "RGB"), ((1, 4, 6), "L"), ((4, 6), "L"), ((4, 6, 3), "RGB"), ((4, 4, 6), "RGBA")],
)
def test_pixels_are_those_that_pillow_gives(
    photos: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], mode: str
) -> None:
    monkeypatch.setattr(images, "rows_of", lambda _: 2)
    read = open_data(str(photos)).read(spec_of(*shape, classes=CLASSES, range=(-1.0, 1.0)))
    expected = []
    for name in ORDER:
        with Image.open(photos / name) as image:
            small = image.convert(mode).resize((6, 4), Image.Resampling.BILINEAR)
        pixels = np.asarray(small, np.float64).reshape(4, 6, -1)
        if shape != (4, 6, 3):
            pixels = np.moveaxis(pixels, 2, 0)
        expected.append((pixels / 255 * 2 - 1).reshape(shape))
    np.testing.assert_allclose(read.data.inputs[0], np.stack(expected), atol=1e-6)
    assert read.data.targets.tolist() == [0, 1, 1]
    assert read.counts == (1, 2, 0)


def test_pixels_are_normalised_as_the_task_says(photos: Path) -> None:
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    plain = open_data(str(photos)).read(spec_of(3, 5, 5, classes=CLASSES))
    read = open_data(str(photos)).read(
        spec_of(3, 5, 5, classes=CLASSES, mean=mean, deviation=deviation)
    )
    assert 0 <= plain.data.inputs[0].min() < plain.data.inputs[0].max() <= 1
    for channel in range(3):
        np.testing.assert_allclose(
            read.data.inputs[0][:, channel],
            (plain.data.inputs[0][:, channel] - mean[channel]) / deviation[channel],
            atol=1e-5,
        )


def test_photo_is_turned_upright_and_16_bits_are_read(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[0] = 255
    (tmp_path / "cat").mkdir()
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    Image.fromarray(pixels).save(tmp_path / "cat" / "a.jpg", exif=exif, quality=100)
    deep = np.full((4, 4), 0x80FF, np.uint16)
    Image.fromarray(deep).save(tmp_path / "cat" / "b.png")
    read = open_data(str(tmp_path)).read(spec_of(1, 4, 4, classes=CLASSES))
    turned, grey = read.data.inputs[0][:, 0]
    assert turned[3].min() > 0.9
    assert turned[0].max() < 0.1
    np.testing.assert_allclose(grey, 128 / 255, atol=1e-6)
    assert read.warnings == ("all 2 samples are of class 'cat': the device learns nothing else",)


@pytest.mark.parametrize(
    ("pixels", "kind"),
    [(np.full((4, 4), np.nan, np.float32), "floats"), (np.ones((4, 4), np.int32), "32-bit whole")],
)
def test_pixels_without_a_known_range_are_refused(tmp_path: Path, pixels: Any, kind: str) -> None:
    (tmp_path / "cat").mkdir()
    Image.fromarray(pixels).save(tmp_path / "cat" / "a.tiff")
    with pytest.raises(DataError, match=rf"cat/a\.tiff: its pixels are {kind}.*\[format\] range"):
        open_data(str(tmp_path)).read(spec_of(1, 4, 4, classes=CLASSES))


def test_16_bits_are_read_from_every_format(tmp_path: Path) -> None:
    """Pillow calls those of a PGM 32-bit."""
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.full((4, 4), 0x80FF, np.uint16)).save(tmp_path / "cat" / "a.tiff")
    (tmp_path / "cat" / "b.pgm").write_bytes(b"P5 4 4 65535\n" + b"\x80\xff" * 16)
    read = open_data(str(tmp_path)).read(spec_of(1, 4, 4, classes=CLASSES))
    np.testing.assert_allclose(read.data.inputs[0], 128 / 255, atol=1e-6)


def test_images_without_class_folders_are_for_inference(photos: Path, tmp_path: Path) -> None:
    spec = spec_of(3, 4, 4, classes=CLASSES)
    source = open_data(str(photos / "dog"))
    assert len(source.read(spec, labelled=False).data) == 2
    with pytest.raises(DataError, match=r"a\.bmp lies in no class folder"):
        source.read(spec)


def test_folder_that_is_no_class_does_not_matter_for_inference(photos: Path) -> None:
    (photos / "dog").rename(photos / "unsorted")
    read = open_data(str(photos)).read(spec_of(3, 4, 4, classes=CLASSES), labelled=False)
    assert not read.labelled
    assert any("labels are not used" in each and "'unsorted'" in each for each in read.notes)


def test_what_is_wrong_with_images_is_named(photos: Path) -> None:
    with pytest.raises(DataError, match=r"has images, but the task's input is 192"):
        open_data(str(photos)).read(spec_of(192))
    with pytest.raises(
        DataError, match=r"dog.a\.bmp: 'dog' is not a class of the task; did you me"
    ):
        open_data(str(photos)).read(spec_of(3, 4, 4, classes=("cat", "dogs", "hen")))
    with pytest.raises(DataError, match="its classes have no names"):
        open_data(str(photos)).read(spec_of(3, 4, 4))
    (photos / "dog" / "c.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"dog.c\.jpg cannot be read as an image"):
        open_data(str(photos)).read(spec_of(3, 4, 4, classes=CLASSES))
    (photos / "loose.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"loose\.png lies beside the class folders"):
        open_data(str(photos))
    (photos / "table.csv").write_text("a,y\n1,0\n")
    with pytest.raises(DataError, match=r"files of different kinds, such as .*table\.csv"):
        open_data(str(photos))


def encoded(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(out, kind)
    return out.getvalue()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["PNG", "JPEG", "BMP", "GIF", "TIFF"]),
    flips=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=8),
    cut=st.integers(0, 300),
)
def test_bad_bytes_raise_one_error(
    tmp_path: Path, kind: str, flips: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(encoded(kind))
    for at, value in flips:
        data[at % len(data)] = value
    (tmp_path / "cat").mkdir(exist_ok=True)
    (tmp_path / "cat" / "a.png").write_bytes(bytes(data[: max(0, len(data) - cut)]))
    with suppress(DataError):
        open_data(str(tmp_path)).read(spec_of(3, 4, 4, classes=CLASSES))
