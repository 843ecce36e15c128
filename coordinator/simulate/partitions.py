"""Partitions of a labelled data set over devices: who has which samples.

    iid_parts         shuffled and dealt out evenly
    dirichlet_parts   each class is dealt out in proportions drawn from a Dirichlet distribution
    label_parts       each device has samples of so many classes
    shard_parts       sorted by label and cut; each device has so many of the pieces
    key_parts         one device for each key, such as a person
    own_test_parts    test data of their own, with the classes that each device trains with

Each returns, device by device, the rows it has, ascending: every sample is in exactly one part. The
same stream gives the same parts. `least` is the smallest number of samples that a device may have;
where that cannot be, `ConfigError` says what to change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.layout import Array, Indices

RowsByDevice = list[Indices]
"""Rows of each device."""


def iid_parts(
    labels: Array, devices: int, stream: np.random.Generator, *, least: int = 1
) -> RowsByDevice:
    """Deal out shuffled samples evenly, whatever their labels; sizes differ by one at most."""
    _check(labels, devices, least)
    return _sorted(np.array_split(stream.permutation(len(labels)), devices))


def dirichlet_parts(
    labels: Array,
    devices: int,
    stream: np.random.Generator,
    *,
    alpha: float,
    least: int = 1,
) -> RowsByDevice:
    """Deal out each class in proportions over the devices drawn from `Dir(alpha)`.

    The smaller `alpha`, the more uneven classes and sizes are. This is the label skew of NIID-Bench
    (Li et al. 2022), after Yurochkin et al. (2019): one draw over devices for each class. (Hsu et
    al. 2019 draw over classes for each of equally large devices instead.) NIID-Bench's code gives
    no more to a device that has an even share already, and draws again until every device has
    enough; here sizes are as drawn, and a device below `least` takes samples from the largest.
    """
    _check(labels, devices, least)
    if not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha must be above 0, not {alpha!r}: 0.1 is very uneven, 100 even")
    pieces: list[list[Indices]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        rows = stream.permutation(np.flatnonzero(labels == label))
        portions = stream.dirichlet([alpha] * devices)
        cuts = (np.cumsum(portions)[:-1] * len(rows)).astype(np.int64)
        for device, piece in zip(pieces, np.split(rows, cuts), strict=True):
            device.append(piece)
    shares = [np.concatenate(each).tolist() for each in pieces]
    for share in shares:
        while len(share) < least:
            share.append(max(shares, key=len).pop())
    return _sorted(shares)


def label_parts(
    labels: Array,
    devices: int,
    stream: np.random.Generator,
    *,
    classes_each: int,
    least: int = 1,
) -> RowsByDevice:
    """Give each device samples of exactly `classes_each` classes.

    NIID-Bench's *#C = k* (Li et al. 2022): a class is shuffled and split evenly among the devices
    that have it. Which classes those are is drawn among the ones that the fewest have so far, so
    that every class has owners, and about equally many. (Its code gives device `i` class `i mod K`
    and draws the others.)
    """
    _check(labels, devices, least)
    found, codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    if not 1 <= classes_each <= len(found):
        raise ConfigError(f"classes_each is from 1 to {len(found)} here, not {classes_each}")
    if devices * classes_each < len(found):
        raise ConfigError(
            f"{devices} devices with {classes_each} classes each cannot hold all {len(found)} "
            "classes: take more devices or more classes each"
        )
    owners: list[list[int]] = [[] for _ in found]
    for device in range(devices):
        order = stream.permutation(len(found)).tolist()
        order.sort(key=lambda code: len(owners[code]))
        for code in order[:classes_each]:
            owners[code].append(device)
    for code, has in enumerate(owners):
        if len(has) > sizes[code]:
            raise ConfigError(
                f"class {found[code]} has {sizes[code]} samples for {len(has)} devices: take fewer "
                "devices or fewer classes each"
            )
    pieces: list[list[Indices]] = [[] for _ in range(devices)]
    for code, has in enumerate(owners):
        rows = stream.permutation(np.flatnonzero(codes.ravel() == code))
        for device, piece in zip(has, np.array_split(rows, len(has)), strict=True):
            pieces[device].append(piece)
    return _enough(_sorted([np.concatenate(each) for each in pieces]), least)


def shard_parts(
    labels: Array,
    devices: int,
    stream: np.random.Generator,
    *,
    shards_each: int = 2,
    least: int = 1,
) -> RowsByDevice:
    """Sort by label, cut into equal shards, and give each device `shards_each` drawn ones.

    The *pathological* split of FedAvg (McMahan et al. 2017), which has two shards each. Samples of
    one label are shuffled first; shards differ by one sample where they cannot be equal.
    """
    _check(labels, devices, least)
    if not 1 <= shards_each <= len(labels) // devices:
        raise ConfigError(
            f"shards_each is from 1 to {len(labels) // devices} for {len(labels)} samples on "
            f"{devices} devices, not {shards_each}"
        )
    order = stream.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    shards = np.array_split(order, devices * shards_each)
    drawn = stream.permutation(len(shards)).reshape(devices, shards_each)
    return _enough(
        _sorted([np.concatenate([shards[number] for number in each]) for each in drawn]), least
    )


def key_parts(keys: Array, *, least: int = 1) -> RowsByDevice:
    """Give each device the samples of one key, such as a person; devices in the order of keys."""
    found, codes = np.unique(keys, return_inverse=True)
    _check(keys, len(found), least)
    parts = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    return _enough(_sorted(parts), least)


def own_test_parts(
    labels: Array, parts: Sequence[Indices], test_labels: Array, stream: np.random.Generator
) -> RowsByDevice:
    """Deal out test data so that each device has its own, of the classes that it trains with.

    `labels` and `parts` are those of the training data. The test samples of a class are dealt out
    in proportion to the training samples that each device has of it; a device with few of a class
    may get none, and test samples of a class that nobody trains with are left out.
    """
    found: list[list[Indices]] = [[] for _ in parts]
    for label in np.unique(test_labels):
        rows = stream.permutation(np.flatnonzero(test_labels == label))
        held = np.array([np.count_nonzero(labels[part] == label) for part in parts])
        if held.sum():
            cuts = np.rint(np.cumsum(held)[:-1] / held.sum() * len(rows)).astype(np.int64)
            for device, piece in zip(found, np.split(rows, cuts), strict=True):
                device.append(piece)
    return _sorted([np.concatenate(each) if each else np.empty(0, np.int64) for each in found])


def _check(labels: Array, devices: int, least: int) -> None:
    if labels.ndim != 1 or not len(labels):
        raise ConfigError(f"give one label for each sample, not an array of shape {labels.shape}")
    if devices < 1 or least < 0:
        raise ConfigError(f"devices = {devices} must be above 0, and least = {least} not negative")
    if len(labels) < devices * least:
        raise ConfigError(
            f"{len(labels)} samples are too few for {devices} devices with at least {least} each: "
            f"take at most {len(labels) // least} devices, or more samples"
        )


def _enough(parts: RowsByDevice, least: int) -> RowsByDevice:
    smallest = min(range(len(parts)), key=lambda number: len(parts[number]))
    if len(parts[smallest]) < least:
        raise ConfigError(
            f"device {smallest} would have {len(parts[smallest])} samples, fewer than {least}: "
            "lower least, or give each device more"
        )
    return parts


def _sorted(parts: Sequence[Sequence[int] | Indices]) -> RowsByDevice:
    return [np.sort(np.asarray(rows, dtype=np.int64)) for rows in parts]
