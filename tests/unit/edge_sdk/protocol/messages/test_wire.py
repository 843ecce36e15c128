"""Control messages on the wire: version 1, to the byte; and what is not a message."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.condition import MAX_LABELS, Condition
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.epoch import LONGEST, MAX_COUNTER, Claim, Echo, Epoch, next_epoch
from edge_sdk.protocol.messages.fields import BLOB_FORMS, MAX_COUNT, RULE_FORMS
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.movement import MOVEMENT_FORMS
from edge_sdk.protocol.messages.round import (
    MAX_REASON_CHARACTERS,
    Assignment,
    Bid,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import MAX_SURVEY_SAMPLES, Survey, SurveyFinding
from edge_sdk.protocol.messages.topics import Topic, TopicKind, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import (
    MAX_RANGES,
    MAX_WANTED,
    Complaint,
    Credit,
    Evaluation,
    Offer,
    Presence,
    TaskNotice,
    Want,
)
from edge_sdk.protocol.messages.wire import (
    FORMS,
    MAX_CONTROL_BYTES,
    ON_TOPIC,
    TYPES,
    ControlMessage,
    decode_message,
    decode_received,
    decode_stamped,
    encode_message,
    may_be_message,
)

DATA = Path(__file__).parents[1] / "golden"
DOCUMENT = Path(__file__).resolve().parents[5] / "docs" / "protocol.md"

RUN = "0123456789abcdef"
A, B, C = (bytes([first]) + bytes(range(15)) for first in (0xA0, 0xB0, 0xC0))
SHA = bytes(range(32))

EXAMPLES: dict[str, tuple[ControlMessage, dict[str, Any]]] = {
    "model_notice": (
        ModelNotice(
            round=7,
            plan_hash=SHA.hex(),
            levels=(1.0, 0.5),
            groups=({"hidden": (0, 1)}, {"hidden": (1,)}),
            accuracies=(0.75, None),
            rescale=0.5,
            run=RUN,
            model=Blob(900, (A,)),
            statistics=Blob(200, (B,)),
        ),
        {
            "round": 7,
            "plan_hash": SHA.hex(),
            "levels": [1.0, 0.5],
            "groups": [{"hidden": [0, 1]}, {"hidden": [1]}],
            "accuracies": [0.75, None],
            "rescale": 0.5,
            "run": RUN,
            "model": {"size": 900, "chunks": A},
            "statistics": {"size": 200, "chunks": B},
        },
    ),
    "task_notice": (
        TaskNotice(
            task="digits",
            run=RUN,
            plan=Blob(5000, (A, B)),
            manifest=Blob(300, (C,)),
            graphs={SHA.hex(): Blob(4096, (B,))},
            chunk_bytes=4096,
        ),
        {
            "task": "digits",
            "run": RUN,
            "plan": {"size": 5000, "chunks": A + B},
            "manifest": {"size": 300, "chunks": C},
            "graphs": {SHA.hex(): {"size": 4096, "chunks": B}},
            "chunk_bytes": 4096,
        },
    ),
    "round_open": (
        RoundOpen(
            round=7,
            plan_hash=SHA.hex(),
            local_rule=LocalRule(
                learning_rate=0.05,
                momentum=0.5,
                clip_norm=2.0,
                widths="sandwich",
                distillation=0.5,
            ),
            steps=20,
            batch_size=32,
            bid_s=5.0,
            train_deadline_s=600.0,
            whole=True,
            replay_within=3,
            up=Encoding(kind="top-k", keep=0.25, zstd=True),
            run=RUN,
            model=Blob(900, (A,)),
            rounds_left=13,
            warmup=True,
            levels=(1.0, 0.5, 0.25),
        ),
        {
            "round": 7,
            "plan_hash": SHA.hex(),
            "rule": {
                "learning_rate": 0.05,
                "momentum": 0.5,
                "weight_decay": 0.0,
                "clip_norm": 2.0,
                "sam_radius": 0.0,
                "proximal": 0.0,
                "rescale": 0.5,
                "widths": "sandwich",
                "distillation": 0.5,
            },
            "steps": 20,
            "batch_size": 32,
            "bid_s": 5.0,
            "train_s": 600.0,
            "whole": True,
            "replay_within": 3,
            "encoding": "top-k:0.25+zstd",
            "run": RUN,
            "model": {"size": 900, "chunks": A},
            "rounds_left": 13,
            "warmup": True,
            "levels": [1.0, 0.5, 0.25],
        },
    ),
    "round_closed": (RoundClosed(round=7, run=RUN), {"round": 7, "run": RUN}),
    "presence": (
        Presence(name="pi-4", session=12, online=True),
        {"name": "pi-4", "session": 12, "online": True},
    ),
    "bid": (
        Bid(
            device="pi-4",
            round=7,
            level=0.5,
            reason="half: memory for 50 % is free",
            samples=120,
            compute=2e6,
            run=RUN,
            code="memory",
        ),
        {
            "device": "pi-4",
            "round": 7,
            "level": 0.5,
            "reason": "half: memory for 50 % is free",
            "samples": 120,
            "replays": False,
            "compute": 2e6,
            "bytes_per_s": None,
            "run": RUN,
            "code": "memory",
        },
    ),
    "assignment": (
        Assignment(
            device="pi-4",
            round=7,
            groups={"hidden": (0, 2), "heads": (1,)},
            run=RUN,
            widths=({"hidden": (0,), "heads": (1,)},),
        ),
        {
            "device": "pi-4",
            "round": 7,
            "groups": {"hidden": [0, 2], "heads": [1]},
            "run": RUN,
            "widths": [{"hidden": [0], "heads": [1]}],
        },
    ),
    "receipt": (
        Receipt(device="pi-4", round=7, outcome=Outcome.MEMORY, reason="late", run=RUN),
        {"device": "pi-4", "round": 7, "outcome": "memory", "reason": "late", "run": RUN},
    ),
    "offer": (
        Offer(
            device="pi-4",
            run=RUN,
            upload=A,
            round=7,
            answers=9,
            size=100_000,
            chunk_bytes=4096,
            sha256=SHA,
        ),
        {
            "device": "pi-4",
            "run": RUN,
            "upload": A,
            "round": 7,
            "answers": 9,
            "size": 100_000,
            "chunk_bytes": 4096,
            "sha256": SHA,
        },
    ),
    "credit": (
        Credit(device="pi-4", upload=A, missing=((0, 3), (5, 25)), window=8),
        {
            "device": "pi-4",
            "upload": A,
            "missing": [[0, 3], [5, 25]],
            "window": 8,
            "refused": False,
            "reason": "",
        },
    ),
    "want": (Want(device="pi-4", chunks=(A, C)), {"device": "pi-4", "chunks": A + C}),
    "evaluation": (
        Evaluation(device="pi-4", run=RUN, round=7, samples=90, loss=0.25, accuracy=None),
        {
            "device": "pi-4",
            "run": RUN,
            "round": 7,
            "samples": 90,
            "loss": 0.25,
            "accuracy": None,
        },
    ),
    "complaint": (
        Complaint(device="pi-4", reason="too many messages"),
        {"device": "pi-4", "reason": "too many messages"},
    ),
    "condition": (
        Condition(
            device="pi-4",
            battery=0.5,
            charging=False,
            temperature_c=41.5,
            memory_free_mb=512.0,
            memory_mb=4096.0,
            energy_today_j=120.0,
            energy_budget_j=3600.0,
            labels={"room": "kitchen 2", "site": "berlin"},
            profile="raspberry_pi_4",
            version="0.1.0",
            last_error="the file is gone",
        ),
        {
            "device": "pi-4",
            "battery": 0.5,
            "charging": False,
            "temperature_c": 41.5,
            "memory_free_mb": 512.0,
            "memory_mb": 4096.0,
            "energy_today_j": 120.0,
            "energy_budget_j": 3600.0,
            "labels": {"room": "kitchen 2", "site": "berlin"},
            "profile": "raspberry_pi_4",
            "version": "0.1.0",
            "last_error": "the file is gone",
        },
    ),
    "survey": (
        Survey(
            round=7,
            plan_hash=SHA.hex(),
            wants="evaluation",
            levels=(1.0, 0.5),
            groups=({"hidden": (0, 1, 2, 3)}, {"hidden": (0, 2)}),
            rescale=0.5,
            samples=256,
            batch_size=32,
            wait_s=60.0,
            devices=("pi-4", "tv"),
            run=RUN,
            model=Blob(900, (A,)),
            statistics=Blob(200, (B,)),
        ),
        {
            "round": 7,
            "plan_hash": SHA.hex(),
            "wants": "evaluation",
            "levels": [1.0, 0.5],
            "groups": [{"hidden": [0, 1, 2, 3]}, {"hidden": [0, 2]}],
            "rescale": 0.5,
            "samples": 256,
            "batch_size": 32,
            "wait_s": 60.0,
            "devices": ["pi-4", "tv"],
            "run": RUN,
            "model": {"size": 900, "chunks": A},
            "statistics": {"size": 200, "chunks": B},
        },
    ),
    "finding": (
        SurveyFinding(
            device="pi-4",
            round=7,
            wants="statistics",
            level=0.5,
            samples=90,
            run=RUN,
            means={"norm.running_mean": bytes(8)},
            m2s={"norm.running_var": bytes(8)},
        ),
        {
            "device": "pi-4",
            "round": 7,
            "wants": "statistics",
            "level": 0.5,
            "samples": 90,
            "run": RUN,
            "reason": "",
            "means": {"norm.running_mean": bytes(8)},
            "m2s": {"norm.running_var": bytes(8)},
            "accuracy": None,
        },
    ),
    "claim": (Claim(run=RUN), {"run": RUN}),
    "echo": (Echo(number=12), {"number": 12}),
}
EPOCH = Epoch(7, "fedcba9876543210")
EVERY = pytest.mark.parametrize("kind", TYPES)


def golden(kind: str) -> bytes:
    return (DATA / f"message_{kind}_v1.bin").read_bytes()


def content(kind: str, **changes: Any) -> bytes:
    """An example's map, with some entries changed; `...` takes one away."""
    entries = {"v": 1, "type": kind, **EXAMPLES[kind][1], **changes}
    data: bytes = msgpack.packb({name: each for name, each in entries.items() if each is not ...})
    return data


