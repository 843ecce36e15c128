"""The condition of a device, as it tells it to the coordinator's operator.

    Condition ▶      when it has joined, and with its bids

Nothing is decided by it but who may take part (`labels`, `memory_mb`, `profile`). Every field may
be None: unknown, or kept back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import MAX_JOULES, MAX_REASON_CHARACTERS
from edge_sdk.protocol.messages.topics import check_name

MAX_LABELS = 16
MAX_LABEL_CHARACTERS = 64
MAX_LABELS_BYTES = 1024
"""Most bytes of all labels together: a device's messages are small."""
MAX_VERSION_CHARACTERS = 40
MAX_MEMORY_MB = 2.0**30
RANGES = {
    "battery": (0.0, 1.0),
    "temperature_c": (-100.0, 300.0),
    "memory_free_mb": (0.0, MAX_MEMORY_MB),
    "memory_mb": (0.0, MAX_MEMORY_MB),
    "energy_today_j": (0.0, MAX_JOULES),
    "energy_budget_j": (0.0, MAX_JOULES),
}
"""Least and largest value of every number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The state of a device, for its operator's eyes."""

    device: str
    battery: float | None = None
    """Charge, 0 to 1; None also for a device without one."""
    charging: bool | None = None
    temperature_c: float | None = None
    """Temperature of the hottest place that is known, in °C."""
    memory_free_mb: float | None = None
    """Memory that training may take now, in MB of 10⁶ bytes."""
    memory_mb: float | None = None
    """Memory of the machine, likewise."""
    energy_today_j: float | None = None
    """Joules that training has taken since the day of the budget began."""
    energy_budget_j: float | None = None
    """Joules that it may take in a day; None also: no limit."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the owner gave the device."""
    profile: str | None = None
    """Profile of the machine, by name."""
    version: str | None = None
    """Version of the device's program."""
    last_error: str | None = None
    """The last error of a training, in words."""

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                raise MessageError(f"{name} is from {least:g} to {most:g}, not {value!r}")
        check_labels(self.labels)
        if self.profile is not None:
            check_name(self.profile, "profile")
        if self.version is not None and not 0 < len(self.version) <= MAX_VERSION_CHARACTERS:
            raise MessageError(f"a version has 1 to {MAX_VERSION_CHARACTERS} characters")
        if self.last_error is not None and len(self.last_error) > MAX_REASON_CHARACTERS:
            raise MessageError(f"an error has at most {MAX_REASON_CHARACTERS} characters")


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise `MessageError` unless these may be the labels of a device."""
    if len(labels) > MAX_LABELS:
        raise MessageError(f"a device has at most {MAX_LABELS} labels, not {len(labels)}")
    if (
        sum(len(f"{name}{value}".encode("utf-8", "replace")) for name, value in labels.items())
        > MAX_LABELS_BYTES
    ):
        raise MessageError(f"the labels of a device have at most {MAX_LABELS_BYTES} bytes in all")
    for name, value in labels.items():
        check_name(name, "label")
        if not 0 < len(value) <= MAX_LABEL_CHARACTERS or not value.isprintable():
            raise MessageError(
                f"label {name} = {value[:80]!r}: use 1 to {MAX_LABEL_CHARACTERS} printable "
                "characters"
            )
