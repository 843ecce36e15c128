"""Topics: built and parsed, each the inverse of the other."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import (
    MAX_TOPIC_CHARACTERS,
    Topic,
    TopicKind,
    Topics,
    check_device,
    check_name,
    parse_topic,
)

HASH = bytes(range(16))
HEX = "000102030405060708090a0b0c0d0e0f"
TOPICS = Topics("digits")

BUILT = [
    (TOPICS.epoch, "pub/epoch", Topic("digits", TopicKind.EPOCH)),
    (TOPICS.echo, "pub/echo", Topic("digits", TopicKind.ECHO)),
    (TOPICS.task, "pub/task", Topic("digits", TopicKind.TASK)),
    (TOPICS.round, "pub/round", Topic("digits", TopicKind.ROUND)),
    (TOPICS.coordinator, "pub/coordinator", Topic("digits", TopicKind.COORDINATOR)),
    (TOPICS.model("latest"), "pub/latest", Topic("digits", TopicKind.LATEST)),
    (TOPICS.model("best"), "pub/best", Topic("digits", TopicKind.BEST)),
    (TOPICS.chunk(HASH), f"pub/chunk/{HEX}", Topic("digits", TopicKind.CHUNK, None, HASH)),
    (
        TOPICS.down_control("pi-4"),
        "down/pi-4/control",
        Topic("digits", TopicKind.DOWN_CONTROL, "pi-4"),
    ),
    (
        TOPICS.down_chunk("pi-4", HASH),
        f"down/pi-4-bulk/chunk/{HEX}",
        Topic("digits", TopicKind.DOWN_CHUNK, "pi-4", HASH),
    ),
    (TOPICS.up_control("pi-4"), "up/pi-4/control", Topic("digits", TopicKind.UP_CONTROL, "pi-4")),
    (TOPICS.up_chunk("pi-4"), "up/pi-4-bulk/chunk", Topic("digits", TopicKind.UP_CHUNK, "pi-4")),
    (TOPICS.presence("pi-4"), "presence/pi-4", Topic("digits", TopicKind.PRESENCE, "pi-4")),
    (TOPICS.view_status, "view/status", Topic("digits", TopicKind.VIEW_STATUS)),
    (TOPICS.view_fleet, "view/fleet", Topic("digits", TopicKind.VIEW_FLEET)),
]


@pytest.mark.parametrize(("topic", "text", "parts"), BUILT)
def test_topic_is_as_documented_and_parsed_again(topic: str, text: str, parts: Topic) -> None:
    assert topic == f"tessera/v1/digits/{text}"
    assert parse_topic(topic) == parts


def test_every_kind_of_topic_can_be_built() -> None:
    assert [parts.kind for _, _, parts in BUILT] == list(TopicKind)


def matches(topic_filter: str, topic: str) -> bool:
    """MQTT's rule: `+` is one level, `#` the rest."""
    pattern = re.escape(topic_filter).replace(r"\+", "[^/]+").replace(r"\#", ".*")
    return re.fullmatch(pattern, topic) is not None


@pytest.mark.parametrize(
    ("topic_filter", "kinds"),
    [
        (TOPICS.up_controls, {TopicKind.UP_CONTROL}),
        (TOPICS.up_chunks, {TopicKind.UP_CHUNK}),
        (TOPICS.presences, {TopicKind.PRESENCE}),
        (TOPICS.down_chunks("pi-4"), {TopicKind.DOWN_CHUNK}),
        (TOPICS.down_chunks("pi-5"), set()),
        (Topics("other").up_controls, set()),
    ],
)
def test_filter_matches_its_topics_only(topic_filter: str, kinds: set[TopicKind]) -> None:
    assert {parts.kind for topic, _, parts in BUILT if matches(topic_filter, topic)} == kinds


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "0",
        "pi-4",
        "a.b_c-d",
        "a" * 59,
        "9-",
        "bulk",
        "a-bulk-a",
        "coordinators",
        "a.coordinator",
        "viewers",
    ],
)
def test_name_that_fits_is_kept(name: str) -> None:
    assert check_name(name) == check_device(name) == name
    assert parse_topic(Topics(name).up_chunk(name)).device == name


