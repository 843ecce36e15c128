"""Tables, against the csv module and naive loops; windows, against a naive loop."""

from __future__ import annotations

import csv
import io
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.readers import samples, tables
from edge_sdk.data.source import open_data
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from tests.unit.edge_sdk.data.specs import spec_of

HEADER = "time,temperature,humidity,class\n"
SPEC = spec_of(2, classes=("cold", "mild", "hot"), features=("temperature", "humidity"))


def write(folder: Path, text: str, name: str = "t.csv") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,20.5,60,mild\n2,-3,80,cold\n\n3,31,10,hot\n")
    read = open_data(path).read(SPEC)
    assert read.data.inputs[0].tolist() == [[20.5, 60], [-3, 80], [31, 10]]
    assert read.data.targets.tolist() == [1, 0, 2]
    assert read.counts == (1, 1, 1)
    assert read.notes == ("names of classes become their numbers",)
    turned = DataFormat(features=("humidity", "time"), label=("class",))
    other = open_data(path, turned).read(SPEC)
    assert other.data.inputs[0].tolist() == [[60, 1], [80, 2], [10, 3]]


def test_mean_and_deviation_of_each_column_are_applied(tmp_path: Path) -> None:
    path = write(tmp_path, "a;b;y\n10;4;0\n30;8;1\n")
    read = open_data(path).read(spec_of(2, mean=(20.0, 6.0), deviation=(10.0, 2.0)))
    assert read.data.inputs[0].tolist() == [[-1, -1], [1, 1]]


def test_table_of_numbers_alone_has_its_label_last(tmp_path: Path) -> None:
    path = write(tmp_path, "0\t16\t8\t4\t2\n16\t16\t0\t0\t1\n", "a.tsv")
    spec = spec_of(1, 2, 2, range=(-1.0, 1.0))
    read = open_data(path, DataFormat(range=(0.0, 16.0))).read(spec)
    assert read.data.inputs[0].tolist() == [[[[-1, 1], [0, -0.5]]], [[[1, 1], [-1, -1]]]]
    assert read.data.targets.tolist() == [2, 1]
    assert "x0 is scaled from 0…16 to -1…1" in read.notes


def test_first_row_that_counts_from_0_is_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, "0,1,2\n5,6,1\n7,8,0\n")
    read = open_data(path, DataFormat(label=("2",))).read(spec_of(2))
    assert read.data.inputs[0].tolist() == [[5, 6], [7, 8]]
    assert read.data.targets.tolist() == [1, 0]


def test_several_columns_may_be_the_target(tmp_path: Path) -> None:
    path = write(tmp_path, "a,u,v\n1,0.5,2\n2,1.5,-1\n")
    spec = spec_of(1, targets=ArraySpec("float32", (2,)))
    read = open_data(path, DataFormat(label=("u", "v"))).read(spec)
    assert read.data.targets.tolist() == [[0.5, 2], [1.5, -1]]
    assert read.counts is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "t.csv is empty"),
        (HEADER, "t.csv is empty: it has no rows"),
        (HEADER + "1,2,3\n", "t.csv, row 2 has 3 values, not 4"),
        (
            HEADER + "1,2,3,hot\n1,abc,3,hot\n",
            "row 3, column 'temperature': 'abc': must be a number",
        ),
        (HEADER + "1,2_0,3,hot\n", "row 2, column 'temperature': '2_0': must be a number"),
        (HEADER + "1,2,,hot\n", "t.csv, row 2, column 'humidity': empty: must be a number"),
        (
            HEADER + "1,nan,3,hot\n",
            "row 2, column 'temperature': nan (not a number): must be a fin",
        ),
        (HEADER + "1,2,1e999,hot\n", "t.csv, row 2, column 'humidity': inf: must be a finite"),
        (HEADER + "1,2,1e39,hot\n", "row 2, column 'humidity': 1e+39 does not fit float32"),
        (
            HEADER + "1,2,3,hto\n",
            "row 2, column 'class': 'hto' is not a class of the task; did you",
        ),
        (HEADER + "1,2,3,rain\n", "'rain' is not a class of the task; known are cold, mild, hot"),
        (HEADER + "1,2,3,7\n", "row 2, column 'class': label 7: the task has 3 classes, 0 to 2"),
        (HEADER + "1,2,3, \n", "t.csv, row 2, column 'class': empty: must be a label"),
        ("temperature,humidity\n1,2\n", "t.csv has no column called label, class, target or y"),
        ("temperature,class\n1,hot\n", "t.csv has no column 'humidity' (a feature that the task"),
        ("humidity,temperature,y,class\n1,2,3,hot\n", "say which is the label in [format] label"),
        ("humidity,humidity,class\n1,2,hot\n", "t.csv: two columns are called 'humidity'"),
        (HEADER + '1,2,3,"hot\n', "t.csv is not a CSV table"),
    ],
)
def test_bad_table_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(DataError) as error:
        open_data(write(tmp_path, text)).read(SPEC)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_other_text_than_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(HEADER.encode() + b"1,2,3,hei\xdf\n")
    with pytest.raises(DataError, match=r"t\.csv is not UTF-8 text .* save it as UTF-8"):
        open_data(str(tmp_path / "t.csv")).read(SPEC)


