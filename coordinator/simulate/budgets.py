"""Budgets of a study's devices: in which share `p` of the rounds each of them trains.

    beta_budgets      CCFL's: p = (1/2)^⌊β·i/N⌋, as many devices of 1, 1/2, 1/4 … (Tables 1 to 4)
    split_budgets     a share r of the devices trains once in W rounds, the others always (Figure 4)

A study of CCFL also says who has which data. Each device has two classes, and the skew says how
these go with budgets; each function returns the rows and the share of every device:

    even_skew         Table 2: budgets are dealt out at random
    high_skew         Table 3: all devices of a class have the same budget
    moderate_skew     Table 4: a tenth of the devices is as in Table 3, the others as in Table 2

A device's share is its `Policy.participation`; its `schedule` and `phase` say which rounds. The
same stream gives the same devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coordinator.errors import ConfigError
from coordinator.simulate.partitions import RowsByDevice, label_parts
from edge_sdk.protocol.plan.layout import Array, Indices

CLASSES_EACH = 2


class SkewedDevices(NamedTuple):
    """Data and budgets of a study's devices, device by device."""

    parts: RowsByDevice
    """Rows of the data set that each device has, ascending."""
    shares: tuple[float, ...]
    """Share of the rounds in which each device trains."""


def beta_budgets(devices: int, beta: int) -> tuple[float, ...]:
    """Return `p_i = (1/2)^⌊β·i/N⌋` for `i = 0 … N − 1`.

    The devices fall into β groups of (almost) equal size, in order: β = 4 gives 1, 1/2, 1/4, 1/8.
    (The paper prints the exponent as `⌊(β − i)/N⌋`, which would be above 1 for most devices; this
    gives the groups that its text describes.)
    """
    if devices < 1 or beta < 1:
        raise ConfigError(f"devices = {devices} and beta = {beta} must be at least 1")
    return tuple(0.5 ** (beta * number // devices) for number in range(devices))


def split_budgets(devices: int, *, rare: float, rounds: int) -> tuple[float, ...]:
    """Return 1 for the first devices, and `1 / rounds` for a share `rare` of them, the last.

    The paper's `r` and `W`; `rare = 1` is its CCFL(r = 1).
    """
    if devices < 1 or rounds < 1 or not 0 <= rare <= 1:
        raise ConfigError(
            f"devices = {devices} and rounds = {rounds} must be at least 1, and rare = {rare} a "
            "share from 0 to 1"
        )
    seldom = round(rare * devices)
    return (1.0,) * (devices - seldom) + (1.0 / rounds,) * seldom


def even_skew(
    labels: Array, devices: int, stream: np.random.Generator, *, beta: int = 4
) -> SkewedDevices:
    """Give each device two classes, and deal out the budgets at random (CCFL, Table 2)."""
    parts = label_parts(labels, devices, stream, classes_each=CLASSES_EACH)
    return SkewedDevices(parts, _shuffled(beta_budgets(devices, beta), stream))


def high_skew(
    labels: Array, devices: int, stream: np.random.Generator, *, beta: int = 4
) -> SkewedDevices:
    """Give all devices of a class the same budget (CCFL, Table 3).

    The classes are drawn in pairs, and each pair is dealt out evenly to as many devices: of ten
    classes and 100 devices, a pair is on 20. Pairs have the budgets that `beta_budgets` gives that
    many devices: of five pairs and β = 4, two have 1, and one each 1/2, 1/4 and 1/8.
    """
    pairs = _pairs(labels, stream)
    if devices < len(pairs):
        raise ConfigError(
            f"{len(pairs)} pairs of classes need at least {len(pairs)} devices, not {devices}"
        )
    parts: RowsByDevice = []
    shares: list[float] = []
    holders = np.array_split(np.arange(devices), len(pairs))
    for pair, budget, members in zip(pairs, beta_budgets(len(pairs), beta), holders, strict=True):
        parts += _dealt(labels, pair, len(members), stream)
        shares += [budget] * len(members)
    return SkewedDevices(parts, tuple(shares))


def moderate_skew(
    labels: Array,
    devices: int,
    stream: np.random.Generator,
    *,
    beta: int = 4,
    skewed: float = 0.1,
) -> SkewedDevices:
    """Give a tenth of the devices, which always train, two classes of their own (CCFL, Table 4).

    The others share the rest of the classes, two each, with budgets dealt out at random. (The paper
    says that 10 % of its devices follow Table 3, with adequate resources; so nobody else has their
    classes.)
    """
    first = max(1, round(skewed * devices))
    pair, *_ = _pairs(labels, stream)
    rest = np.flatnonzero(~np.isin(labels, pair))
    if not (0 < skewed < 1 and first < devices and len(rest)):
        raise ConfigError(
            f"skewed = {skewed} must leave devices and classes to others: {devices} devices, "
            f"{len(np.unique(labels))} classes"
        )
    others = even_skew(labels[rest], devices - first, stream, beta=beta)
    parts = [*_dealt(labels, pair, first, stream), *(rest[rows] for rows in others.parts)]
    return SkewedDevices(parts, (1.0,) * first + others.shares)


def _pairs(labels: Array, stream: np.random.Generator) -> list[Array]:
    """Draw pairs of classes; of an odd number, the last one is a class alone."""
    found = stream.permutation(np.unique(labels))
    return [found[at : at + CLASSES_EACH] for at in range(0, len(found), CLASSES_EACH)]


def _dealt(
    labels: Array, classes: Array, devices: int, stream: np.random.Generator
) -> list[Indices]:
    """Deal out the samples of each of these classes evenly."""
    pieces: list[list[Indices]] = [[] for _ in range(devices)]
    for each in classes:
        rows = stream.permutation(np.flatnonzero(labels == each))
        if len(rows) < devices:
            raise ConfigError(
                f"class {each} has {len(rows)} samples for {devices} devices: take fewer devices"
            )
        for device, piece in zip(pieces, np.array_split(rows, devices), strict=True):
            device.append(piece)
    return [np.sort(np.concatenate(each)).astype(np.int64) for each in pieces]


def _shuffled(shares: tuple[float, ...], stream: np.random.Generator) -> tuple[float, ...]:
    return tuple(shares[place] for place in stream.permutation(len(shares)).tolist())
