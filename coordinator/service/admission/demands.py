"""The devices that may take part in a run, by what they tell of themselves (`Condition`).

A device that does not fit is barred: it is not selected, does not count among the devices that are
there, and is told the reason when it bids. One that tells nothing cannot be judged and is barred.
Who has the broker's certificates can claim any label: this sorts devices, and keeps nobody out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from coordinator.errors import ConfigError
from edge_sdk.program.settings import Example, Within, check_fields
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.condition import Condition, check_labels

UNTOLD = (
    "it has not told its labels, memory and profile, which this run asks for (share_condition = "
    "true in its settings, and a recent version)"
)
"""Reason why a device is barred of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """Demands of a run on its devices; by default there are none. Raises `ConfigError`."""

    labels: Annotated[dict[str, str], Example({"site": "berlin"})] = field(default_factory=dict)
    """Labels that a device must have, with these values; devices set theirs in `labels`."""
    min_memory_mb: Annotated[float | None, Within(above=0), Example(1000)] = None
    """Least memory of a device's machine, in MB of 10⁶ bytes."""
    profiles: Annotated[tuple[str, ...], Example(["raspberry_pi_4"])] = ()
    """Profiles of machines that may take part (docs/devices.md); devices set theirs in `board`."""

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            check_labels(self.labels)
        except MessageError as error:
            raise ConfigError(f"labels: {error}") from error

    @property
    def active(self) -> bool:
        """True if there are any."""
        return bool(self.labels or self.profiles) or self.min_memory_mb is not None

    def objection(self, condition: Condition) -> str | None:
        """Return why a device may not take part; None: it may."""
        for name, wanted in self.labels.items():
            has = condition.labels.get(name)
            if has != wanted:
                said = f"it has {has!r}" if has is not None else "it has none"
                return f"this run is for devices with label {name} = {wanted!r}, and {said}"
        least, memory = self.min_memory_mb, condition.memory_mb
        if least is not None and (memory is None or memory < least):
            said = "it does not know its own" if memory is None else f"it has {memory:.0f} MB"
            return f"this run needs {least:g} MB of memory, and {said}"
        if self.profiles and condition.profile not in self.profiles:
            said = f"it is {condition.profile}" if condition.profile else "it names none"
            return f"this run is for profiles {', '.join(self.profiles)}, and {said}"
        return None


class Doorkeeper:
    """Remembers which devices are barred, and why."""

    def __init__(self, demands: Demands) -> None:
        self._demands = demands
        self._admitted: set[str] = set()
        self.barred: dict[str, str] = {}
        """Reason for each device that was heard of and may not take part."""

    @property
    def active(self) -> bool:
        """True if not every device may take part."""
        return self._demands.active

    def objection(self, device: str) -> str | None:
        """Return why a device may not take part; None: it may."""
        if not self._demands.active or device in self._admitted:
            return None
        return self.barred.get(device, UNTOLD)

    def arrived(self, device: str) -> None:
        """Note a device of which nothing else is known yet."""
        if (reason := self.objection(device)) is not None:
            self.barred[device] = reason

    def judge(self, device: str, condition: Condition) -> str | None:
        """Judge a device by its condition; return why it may not take part, None: it may."""
        reason = self._demands.objection(condition)
        if reason is None:
            self._admitted.add(device)
            self.barred.pop(device, None)
        else:
            self._admitted.discard(device)
            self.barred[device] = reason
        return reason
