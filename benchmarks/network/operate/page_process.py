"""A run's overview with its page, metrics and control socket, in a process of its own.

    python -m benchmarks.network.operate.page_process FOLDER DEVICES

No coordinator and no devices: the overview is told what devices would tell it. The first line on
standard output is JSON: the address of the page, one of a page whose metrics have series of every
device, and a token for both. For each line on standard input, a number of devices,
so many of them answer every second until the next line; the answer is a line of JSON with the CPU
seconds that this process has taken, when it has begun. It ends with the input.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

from coordinator.operate.config import HttpTable
from coordinator.operate.control.overview import overview_commands
from coordinator.operate.http.access.tokens import Role, token_path
from coordinator.operate.http.opening import open_http
from coordinator.operate.serve.runs import ServedRun, ServedRuns
from coordinator.service.overview.facts import RunFacts
from coordinator.service.overview.overview import Overview
from edge_sdk.program.control import ControlSocket
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

TASK = "bench"
SLICES = 10
"""Parts of a second in which devices answer, as they do: not all at once."""


class TalkingFleet(threading.Thread):
    """Tells an overview what devices would: another charge, heat and answer each time."""

    def __init__(self, overview: Overview, devices: int) -> None:
        super().__init__(daemon=True)
        self.names = [f"device-{number:05}" for number in range(devices)]
        self.each_second = 0
        self._overview, self._said = overview, 0

    def run(self) -> None:
        """Go on until the process ends."""
        due = time.monotonic()
        while True:
            for _ in range(self.each_second // SLICES):
                self.tell()
            due += 1 / SLICES
            time.sleep(max(0.0, due - time.monotonic()))

    def tell(self) -> None:
        """Let the next device answer."""
        number, self._said = self._said, self._said + 1
        turn, at = divmod(number, len(self.names))
        name = self.names[at]
        self._overview.condition(
            Condition(
                device=name,
                battery=(7 * number + turn) % 1000 / 1000,
                charging=number % 3 == 0,
                temperature_c=30 + number % 100 / 10,
                memory_free_mb=900.25 + number % 97,
                memory_mb=4096.0,
                energy_today_j=number * 0.125,
                energy_budget_j=20_000.0,
                labels={"site": "berlin"},
                profile="pixel-8",
                version="0.1.0",
            )
        )
        level = None if at % 3 == 0 else 0.5
        reason = "battery 12 % is below 20 %" if level is None else "half is affordable"
        self._overview.bid(
            Bid(device=name, round=turn + 1, level=level, reason=reason, code="battery")
        )


def main(folder: str, devices: str) -> None:
    """Serve until the input ends."""
    place = Path(folder)
    plan = ModelPlan((Axis("a", (1, 1)),), (Tensor("w", "float32", (Dim(2, 0),)),))
    overview = Overview(RunFacts(task=TASK, run="0" * 16, folder=place, plan=plan, rounds=9))
    overview.began()
    fleet = TalkingFleet(overview, int(devices))
    for name in fleet.names:
        overview.joined(name)
        fleet.tell()
    fleet.start()
    runs = ServedRuns()
    runs.add(ServedRun(TASK, place, overview, {}))
    control = ControlSocket(place, overview_commands(overview))
    control.start()
    try:
        own, whole = HttpTable(), HttpTable(device_metrics=True)
        with open_http(own, runs, place) as page, open_http(whole, runs, place) as other:
            if page is None or other is None:
                raise RuntimeError("the page is off")
            token = token_path(place, Role.READ).read_text().strip()
            facts = {"page": page.address, "by_device": other.address, "token": token}
            print(json.dumps(facts), flush=True)
            for line in sys.stdin:
                fleet.each_second = int(line)
                print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    finally:
        control.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
