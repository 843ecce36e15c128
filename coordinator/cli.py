"""`tessera-coordinator`: the command line of the coordinator."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError
from coordinator.operate.control.forgetting import add_command as add_forget_command
from coordinator.operate.control.quarantine import add_commands as add_quarantine_commands
from coordinator.operate.control.showing import add_commands as add_showing_commands
from coordinator.operate.control.steering import add_commands as add_steering_commands
from coordinator.operate.http.commands import add_command as add_page_command
from coordinator.operate.identity.commands import add_commands as add_identity_commands
from coordinator.operate.joining.commands import add_commands as add_join_commands
from coordinator.operate.results.commands import add_commands as add_result_commands
from coordinator.operate.upkeep.commands import add_commands as add_upkeep_commands
from edge_sdk import __version__
from edge_sdk.program.command import (
    EXIT_INTERRUPTED,
    run_command,
)
from edge_sdk.program.completion import add_completion

if TYPE_CHECKING:
    from coordinator.simulate.demo.config import DemoConfig

EXIT_FENCED = 3
EXIT_TERMINATED = 143
PLOT_FORMATS = (".png", ".pdf", ".svg")
FLAGS = (
    *("rule", "mask", "widths", "grow", "classes", "recipe", "robust", "up", "down", "memory"),
    *("memory_type", "threads", "rounds", "fleet", "seed", "backend", "init", "preset"),
    "max_staleness",
)
"""Settings of the demo that are flags under the same name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    return run_command(make_parser, argv, "coordinator")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tessera-coordinator",
        description="Federated learning that fits the device: the coordinator.",
        epilog=(
            "examples:\n"
            "  tessera-coordinator demo                      watch eight unequal devices train\n"
            "  tessera-coordinator init run.toml             writes settings to start from\n"
            "  tessera-coordinator serve --config run.toml   runs the coordinator\n"
            "  tessera-coordinator serve --runs runs         runs all coordinators of a folder\n"
            "  tessera-coordinator status run                what a run does and waits for\n"
            "  tessera-coordinator devices run               who is there, and why they skip\n"
            "  tessera-coordinator history run               shows the rounds of a run\n"
            "  tessera-coordinator export run --format onnx --out model.onnx"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_demo(commands)
    add_result_commands(commands)
    _add_serve(commands)
    add_showing_commands(commands)
    _add_run_commands(commands)
    add_forget_command(commands)
    add_quarantine_commands(commands)
    add_steering_commands(commands)
    add_upkeep_commands(commands)
    add_join_commands(commands)
    add_page_command(commands)
    add_identity_commands(commands)
    add_completion(commands, parser)
    return parser


def _add_demo(commands: Any) -> None:
    from coordinator.simulate.demo.config import DemoConfig
    from edge_sdk.program.settings.reference import add_flags

    demo = commands.add_parser(
        "demo",
        help="watch unequal devices train one model",
        description=(
            "Emulated phones and boards train a small CNN on scikit-learn's handwritten digits. "
            "Each round, every device offers the share of the model it can afford, or skips and "
            "says why. The mask policy picks the groups, and the rule combines the movements block "
            "by block. The demo starts a broker, a coordinator and the devices as processes on "
            "this machine and stops them all at the end; --in-process runs everything in one "
            "process. Afterwards it repeats the run with every device training the whole model, "
            "to show the savings."
        ),
        epilog=(
            "examples: tessera-coordinator demo --rounds 40 --seed 7 --json run.json; "
            "tessera-coordinator demo --rule ram-fed --rule-option damping=0.5 --mask rolling; "
            "tessera-coordinator demo --rule ccfl-2 --up int8 --down fp16; "
            "tessera-coordinator demo --fleet my_fleet.toml. "
            "`--rule list`, `--mask list`, `--recipe list`: all choices. The same seed gives the "
            "same bits, with and without --in-process; asynchronous rules repeat only with it."
        ),
    )
    add_flags(demo, DemoConfig, FLAGS)
    options = (
        ("rule", "the rule", "damping=0.5"),
        ("mask", "the mask", "tied=true"),
        ("robust", "the defence", "factor=2"),
        ("local", "the devices' training", "proximal=0.1"),
    )
    for name, said, example in options:
        demo.add_argument(
            f"--{name}-option",
            type=_option,
            action="append",
            metavar="NAME=VALUE",
            help=f"an option of {said}, e.g. {example}; repeatable",
        )
    demo.add_argument("--devices", metavar="N", help="number of devices to use (default: all)")
    demo.add_argument(
        "--no-compare",
        action="store_true",
        help="skip the second run, in which every device trains the whole model",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write all rounds as JSON")
    demo.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path("tessera-demo.png"),
        help="file for the plot of accuracy by round (default %(default)s)",
    )
    demo.add_argument(
        "--save", type=Path, metavar="DIR", help="save the trained model in a new folder"
    )
    demo.add_argument(
        "--in-process",
        action="store_true",
        help="run everything in this process over an in-memory link, without a broker",
    )
    demo.set_defaults(run=_demo)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="run a task's coordinator over an MQTT broker",
        description=(
            "Runs the coordinator described by a configuration until the run is complete, or "
            "until SIGTERM or Ctrl-C. The run's folder holds its whole state: started again, the "
            "coordinator resumes where it stopped. With --runs, one process serves every *.toml "
            "file of a folder as a run until SIGTERM or Ctrl-C: a file that is added starts one, "
            "one that is removed stops its run, one that is saved again restarts it. The runs "
            "share a broker, an authority and the port for joining (coordinator.toml there). A run "
            "that fails ends alone, and starts again by itself; tessera-coordinator served DIR "
            "lists all with their errors."
        ),
        epilog=(
            "exit codes: 0 the run is complete, or tessera-coordinator stop ended it; "
            "1 the run failed, start it again to resume; "
            "2 the configuration, the task or the broker cannot be used; "
            "3 another coordinator has the task, or takes it over; "
            "130 stopped by Ctrl-C; 143 stopped by SIGTERM. "
            "examples: tessera-coordinator serve --config run.toml; "
            "tessera-coordinator serve --runs /etc/tessera/runs"
        ),
    )
    which = serve.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", type=Path, metavar="FILE", help="the TOML file of a run")
    which.add_argument(
        "--runs", type=Path, metavar="DIR", help="a folder of such files; serves all of them"
    )
    serve.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of the logs on stderr (default %(default)s)",
    )
    serve.add_argument(
        "--qr",
        action="store_true",
        help="also draw the line for devices as a QR code (needs segno)",
    )
    serve.add_argument(
        "--take-over",
        action="store_true",
        help="stop another coordinator of the task, and continue from this folder even if it is a "
        "copy or older than what devices have heard of",
    )
    serve.set_defaults(run=_serve)
    served = commands.add_parser(
        "served",
        help="list the runs of a process that serves many",
        description=(
            "Asks the process that serves a folder of run files (serve --runs) for all of them: "
            "the task, the state, and the error of one that is broken or failed."
        ),
        epilog="example: tessera-coordinator served /etc/tessera/runs",
    )
    served.add_argument("folder", type=Path, metavar="DIR", help="the folder of run files")
    served.add_argument("--json", action="store_true", help="as JSON, for scripts")
    served.set_defaults(run=_served)
    init = commands.add_parser(
        "init",
        help="write a commented configuration as a starting point",
        description=(
            "Writes a configuration for serve. Unchanged, it trains the task of "
            "examples/coordinator/task.py over an embedded broker."
        ),
        epilog="example: tessera-coordinator init run.toml --source task.py",
    )
    init.add_argument(
        "file", type=Path, nargs="?", default=Path("run.toml"), help="default: %(default)s"
    )
    init.add_argument(
        "--source", default="task.py", metavar="TASK", help="the task's file (default %(default)s)"
    )
    init.set_defaults(run=_init)
    broker = commands.add_parser(
        "broker",
        help="run a broker on this machine, for trials",
        description=(
            "Runs Mosquitto if it is installed, otherwise amqtt, on loopback until Ctrl-C or "
            "SIGTERM. Prints the [broker] table that programs on this machine need to connect."
        ),
        epilog="example: tessera-coordinator broker --port 1883",
    )
    broker.add_argument("--port", type=int, help="default: any free port")
    broker.add_argument(
        "--folder", type=Path, help="folder for its configuration and log (default: temporary)"
    )
    broker.set_defaults(run=_broker)


