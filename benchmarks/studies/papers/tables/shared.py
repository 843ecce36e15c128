"""Settings that all tables share: what the papers' runs do not have, switched off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AS_PRINTED: Mapping[str, Any] = {
    "run.rescale": 0.0,
    "run.clip_norm": 0.0,
    "run.widths": "own",
    "run.grow": 0.0,
    "run.levels": [1.0],
    "run.robust": "none",
    "run.rms_limit": 1e9,
    "run.cohort_limit": 1e9,
    "run.quarantine_after": 0,
    "run.max_staleness": 1000,
    "round.train_deadline_s": 1e6,
}
"""No rescaling, no clipping, one width a device, no screening of movements, no age limit on memory;
only the whole model is evaluated, the run begins when all devices are there, and every round waits
for everybody."""

RAM_FED: Mapping[str, Any] = {
    "rule.name": "ram-fed",
    "rule.options.damping": 1.0,
    "rule.options.population": "all",
    "rule.options.warmup_rounds": 1,
}
"""RAM-Fed as printed: undamped, memory averaged over all devices; everybody trains everything in
the first round."""


def settings(*parts: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return all settings of a cell; later ones count, and `_` in a keyword's name is a dot.

    A keyword such as `run_rounds` stands for `run.rounds`; the first `_` alone is the dot.
    """
    found: dict[str, Any] = dict(AS_PRINTED)
    for part in parts:
        found |= part
    found |= {name.replace("_", ".", 1): value for name, value in more.items()}
    return found | {"round.min_devices": found["fleet.devices"]}