def test_tables_of_one_folder_need_the_same_columns(tmp_path: Path) -> None:
    write(tmp_path, "a,b,y\n1,2,0\n", "a.csv")
    write(tmp_path, "a,c,y\n1,2,0\n", "b.csv")
    with pytest.raises(DataError, match=r"b\.csv has the columns a, c, .*a\.csv has a, b"):
        open_data(str(tmp_path)).read(spec_of(2))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("label", ["", "?", "9"])
def test_labels_that_are_not_the_task_s_do_not_matter_for_inference(
    tmp_path: Path, label: str, kind: str
) -> None:
    if kind == "csv":
        path = write(tmp_path, f"a,b,class\n1,2,cold\n3,4,{label}\n5,6,hot\n")
    else:
        columns: dict[str, list[object]] = {"a": [1, 3, 5], "b": [2, 4, 6]}
        columns["class"] = ["cold", label or None, "hot"]
        path = parquet_of(tmp_path / "t.parquet", **columns)
    spec = spec_of(2, classes=SPEC.classes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ROWS", 1)
        read = open_data(path).read(spec, labelled=False)
    assert read.data.inputs[0].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert not read.labelled
    assert [each for each in read.notes if each.startswith("labels are not used: t.")]
    with pytest.raises(DataError, match="class"):
        open_data(path).read(spec)


def test_last_of_too_many_numbers_is_the_label_for_inference_too(tmp_path: Path) -> None:
    path = write(tmp_path, "1,2,0\n3,4,1\n")
    read = open_data(path).read(spec_of(2), labelled=False)
    assert (read.labelled, read.data.targets.tolist()) == (True, [0, 1])
    assert not open_data(path).read(spec_of(3), labelled=False).labelled


def test_delimiter_is_found_outside_quotes_and_below_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '\n\n"a, in m, s, or km";b;y\n1;2;0\n')
    assert open_data(path).read(spec_of(2)).data.inputs[0].tolist() == [[1, 2]]


def test_unlabelled_table_is_for_inference(tmp_path: Path) -> None:
    path = write(tmp_path, "temperature,humidity\n1,2\n")
    read = open_data(path).read(SPEC, labelled=False)
    assert not read.labelled
    assert read.data.inputs[0].tolist() == [[1, 2]]


numbers = st.floats(-1e6, 1e6, width=32)
labels = st.sampled_from(["cold", "mild", "hot"])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(numbers, numbers, labels), min_size=1, max_size=20))
def test_table_is_what_the_csv_module_reads(
    tmp_path: Path, rows: list[tuple[float, float, str]]
) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([("humidity", "temperature", "class"), *rows])
    read = open_data(write(tmp_path, out.getvalue())).read(SPEC)
    naive = list(csv.DictReader(io.StringIO(out.getvalue())))
    expected = [[float(row["temperature"]), float(row["humidity"])] for row in naive]
    np.testing.assert_array_equal(read.data.inputs[0], np.array(expected, np.float32))
    assert read.data.targets.tolist() == [SPEC.classes.index(row["class"]) for row in naive]


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=120) | st.text(',;"\n\t0a.\x00é', max_size=60).map(str.encode))
def test_any_bytes_are_a_table_or_one_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    with suppress(DataError):
        open_data(str(tmp_path / "t.csv")).read(spec_of(2))


# -- windows --------------------------------------------------------------------------------------


def windows_of(
    rows: list[tuple[str, float, float, str]], length: int, stride: int, choice: str
) -> list[tuple[list[list[float]], str]]:
    """Cut naively: at each row, see if it ends a window of its series."""
    found = []
    for end, row in enumerate(rows, 1):
        part = [each for each in rows[:end] if each[0] == row[0]]
        start = len(part) - length
        if start < 0 or start % stride:
            continue
        cut = part[start:]
        names = [each[3] for each in cut]
        if choice == "same" and len(set(names)) > 1:
            continue
        most = Counter(names).most_common()
        first = next(n for n in names if dict(most)[n] == most[0][1])
        label = first if choice == "majority" else names[-1]
        found.append(([[each[1], each[2]] for each in cut], label))
    return found


