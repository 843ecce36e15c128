"""Numbers that define local training, sent to every device with a round (docs/algorithms.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from edge_sdk.protocol.errors import MessageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRule:
    """Local SGD and its variations; the defaults are plain SGD.

    Per step, on the objective `loss + proximal/2 · ‖w − w_start‖²`:

    1. `g` at `w`; with `sam_radius` δ > 0, `g` at `w + δ g/‖g‖` instead, same batch (SubDisMO);
    2. `g` is shortened to `clip_norm` if it is longer (norm over the submodel);
    3. `weight_decay · w` is added; momentum as in torch: `v ← momentum · v + g`, `v` starts at 0
       every round; `w ← w − learning_rate · v`.

    `rescale` multiplies the input of each layer that consumes a narrowed axis by
    `(1 / level)^rescale`. 0 follows the papers, and only then does a submodel compute exactly what
    the zero-masked model does.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    sam_radius: float = 0.0
    proximal: float = 0.0
    rescale: float = 0.5

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is None and entry.name == "clip_norm":
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise MessageError(f"{entry.name} must be a finite number ≥ 0, not {value!r}")
        if self.learning_rate == 0 or self.clip_norm == 0:
            raise MessageError("learning_rate and clip_norm must be above 0")
        if self.momentum >= 1:
            raise MessageError(f"momentum must be below 1, not {self.momentum!r}")
