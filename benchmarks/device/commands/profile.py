"""`tessera-bench profile`: measure this machine, and write a profile of it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.device.commands.kit import QUICK_FAMILIES
from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import NO_TORCH, UsageError, check_writable
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.device.own_profile.profile import Identity
    from benchmarks.device.own_profile.profiling import Endurance, Pace, ProfilingConfig
    from benchmarks.device.results import Machine
    from benchmarks.report.figures import Figure
    from edge_sdk.machine.board import Board
    from edge_sdk.machine.snapshot import Snapshot

FAMILIES = ("mlp", "cnn", "sensor-cnn", "vit-small")
"""Models whose time is mostly arithmetic; a bag of words has almost none."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "profile",
        _measure,
        help="measure this machine, and write a profile for the emulator and the cost model",
        description=(
            "Measures how fast this machine trains with one thread and with all cores, its power "
            "if a rail or the battery tells, and the effect of heat, and writes a profile that "
            "gives the source of every number. Close all other programs. Takes about six minutes; "
            "--quick, without heat, under one. On a device without torch, give it a kit made "
            "elsewhere by `tessera-bench kit`."
        ),
        example="profile --write my_board.toml --cooling 'with fan'",
        quick="three small models once, without the effect of heat",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", required=True, help="the profile, a .toml file"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing profile")
    parser.add_argument("--kit", type=Path, metavar="DIR", help="models compiled before")
    parser.add_argument("--name", help="lower-case letters, digits, _ (default: that of the file)")
    parser.add_argument("--title", help="name for people (default: the machine's own)")
    parser.add_argument(
        "--kind", choices=("board", "phone", "computer"), help="kind (default: detected)"
    )
    parser.add_argument("--cooling", metavar="TEXT", help="its cooling, such as 'with fan'")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="folder of /proc and /sys (default /)",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from tempfile import TemporaryDirectory

    from benchmarks.device.own_profile.profiling import ProfilingConfig
    from edge_sdk.machine.board import write_board
    from edge_sdk.program.plain import to_plain

    name = _checked_name(arguments)
    config = ProfilingConfig(families=_families(arguments))
    if arguments.quick:
        config = ProfilingConfig(
            families=config.families, reps=1, burst_s=1.0, rest_s=3.0, endure_s=6.0, heat=False
        )
    with TemporaryDirectory(prefix="tessera-bench-") as temporary:
        made = _make(arguments, name, config, Path(temporary) / "kit")
    write_board(arguments.write, made.board)
    return Measured(
        figures=made.figures,
        shown=[_table(made.paces)],
        closing=_summary(arguments.write, made),
        packages=("onnxruntime", "numpy"),
        config=to_plain(config),
        data={
            "machine": to_plain(made.machine),
            "paces": [{**to_plain(pace), "macs_per_s": pace.macs_per_s} for pace in made.paces],
            "endurance": to_plain(made.endurance),
            "lacking": made.lacking,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Results of a run."""

    machine: Machine
    board: Board
    lacking: list[str]
    """A sentence for each number that could not be measured."""
    paces: list[Pace]
    endurance: Endurance | None
    warnings: list[str]

    @property
    def figures(self) -> list[Figure]:
        from benchmarks.device.own_profile.profile import profile_figures

        return profile_figures(self.board, self.paces)


def _make(
    arguments: argparse.Namespace, name: str, config: ProfilingConfig, new_kit: Path
) -> _Made:
    """Measure with the given kit, or with a new one made in `new_kit`."""
    from benchmarks.device.kit import read_kit, write_kit
    from benchmarks.device.own_profile.profile import identify, make_profile
    from benchmarks.device.own_profile.profiling import measure_endurance, measure_paces
    from benchmarks.device.trial.machine import look, others, rest, usable_threads
    from edge_sdk.machine.sensors.files import Files

    seen = look(arguments.root, cooling=arguments.cooling)
    snapshot = seen.probe.snapshot()
    identity = identify(
        Files(arguments.root),
        seen.probe.name,
        seen.machine,
        name=name,
        date=datetime.now(timezone.utc).date().isoformat(),
        title=arguments.title,
        kind=arguments.kind,
    )
    try:
        _check_enough(identity, snapshot)
        seen = rest(seen, config.rest_s)
    finally:
        seen.probe.close()
    idle_w = None if seen.machine.idle_w is None else seen.machine.idle_w.value
    threads = usable_threads(snapshot)
    metered = config.heat or idle_w is not None
    compiled = 0 if arguments.kit else len(config.families)
    timed = len(config.families) * len({1, threads}) * config.reps
    with progress("profile", compiled + timed + metered) as begin:
        if arguments.kit:
            folder, kit = arguments.kit, read_kit(arguments.kit)
        else:
            folder = new_kit
            kit = write_kit(new_kit, config.families, begin=begin)
        paces = measure_paces(folder, kit, config, threads, begin)
        endurance = None
        if metered:
            tick = begin(f"all cores for {config.endure_s:g} s")
            endurance = measure_endurance(folder, kit, config, threads, arguments.root)
            tick()
    board, lacking = make_profile(
        identity, snapshot, paces, endurance, idle_w=idle_w, heat=config.heat
    )
    beside = others(snapshot)
    return _Made(
        machine=seen.machine,
        board=board,
        lacking=lacking,
        paces=paces,
        endurance=endurance,
        warnings=[f"Measured {beside}: end them and measure again."] if beside else [],
    )


# -- checks, before minutes are spent ------------------------------------------------------------


def _checked_name(arguments: argparse.Namespace) -> str:
    path: Path = arguments.write
    check_writable(path)
    name: str = arguments.name or path.stem
    if path.suffix != ".toml":
        raise UsageError(f"--write {path}: a profile's file must end in .toml")
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise UsageError(f"{name!r} cannot name a profile: use lower-case letters, digits and '_'")
    if path.exists() and not arguments.force:
        raise UsageError(f"{path} already exists: name another file, or replace it with --force")
    return name


def _families(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the families to train: those of a given kit, if any."""
    from benchmarks.device.kit import read_kit

    wanted = QUICK_FAMILIES if arguments.quick else FAMILIES
    if arguments.kit is None:
        if find_spec("torch") is None:
            raise UsageError(NO_TORCH)
        return wanted
    had = read_kit(arguments.kit).families
    found = tuple(family for family in wanted if family in had)
    if not found:
        raise UsageError(
            f"{arguments.kit} has none of {', '.join(wanted)}, which speed is counted by; make "
            f"one with `tessera-bench kit --families {','.join(wanted)}`"
        )
    return found


def _check_enough(identity: Identity, snapshot: Snapshot) -> None:
    if snapshot.memory.total_bytes is None:
        raise UsageError("the system does not tell how much memory there is; a profile needs that")
    if identity.kind == "phone" and snapshot.battery.capacity_wh is None:
        raise UsageError(
            "a phone's profile needs the capacity of its battery, which this system does not "
            "tell: give --kind board, and add [battery] to the file by hand"
        )


# -- output --------------------------------------------------------------------------------------


def _table(paces: Sequence[Pace]) -> Table:
    return table_of(
        "Training on the onnx backend",
        paces,
        ("family", lambda pace: pace.family),
        ("level", lambda pace: f"{pace.level:.0%}"),
        ("threads", lambda pace: str(pace.threads)),
        ("ms per step", lambda pace: f"{pace.step_s * 1e3:.2f}"),
        ("10⁹ MACs per s", lambda pace: f"{pace.macs_per_s / 1e9:.2f}"),
        texts=1,
    )


def _summary(path: Path, made: _Made) -> list[str]:
    errors = {figure.name: figure.value for figure in made.figures}
    return [
        f"{path}: {made.board.title}",
        *(
            f"  {key} = {quantity.value:g} ({quantity.provenance})"
            for key, quantity in made.board.quantities()
        ),
        f"Emulated steps differ from those measured by {errors['profile.error']:.0%} (median), "
        f"{errors['profile.largest_error']:.0%} at most: one number stands for all models.",
        "Not measured:",
        *(f"  {sentence}" for sentence in made.lacking),
        *made.warnings,
        f"Use it: tessera-bench device --emulate {path}",
    ]
