"""Filters against a naive oracle: a regular expression made from the filter."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.transport.filters import check_filter, check_topic, matches
from edge_sdk.transport.settings import LinkError

level = st.sampled_from(["", "a", "b", "ab", "$a"])
topics = st.lists(level, min_size=1, max_size=4).map("/".join).filter(bool)
filters = (
    st.tuples(st.lists(level | st.just("+"), max_size=4), st.booleans())
    .map(lambda parts: "/".join([*parts[0], *(["#"] if parts[1] else [])]))
    .filter(bool)
)


def fits(topic: str, topic_filter: str) -> bool:
    if topic.startswith("$") and topic_filter[0] in "+#":
        return False
    pattern = re.escape(topic_filter).replace(r"\+", "[^/]*").replace(r"\#", "#")
    if pattern == "#":
        pattern = ".*"
    elif pattern.endswith("/#"):
        pattern = pattern.removesuffix("/#") + "(/.*)?"
    return re.fullmatch(pattern, topic) is not None


@given(topics, filters)
def test_filter_fits_as_the_expression_does(topic: str, topic_filter: str) -> None:
    check_topic(topic)
    check_filter(topic_filter)
    assert matches(topic, topic_filter) == fits(topic, topic_filter)


@given(topics)
def test_topic_fits_itself(topic: str) -> None:
    assert matches(topic, topic)


@pytest.mark.parametrize("text", ["", "a\0", "x" * 65_536])
def test_topic_that_mqtt_cannot_carry_is_refused(text: str) -> None:
    with pytest.raises(LinkError):
        check_topic(text)
    with pytest.raises(LinkError):
        check_filter(text)


@pytest.mark.parametrize("text", ["#/a", "a#", "a/b#", "+a", "a/+b/c", "##"])
def test_filter_with_a_misplaced_wildcard_is_refused(text: str) -> None:
    with pytest.raises(LinkError):
        check_filter(text)
