"""Descriptions of a task's data: contradictions are refused, and JSON and bytes bring them back."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.task.codec import decode_manifest, encode_manifest
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription
from tests.property.plan.test_plan_codec_fuzz import grafts
from tests.unit.edge_sdk.protocol.task.test_graphs import (
    MANIFEST,
    PLAN,
    sealed,
    structures,
)

PHOTOS = DataSpec((ArraySpec("float32", (3, 8, 8)),), ArraySpec("int64", (), 1))
SERIES = DataSpec((ArraySpec("float32", (2, 50)),), ArraySpec("float32", (1,)))
SOUND = DataSpec((ArraySpec("float32", (1, 40, 98)),), ArraySpec("int64", (), 2))
GOLDEN = Path(__file__).parents[1] / "golden" / "manifest_v3.bin"

DESCRIBED = (
    PHOTOS.described(classes=("cat", "dog"), inputs=(InputDescription(range=(0.0, 1.0)),)),
    PHOTOS.described(inputs=(InputDescription(mean=(0.5, 0.4, 0.3), deviation=(0.2, 0.2, 0.25)),)),
    SERIES.described(inputs=(InputDescription(window=50, features=("x", "y")),)),
    SOUND.described(
        inputs=(InputDescription(sample_rate=16_000, mels=40, frame=400, hop=160),),
        classes=("yes", "no", "other"),
    ),
    DataSpec(
        (ArraySpec("float32", (3,)), ArraySpec("int64", (4,), 9)), ArraySpec("float32", (2,), 1)
    ).described(classes=("a", "b"), inputs=(InputDescription(mean=(1.0,), deviation=(2.0,)),)),
)

NAMED = replace(
    MANIFEST,
    data=MANIFEST.data.described(
        classes=tuple("abcdefg"),
        inputs=(InputDescription(features=("u", "v", "w"), range=(-1.0, 1.0)),),
    ),
)
TREE = msgpack.unpackb(msgpack.unpackb(NAMED.encoded)[3])


@pytest.mark.parametrize("spec", DESCRIBED)
def test_description_comes_back_from_json_and_bytes(spec: DataSpec) -> None:
    assert DataSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    manifest = replace(MANIFEST, data=spec, graphs=())
    assert msgpack.unpackb(manifest.encoded)[1] == 3
    assert decode_manifest(encode_manifest(manifest)).data == spec


def test_format_without_a_description_is_what_it_was() -> None:
    assert PHOTOS.described(inputs=(InputDescription(),)) == PHOTOS
    assert msgpack.unpackb(replace(MANIFEST, data=PHOTOS, graphs=()).encoded)[1] == 1
    assert PHOTOS.first == InputDescription()


def test_golden_file_of_version_three() -> None:
    assert decode_manifest(GOLDEN.read_bytes()) == NAMED
    assert encode_manifest(NAMED) == GOLDEN.read_bytes()
    NAMED.check(PLAN)
    assert TREE[6][2:] == [list("abcdefg"), [[["u", "v", "w"], [-1.0, 1.0], [], [], *[None] * 5]]]


@settings(max_examples=60)
@given(tree=structures.flatmap(lambda branch: st.sampled_from(grafts(TREE[6], branch))))
def test_decode_of_grafted_data_is_exact_or_refused(tree: Any) -> None:
    """One node of the data is anything: nothing but `GraphError` comes out."""
    data = sealed(msgpack.packb([*TREE[:6], tree, TREE[7]]), 3)
    with suppress(GraphError):
        assert decode_manifest(data).encoded == data


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"range": (1.0, 0.0)}, "lowest and highest"),
        ({"range": (0.0, float("nan"))}, "lowest and highest"),
        ({"range": (0.0, 1.0), "mean": (0.0,), "deviation": (1.0,)}, "one or the other"),
        ({"mean": (0.0,)}, "mean has 1 numbers and deviation 0"),
        ({"mean": (0.0,), "deviation": (0.0,)}, "must be above 0"),
        ({"mean": (float("inf"),), "deviation": (1.0,)}, "finite"),
        ({"features": ("a", "a")}, "'a' occurs twice"),
        ({"features": ("a", " ")}, "is not a name"),
        ({"window": 0}, "window = 0"),
        ({"mels": 40, "frame": 400}, "need all of sample_rate, mels, frame and hop"),
        ({"mels": 4, "frame": 8, "hop": 4, "sample_rate": 9, "window": 3}, "window is set"),
    ],
)
def test_contradiction_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        InputDescription(**wrong)


@pytest.mark.parametrize(
    ("spec", "described", "words"),
    [
        (PHOTOS, {"mean": (0.5, 0.5), "deviation": (1.0, 1.0)}, "mean has 2 numbers, but a sample"),
        (PHOTOS, {"features": ("a",)}, "1 features have names, but a sample has 192"),
        (SERIES, {"window": 49}, "window = 49, but a sample is 2×50"),
        (SERIES, {"window": 50, "features": ("a",)}, "1 features have names, but a sample has 2"),
        (SERIES, {"mels": 40, "frame": 4, "hop": 2, "sample_rate": 8}, "mels = 40, but a sample"),
        (replace(PHOTOS, inputs=(ArraySpec("int64", (3,)),)), {"range": (0.0, 1.0)}, "for floats"),
    ],
)
def test_description_of_another_input_is_refused(
    spec: DataSpec, described: dict[str, Any], words: str
) -> None:
    with pytest.raises(GraphError, match=words):
        spec.described(inputs=(InputDescription(**described),))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("cat",), "1 classes have names, but the task has 2"),
        (("cat", "cat"), "'cat' occurs twice"),
        (("cat", ""), "is not a name"),
    ],
)
def test_classes_that_do_not_fit_are_refused(classes: tuple[str, ...], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        PHOTOS.described(classes=classes)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"inputs": 3, "targets": {}},
        {"inputs": [{"type": "float32", "shape": "x"}], "targets": {"type": "int64", "shape": []}},
        {"inputs": [{"type": "float32", "shape": [3], "range": [1]}], "targets": {"type": "int64"}},
        {
            "inputs": [{"type": "float32", "shape": [3], "mean": ["a"]}],
            "targets": {"type": "int64", "shape": []},
        },
    ],
)
def test_other_json_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(GraphError):
        DataSpec.from_dict(content)