# -- version 1 -----------------------------------------------------------------------------------


@EVERY
def test_message_is_the_golden_file(kind: str) -> None:
    message = EXAMPLES[kind][0]
    assert type(message) is TYPES[kind]
    assert encode_message(message) == golden(kind)
    assert decode_message(golden(kind)) == message


@EVERY
def test_golden_file_is_as_the_format_is_described(kind: str) -> None:
    assert golden(kind) == content(kind)


def test_field_that_was_added_is_written_only_if_it_is_set() -> None:
    """So all other messages stay as they were, to the byte."""
    message = EXAMPLES["round_open"][0]
    assert isinstance(message, RoundOpen)
    assert b"by_invitation" not in encode_message(message)
    announced = replace(message, by_invitation=True)
    assert encode_message(announced) == content("round_open", by_invitation=True)
    assert decode_message(encode_message(announced)) == announced
    known = replace(message, statistics=Blob(200, (B,)))
    statistics = {"size": 200, "chunks": B}
    assert encode_message(known) == content("round_open", statistics=statistics)
    assert decode_message(encode_message(known)) == known
    assert b"largest" not in encode_message(message)
    growing = replace(message, largest=0.25)
    assert encode_message(growing) == content("round_open", largest=0.25)
    assert decode_message(encode_message(growing)) == growing
    assert b"classes" not in encode_message(message)
    own = replace(message, local_rule=replace(message.local_rule, classes="own"))
    assert b"classes\xa3own" in encode_message(own)
    assert decode_message(encode_message(own)) == own
    silent = Condition(device="pi-4")
    alone = {"v": 1, "type": "condition", "device": "pi-4"}
    assert encode_message(silent) == msgpack.packb(alone)
    assert decode_message(encode_message(silent)) == silent
    gone = Presence(name="pi-4", session=12, online=False, reason="no data", exit_code=3)
    said = content("presence", online=False, reason="no data", exit_code=3)
    assert encode_message(gone) == said
    assert decode_message(said) == gone


