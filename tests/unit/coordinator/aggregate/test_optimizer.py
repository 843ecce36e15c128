"""Options of a server optimiser that would do nothing are refused."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.errors import ConfigError


@pytest.mark.parametrize(
    "options",
    [{"rate": 0.01}, {"name": "momentum", "tau": 0.1}, {"name": "momentum", "beta2": 0.9}],
)
def test_option_that_the_optimiser_does_not_use_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does nothing with the server optimiser"):
        ServerOptimizer(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "momentum", "beta1": 0.5, "rate": 2.0},
        {"name": "yogi", "beta1": 0.5, "beta2": 0.9, "tau": 0.1, "rate": 0.1},
    ],
)
def test_options_that_the_optimiser_uses_are_taken(options: dict[str, Any]) -> None:
    optimizer = ServerOptimizer(**options)
    assert {name: getattr(optimizer, name) for name in options} == options
