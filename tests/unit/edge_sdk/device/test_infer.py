"""The words of `tessera-device infer`; what it computes is tested with the backends."""

from __future__ import annotations

import pytest

from edge_sdk.device.infer import _counted


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["3", "1", "3"], "3, 1, 3"),
        ([*"112"] * 3, "1: 6×, 2: 3×"),
        ([*"0123456788"], "8: 2×, 0: 1×, 1: 1×, 2: 1×, 3: 1×, 4: 1×, 5: 1×, 6: 1×; 1 more class"),
        (
            [*"01234567899"],
            "9: 2×, 0: 1×, 1: 1×, 2: 1×, 3: 1×, 4: 1×, 5: 1×, 6: 1×; 2 more classes",
        ),
    ],
)
def test_many_predictions_are_counted(names: list[str], words: str) -> None:
    assert _counted(names) == words
