"""`tessera-coordinator`: the command line of the coordinator."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.errors import ConfigError
from edge_sdk import TesseraError, __version__

EXIT_INTERRUPTED = 130
PLOT_FORMATS = (".png", ".pdf", ".svg")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("tessera-coordinator: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TesseraError as error:
        print(f"tessera-coordinator: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"tessera-coordinator: {error.name} is not installed; "
            "this command needs: pip install 'tessera-fl[coordinator]'",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"tessera-coordinator: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-coordinator",
        description="Federated learning that fits the device: the coordinator's side.",
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="watch devices of different means train one model",
        description=(
            "Devices of different means train a small CNN on scikit-learn's handwritten digits. "
            "Each round every device says how much of the model it can afford, or skips and says "
            "why; the mask policy picks the groups and the rule puts the pieces together, block "
            "by block."
        ),
        epilog=(
            "examples: tessera-coordinator demo --rounds 40 --seed 7 --json run.json; "
            "tessera-coordinator demo --rule ram-fed --rule-option damping=0.5 --mask rolling; "
            "tessera-coordinator demo --rule ccfl-2 --up int8 --down fp16. "
            "`--rule list` and `--mask list` name all there are. The same seed gives the same bits."
        ),
    )
    demo.add_argument(
        "--rule", default="ram-fed", help="how movements are put together (default %(default)s)"
    )
    demo.add_argument(
        "--rule-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the rule; may be given again",
    )
    demo.add_argument(
        "--mask", help="which groups devices train (default: what serves the rule best)"
    )
    demo.add_argument(
        "--mask-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the mask policy, e.g. tied=true; may be given again",
    )
    demo.add_argument(
        "--up",
        default="fp32",
        metavar="ENCODING",
        help="how movements travel: fp32, fp16, int8, top-k:0.1; +zstd behind any (default fp32)",
    )
    demo.add_argument(
        "--down", default="fp32", metavar="ENCODING", help="how the model travels (default fp32)"
    )
    demo.add_argument(
        "--memory", type=Path, metavar="DIR", help="keep the rule's memory on disk, in this folder"
    )
    demo.add_argument(
        "--memory-type",
        choices=("fp32", "fp16", "int8"),
        default="fp32",
        help="how memory holds its values (default %(default)s)",
    )
    demo.add_argument(
        "--threads",
        type=int,
        default=1,
        help="devices that train at a time; the result is the same (default %(default)s)",
    )
    demo.add_argument(
        "--rounds", type=int, default=30, help="rounds to train (default %(default)s)"
    )
    demo.add_argument(
        "--devices", type=int, default=8, help="how many devices (default %(default)s)"
    )
    demo.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write every round as JSON")
    demo.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        default=Path("tessera-demo.png"),
        help="where to draw accuracy by round (default %(default)s)",
    )
    demo.add_argument(
        "--backend",
        choices=("onnx", "torch"),
        default="onnx",
        help="how devices train: onnxruntime on the compiled graph, or torch (default %(default)s)",
    )
    demo.add_argument(
        "--init",
        type=Path,
        metavar="FILE",
        help="start from these weights: .safetensors, or a torch state_dict (.pt, .pth, .bin)",
    )
    demo.add_argument(
        "--save", type=Path, metavar="DIR", help="save the trained model in a new folder"
    )
    demo.add_argument(
        "--in-process",
        action="store_true",
        help="all in one process, over the in-memory link (the only mode so far)",
    )
    demo.set_defaults(run=_demo)
    export = commands.add_parser(
        "export",
        help="write a saved model as ONNX, safetensors or a torch state_dict",
        description=(
            "Writes a saved model to one file. onnx: the model for inference with its weights "
            "inside, for plain onnxruntime; safetensors, torch: weights and buffers by the names "
            "they have in the torch module."
        ),
        epilog=(
            "example: tessera-coordinator demo --save digits && "
            "tessera-coordinator export digits --format onnx --out model.onnx"
        ),
    )
    export.add_argument("model", type=Path, metavar="MODEL_DIR", help="a folder that --save made")
    export.add_argument("--format", choices=("onnx", "safetensors", "torch"), required=True)
    export.add_argument("--out", type=Path, metavar="FILE", required=True, help="where to write it")
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    export.set_defaults(run=_export)
    return parser


def _export(arguments: argparse.Namespace) -> int:
    from coordinator.export import export_model
    from coordinator.saved import read_model

    model = read_model(arguments.model)
    export_model(model, arguments.format, arguments.out, force=arguments.force)
    size = arguments.out.stat().st_size
    print(f"{arguments.out}: {arguments.format}, {model.plan.parameters:,} parameters, {size:,} B")
    return 0


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is a number, true, false, or else the text itself."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _demo(arguments: argparse.Namespace) -> int:
    from coordinator.masks import MASKS
    from coordinator.named import listing
    from coordinator.rules import ASYNC_RULES, RULES

    if "list" in (arguments.rule, arguments.mask):
        if arguments.rule == "list":
            print("rules:", listing({**RULES, **ASYNC_RULES}), sep="\n")
        if arguments.mask == "list":
            print("mask policies:", listing(MASKS), sep="\n")
        return 0
    return _run_demo(arguments)


def _run_demo(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from coordinator.demo.run import DemoConfig, make_demo
    from coordinator.demo.view import save_plot, summarise, watch
    from coordinator.saved import check_folder_free
    from edge_sdk.protocol.encoding import Encoding

    config = DemoConfig(
        rounds=arguments.rounds,
        devices=arguments.devices,
        seed=arguments.seed,
        backend=arguments.backend,
        init=arguments.init,
        rule=arguments.rule,
        rule_options=dict(arguments.rule_option),
        mask=arguments.mask,
        mask_options=dict(arguments.mask_option),
        up=Encoding.parse(arguments.up),
        down=Encoding.parse(arguments.down),
        memory_dir=arguments.memory,
        memory_dtype=arguments.memory_type,
        threads=arguments.threads,
    )
    for folder in (arguments.save, arguments.memory):
        if folder is not None:
            check_folder_free(folder)
    for path in (arguments.json, arguments.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"cannot write {path}: name a file in a folder that exists")
    if arguments.plot.suffix not in PLOT_FORMATS:
        raise ConfigError(f"--plot must end in one of {', '.join(PLOT_FORMATS)}")
    console = Console()
    code = 0
    with console.status("tracing the model, compiling its graphs, dealing out data …"):
        demo = make_demo(config)
    try:
        watch(demo, console)
    except KeyboardInterrupt:
        console.print(f"stopped after {len(demo.rounds)} of {config.rounds} rounds")
        code = EXIT_INTERRUPTED
    if demo.rounds:
        save_plot(demo, arguments.plot)
        summarise(demo, console, plot=arguments.plot)
        if arguments.save is not None:
            demo.save(arguments.save)
            console.print(f"model           {arguments.save}", markup=False, highlight=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(demo.as_json(), indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