@pytest.mark.parametrize(
    "name", ["", "A", "-a", ".a", "_", "a" * 65, "a/b", "+", "#", "a+", "ä", "a b", "a\n", "$sys"]
)
def test_name_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(MessageError, match="cannot name a device"):
        TOPICS.up_control(name)
    with pytest.raises(MessageError, match="cannot name a task"):
        Topics(name)
    with pytest.raises(MessageError):
        parse_topic(f"tessera/v1/digits/up/{name}/control")
    with pytest.raises(MessageError):
        parse_topic(f"tessera/v1/{name}/pub/task")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pi-bulk", "reserved for connections"),
        ("a" * 60, "60 characters"),
        ("coordinator", "reserved for coordinators"),
        ("coordinator-2", "reserved for coordinators"),
    ],
)
def test_name_that_devices_may_not_have_is_refused_everywhere(name: str, why: str) -> None:
    for build in (TOPICS.up_control, TOPICS.up_chunk, TOPICS.presence, TOPICS.down_chunks):
        with pytest.raises(MessageError, match=why):
            build(name)
    for text in (f"up/{name}/control", f"up/{name}-bulk/chunk", f"presence/{name}"):
        with pytest.raises(MessageError):
            parse_topic(f"tessera/v1/digits/{text}")


def test_task_may_not_look_like_the_bulk_connection_of_another() -> None:
    with pytest.raises(MessageError, match="'x-bulk' cannot name a task"):
        Topics("x-bulk")
    assert parse_topic(Topics("coordinator").task).task == "coordinator"


def test_connection_that_writes_where_the_other_should_is_no_topic() -> None:
    for text in ("up/pi/chunk", "up/pi-bulk/control", f"down/pi/chunk/{HEX}", "presence/pi-bulk"):
        with pytest.raises(MessageError):
            parse_topic(f"tessera/v1/digits/{text}")


@pytest.mark.parametrize("hash", [b"", HASH[:15], HASH + b"x"])
def test_hash_of_another_length_is_refused(hash: bytes) -> None:
    with pytest.raises(MessageError, match="hash"):
        TOPICS.chunk(hash)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tessera/v1",
        "tessera/v2/digits/pub/task",
        "tessera/v1/digits",
        "tessera/v1/digits/",
        "tessera/v1/digits/pub",
        "tessera/v1/digits/pub/task/",
        "tessera/v1/digits/pub/task\n",
        "/tessera/v1/digits/pub/task",
        "tessera/v1/digits/pub/chunk/",
        f"tessera/v1/digits/pub/chunk/{HEX.upper()}",
        f"tessera/v1/digits/pub/chunk/{HEX[:-1]}",
        f"tessera/v1/digits/pub/chunk/{HEX}0",
        "tessera/v1/digits/up/pi-bulk/chunk/0",
        "tessera/v1/digits/up/-bulk/chunk",
        "tessera/v1/digits/up/+/control",
        "tessera/v1/digits/up//control",
        "tessera/v1/digits/" + "a" * 100_000,
    ],
)
def test_other_text_is_no_topic(text: str) -> None:
    with pytest.raises(MessageError):
        parse_topic(text)


@settings(max_examples=200)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(
                ["pub", "up", "down", "chunk", "control", "task", "pi", "pi-bulk", HEX, "", "+"]
            ),
            max_size=6,
        ).map(lambda parts: "tessera/v1/" + "/".join(parts)),
    )
)
def test_parse_gives_a_topic_that_builds_the_text_or_refuses(text: str) -> None:
    try:
        topic = parse_topic(text)
    except MessageError:
        return
    form = topic.kind.value.replace("<device>", topic.device or "")
    if topic.hash is not None:
        form = form.replace("<hash>", topic.hash.hex())
    assert text == f"tessera/v1/{topic.task}/{form}"


def test_longest_topic_fits() -> None:
    longest = Topics("t" * 64).down_chunk("d" * 59, HASH)
    assert len(longest) <= MAX_TOPIC_CHARACTERS
    assert parse_topic(longest).device == "d" * 59
    assert len(longest) == 184
