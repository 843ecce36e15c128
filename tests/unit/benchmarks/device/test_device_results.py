"""`results.json` survives being written and read, and says what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, Optional, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.device.results import (
    VERSION,
    Case,
    Curve,
    LearningPoint,
    LeftOut,
    Provenance,
    Results,
    ResultsError,
    TimeSpread,
    parse_results,
    read_results,
    write_results,
)
from benchmarks.report.figures import Figure
from edge_sdk.program.plain import ProfileError, from_plain, to_plain
from edge_sdk.program.settings.types import kind_of
from tests.unit.benchmarks.device.sample_results import (
    board_with_sensors,
    computer_without_sensors,
    make_case,
    modelled_phone,
)


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type; of numbers, those that every key takes."""
    kind = kind_of(hint)
    inner = get_args(kind.plain)
    known: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        int: st.integers(1, 4096),
        float: st.floats(1e-6, 1),
        bool: st.booleans(),
        Provenance: st.just("measured"),  # in results that are
        TimeSpread: instances(TimeSpread, p90=st.floats(1, 1e9)),
    }
    if kind.plain in known:
        found = known[kind.plain]
    elif is_dataclass(kind.plain):
        found = instances(kind.plain)
    elif get_origin(kind.plain) is Literal:
        found = st.sampled_from(inner)
    elif get_origin(kind.plain) is tuple:
        found = st.lists(any_of(inner[0]), max_size=2).map(tuple)
    else:
        found = st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=2)
    return st.none() | found if kind.optional else found


def instances(cls: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    return st.deferred(
        lambda: st.builds(cls, **{name: any_of(hint) for name, hint in hints.items()} | given)
    )


def any_results() -> st.SearchStrategy[Results]:
    cases = st.lists(any_of(Case), max_size=2, unique_by=lambda case: case.key).map(tuple)
    given = {"version": st.just(VERSION), "provenance": st.just("measured"), "cases": cases}
    return instances(Results, left_out=st.just(()), **given)


@settings(max_examples=50)
@given(any_results())
def test_results_survive_json(results: Results) -> None:
    content = json.loads(json.dumps({"command": "device", "results": to_plain(results)}))
    assert parse_results(content) == results


@pytest.mark.parametrize("make", [board_with_sensors, computer_without_sensors, modelled_phone])
def test_written_results_are_read_back(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("of an older run")
    write_results(path, make(), [Figure(name="device.cases", value=1, unit="cases")])
    assert read_results(path) == make()
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_unknown_is_left_out_of_the_file() -> None:
    plain = to_plain(computer_without_sensors())
    assert "joules" not in plain["cases"][0]
    assert "power_mode" not in plain["machine"]


def document(**changes: Any) -> dict[str, Any]:
    """A small file's content with these keys of its results changed."""
    results = to_plain(modelled_phone(cases=(make_case("cnn", 1.0, provenance="modelled"),)))
    content: dict[str, Any] = {"command": "device", "results": json.loads(json.dumps(results))}
    content["results"].update(changes)
    return content


def changed_case(**changes: Any) -> dict[str, Any]:
    content = document()
    content["results"]["cases"][0].update(changes)
    return content


TWO = [to_plain(make_case(provenance="modelled"))] * 2
MEASURED = {"provenance": "measured"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([], "is not what `tessera-bench device` writes"),
        ({"command": "costs", "figures": []}, "is not what `tessera-bench device` writes"),
        ({"command": "device"}, "results = None: must be a table"),
        (document(version=2), "version is 2, and this program reads version 1"),
        (document(version="x" * 99), "this program reads version 1: use the tessera-fl that"),
        (document(version=True), "results.version = True: must be a whole number"),
        (document(tilte="x"), "results.tilte is not a known key; did you mean 'title'?"),
        (document(qqq=1), "results.qqq is not a known key; known are version, title"),
        (document(title=7), "results.title = 7: must be a text"),
        (document(title=None), "results.title is missing"),
        (document(complete="yes"), "results.complete = 'yes': must be true or false"),
        (document(provenance="guessed"), "'guessed': must be one of measured, modelled"),
        (document(provenance=["measured"]), "must be one of measured, modelled"),
        (document(seconds=math.nan), "results.seconds = nan: must be a finite number"),
        (document(seconds=math.inf), "results.seconds = inf: must be a finite number"),
        (document(seconds=10**400), "0: must be a finite number"),
        (document(cases={}), "results.cases = {}: must be a list"),
        (document(cases=[3]), "results.cases[0] = 3: must be a table"),
        (document(cases=TWO), "cnn at 1 on onnx, 1 threads, is there twice"),
        (changed_case(peak_byte=1), "results.cases[0].peak_byte is not a known key; did you mean"),
        (
            changed_case(backend="tflite"),
            "results.cases[0].backend = 'tflite': must be one of onnx",
        ),
        (changed_case(level=1.5), "cases[0].level = 1.5: must be from 1e-06 to 1"),
        (changed_case(level=0), "cases[0].level = 0.0: must be from"),
        (changed_case(threads=0), "cases[0].threads = 0: must be from 1"),
        (changed_case(threads=1.5), "results.cases[0].threads = 1.5: must be a whole number"),
        (
            changed_case(step_s={"median": 2, "p90": 1, "samples": 3, "provenance": "modelled"}),
            "cases[0].step_s: its p90 is below its median",
        ),
        (
            changed_case(peak_bytes={"value": math.nan, "provenance": "modelled"}),
            "results.cases[0].peak_bytes.value = nan: must be a finite number",
        ),
        (changed_case(peak_bytes={"value": 1e8, **MEASURED}), "is measured, in results that"),
        (
            changed_case(joules={"gross": 1, "source": "rail", **MEASURED}),
            "joules are measured, in results that are modelled",
        ),
        (
            changed_case(joules={"gross": -1, "source": "x", "provenance": "modelled"}),
            "cases[0].joules.gross = -1.0: must be from 0",
        ),
        (
            changed_case(predicted={"seconds": -1, "grown_bytes": 0}),
            "cases[0].predicted.seconds = -1.0: must be from 0",
        ),
        (
            changed_case(bytes=[{"encoding": "fp32", "up": -4, "provenance": "counted"}]),
            "cases[0].bytes[0].up = -4: must be from 0",
        ),
    ],
)
def test_broken_file_is_refused_with_its_name_and_key(
    content: Any, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ResultsError, match=re.escape(complaint)) as error:
        read_results(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["batch", "steps"])
def test_round_of_nothing_is_refused(name: str) -> None:
    config = to_plain(modelled_phone().config)
    with pytest.raises(ResultsError, match=f"config.{name} = 0: must be from 1"):
        parse_results(document(config={**config, name: 0}))


def test_left_out_case_is_not_measured_too() -> None:
    left = LeftOut(family="cnn", level=1.0, backend="onnx", threads=8, why="no memory")
    with pytest.raises(ResultsError, match="cnn at 1 on onnx, 8 threads, is there twice"):
        modelled_phone(left_out=(left,))


def test_accuracy_above_one_is_refused() -> None:
    point = LearningPoint(round=1, accuracy=97.0, seconds=1.0, bytes=1.0)
    curve = Curve(family="cnn", level=1.0, data="digits", provenance="measured", points=(point,))
    with pytest.raises(
        ResultsError, match=r"curves\[0\].points\[0\].accuracy = 97.0: must be from 0"
    ):
        computer_without_sensors(curves=(curve,))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        json.dumps(document()).encode()[:-40],
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"command": "device", "results": {"seconds": ' + b"9" * 5000 + b"}}",
    ],
    ids=["empty", "truncated", "not-utf8", "deep", "long-number"],
)
def test_file_that_is_not_json_is_refused_with_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_bytes(content)
    said = re.escape(f"{path} is not what `tessera-bench device` writes")
    with pytest.raises(ResultsError, match=said):
        read_results(path)


