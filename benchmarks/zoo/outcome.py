"""The outcome of one model, as plain data: written by its process, read by the command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report.options import UsageError


@dataclass(frozen=True, slots=True)
class ZooOutcome:
    """What one model came to. `None`: not reached, or not known."""

    key: str
    code: str
    """Hash of the code that traces and compiles."""
    parameters: int | None = None
    traced: bool = False
    share: float | None = None
    """Parameters left at level ½, of all."""
    layer_norm: str = "whole"
    """Way the model was traced; `submodel` only where nothing can be narrowed otherwise."""
    submodel_share: float | None = None
    """Parameters left with `layer_norm="submodel"`, if that makes a difference."""
    pruned_share: float | None = None
    """The same by torch-pruning at ratio ½."""
    pruning_failed: str = ""
    trace_s: float | None = None
    """Seconds of computing, on one thread; so is `compile_s`."""
    compiled: bool = False
    compile_s: float | None = None
    graph_bytes: int | None = None
    graphs: int | None = None
    right: bool = False
    """One training step is right at every level."""
    error: float | None = None
    """Largest error of onnx against torch in float64, of all levels."""
    torch_error: float | None = None
    """Error of torch in float32 where ours is largest."""
    reason: str = ""
    """Why the model went no further."""
    raw: bool = False
    """The reason is no message of ours but a traceback."""

    @property
    def passed(self) -> bool:
        """True if the model traces, compiles and trains right."""
        return self.traced and self.compiled and self.right

    def failed(self, reason: str, *, raw: bool = False) -> ZooOutcome:
        """Return the outcome of a model that goes no further."""
        return replace(self, reason=" ".join(reason.split())[:600], raw=raw)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def read_outcomes(path: Path) -> dict[str, ZooOutcome]:
    """Read a file of outcomes, a line of JSON each, by the model's key; the last one counts.

    A file that does not exist has none, and a last line that was cut off is left out. Raises
    `UsageError` for a file of anything else.
    """
    if not path.exists():
        return {}
    found = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            outcome = ZooOutcome(**json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise UsageError(f"{path}, line {number} is no outcome of the zoo: {error}") from error
        found[outcome.key] = outcome
    return found


def write_outcomes(path: Path, outcomes: Iterable[ZooOutcome]) -> None:
    """Write a file of outcomes, in place of an earlier one."""
    text = "".join(json.dumps(each.plain()) + "\n" for each in outcomes)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def by_source(outcomes: Mapping[str, ZooOutcome], source: str) -> list[ZooOutcome]:
    """Return the outcomes of one source, in order."""
    return [each for key, each in outcomes.items() if key.partition("/")[0] == source]