def _add_run_commands(commands: Any) -> None:
    history = commands.add_parser(
        "history",
        help="show the rounds of a run",
        description="Prints a line for every closed round; works while the run is going on.",
        epilog="example: tessera-coordinator history run",
    )
    history.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    history.add_argument("--json", action="store_true", help="all details, one JSON line per round")
    history.set_defaults(run=_history)
    notify = commands.add_parser(
        "notify",
        help="try the URL that notices of a run are sent to",
        description=(
            "Sends a notice with the event `test` to the URL in [notify] of a configuration, once, "
            "and says what the receiver answers."
        ),
        epilog=(
            "exit codes: 0 the receiver took it; 1 it did not. "
            "example: tessera-coordinator notify --test --config run.toml"
        ),
    )
    notify.add_argument("--test", action="store_true", required=True, help="send a test")
    notify.add_argument("--config", type=Path, metavar="FILE", required=True, help="the TOML file")
    notify.add_argument("--json", action="store_true", help="as JSON, for scripts")
    notify.set_defaults(run=_notify)


def _serve(arguments: argparse.Namespace) -> int:
    from coordinator.operate.config import read_config
    from coordinator.operate.serve.serving import ServeEnd, explain_failure, serve
    from coordinator.rounds.report import run_terms
    from coordinator.run.folder import RunError, read_history
    from coordinator.run.steering.audit import is_moving
    from coordinator.run.steering.orders import read_steered
    from coordinator.service.outgoing.fence import FencedError
    from edge_sdk.program.logs import configure_logging
    from edge_sdk.program.watchdog import Watchdog

    configure_logging(arguments.log_format, "info")
    if arguments.runs is not None:
        return _serve_many(arguments)
    config = read_config(arguments.config)
    stop, codes = _stop_on_signals()
    try:
        watchdog = Watchdog.from_environment()
        complete = serve(
            config,
            stop,
            lambda line: print(line, flush=True),
            watchdog,
            qr=arguments.qr,
            take_over=arguments.take_over,
        )
    except FencedError as error:
        print(f"tessera-coordinator: {error}", file=sys.stderr)
        return EXIT_FENCED
    except RunError as error:
        print(f"tessera-coordinator: {explain_failure(error)}", file=sys.stderr)
        return 1
    if complete and (terms := str(run_terms(read_history(config.run.folder)))):
        print(f"all rounds: {terms}")
    if complete is ServeEnd.ORDERED and is_moving(read_steered(config.run.folder).last):
        print("stopped by pack --move: the run goes on where it is unpacked", flush=True)
        return 0
    if complete is ServeEnd.ORDERED:
        again = f"tessera-coordinator serve --config {arguments.config}"
        print(f"stopped, as asked; to go on: {again}", flush=True)
        return 0
    print("the run is complete" if complete else "stopped; serve resumes from here", flush=True)
    return 0 if complete else codes[0]