def test_round_with_variates_names_the_global_one() -> None:
    message = EXAMPLES["round_open"][0]
    assert isinstance(message, RoundOpen)
    assert b"variates" not in encode_message(message)
    varied = replace(message, variates=True, control=Blob(20, (b"a" * 16,)))
    written = content("round_open", variates=True, control={"size": 20, "chunks": b"a" * 16})
    assert encode_message(varied) == written
    assert decode_message(written) == varied
    with pytest.raises(MessageError, match="control is the global variate"):
        replace(message, control=Blob(20, (b"a" * 16,)))


@EVERY
def test_every_field_of_a_message_travels(kind: str) -> None:
    assert list(FORMS[TYPES[kind]]) == [each.name for each in fields(TYPES[kind])]


def test_every_field_of_values_in_messages_travels() -> None:
    assert list(BLOB_FORMS) == [each.name for each in fields(Blob)]
    assert list(RULE_FORMS) == [each.name for each in fields(LocalRule)]


def test_document_names_every_message_and_field() -> None:
    """Each section has a table with a row for every field, and for nothing else."""
    text = DOCUMENT.read_text()
    described = {
        **{
            kind: [form.name or name for name, form in FORMS[cls].items()]
            for kind, cls in TYPES.items()
        },
        "blob": list(BLOB_FORMS),
        "rule": list(RULE_FORMS),
        "movement": [*MOVEMENT_FORMS, "statistics"],
    }
    for kind, names in described.items():
        section = re.search(rf"^#+ `{kind}`\n(.*?)(?=^#|\Z)", text, flags=re.DOTALL | re.MULTILINE)
        assert section is not None, f"docs/protocol.md has no section on {kind}"
        rows = re.findall(r"^\| `(\w+)` \|", section[1], flags=re.MULTILINE)
        assert rows == names, kind


