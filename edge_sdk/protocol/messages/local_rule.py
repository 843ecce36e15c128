"""Numbers that define local training, sent to every device with a round (docs/algorithms.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from edge_sdk.protocol.errors import MessageError

Widths = Literal["own", "ordered-dropout", "sandwich"]
Classes = Literal["all", "own"]
CLIP_NORM = 20.0
"""Norm to which gradients are clipped unless a run says otherwise: training that goes well hardly
ever has longer ones, and it bounds the movement of a device that means harm."""
_NAMED: Mapping[str, Any] = {"widths": Widths, "classes": Classes}
"""Fields that are one of a few names."""
Precision = Literal["auto", "fp32", "fp16"]
"""A device's choice for the products of its steps; `auto`: fp16 on providers that gain from it."""


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

    `widths` names the submodels that a step trains. `own`: the assigned one. `ordered-dropout`: one
    drawn uniformly from the assigned one and the narrower ones within it (FjORD). `sandwich`: the
    assigned one and one drawn narrower one on the same batch, their losses added (slimmable
    networks); `distillation` κ mixes the wide outputs into the narrow one's targets:
    `(1 − κ) · loss + κ · cross-entropy(wide outputs, narrow outputs)`.

    `classes`: with `own`, scores of classes of which the device has no sample are 0 in the loss,
    and take no gradient (HeteroFL). Needs cross-entropy.
    """

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    sam_radius: float = 0.0
    proximal: float = 0.0
    rescale: float = 0.5
    widths: Widths = "own"
    distillation: float = 0.0
    classes: Classes = "all"

    def __post_init__(self) -> None:
        for name, kind in _NAMED.items():
            if (value := getattr(self, name)) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise MessageError(f"{name} must be one of {known}, not {value!r}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _NAMED or (value is None and entry.name == "clip_norm"):
                continue
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise MessageError(f"{entry.name} must be a finite number ≥ 0, not {value!r}")
        if self.learning_rate == 0 or self.clip_norm == 0:
            raise MessageError("learning_rate and clip_norm must be above 0")
        if self.momentum >= 1:
            raise MessageError(f"momentum must be below 1, not {self.momentum!r}")
        if self.distillation > 1:
            raise MessageError(f"distillation is a share up to 1, not {self.distillation!r}")
        if self.distillation and self.widths != "sandwich":
            raise MessageError("distillation needs the wide outputs: set widths to sandwich")