def _serve_many(arguments: argparse.Namespace) -> int:
    from coordinator.operate.config import read_process_config
    from coordinator.operate.serve.supervising import serve_folder
    from edge_sdk.program.watchdog import Watchdog

    if arguments.qr:
        raise ConfigError(
            "--qr draws the code of one run; with --runs: tessera-coordinator codes create "
            f"{arguments.runs} --task NAME --qr"
        )
    config = read_process_config(arguments.runs)
    stop, codes = _stop_on_signals()
    serve_folder(
        arguments.runs,
        config,
        stop,
        lambda line: print(line, flush=True),
        Watchdog.from_environment(),
        take_over=arguments.take_over,
    )
    print("stopped; serve resumes from here", flush=True)
    return codes[0]


def _served(arguments: argparse.Namespace) -> int:
    from coordinator.operate.config import process_folder
    from edge_sdk.program.control import ask_run

    folder = process_folder(arguments.folder)
    if folder is None:
        raise ConfigError(
            f"{arguments.folder} was never served: tessera-coordinator serve --runs "
            f"{arguments.folder}"
        )
    rows = ask_run(folder, "runs.list")
    if arguments.json:
        print(json.dumps(rows))
        return 0
    if not rows:
        print(f"no run files in {arguments.folder}")
    width = max((len(row["task"] or row["file"]) for row in rows), default=0)
    for row in rows:
        again = "" if row["again_s"] is None else f"; again in {row['again_s']:.0f} s"
        error = "" if row["error"] is None else f": {row['error']}"
        where = row["folder"] or row["file"]
        print(f"{row['task'] or row['file']:{width}}  {row['state']:8}  {where}{error}{again}")
    return 0