def test_document_names_every_topic() -> None:
    text = DOCUMENT.read_text()
    for kind in TopicKind:
        assert f"| `{kind.value}` |" in text


# -- what may differ -----------------------------------------------------------------------------


@EVERY
def test_unknown_fields_are_ignored(kind: str) -> None:
    assert decode_message(content(kind, later={"x": [1, None]})) == EXAMPLES[kind][0]


@EVERY
def test_missing_fields_take_their_default_or_are_named(kind: str) -> None:
    message = EXAMPLES[kind][0]
    for entry in fields(message):
        name = FORMS[type(message)][entry.name].name or entry.name
        data = content(kind, **{name: ...})
        try:
            default = replace(message, **{entry.name: _default(entry)})
        except LookupError:
            with pytest.raises(MessageError, match=f"{name!r} is missing"):
                decode_message(data)
        else:
            assert decode_message(data) == default


def _default(entry: Any) -> Any:
    if callable(entry.default_factory):
        return entry.default_factory()
    if entry.default is entry.default_factory:  # both are MISSING
        raise LookupError
    return entry.default


def test_whole_numbers_stand_for_floats() -> None:
    assert decode_message(content("bid", level=1)) == replace(_bid(), level=1.0)


def _bid() -> Bid:
    message = EXAMPLES["bid"][0]
    assert isinstance(message, Bid)
    return message


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0, [1]])
def test_other_versions_are_refused_naming_both(version: Any) -> None:
    with pytest.raises(MessageError, match=rf"version {re.escape(repr(version))} .* has 1"):
        decode_message(content("bid", v=version))


