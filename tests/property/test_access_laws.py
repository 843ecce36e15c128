"""Access rules beside an independent reading of MQTT's and Mosquitto's documents.

The oracle knows nothing of the writer: it reads the file line by line, splits filters and topics at
the slashes as MQTT 4.7 has it, and grants what a line grants.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from coordinator.operate.identity.mosquitto import access_rules
from edge_sdk.protocol.messages.topics import BULK, Topics

NAMES = ["a", "b", "a-b", "ab", "a.b", "robot", "t", "pub", "up", "x" * 59]
TASKS = ["t", "u", "tu", "t-u", "pub", "up", "down", "presence", "a", "y" * 64]
HASH = bytes(16)

names = st.sampled_from(NAMES)
allowances = st.none() | st.lists(st.sampled_from(TASKS), max_size=3, unique=True).map(tuple)
fleets = st.dictionaries(names, allowances, max_size=5)


def covers(topic_filter: list[str], topic: list[str]) -> bool:
    """MQTT 3.1.1, 4.7: `+` is one level, `#` the level above it and all below."""
    if topic_filter == ["#"]:
        return True
    if not topic_filter or not topic:
        return not topic_filter and not topic
    return topic_filter[0] in ("+", topic[0]) and covers(topic_filter[1:], topic[1:])


def grants(rules: str, user: str, topic: str) -> set[str]:
    """What a user may do with a topic, by mosquitto.conf(5), "acl_file"."""
    rights: set[str] = set()
    section: str | None = None
    for line in rules.splitlines():
        if not line or line.startswith("#"):
            continue
        word, rest = line.split(" ", 1)
        if word == "user":
            section = rest
            continue
        assert word == "topic", line  # patterns would be for everybody
        access, topic_filter = rest.split(" ")
        if section == user and covers(topic_filter.split("/"), topic.split("/")):
            rights |= {"read", "write"} if access == "readwrite" else {access}
    return rights


def wanted(
    user: str, fleet: Mapping[str, tuple[str, ...] | None], task: str
) -> dict[str, set[str]]:
    """What a user may do with every topic of a task, in plain words."""
    topics = Topics(task)
    public = [topics.epoch, topics.task, topics.round, topics.coordinator, topics.chunk(HASH)]
    rights = {topic: set[str]() for topic in (*public, topics.echo)}
    for each in NAMES:
        for topic in (
            topics.down_control(each),
            topics.down_chunk(each, HASH),
            topics.up_control(each),
            topics.up_chunk(each),
            topics.presence(each),
        ):
            rights[topic] = set()
    owner = user.removesuffix(BULK)
    tasks = fleet.get(owner, ())
    if owner in fleet and (tasks is None or task in tasks):
        for topic in (*public, topics.echo):
            rights[topic] = {"read"}
        if user == owner:
            rights[topics.down_control(owner)] = {"read"}
            rights[topics.up_control(owner)] = {"write"}
            rights[topics.presence(owner)] = {"read", "write"}
        else:
            rights[topics.down_chunk(owner, HASH)] = {"read"}
            rights[topics.up_chunk(owner)] = {"write"}
    return rights


@given(fleet=fleets, name=names, bulk=st.booleans(), task=st.sampled_from(TASKS))
def test_a_device_has_exactly_the_rights_of_its_tasks(
    fleet: dict[str, tuple[str, ...] | None], name: str, bulk: bool, task: str
) -> None:
    rules = access_rules(["coordinator"], fleet)
    user = name + BULK if bulk else name
    for topic, rights in wanted(user, fleet, task).items():
        assert grants(rules, user, topic) == rights, (user, topic)


@given(fleet=fleets, leaving=fleets, name=names, bulk=st.booleans(), task=st.sampled_from(TASKS))
def test_a_revoked_device_may_only_say_that_it_is_gone(
    fleet: dict[str, tuple[str, ...] | None],
    leaving: dict[str, tuple[str, ...] | None],
    name: str,
    bulk: bool,
    task: str,
) -> None:
    gone = {each: tasks for each, tasks in leaving.items() if each not in fleet}
    rules, user = access_rules(["coordinator"], fleet, gone), name + BULK if bulk else name
    was = wanted(user, gone, task) if name in gone else wanted(user, fleet, task)
    for topic, rights in was.items():
        presence = topic == Topics(task).presence(name)
        left = rights & {"write"} if presence else set()
        assert grants(rules, user, topic) == (left if name in gone else rights), (user, topic)


@given(fleet=fleets, other=names, task=st.sampled_from(TASKS))
def test_coordinators_may_do_all_and_nobody_else_is_one(
    fleet: dict[str, tuple[str, ...] | None], other: str, task: str
) -> None:
    rules = access_rules(["coordinator", "coordinator-eu"], fleet)
    for topic in wanted("nobody", fleet, task):
        for user in ("coordinator", "coordinator-bulk", "coordinator-eu", "coordinator-eu-bulk"):
            assert grants(rules, user, topic) == {"read", "write"}
        assert grants(rules, "nobody", topic) == set()
    assert grants(rules, other, "tessera/v2/t/pub/task") == set()
    assert grants(rules, other, "elsewhere") == set()