def test_deep_values_are_refused_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text('{"command": "device", "results": ' + "[" * 400 + "]" * 400 + "}")
    with pytest.raises(ResultsError, match=r"results = .*: must be a table"):
        read_results(path)


def test_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"none\.json is not there"):
        read_results(tmp_path / "none.json")
    with pytest.raises(ResultsError, match=r"results\.json is not there"):
        read_results(tmp_path)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["version", "cases", "machine", "config", "provenance", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(plain_values)
def test_any_json_is_results_or_refused(content: Any) -> None:
    with pytest.raises(ResultsError):
        parse_results({"command": "device", "results": content})


# -- plain values: one of a few texts, tuples of scalars, tables of texts --------------------------


@dataclass(frozen=True)
class Shelf:
    """One field of every kind that results need and profiles do not."""

    kind: Literal["open", "closed"] = "open"
    side: Literal["left", "right"] | None = None
    place: Optional[int] = None  # noqa: UP045  # the older spelling means the same
    widths: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


def test_shelf_survives_plain_values() -> None:
    shelf = Shelf(
        kind="closed",
        side="left",
        place=3,
        widths=(0.5, 1.0),
        counts=(1, 2),
        names=("a", "b"),
        labels={"x": "y"},
        weights={"x": 2.5},
    )
    plain = to_plain(shelf)
    assert plain["widths"] == [0.5, 1.0]
    assert from_plain(Shelf, json.loads(json.dumps(plain)), "shelf") == shelf


def test_whole_numbers_are_read_as_floats_where_floats_are_meant() -> None:
    [width] = from_plain(Shelf, {"widths": [1]}, "").widths
    assert isinstance(width, float)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"kind": "ajar"}, "shelf.kind = 'ajar': must be one of open, closed"),
        ({"kind": {}}, "shelf.kind = {}: must be one of open, closed"),
        ({"side": "up"}, "shelf.side = 'up': must be one of left, right"),
        ({"place": "3"}, "shelf.place = '3': must be a whole number"),
        ({"widths": "12"}, "shelf.widths = '12': must be a list"),
        ({"widths": ["1"]}, "shelf.widths = ['1']: must be a list, each item a number"),
        ({"counts": [1.5]}, "shelf.counts = [1.5]: must be a list, each item a whole number"),
        ({"counts": [True]}, "shelf.counts = [True]: must be a list, each item a whole number"),
        ({"names": [None]}, "shelf.names = [None]: must be a list, each item a text"),
        ({"labels": {"x": 1}}, "shelf.labels = {'x': 1}: must be a table, each value a text"),
        ({"labels": ["x"]}, "shelf.labels = ['x']: must be a table"),
        (
            {"weights": {"x": "y"}},
            "shelf.weights = {'x': 'y'}: must be a table, each value a number",
        ),
    ],
)
def test_wrong_plain_value_is_refused_with_its_key(content: Any, complaint: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(complaint)):
        from_plain(Shelf, content, "shelf")
