"""The meaning of a task's inputs: how to make them from photos, tables, time series and sound.

A task may describe each of its inputs. Devices then read their own files into it without code of
their own, all in the same way (docs/data.md). A task without descriptions takes arrays that are
already in its form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from edge_sdk.protocol.errors import GraphError

MAX_NAMES = 2**14
"""Most classes, or features of a sample, that can have names."""
MAX_NAME_CHARACTERS = 200
MAX_SAMPLES = 2**24
"""Longest frame, hop or window of a series; highest sample rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDescription:
    """What one input means. Raises `GraphError` for a contradiction; every part may be absent."""

    features: tuple[str, ...] = ()
    """Names of a sample's values, in order: the columns of a table, or of a time series."""
    range: tuple[float, float] | None = None
    """Lowest and highest value the model was made for. Pixels and sound are scaled to it."""
    mean: tuple[float, ...] = ()
    """Subtracted from every value: one number, or one for each channel or feature. Pixels are
    scaled to 0 to 1 before."""
    deviation: tuple[float, ...] = ()
    """Every value is divided by it, after `mean` is subtracted."""
    window: int | None = None
    """Time steps of a sample that is cut out of a longer series."""
    sample_rate: int | None = None
    """Samples per second of sound."""
    mels: int | None = None
    """Mel bands of sound as log-mel frames; without it, sound is raw samples."""
    frame: int | None = None
    """Samples in one frame of sound."""
    hop: int | None = None
    """Samples from the start of one frame to the start of the next."""

    def __post_init__(self) -> None:
        check_names("features", self.features)
        if self.range is not None:
            if len(self.range) != 2 or not _finite(self.range) or self.range[0] >= self.range[1]:
                raise GraphError(f"range = {list(self.range)}: give the lowest and highest value")
            if self.mean or self.deviation:
                raise GraphError("range and mean are both set: values have one or the other")
        if len(self.mean) != len(self.deviation):
            raise GraphError(
                f"mean has {len(self.mean)} numbers and deviation {len(self.deviation)}: give both "
                "equally many"
            )
        if len(self.mean) > MAX_NAMES or not _finite(self.mean) or not _finite(self.deviation):
            raise GraphError(f"mean and deviation are at most {MAX_NAMES} finite numbers")
        if any(each <= 0 for each in self.deviation):
            raise GraphError(f"deviation = {list(self.deviation)[:8]}: must be above 0")
        for name in ("window", "sample_rate", "mels", "frame", "hop"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_SAMPLES:
                raise GraphError(f"{name} = {value}: must be from 1 to {MAX_SAMPLES}")
        self._check_sound()

    def _check_sound(self) -> None:
        given = [name for name in ("mels", "frame", "hop") if getattr(self, name) is not None]
        if not given:
            return
        if len(given) < 3 or self.sample_rate is None:
            raise GraphError("log-mel frames need all of sample_rate, mels, frame and hop")
        if self.range is not None:
            raise GraphError("log-mel frames have no range: give mean and deviation, or neither")
        if self.window is not None:
            raise GraphError("window is set for log-mel frames: the shape says how many")

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise `GraphError` unless this describes an input of this type and shape."""
        words = "×".join(map(str, shape)) or "one number"
        if (self.range or self.mean) and not dtype.startswith("float"):
            raise GraphError(f"range and mean are for floats, but the input is {dtype}")
        if len(self.mean) > 1 and len(self.mean) not in (*shape[:1], *shape[-1:]):
            raise GraphError(
                f"mean has {len(self.mean)} numbers, but a sample is {words}: give one, or one for "
                "each channel or feature"
            )
        if self.window is not None and self.window not in shape:
            raise GraphError(f"window = {self.window}, but a sample is {words}")
        values = math.prod(shape) // (self.window or 1)
        if self.features and len(self.features) != values:
            raise GraphError(f"{len(self.features)} features have names, but a sample has {values}")
        if self.mels is not None:
            inner = [size for size in shape if size != 1]
            if self.mels not in shape or len(inner) > 2:
                raise GraphError(f"mels = {self.mels}, but a sample is {words}: bands by frames")

    def to_dict(self) -> dict[str, Any]:
        """Return everything that is set, for JSON."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in found.items()
            if value not in (None, ())
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> InputDescription:
        """Return the description that `to_dict` wrote. Raises `GraphError`."""
        try:
            return cls(
                features=tuple(_text(each) for each in content.get("features", ())),
                range=_pair(content.get("range")),
                mean=tuple(_number(each) for each in content.get("mean", ())),
                deviation=tuple(_number(each) for each in content.get("deviation", ())),
                **{
                    name: _whole(content.get(name))
                    for name in ("window", "sample_rate", "mels", "frame", "hop")
                },
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise GraphError(f"this is not the description of an input: {error}") from error


def check_names(what: str, names: Sequence[str]) -> None:
    """Raise `GraphError` unless every name is there, short and different from the others."""
    if len(names) > MAX_NAMES:
        raise GraphError(f"{len(names)} {what} are too many to have names (at most {MAX_NAMES})")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise GraphError(f"{what}: {twice!r} occurs twice")
    for name in names:
        if not name.strip() or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
            raise GraphError(f"{what}: {name!r:.80} is not a name of 1 to {MAX_NAME_CHARACTERS}")


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a text")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.80} is not a number")
    return float(value)


def _whole(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{value!r:.80} is not a whole number")
    return value


def _pair(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    low, high = value
    return _number(low), _number(high)
