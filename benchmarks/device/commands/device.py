"""`tessera-bench device`: costs of each level on this machine, or modelled for a board."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.device.commands.kit import KIT_FAMILIES, QUICK_FAMILIES
from benchmarks.device.trial.providers import PROVIDERS, accelerated
from benchmarks.report.options import (
    NO_TORCH,
    RUNS,
    UsageError,
    add_common,
    add_families,
    check_families,
    check_writable,
    count,
    level_words,
    levels,
    names,
    numbers,
)
from benchmarks.report.progress import progress
from edge_sdk.program.command import EXIT_INTERRUPTED
from edge_sdk.protocol.plan import LEVELS

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.data import Dataset
    from benchmarks.device.results import Config, Results
    from benchmarks.device.trial.machine import Seen

ALL = "all"
QUICK_LEVELS = (1.0, 0.5, 0.25)
MOST_THREADS = 1024
SAME = (
    *("model", "system", "cores", "power_mode", "versions"),
    *("board", "cooling", "fed_by"),
)
"""Facts of a machine; results that differ in one of these do not belong together."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "device",
        help="measure the costs of each level on this machine: seconds, joules, megabytes, bytes",
        description=(
            "Trains each model family at each level, on each backend and number of threads, in a "
            "fresh process. Measures seconds of a step and of a round, peak memory, joules (net of "
            "idle, from rails or battery if readable; otherwise from a board's profile, and "
            "labelled so), bytes in every encoding, temperature and throttling, beside the SDK's "
            "predictions. Each case is measured three times; a run that other programs, heat or an "
            "unsettled machine disturbed is marked invalid. Writes a folder with results.json, "
            "report.md and plots. First close other programs, and let the device rest and cool. "
            "Takes a quarter of an hour; --quick under two minutes, and on a slow or busy machine "
            "it does less. Ctrl-C keeps finished cases, --resume continues."
        ),
        epilog=(
            "examples: tessera-bench device --quick | tessera-bench device --kit kit --board "
            "raspberry_pi_4 --cooling 'heat sink, no fan' | tessera-bench device --emulate "
            "devices/jetsons/jetson_nano.toml | tessera-bench device --emulate all"
        ),
    )
    add_common(parser, "three models, three levels, onnx alone, short bursts, more noise")
    where = parser.add_argument_group("where results go")
    where.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"results.json, report.md, plots (default: a new folder in {RUNS}/)",
    )
    where.add_argument(
        "--resume",
        action="store_true",
        help=f"continue the run in --out, or the newest incomplete one in {RUNS}/",
    )
    what = parser.add_argument_group("what is measured")
    add_families(what, KIT_FAMILIES, QUICK_FAMILIES)
    what.add_argument(
        "--levels",
        type=levels,
        metavar="L,M",
        help=(
            f"shares of every width (default {level_words(LEVELS)}; "
            f"quick {level_words(QUICK_LEVELS)})"
        ),
    )
    what.add_argument(
        "--backends",
        type=_backend_names,
        metavar="A,B",
        help="onnx, torch, or onnx with an execution provider: onnx-cuda, onnx-tensorrt, "
        "onnx-xnnpack, onnx-nnapi, onnx-coreml (default: all that are there; quick onnx)",
    )
    what.add_argument(
        "--threads", type=_threads, metavar="N,M", help="default: one, and the number of cores"
    )
    what.add_argument(
        "--repeats",
        type=count,
        metavar="N",
        help="fresh processes that measure each case (default 3; quick 1)",
    )
    what.add_argument("--batch", type=count, metavar="N", help="samples per step (default 32)")
    what.add_argument("--steps", type=count, metavar="N", help="per round (default 20; quick 10)")
    what.add_argument(
        "--kit", type=Path, metavar="DIR", help="made by `tessera-bench kit`: no torch needed here"
    )
    what.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=(
            "MNIST or Fashion-MNIST (idx), CIFAR-10 (binary) or UCI HAR (npz), for accuracy "
            "against joules (default: scikit-learn's digits)"
        ),
    )
    device = parser.add_argument_group("the device")
    device.add_argument(
        "--board",
        metavar="NAME|FILE",
        help="profile whose watts count if no sensor tells (default: recognised, if possible)",
    )
    device.add_argument("--title", metavar="TEXT", help="its name in the report")
    device.add_argument(
        "--cooling", metavar="TEXT", help="such as 'fan on' (default: what the kernel says)"
    )
    device.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="read sensors below this folder: a container's view of its host",
    )
    device.add_argument(
        "--emulate",
        metavar="NAME|FILE|all",
        help=(
            "model the report of a profile, or of all that ship with the project; only the "
            "accuracies come from real training, which runs here"
        ),
    )
    device.add_argument(
        "--update",
        type=Path,
        metavar="PAGE",
        help="with --emulate all: put the table of all profiles into this Markdown page",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    check_writable(arguments.json)
    console = Console()
    if arguments.emulate is not None:
        from benchmarks.device.commands.emulated import emulate

        return emulate(arguments, console)
    if arguments.update is not None:
        raise UsageError("--update needs --emulate all, which makes the table")
    return _measure(arguments, console)


# -- measuring -----------------------------------------------------------------------------------


def _measure(arguments: argparse.Namespace, console: Console) -> int:
    from benchmarks.data import load_data
    from benchmarks.device.kit import check_kit, kit_digits, read_kit
    from benchmarks.device.measure import Bench, measure, missing, missing_curves
    from benchmarks.device.report.folder import begun, keep
    from benchmarks.device.trial.machine import look, named_board, others, usable_threads

    started = time.monotonic()
    if "torch" in (arguments.backends or ()) and find_spec("torch") is None:
        raise UsageError("--backends torch: torch is not installed here; leave it out")
    folder, before = begun(arguments.out, arguments.resume)
    board = None if arguments.board is None else named_board(arguments.board)
    if not (arguments.root / "proc").is_dir() and not (arguments.root / "sys").is_dir():
        raise UsageError(f"--root {arguments.root}: it has no proc and no sys")
    own_data = None if arguments.data is None else load_data(arguments.data)
    seen = look(arguments.root, board=board, cooling=arguments.cooling)
    if before is not None:
        before = _resumed(arguments, before, seen, own_data)
        if not missing(before) and not missing_curves(before):
            print(f"tessera-bench: the run in {folder} is complete", file=sys.stderr)
            _finish(arguments, folder, replace(before, complete=True), console)
            return 0
    if busy := others(seen.probe.snapshot()):
        print(f"tessera-bench: measuring {busy}; end them for better numbers", file=sys.stderr)
    if before is None and arguments.kit is None:
        seen = _rest(arguments, seen)  # before compiling makes it warm
    with open_kit(arguments, before) as kit:
        data = kit_digits(kit) if own_data is None else own_data
        if before is not None:
            results, config = before, before.config
            if data.samples != (config.samples or data.samples):
                raise UsageError(
                    f"the run was started with {config.samples:,} samples of {config.data!r}, but "
                    f"there are {data.samples:,} here: give the same --data"
                )
            check_kit(kit, read_kit(kit), config.families, config.levels, config.batch)
        else:
            threads = arguments.threads or tuple(sorted({1, usable_threads(seen.probe.snapshot())}))
            config = make_config(arguments, kit, data, threads)
            if arguments.kit is not None:
                seen = _rest(arguments, seen)
            results = _new(arguments, seen, config, time.monotonic() - started)
        folder.mkdir(parents=True, exist_ok=True)
        keep(folder, results)
        bench = Bench(kit, seen, data, arguments.root, folder)
        parts = len(missing(results)) + len(missing_curves(results))
        try:
            with progress("device", parts) as part:
                for newer in measure(bench, results, part):
                    results = newer
                    keep(folder, results)
        except KeyboardInterrupt:
            # First: a second Ctrl-C does not wait for the report.
            print(
                f"tessera-bench: interrupted; {len(results.cases)} cases are kept. Continue with:\n"
                f"  {_again(arguments, folder)}",
                file=sys.stderr,
            )
            _finish(arguments, folder, results, console)
            return EXIT_INTERRUPTED
    _finish(arguments, folder, results, console)
    return 0


def _rest(arguments: argparse.Namespace, seen: Seen) -> Seen:
    from benchmarks.device.trial.machine import rest

    return rest(seen, 2.0 if arguments.quick else 5.0)


def _again(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the command that continues a run."""
    words = ["tessera-bench", "device", "--resume", "--out", str(folder)]
    for name in ("kit", "data", "board", "cooling"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name}", str(value)]
    if arguments.root != Path("/"):
        words += ["--root", str(arguments.root)]
    return shlex.join(words)


@contextmanager
def open_kit(arguments: argparse.Namespace, before: Results | None) -> Iterator[Path]:
    """Give the named kit, or a temporary one."""
    from tempfile import TemporaryDirectory

    from benchmarks.device.kit import BATCH, read_kit, write_kit

    if arguments.kit is not None:
        read_kit(arguments.kit)
        yield arguments.kit
        return
    families = arguments.families or (QUICK_FAMILIES if arguments.quick else KIT_FAMILIES)
    batch = arguments.batch or BATCH
    own_levels = arguments.levels or _levels(arguments.quick)
    if before is not None:
        config = before.config
        families, batch, own_levels = config.families, config.batch, config.levels
    if find_spec("torch") is None:
        raise UsageError(NO_TORCH)
    check_families(families)
    with TemporaryDirectory(prefix="tessera-kit-") as temporary:
        with progress("compile", len(families)) as part:
            write_kit(Path(temporary), families, levels=own_levels, batch=batch, begin=part)
        yield Path(temporary)


def make_config(
    arguments: argparse.Namespace, folder: Path, data: Dataset, threads: Sequence[int]
) -> Config:
    """Return the parameters; those not given are as in the kit."""
    from benchmarks.device.kit import check_kit, read_kit
    from benchmarks.device.results import Config
    from benchmarks.device.trial.learning import learners

    kit, quick = read_kit(folder), arguments.quick
    families = arguments.families
    if families is None:
        few = tuple(each for each in kit.families if each in QUICK_FAMILIES)
        families = few if quick and few else kit.families
    backends = arguments.backends or _backends(quick)
    steps = arguments.steps or (10 if quick else 20)
    few_levels = tuple(level for level in _levels(quick) if level in kit.levels) if quick else ()
    shares = arguments.levels or few_levels or kit.levels
    batch = arguments.batch or kit.batch
    check_kit(folder, kit, families, shares, batch)
    return Config(
        families=tuple(families),
        levels=shares,
        backends=tuple(backends),
        threads=tuple(threads),
        batch=batch,
        steps=steps,
        rounds=3 if quick else 10,
        repeats=arguments.repeats or (1 if quick else 3),
        burst_s=0.4 if quick else 2.0,
        data=data.name,
        samples=data.samples,
        learners=learners(data, folder, families)[: 1 if quick else None],
        learn_rounds=12 if quick else 30,
        quick=quick,
    )


def _levels(quick: bool) -> tuple[float, ...]:
    return QUICK_LEVELS if quick else LEVELS


def _backend_names(text: str) -> tuple[str, ...]:
    found = names(text)
    known = ("onnx", "torch", *PROVIDERS)
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose from {', '.join(known)}")
    return found


def _threads(text: str) -> tuple[int, ...]:
    found = numbers(text)
    if max(found) > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r}: give at most {MOST_THREADS} threads")
    return found


def _backends(quick: bool) -> tuple[str, ...]:
    if quick:
        return ("onnx",)
    return ("onnx", *(("torch",) if find_spec("torch") else ()), *accelerated())


def _new(arguments: argparse.Namespace, seen: Seen, config: Config, seconds: float) -> Results:
    from benchmarks.device.report.folder import now
    from benchmarks.device.results import Results

    title = arguments.title or seen.machine.model or "this machine"
    if arguments.board is None and seen.board is not None:
        title = arguments.title or seen.board.title  # its own name
    return Results(
        title=title,
        provenance="measured",
        started=now(),
        seconds=seconds,
        complete=False,
        machine=seen.machine,
        config=config,
    )


def _resumed(
    arguments: argparse.Namespace, before: Results, seen: Seen, data: Dataset | None
) -> Results:
    """Return the earlier run, if it can be continued here; failed cases are tried again.

    Raises `UsageError` for another machine, and for options that differ from the earlier ones.
    """
    config = before.config
    if before.provenance == "modelled":
        raise UsageError("these results are modelled: nothing to resume, start again")
    for name in SAME:
        then, now = getattr(before.machine, name), getattr(seen.machine, name)
        if then != now:
            raise UsageError(f"the run was started where {name} was {then}; here it is {now}")
    for name in ("families", "levels", "backends", "threads", "batch", "steps", "repeats"):
        then, now = getattr(config, name), getattr(arguments, name)
        if now is not None and now != then:
            words = [
                ",".join(map(str, each)) if isinstance(each, tuple) else each
                for each in (then, now)
            ]
            raise UsageError(
                f"the run was started with --{name} {words[0]}, not {words[1]}: resume it with the "
                "same options, or with none"
            )
    if arguments.quick and not config.quick:
        raise UsageError("the run was started without --quick: resume it without")
    name = "digits" if data is None else data.name
    if name != config.data:
        raise UsageError(f"the run was started with the data {config.data!r}: give its --data")
    curves = tuple(curve for curve in before.curves if curve.failed is None)
    return replace(before, complete=False, left_out=(), curves=curves)


def _finish(
    arguments: argparse.Namespace, folder: Path, results: Results, console: Console
) -> None:
    from benchmarks.device.report.folder import keep_report

    keep_report(folder, results)
    show(arguments, folder, results, console)


def show(arguments: argparse.Namespace, folder: Path, results: Results, console: Console) -> None:
    """Print the tables and missed targets; write `--json`."""
    from benchmarks.device.measure import device_figures
    from benchmarks.device.report.lines import print_results
    from benchmarks.device.report.report import FILE
    from benchmarks.device.results import write_results
    from benchmarks.report.figures import print_figures

    figures = device_figures(results)
    print_results(results, console)
    print_figures(figures, console)
    if arguments.json:
        write_results(arguments.json, results, figures)
    said = f"{folder / FILE} has all of it, with plots"
    console.print(said, highlight=False, soft_wrap=True)
