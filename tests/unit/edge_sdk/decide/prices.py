"""Costs of levels, as shares of what the whole model costs."""

from __future__ import annotations

from dataclasses import replace

from edge_sdk.decide.costs.cost import Cost


def share_of(whole: Cost, level: float, power: float = 1.0) -> Cost:
    """What a level costs if the whole model costs this; bytes are as many as parameters."""
    share = level**power
    return replace(
        whole,
        level=level,
        seconds=whole.seconds * share,
        joules=None if whole.joules is None else whole.joules * share,
        peak_bytes=whole.peak_bytes * share,
        bytes_down=whole.bytes_down * level,
        bytes_up=whole.bytes_up * level,
        second_s=whole.second_s * share,
        second_j=None if whole.second_j is None else whole.second_j * share,
        second_bytes=whole.second_bytes * share,
    )
