"""Pictures of the page for the docs, of a staged run: python -m tests.screenshots [FOLDER]

They are written to FOLDER (docs) as operate-*.png. The run is drawn from one seed, and the page is
the real one, in the real server and a real Chromium; only times of day differ between two calls.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from coordinator.service.overview.strip import LEGEND
from tests.chromium import Visitor, open_chromium, visiting
from tests.staged_runs import StagedPage, StagedView, staged_device, staged_page, staged_round

ROUNDS, DEVICES = 48, 26
COLOURS = 96
"""Of a picture: few enough to be small."""
PICTURES = {
    "run": ("", ".uplot", "light"),
    "fleet": ("/fleet", ".grid tbody th", "light"),
    "strips": ("/strips", ".grid canvas", "dark"),
    "model": ("/model", "figure canvas", "light"),
    "device": ("/device/pixel-08", ".uplot", "dark"),
}
"""Parts of the run, what to wait for, and colours, by name."""
KINDS = ("pixel", "jetson", "pi", "galaxy")
SKIPS = (
    ("b", "battery", "battery 14 % is below 20 %"),
    ("h", "heat", "42.5 °C is above 40 °C"),
    ("m", "memory", "level 0.25 needs 96 MB, 71 MB are free"),
    ("n", "network", "the network is metered"),
)


class Pictured(StagedView):
    """A run of 26 devices in its 49th round."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(7)
        self._now = time.time()
        names = [f"{KINDS[number % 4]}-{number:02}" for number in range(DEVICES)]
        self._strips = {name: self._strip() for name in names}
        self._map = self._blocks()
        super().__init__(
            sequence=5,
            rows={name: self._device(name) for name in names},
            history=[self._round(number) for number in range(1, ROUNDS + 1)],
        )
        self.history[19]["event"] = None
        event = "learning_rate: 0.1 → 0.05, by lena"
        self.history.insert(20, self.history[19] | {"event": event, "accuracy": None, "levels": []})
        last = self.history[-1]
        self.state = {
            "round": ROUNDS + 1,
            "rounds": 80,
            "committed": ROUNDS,
            "waits_for": "movements of 3 devices: jetson-09, pi-14 and pixel-08",
            "deadline_s": 210.0,
            "started": self._now - 170 * ROUNDS,
            "time": self._now,
            "devices": self._counts(),
            "levels": {"1": 6, "0.5": 8, "0.25": 4},
            "skips": {"battery": 3, "heat": 1},
            "accuracy": last["accuracy"],
            "best": {"round": 46, "accuracy": last["accuracy"] + 0.002, "level": 1.0},
            "level_reports": [
                {"level": each["level"], "parameters": size, "devices": number, **each}
                for each, size, number in zip(
                    last["levels"], (421_642, 106_122, 26_874), (6, 8, 4), strict=True
                )
            ],
            "totals": {
                "seconds": 41_300.0,
                "joules": 98_400.0,
                "bytes_up": 712_000_000,
                "bytes_down": 1_904_000_000,
                "trained": 868,
                "skipped": 211,
                "late": 17,
                "rejected": 2,
            },
            "settings": {
                "rule": "ram-fed",
                "masks": "coverage",
                "learning_rate": 0.05,
                "steps": 20,
                "batch_size": 16,
                "levels": [1, 0.5, 0.25],
                "min_devices": 8,
            },
        }

    def device(self, name: str) -> dict[str, Any]:
        rounds = []
        for number, mark in enumerate(self._strips[name], 1):
            level = {"9": 1.0, "4": 0.5, "2": 0.25}.get(mark)
            skip = next((each for each in SKIPS if each[0] == mark), None)
            if level is None and skip is None:
                continue
            loss = 2.1 * math.exp(-number / 14) + 0.12 * self._random.random() + 0.1
            rounds.append(
                {
                    "round": number,
                    "level": level,
                    "reason": skip[2] if skip else "battery and memory allow it",
                    "code": skip[1] if skip else None,
                    "outcome": "skipped" if skip else "counted",
                    "loss": None if skip else loss,
                    "bytes_up": 0 if skip else round(820_000 * (level or 0)),
                    "bytes_down": 0 if skip else round(1_700_000 * (level or 0)),
                    "train_s": 0.0 if skip else 40 * (level or 0) + 3 * self._random.random(),
                    "joules": None if skip else 110 * (level or 0) + 9 * self._random.random(),
                }
            )
        return self.rows[name] | {"rounds": rounds}

    def blocks(self) -> dict[str, Any]:
        return self._map

    def strip(self, rounds: int = 60) -> dict[str, Any]:
        numbers = list(range(max(1, ROUNDS - rounds + 1), ROUNDS + 1))
        devices = {name: marks[-len(numbers) :] for name, marks in self._strips.items()}
        return {"rounds": numbers, "devices": devices, "legend": LEGEND}

    def _counts(self) -> dict[str, int]:
        states = [row["state"] for row in self.rows.values()]
        found = {each: states.count(each) for each in ("training", "quarantined", "paused")}
        return {"known": DEVICES, "present": DEVICES - states.count("offline"), **found}

    def _strip(self) -> str:
        own = str(self._random.choice(list("99442")))
        often = self._random.random() * 0.3
        marks = []
        for _ in range(ROUNDS):
            draw = self._random.random()
            if draw < often:
                marks.append(str(self._random.choice(list("bbbhmn"))))
            elif draw > 0.97:
                marks.append(str(self._random.choice(list("llor"))))
            elif draw > 0.9:
                marks.append(".")
            else:
                marks.append(own)
        return "".join(marks)

    def _device(self, name: str) -> dict[str, Any]:
        marks, random = self._strips[name], self._random
        states = ("training", "training", "kept", "kept", "kept", "idle", "skipped", "offline")
        state = str(random.choice(states))
        own = next(mark for mark in reversed(marks) if mark in "942")
        level = {"9": 1.0, "4": 0.5, "2": 0.25}[own]
        skip = SKIPS[int(random.integers(len(SKIPS)))] if state == "skipped" else None
        trained = sum(mark in "942" for mark in marks)
        plugged = name.startswith(("pi-", "jetson"))
        quarantined = name == "galaxy-11"
        return staged_device(
            name,
            present=state != "offline",
            state="quarantined" if quarantined else state,
            level=level if state in ("training", "kept") else None,
            reason=skip[2] if skip else "battery and memory allow it",
            code=skip[1] if skip else None,
            round=ROUNDS + 1,
            last_seen=self._now - (4000 if state == "offline" else 80 * random.random()),
            battery=None if plugged else 0.15 + 0.8 * random.random(),
            charging=None if plugged else bool(random.random() > 0.6),
            temperature_c=29 + 11 * random.random(),
            memory_free_mb=300 + 2500 * random.random(),
            memory_mb=4096.0,
            bytes_up=round(820_000 * level * trained),
            bytes_down=round(1_700_000 * level * trained),
            train_s=41 * level * trained,
            joules=114 * level * trained,
            energy_today_j=114 * level * 8,
            energy_budget_j=None if plugged else 4000.0,
            trained=trained,
            skipped=sum(mark in "bhmn" for mark in marks),
            late=marks.count("l"),
            rejected=marks.count("r"),
            contribution=trained / 868,
            staleness=int(random.integers(0, 4)),
            samples=int(random.integers(80, 900)),
            quarantined={"round": 31, "reason": "9.1 times the median size"}
            if quarantined
            else None,
            labels={"site": str(random.choice(["berlin", "lyon"]))},
            profile=None if plugged else "pixel-8",
        )

    def _round(self, number: int) -> dict[str, Any]:
        top = 0.955 - 0.8 * math.exp(-number / 9) + 0.012 * self._random.random()
        levels = ((1.0, 0.0), (0.5, 0.035), (0.25, 0.1))
        return staged_round(
            number,
            time=self._now - 170 * (ROUNDS - number),
            accuracy=top,
            levels=[{"level": level, "accuracy": top - less} for level, less in levels],
            seconds=130 + 60 * self._random.random(),
            joules=1900 + 400 * self._random.random(),
            bytes_up=14_000_000 + int(self._random.integers(2_000_000)),
            bytes_down=39_000_000,
            trained=18,
            skipped=4,
        )

    def _blocks(self) -> dict[str, Any]:
        axes = [{"name": name, "groups": [8] * 16} for name in ("conv1", "conv2", "hidden")]
        layers = {
            "conv1": ([128, 1, 3, 3], [0]),
            "conv2": ([128, 128, 3, 3], [1, 0]),
            "hidden": ([128, 128], [2, 1]),
            "output": ([10, 128], [2]),
        }
        tensors = []
        for layer, (shape, over) in layers.items():
            for part, used in (("weight", over), ("bias", over[:1] if layer != "output" else [])):
                size = shape if part == "weight" else shape[:1]
                tensors.append(self._tensor(f"{layer}.{part}", size, used))
        return {"round": ROUNDS, "axes": axes, "tensors": tensors}

    def _tensor(self, name: str, shape: list[int], over: list[int]) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        size = max(1, math.prod(shape) // 16 ** len(over))
        for groups in product(range(16), repeat=len(over)):
            far = max(groups, default=0) / 16
            covered = max(1, round(ROUNDS * (1 - 0.8 * far) * (0.8 + 0.2 * self._random.random())))
            age = int(self._random.integers(0, 1 + round(6 * far)))
            blocks.append(
                {
                    "id": len(blocks),
                    "parameters": size,
                    "signature": [list(pair) for pair in zip(over, groups, strict=True)],
                    "covered": covered,
                    "last_covered": ROUNDS - age,
                    "age": age,
                    "memory_age": age,
                    "movement": 1e-3 * (0.3 + self._random.random()) * (1 + far),
                }
            )
        return {"name": name, "shape": shape, "parameters": size * len(blocks), "blocks": blocks}


def keep(picture: bytes, path: Path) -> None:
    """Write a picture with few colours."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    few = image.quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def take(visitor: Visitor, staged: StagedPage, part: str, wanted: str) -> bytes:
    """Return a picture of a part of the run."""
    visitor.sign_in(staged.token())
    visitor.go(f"#/run/digits{part}")
    visitor.page.locator(wanted).first.wait_for()
    return visitor.page.screenshot()


def main(folder: Path) -> None:
    """Take all pictures."""
    with (
        tempfile.TemporaryDirectory() as place,
        staged_page(Path(place), view=Pictured()) as staged,
        open_chromium() as browser,
    ):
        for name, (part, wanted, scheme) in PICTURES.items():
            size = {"width": 1200, "height": 780}
            with visiting(browser, staged.origin, viewport=size, color_scheme=scheme) as visitor:
                keep(take(visitor, staged, part, wanted), folder / f"operate-{name}.png")
        phone = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 2}
        with visiting(browser, staged.origin, **phone) as visitor:
            keep(take(visitor, staged, "", ".uplot"), folder / "operate-phone.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