def _stop_on_signals() -> tuple[threading.Event, list[int]]:
    """Return an event that the first signal sets, and its exit code; a second signal ends us."""
    stop, codes = threading.Event(), [EXIT_INTERRUPTED]

    def ask(number: int, _frame: object) -> None:
        codes[0] = EXIT_TERMINATED if number == signal.SIGTERM else EXIT_INTERRUPTED
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
    return stop, codes


def _init(arguments: argparse.Namespace) -> int:
    from coordinator.operate.config import render_default
    from edge_sdk.program.settings.reference import write_example

    path: Path = arguments.file
    write_example(path, render_default(path.name, arguments.source))
    print(f"{path}: edit it, then tessera-coordinator serve --config {path}")
    return 0


def _broker(arguments: argparse.Namespace) -> int:
    from tempfile import TemporaryDirectory

    from coordinator.operate.broker.embedded import embedded_broker
    from coordinator.operate.serve.serving import broker_table

    stop, codes = _stop_on_signals()
    with TemporaryDirectory(prefix="tessera-broker-") as temporary:
        folder = arguments.folder or Path(temporary)
        with embedded_broker(folder, port=arguments.port) as settings:
            print(broker_table(settings), end="", flush=True)
            stop.wait()
    return codes[0]


def _history(arguments: argparse.Namespace) -> int:
    from coordinator.rounds.report import run_terms
    from coordinator.run.folder import read_history
    from coordinator.run.steering.audit import words_of

    entries = list(read_history(arguments.folder))
    for entry in entries:
        if arguments.json:
            print(json.dumps(entry))
        elif (words := words_of(entry)) is not None:
            print(words)
        elif "devices" not in entry:
            continue  # of a later version
        else:
            print(_history_line(entry))
    if not arguments.json and (terms := str(run_terms(entries))):
        print(f"all rounds: {terms}")
    return 0


def _notify(arguments: argparse.Namespace) -> int:
    from coordinator.operate.config import read_config
    from coordinator.operate.serve.notices import try_receiver

    config = read_config(arguments.config)
    found = try_receiver(config.notify, config.task.name)
    if arguments.json:
        print(json.dumps(found))
    else:
        print(found["error"] or f"{found['receiver']} took the notice (status {found['status']})")
    return 0 if found["error"] is None else 1


def _history_line(entry: dict[str, Any]) -> str:
    devices = entry["devices"]
    trained = sum(device["level"] is not None for device in devices)
    accuracy = "      –" if entry["accuracy"] is None else f"{entry['accuracy']:7.2%}"
    deploy = ""
    for level in entry.get("levels", ()):  # older lines have none
        if level["level"] == entry["deploy"]:
            deploy = f"  deploy level {level['level']:g} {level['accuracy']:7.2%}"
    up, down = (sum(device[name] for device in devices) for name in ("bytes_up", "bytes_down"))
    return (
        f"round {entry['round']:5}  {trained:4} of {len(devices):4} trained  accuracy {accuracy}  "
        f"{entry['seconds']:8.1f} s  {up / 1e6:9.2f} MB up  {down / 1e6:9.2f} MB down"
        f"{deploy}"
    )


