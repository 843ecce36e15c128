"""Small tasks for tests of readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription


def spec_of(
    *shape: int,
    dtype: str = "float32",
    highest: int | None = 2,
    targets: ArraySpec | None = None,
    classes: Sequence[str] = (),
    **described: Any,
) -> DataSpec:
    """A task with one input of this shape and classes 0 to `highest`."""
    wanted = ArraySpec("int64", (), highest) if targets is None else targets
    return DataSpec((ArraySpec(dtype, shape),), wanted).described(
        classes=classes, inputs=[InputDescription(**described)]
    )
