"""Partitions of labelled data over devices: laws that hold for any labels and devices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator import (
    dirichlet_parts,
    iid_parts,
    key_parts,
    label_parts,
    own_test_parts,
    shard_parts,
)
from coordinator.errors import ConfigError
from edge_sdk import stream
from tests.property.strategies import law

Labels = NDArray[np.int64]
Split = Callable[[Labels, int, int], list[Labels]]
"""Labels, devices and a seed."""

few = settings(law, max_examples=40)
labelled = st.builds(
    lambda samples, classes, seed: np.random.default_rng(seed).integers(0, classes, samples),
    st.integers(40, 400),
    st.integers(1, 7),
    st.integers(0, 99),
)
SPLITS: dict[str, Split] = {
    "iid": lambda y, n, seed: iid_parts(y, n, stream(seed, "iid"), least=2),
    "dirichlet": lambda y, n, seed: dirichlet_parts(y, n, stream(seed, "d"), alpha=0.2, least=2),
    "labels": lambda y, n, seed: label_parts(y, n, stream(seed, "labels"), classes_each=1, least=0),
    "shards": lambda y, n, seed: shard_parts(y, n, stream(seed, "shards"), least=2),
    "key": lambda y, _, __: key_parts(y),
}


def counts(labels: Labels, parts: list[Labels]) -> NDArray[np.int64]:
    """Samples of each class on each device: devices × classes."""
    return np.array([np.bincount(labels[rows], minlength=labels.max() + 1) for rows in parts])


@pytest.mark.parametrize("name", SPLITS)
@few
@given(labels=labelled, devices=st.integers(7, 10), seed=st.integers(0, 9))
def test_every_sample_is_in_one_part_and_the_same_stream_gives_the_same(
    name: str, labels: Labels, devices: int, seed: int
) -> None:
    try:
        parts = SPLITS[name](labels, devices, seed)
    except ConfigError:
        assert name == "labels"  # a class with fewer samples than owners
        return
    assert len(parts) == (len(np.unique(labels)) if name == "key" else devices)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all((np.diff(rows) > 0).all() for rows in parts)
    if name not in ("labels", "key"):
        assert min(map(len, parts)) >= 2
    again, other = (SPLITS[name](labels, devices, seed + more) for more in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if name != "key":
        assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@few
@given(labels=labelled, devices=st.integers(1, 10))
def test_iid_parts_are_of_one_size(labels: Labels, devices: int) -> None:
    sizes = [len(rows) for rows in iid_parts(labels, devices, stream(3))]
    assert max(sizes) - min(sizes) <= 1


@few
@given(
    classes=st.integers(2, 7),
    devices=st.integers(4, 12),
    classes_each=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_devices_have_as_many_classes_as_they_should_and_owners_share_evenly(
    classes: int, devices: int, classes_each: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 50))
    if classes_each > classes or devices * classes_each < classes:
        with pytest.raises(ConfigError, match="classes"):
            label_parts(labels, devices, stream(seed), classes_each=classes_each)
        return
    held = counts(labels, label_parts(labels, devices, stream(seed), classes_each=classes_each))
    assert ((held > 0).sum(axis=1) == classes_each).all()
    owners = (held > 0).sum(axis=0)
    assert owners.max() - owners.min() <= 1
    for column in held.T:
        assert np.ptp(column[column > 0]) <= 1


@few
@given(devices=st.integers(2, 10), shards_each=st.integers(1, 4), seed=st.integers(0, 9))
def test_shards_hold_few_classes_and_equally_many_samples(
    devices: int, shards_each: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), 48))
    parts = shard_parts(labels, devices, stream(seed), shards_each=shards_each)
    sizes = [len(rows) for rows in parts]
    assert max(sizes) - min(sizes) <= shards_each
    # A shard is no longer than 240 / (2 · 1) samples, so it meets at most 4 of the classes of 48.
    longest = -(-len(labels) // (devices * shards_each))
    most = shards_each * (2 + (longest - 2) // 48)
    assert (counts(labels, parts) > 0).sum(axis=1).max() <= most


def test_shards_as_published_give_most_devices_two_labels() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    held = counts(labels, shard_parts(labels, 100, stream(0)))
    assert (held.sum(axis=1) == 60).all()
    assert (held > 0).sum(axis=1).max() == 2


def test_dirichlet_is_the_more_uneven_the_smaller_alpha() -> None:
    labels = np.repeat(np.arange(10), 500)

    def skew(alpha: float) -> float:
        """Mean over devices and seeds of the share of the commonest class."""
        shares = []
        for seed in range(5):
            held = counts(labels, dirichlet_parts(labels, 20, stream(seed), alpha=alpha))
            shares.append((held.max(axis=1) / held.sum(axis=1)).mean())
        return float(np.mean(shares))

    skews = [skew(alpha) for alpha in (0.05, 0.3, 1.0, 10.0, 1000.0)]
    assert all(more > less + 0.02 for more, less in pairwise(skews))
    assert skews[0] > 0.6
    assert skews[-1] < 0.12  # an even share is 0.1


def test_dirichlet_proportions_have_the_variance_of_the_distribution() -> None:
    labels, devices, alpha = np.zeros(1000, np.int64), 5, 0.5
    shares = np.array(
        [
            [len(rows) / 1000 for rows in dirichlet_parts(labels, devices, stream(s), alpha=alpha)]
            for s in range(200)
        ]
    )
    mean, total = 1 / devices, alpha * devices
    assert shares.mean(axis=0) == pytest.approx([mean] * devices, abs=0.05)
    assert shares.var() == pytest.approx(mean * (1 - mean) / (total + 1), rel=0.15)


def test_key_parts_are_those_of_each_key_in_order() -> None:
    keys = np.array([30, 7, 30, 12, 7, 30])
    assert [rows.tolist() for rows in key_parts(keys)] == [[1, 4], [3], [0, 2, 5]]
    with pytest.raises(ConfigError, match="device 1 would have 1 samples, fewer than 2"):
        key_parts(keys, least=2)


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (lambda y, s: iid_parts(y, 11, s), "10 samples are too few for 11 devices .* at most 10"),
        (lambda y, s: iid_parts(y, 3, s, least=4), "at most 2 devices, or more samples"),
        (lambda y, s: iid_parts(y, 0, s), "devices = 0 must be above 0"),
        (lambda y, s: iid_parts(y[:0], 1, s), "one label for each sample"),
        (lambda y, s: iid_parts(y.reshape(2, 5), 1, s), r"shape \(2, 5\)"),
        (lambda y, s: dirichlet_parts(y, 2, s, alpha=0.0), "alpha must be above 0, not 0.0"),
        (lambda y, s: label_parts(y, 1, s, classes_each=1), "cannot hold all 2 classes"),
        (lambda y, s: label_parts(y, 2, s, classes_each=3), "from 1 to 2 here, not 3"),
        (lambda y, s: label_parts(y, 6, s, classes_each=2), "class 0 has 5 samples for 6 devices"),
        (lambda y, s: shard_parts(y, 3, s, shards_each=4), "from 1 to 3 for 10 samples"),
        (lambda y, s: shard_parts(y, 3, s, shards_each=1, least=4), "too few"),
    ],
)
def test_impossible_partition_says_what_to_change(
    split: Callable[[Labels, np.random.Generator], list[Labels]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        split(np.arange(10) % 2, stream(0))


@few
@given(labels=labelled, test=labelled, devices=st.integers(1, 8), seed=st.integers(0, 9))
def test_own_test_data_is_of_the_classes_a_device_trains_with(
    labels: Labels, test: Labels, devices: int, seed: int
) -> None:
    parts = dirichlet_parts(labels, devices, stream(seed, "train"), alpha=0.3)
    own = own_test_parts(labels, parts, test, stream(seed, "test"))
    assert len(own) == devices
    rows = np.concatenate(own)
    assert len(set(rows.tolist())) == len(rows)
    known = np.isin(test, labels)
    assert sorted(rows.tolist()) == np.flatnonzero(known).tolist()
    for part, mine in zip(parts, own, strict=True):
        for label in range(8):
            held, all_held = np.sum(labels[part] == label), np.sum(labels == label)
            got, there = np.sum(test[mine] == label), np.sum(test == label)
            if all_held:
                assert abs(got - there * held / all_held) <= 1
            else:
                assert got == 0