def _option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; the value is a number, true, false, or the text itself."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _demo(arguments: argparse.Namespace) -> int:
    from coordinator.aggregate.published import PUBLISHED
    from coordinator.aggregate.rules import ASYNC_RULES, RULES
    from coordinator.masks import MASKS
    from coordinator.simulate.presets import LEVEL_PRESETS
    from edge_sdk.program.settings.choices import listing

    if "list" in (arguments.rule, arguments.mask, arguments.recipe, arguments.preset):
        if arguments.rule == "list":
            print("rules:", listing({**RULES, **ASYNC_RULES}), sep="\n")
        if arguments.mask == "list":
            print("mask policies:", listing(MASKS), sep="\n")
        if arguments.recipe == "list":
            print("recipes:", *(f"  {n:<15}  {r.source}" for n, r in PUBLISHED.items()), sep="\n")
        if arguments.preset == "list":
            shown = ((n, ", ".join(f"{level:g}" for level in p)) for n, p in LEVEL_PRESETS.items())
            print("levels of devices, in turn:", *(f"  {n:<6}  {p}" for n, p in shown), sep="\n")
        return 0
    return _run_demo(arguments)


def _demo_config(arguments: argparse.Namespace) -> DemoConfig:
    """Return the settings of a demo. Raises `ConfigError`."""
    from coordinator.aggregate.published import recipe_preset
    from coordinator.simulate.demo.config import DemoConfig, demo_key
    from edge_sdk.decide.emulation.fleet import load_fleet
    from edge_sdk.program.settings import load_settings

    flags = {name: getattr(arguments, name) for name in (*FLAGS, "devices")}
    for name in ("rule", "mask", "robust"):
        flags[f"{name}_options"] = dict(getattr(arguments, f"{name}_option") or ())
    flags["local"] = dict(arguments.local_option or ())
    preset = partial(recipe_preset, key="recipe", named=demo_key)
    config = load_settings(DemoConfig, environment={}, flags=flags, preset=preset)
    if arguments.devices is None:
        config = replace(config, devices=len(load_fleet(config.fleet)))
    return config


def _run_demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from coordinator.run.folder import RunError
    from coordinator.simulate.demo.processes import ProcessDemo
    from coordinator.simulate.demo.run import make_demo, run_full
    from coordinator.simulate.demo.view import AnyDemo, as_json, save_plot, summarise, watch
    from coordinator.task.saved_model import check_folder_free

    config = _demo_config(arguments)
    for folder in (arguments.save, config.memory):
        if folder is not None:
            check_folder_free(folder)
    for path in (arguments.json, arguments.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"cannot write {path}: name a file in an existing folder")
    if arguments.plot.suffix not in PLOT_FORMATS:
        raise ConfigError(f"--plot must end in one of {', '.join(PLOT_FORMATS)}")
    console = Console()
    code = 0
    demo: AnyDemo
    if arguments.in_process:
        with console.status("tracing the model, compiling its graphs, distributing data …"):
            demo = make_demo(config)
    else:
        demo = ProcessDemo(config)
    try:
        watch(demo, console)
    except KeyboardInterrupt:
        console.print(f"stopped after {len(demo.rounds)} of {config.rounds} rounds")
        code = EXIT_INTERRUPTED
    except RunError as error:
        print(f"tessera-coordinator: {error}", file=sys.stderr)
        return 1
    if demo.rounds:
        save_plot(demo, arguments.plot)
        full = None
        if not code and not arguments.no_compare:
            with console.status("the same with every device training the whole model …"):
                full = run_full(config, demo.initial)
        summarise(demo, console, plot=arguments.plot, full=full)
        if arguments.save is not None:
            demo.save(arguments.save)
            console.print(f"model           {arguments.save}", markup=False, highlight=False)
        if arguments.json is not None:
            content = as_json(demo) | {"full": None if full is None else as_json(full)}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