series = st.lists(
    st.tuples(st.sampled_from("ab"), numbers, numbers, labels), min_size=1, max_size=40
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=series,
    length=st.integers(1, 5),
    stride=st.integers(1, 7),
    choice=st.sampled_from(["majority", "last", "same"]),
    time_last=st.booleans(),
    ones=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    at_once=st.integers(1, 6),
)
def test_windows_are_those_of_a_naive_loop(
    tmp_path: Path,
    rows: list[tuple[str, float, float, str]],
    length: int,
    stride: int,
    choice: str,
    time_last: bool,
    ones: tuple[int, int],
    at_once: int,
) -> None:
    """Whether series follow each other or take turns, and with sizes of 1 in the task's shape."""
    length += 1 if length == 2 else 0  # two channels: the shape must tell time from them
    out = io.StringIO()
    csv.writer(out).writerows([("who", "u", "v", "class"), *rows])
    path = write(tmp_path, out.getvalue())
    shape = (2, length) if time_last else (length, 2)
    shape = (*[1] * ones[0], *shape, *[1] * ones[1])  # type: ignore[assignment]
    spec = spec_of(*shape, classes=SPEC.classes, window=length, features=("u", "v"))
    format = DataFormat(series="who", stride=stride, window_label=choice)  # type: ignore[arg-type]
    expected = windows_of(rows, length, stride, choice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "ROWS", at_once)
        patch.setattr(samples, "WINDOWS", 2)
        if not expected:
            with pytest.raises(DataError, match="no series is as long as"):
                open_data(path, format).read(spec)
            return
        read = open_data(path, format).read(spec)
    made = np.array([values for values, _ in expected], np.float32)
    made = made.transpose(0, 2, 1) if time_last else made
    np.testing.assert_array_equal(read.data.inputs[0], made.reshape(-1, *shape))
    assert read.data.targets.tolist() == [SPEC.classes.index(name) for _, name in expected]


def test_window_of_an_unknown_order_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,c,d,y\n" + "1,2,3,4,0\n" * 3)
    with pytest.raises(DataError, match=r"2×3×2: .*only where the time comes first or last"):
        open_data(path).read(spec_of(2, 3, 2, window=3))


def test_bad_value_in_a_window_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "u,v,y\n1,2,0\n1,2,0\n1,2,0\n1,inf,0\n")
    with pytest.raises(DataError, match=r"t\.csv, rows 4 to 5, column 'v': inf"):
        open_data(path).read(spec_of(2, 2, window=2))


# -- Parquet --------------------------------------------------------------------------------------


def parquet_of(path: Path, **columns: list[object]) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def test_parquet_is_read_like_a_table(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "humidity": [60, 80, 10],
        "class": ["mild", "cold", "hot"],
        "temperature": [20.5, -3.0, 31.0],
    }
    read = open_data(parquet_of(tmp_path / "t.parquet", **columns)).read(SPEC)
    assert read.data.inputs[0].tolist() == [[20.5, 60], [-3, 80], [31, 10]]
    assert read.data.targets.tolist() == [1, 0, 2]
    columns["humidity"][1] = None
    with pytest.raises(DataError, match=r"t\.parquet, row 2, column 'humidity': empty"):
        open_data(parquet_of(tmp_path / "t.parquet", **columns)).read(SPEC)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"t\.parquet cannot be read as Parquet"):
        open_data(str(tmp_path / "t.parquet")).read(SPEC)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=5),
    cut=st.integers(0, 400),
)
def test_bad_parquet_raises_one_error(
    tmp_path: Path, flips: list[tuple[int, int]], cut: int
) -> None:
    path = parquet_of(tmp_path / "t.parquet", a=[1.0, 2.0], b=[3, 4], y=["0", "1"])
    data = bytearray(Path(path).read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    Path(path).write_bytes(bytes(data[: max(0, len(data) - cut)]))
    with suppress(DataError):
        open_data(path).read(spec_of(2))


def test_task_of_several_inputs_needs_arrays(tmp_path: Path) -> None:
    two = DataSpec((ArraySpec("float32", (1,)),) * 2, ArraySpec("int64", (), 1))
    with pytest.raises(DataError, match=r"the task has 2 inputs; use \.npz files"):
        open_data(write(tmp_path, "a,y\n1,0\n")).read(two)
