"""Settings of the demo, as its command line gives them. Loads neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from edge_sdk.decide.emulation.fleet import shipped_fleet
from edge_sdk.program.settings import NOT_A_KEY, Count, Within, check_fields, nearest
from edge_sdk.program.settings.choices import EncodingText
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.local_rule import Classes, LocalRule, Widths


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Options of the command line. Raises `ConfigError`."""

    rule: str = "ram-fed"
    """Rule that combines movements; `list` lists all."""
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None
    """Policy that picks each device's groups; `list` lists all; without it, the best for the
    rule."""
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    widths: Widths | None = None
    """Submodels that a step trains: the assigned one, one drawn from it and the narrower ones
    within it, or it and a drawn narrower one; without it, the best for rule and masks."""
    grow: Annotated[float, Within(least=0, below=1)] = 0.0
    """Share of the rounds in which the model grows from its smallest level to the whole; 0: devices
    train what they can afford from the first round on."""
    classes: Classes = "all"
    """Classes whose scores count in local training: all, or those that the device has samples of
    (`own`)."""
    recipe: str | None = None
    """Published system, which sets --rule, --mask, --widths, --grow and --classes; `list` lists
    all."""
    local: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the devices' local rule, given or set by the recipe; those that are settings here
    have their own flags."""
    robust: Literal[
        "none",
        "clip",
        "clip-median",
        "median",
        "trimmed-mean",
        "geometric-median",
        "multi-krum",
    ] = "none"
    """Defence against bad devices, see docs/algorithms.md."""
    robust_options: Mapping[str, Any] = field(default_factory=dict)
    up: EncodingText = field(default_factory=Encoding)
    """Encoding of movements: fp32 (the default), fp16, int8, top-k:0.1; add +zstd to any."""
    down: EncodingText = field(default_factory=Encoding)
    """Encoding of the model, fp32 by default."""
    memory: Path | None = None
    """Folder on disk for the rule's memory (with --in-process); without it, RAM."""
    memory_type: Literal["fp32", "fp16", "int8"] = "fp32"
    """Number type of the values in memory."""
    threads: Annotated[int, Within(least=1, most=64)] = 1
    """Devices that train at the same time, with --in-process; does not change the result."""
    rounds: Count = 45
    """Rounds to train."""
    fleet: Path = field(default_factory=lambda: shipped_fleet("mixed"))
    """File of the fleet to emulate, see docs/devices.md; by default devices/fleets/mixed.toml."""
    devices: Annotated[int, Within(least=1, most=200)] = 8
    """Number of devices to use (`choose_members`)."""
    weigh: bool = field(default=True, metadata=NOT_A_KEY)
    """Devices decide for themselves; False: all train the whole model in every round."""
    seed: Annotated[int, Within(least=0, below=2**63)] = 0
    """Random seed."""
    backend: Literal["onnx", "torch"] = "onnx"
    """Training backend: onnxruntime on the compiled graph or, with --in-process, torch."""
    init: Path | None = None
    """Start from these weights: .safetensors, or a torch state_dict (.pt, .pth, .bin)."""

    def __post_init__(self) -> None:
        check_fields(self)
        known = [each.name for each in fields(LocalRule) if each.name not in OWN]
        if unknown := [name for name in self.local if name not in known]:
            name = unknown[0]
            raise ConfigError(f"the devices' training has no option {name!r}{nearest(name, known)}")


OWN = ("widths", "classes", "grow")
"""Settings of a run's devices that are settings of the demo."""


def demo_key(key: str) -> str:
    """Return the demo's name for a key of a run's file that a recipe sets."""
    if key.startswith("run."):
        own = key.removeprefix("run.")
        return own if own in OWN else f"local.{own}"
    return key.replace(".options", "_options").removesuffix(".name")
