"""`replace` means what `dataclasses.replace` means."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from edge_sdk.program.records import replace


@dataclass(frozen=True, slots=True)
class Slotted:
    name: str
    count: int = 0
    rest: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Wider(Slotted):
    more: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("below 0")


@dataclass(frozen=True)
class Plain:
    count: int


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (Slotted("a", 1, (2,)), {}),
        (Slotted("a", 1, (2,)), {"count": 5}),
        (Slotted("a"), {"name": "b", "rest": (1, 2)}),
        (Wider("a", 3), {"more": 0.0, "name": "c"}),
        (Checked(count=1), {"count": 2}),
        (Plain(1), {"count": 2}),
    ],
)
def test_replace_gives_what_dataclasses_gives(value: object, changes: dict[str, object]) -> None:
    before = repr(value)
    made = replace(value, **changes)
    assert made == dataclasses.replace(value, **changes)  # type: ignore[type-var]
    assert type(made) is type(value)
    assert repr(value) == before


def test_replaced_value_is_checked_where_its_class_checks() -> None:
    with pytest.raises(ValueError, match="below 0"):
        replace(Checked(count=1), count=-1)


@pytest.mark.parametrize("value", [Slotted("a"), Plain(1)])
def test_unknown_field_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="size"):
        replace(value, size=3)