@pytest.mark.parametrize("kind", ["", "bids", "movement", None, 3, ["bid"], {}])
def test_unknown_types_are_refused(kind: Any) -> None:
    with pytest.raises(MessageError, match="unknown type"):
        decode_message(content("bid", type=kind))


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("bid", "device", [None, 3, "", "a/b", "+", "#", "Pi", "-a", "a" * 65, "pi\n", b"pi"]),
        ("bid", "round", [None, -1, 1.0, "1", True, MAX_COUNT + 1, 2**64 - 1]),
        ("bid", "level", ["1", True, 0, -0.5, 1.01, float("nan"), float("inf"), [0.5]]),
        ("bid", "reason", [None, "", "x" * (MAX_REASON_CHARACTERS + 1), b"x"]),
        ("bid", "replays", [None, 0, "yes", True]),
        ("bid", "compute", [0, -1.0, float("inf")]),
        ("bid", "run", [None, "0123", RUN.upper(), RUN + "0", 7]),
        ("round_open", "plan_hash", [None, "", "0" * 63, "G" * 64, SHA]),
        ("round_open", "rule", [None, [], {}, {"learning_rate": 0}, {"learning_rate": "1"}]),
        ("round_open", "encoding", [None, "fp8", "top-k:2", "top-k:" + "1" * 100, 32]),
        ("round_open", "steps", [0, -1]),
        ("round_open", "bid_s", [0, float("inf"), float("nan"), None]),
        ("round_open", "model", [5, [], {}, {"size": 1}, {"size": 1, "chunks": b""}]),
        ("round_open", "model", [{"size": 0, "chunks": A}, {"size": 9, "chunks": A[:15]}]),
        ("round_open", "model", [{"size": 1, "chunks": A + B}, {"size": -1, "chunks": A}]),
        ("round_open", "model", [{"size": 2**41, "chunks": A}, {"size": 9, "chunks": [A]}]),
        ("assignment", "groups", [None, [], [["a", [1]]], {"a": 1}, {"a": []}, {"a": [64]}]),
        ("assignment", "groups", [{"a": [1, 1]}, {"a": [-1]}, {"a": [True]}, {"a": [0.0]}]),
        ("assignment", "groups", [{"a": list(range(65))}, {b"a": [1]}]),
        ("receipt", "outcome", [None, "lost", "COUNTED", 1, [], {}]),
        ("task_notice", "run", ["", "x"]),
        ("task_notice", "chunk_bytes", [0, 1023, 2**20 + 1]),
        ("task_notice", "graphs", [None, [], {"x": {"size": 0, "chunks": b""}}, {SHA.hex(): 1}]),
        ("presence", "session", [-1, 1.5]),
        ("presence", "online", [1, None]),
        ("offer", "upload", [b"", A[:15], A + b"x", "x" * 16, None]),
        ("offer", "sha256", [b"", SHA[:31], SHA.hex()]),
        ("offer", "size", [0, 2**40 + 1]),
        ("offer", "answers", [7, 6, 0, "9"]),
        ("offer", "round", [0]),
        ("offer", "chunk_bytes", [0, 1, 2**21]),
        ("credit", "missing", [None, {}, [1], [[1]], [[1, 2, 3]], [[2, 2]], [[3, 2]], [["a", 2]]]),
        ("credit", "missing", [[[0, 2], [2, 3]], [[5, 6], [0, 1]], [[-1, 2]], []]),
        ("credit", "missing", [[[2 * n, 2 * n + 1] for n in range(MAX_RANGES + 1)]]),
        ("credit", "window", [-1, 1025, None]),
        ("credit", "refused", [True]),
        ("want", "chunks", [b"", A[:15], [A], None, A * (MAX_WANTED + 1)]),
        ("evaluation", "loss", [float("nan"), float("inf"), None, 1e308, -1e308]),
        ("evaluation", "accuracy", [-0.1, 1.1]),
        ("evaluation", "samples", [0, 2**41]),
        ("evaluation", "run", [""]),
        ("model_notice", "levels", [[], [0.5, 1.0], [1.0], [1.0, 1.0], [1.0, 0.0], 1.0]),
        ("model_notice", "groups", [[], [{}], {"a": [1]}, [{"a": []}, {}]]),
        ("model_notice", "accuracies", [[], [0.5], [0.5, 1.5], [0.5, "1"], None, 0.5]),
        ("model_notice", "rescale", [-1.0, float("nan"), None]),
        ("model_notice", "round", [0, -1, None]),
        ("model_notice", "run", ["", "x", None]),
        ("model_notice", "model", [None, {}, 5]),
        ("survey", "wants", ["", "both", None, 1]),
        ("survey", "levels", [[], [0.5, 1.0], [1.0], [1.0, 1.0], [2.0, 0.5], [1.0, 0.0], 1.0]),
        ("survey", "groups", [[], [{}], {"a": [1]}, [{"a": []}, {}], [{}] * 65]),
        ("survey", "rescale", [-1.0, float("nan"), None]),
        ("survey", "samples", [0, -1, MAX_SURVEY_SAMPLES + 1]),
        ("survey", "batch_size", [0]),
        ("survey", "wait_s", [0, float("inf"), None]),
        ("survey", "devices", [None, "pi", ["a/b"], [1], ["pi"] * 1001]),
        ("finding", "wants", ["", "loss", None]),
        ("finding", "level", [0, 1.5, None, float("nan")]),
        ("finding", "samples", [0, -1, 2**41]),
        ("finding", "means", [None, [], {"m": bytes(3)}, {"m": [0.0]}, {"m": "abcd"}]),
        ("finding", "m2s", [None, {"v": bytes(5)}, {"v": "abcd"}]),
        ("finding", "accuracy", [-0.1, 1.1, float("nan")]),
        ("condition", "battery", [-0.01, 1.01, float("nan"), "1", True]),
        ("condition", "charging", [0, "yes"]),
        ("condition", "temperature_c", [-101, 301, float("inf")]),
        ("condition", "memory_free_mb", [-1, 2**30 + 1]),
        ("condition", "memory_mb", [-1, 2**30 + 1]),
        ("condition", "energy_today_j", [-1.0, 1.1e9]),
        ("condition", "energy_budget_j", [-1.0, 1.1e9]),
        ("condition", "labels", [None, [], {"site": 1}, {"Site": "x"}, {"a/b": "x"}, {b"a": "x"}]),
        ("condition", "labels", [{"site": ""}, {"site": "x" * 65}, {"site": "\x1b[2J"}]),
        ("condition", "labels", [{f"l{number}": "x" for number in range(MAX_LABELS + 1)}]),
        ("condition", "profile", ["", "a b", "../x"]),
        ("condition", "version", ["", "1" * 41, 1]),
        ("condition", "last_error", ["x" * (MAX_REASON_CHARACTERS + 1), 3]),
    ],
)
def test_wrong_values_are_refused(kind: str, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(MessageError, match=f"^{kind}: "):
            decode_message(content(kind, **{name: value}))


def test_too_many_bytes_are_refused_before_they_are_looked_at() -> None:
    filler = MAX_CONTROL_BYTES - len(content("bid", later=b""))
    most = content("bid", later=bytes(filler - 4))
    assert len(most) <= MAX_CONTROL_BYTES < len(most) + 5
    assert decode_message(most) == _bid()
    with pytest.raises(MessageError, match="too many for a message"):
        decode_message(b"\xc1" * (MAX_CONTROL_BYTES + 1))


def test_message_that_is_too_large_is_not_sent() -> None:
    blob = Blob(2**30, (A,) * (MAX_CONTROL_BYTES // 16))
    opened = EXAMPLES["round_open"][0]
    assert isinstance(opened, RoundOpen)
    with pytest.raises(MessageError, match="too large to send"):
        encode_message(replace(opened, model=blob))


def test_message_that_would_be_refused_is_not_sent() -> None:
    for wrong in (
        replace(_bid(), device="a/b"),
        replace(_bid(), run="x"),
        replace(_bid(), round=2**53 + 1),
    ):
        with pytest.raises(MessageError, match="is wrong"):
            encode_message(wrong)


def test_long_or_broken_reason_is_sent_as_far_as_possible() -> None:
    receipt = Receipt(device="pi", round=1, outcome=Outcome.REJECTED, reason="\udcff" + "x" * 900)
    read = decode_message(encode_message(receipt))
    assert isinstance(read, Receipt)
    assert read.reason == "?" + "x" * (MAX_REASON_CHARACTERS - 1)


def test_field_that_is_there_twice_is_refused() -> None:
    data = content("round_closed")
    twice = bytes([data[0] + 1]) + data[1:] + msgpack.packb("round") + msgpack.packb(8)
    with pytest.raises(MessageError, match="twice"):
        decode_message(twice)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x01",
        b"\x90",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff" + bytes(100),
        b"\x91" * 100_000,
        b"\x81\xa1k" * 80_000,
        b"\xdc\xff\xff" + b"\x80" * 0xFFFF,
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="not a message"):
        decode_message(data)


# -- topics --------------------------------------------------------------------------------------


def topic_for(kind: TopicKind) -> Topic:
    device = "pi-4" if "<device>" in kind.value else None
    return Topic("digits", kind, device)


@pytest.mark.parametrize("topic", TopicKind)
@EVERY
def test_message_is_accepted_on_its_topics_only(kind: str, topic: TopicKind) -> None:
    if TYPES[kind] in ON_TOPIC.get(topic, ()):
        assert decode_received(topic_for(topic), golden(kind)) == EXAMPLES[kind][0]
    else:
        with pytest.raises(MessageError, match="does not belong"):
            decode_received(topic_for(topic), golden(kind))


@pytest.mark.parametrize("topic", TopicKind)
@pytest.mark.parametrize("kind", EXAMPLES)
def test_message_looks_like_one_on_its_topics_only(kind: str, topic: TopicKind) -> None:
    turned = dict(reversed(msgpack.unpackb(golden(kind), strict_map_key=False).items()))
    for data in (golden(kind), msgpack.packb(turned)):  # whatever the order of its fields
        assert may_be_message(topic, data) == (TYPES[kind] in ON_TOPIC.get(topic, ()))
        assert not may_be_message(topic, data.replace(b"\xa4type", b"\xa4typo"))


@pytest.mark.parametrize("data", [b"", b"\xa4type", b"\xa4type\xa3big", bytes(1000), b"bid"])
def test_garbage_does_not_look_like_a_message(data: bytes) -> None:
    assert not any(may_be_message(topic, data) for topic in TopicKind)


def test_every_message_has_a_topic() -> None:
    assert {cls for allowed in ON_TOPIC.values() for cls in allowed} == set(TYPES.values())


@EVERY
def test_message_that_names_another_device_is_refused(kind: str) -> None:
    own = [topic for topic, allowed in ON_TOPIC.items() if TYPES[kind] in allowed]
    for topic in own:
        if "<device>" in topic.value and {"device", "name"} & set(FORMS[TYPES[kind]]):
            with pytest.raises(MessageError, match="'pi-4' on the topic of 'thief'"):
                decode_received(Topic("digits", topic, "thief"), golden(kind))


# -- stamps --------------------------------------------------------------------------------------


def test_stamped_message_is_the_golden_file() -> None:
    data = (DATA / "message_stamped_v1.bin").read_bytes()
    message = EXAMPLES["receipt"][0]
    assert encode_message(message, EPOCH) == data
    assert data == content("receipt", epoch=[7, "fedcba9876543210"])
    assert decode_stamped(topic_for(TopicKind.DOWN_CONTROL), data) == (message, EPOCH)


@EVERY
def test_stamp_changes_nothing_else(kind: str) -> None:
    """So a program that knows no stamps reads the message as before."""
    message = EXAMPLES[kind][0]
    topic = next(each for each, allowed in ON_TOPIC.items() if type(message) in allowed)
    stamped, plain = encode_message(message, EPOCH), encode_message(message)
    unpacked = msgpack.unpackb(stamped)
    assert unpacked.pop("epoch") == [7, "fedcba9876543210"]
    assert unpacked == msgpack.unpackb(plain)
    assert decode_message(stamped) == message
    assert decode_stamped(topic_for(topic), stamped) == (message, EPOCH)
    assert decode_stamped(topic_for(topic), plain) == (message, None)


@pytest.mark.parametrize(
    "stamp",
    [
        7,
        "7",
        [],
        [7],
        [7, "fedcba9876543210", 1],
        [0, "fedcba9876543210"],
        [-1, "fedcba9876543210"],
        [7.0, "fedcba9876543210"],
        [True, "fedcba9876543210"],
        [MAX_COUNTER + 1, "fedcba9876543210"],
        [7, "FEDCBA9876543210"],
        [7, ""],
        [7, b"fedcba9876543210"],
        {7: "fedcba9876543210"},
    ],
)
def test_wrong_stamp_is_refused(stamp: Any) -> None:
    with pytest.raises(MessageError):
        decode_stamped(topic_for(TopicKind.ROUND), content("round_closed", epoch=stamp))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1))
def test_epochs_are_ordered_by_counter_then_instance(pairs: list[tuple[int, int]]) -> None:
    epochs = [Epoch(counter, f"{instance:016x}") for counter, instance in pairs]
    assert max(epochs) == Epoch(max(pairs)[0], f"{max(pairs)[1]:016x}")
    later = next_epoch("0" * 16, None, *epochs)
    assert all(later > each for each in epochs)
    assert later.counter == 1 + max(each.counter for each in epochs)


def test_first_epoch_has_counter_one_and_none_is_longer_than_the_longest() -> None:
    assert next_epoch(EPOCH.instance).counter == 1
    assert EPOCH < LONGEST


def test_notice_of_another_task_is_refused() -> None:
    with pytest.raises(MessageError, match="'digits' on the topic of 'other'"):
        decode_received(parse_topic(Topics("other").task), golden("task_notice"))
