"""Commands of a run's control socket that show it, its devices, rounds and blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.service.overview.overview import Overview
    from edge_sdk.program.control import ControlCommand


def overview_commands(overview: Overview) -> dict[str, ControlCommand]:
    """Return the commands of a run's socket that only look: they never wait for the loop."""

    def devices(since: int = 0) -> list[dict[str, Any]]:
        return overview.devices(since)

    def rounds(since: int = 0) -> list[dict[str, Any]]:
        return overview.rounds(since)

    def strip(rounds: int = 60) -> dict[str, Any]:
        return overview.strip(rounds)

    return {
        "status": lambda: overview.status(),
        "devices": devices,
        "device": lambda device: overview.device(device),
        "rounds": rounds,
        "blocks": lambda: overview.blocks(),
        "strip": strip,
    }
