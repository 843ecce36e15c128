"""`tessera-coordinator export` and `evaluate`: the model of a run as a file, and its accuracy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.run.folder import WhichRound
    from coordinator.task.saved_model import SavedModel
    from edge_sdk.data.format import DataFormat
    from edge_sdk.protocol.plan.layout import Array
    from edge_sdk.protocol.task.data_spec import DataSpec


def add_commands(commands: Any) -> None:
    """Add the commands that read a run's model."""
    _add_export(commands)
    _add_evaluate(commands)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a run's trained model as ONNX, safetensors or a torch state_dict",
        description=(
            "Writes the model of a run, finished or still running, or a saved model, to one file. "
            "onnx: the model for inference with its weights inside, for plain onnxruntime; "
            "safetensors, torch: weights and buffers under their names in the torch module. A "
            "level below 1 is a narrower model with BatchNorm statistics of its own. Weights that "
            "no device ever trained are refused, unless --untrained asks for them."
        ),
        epilog=(
            "examples:\n"
            "  tessera-coordinator export run --format onnx --out model.onnx\n"
            "  tessera-coordinator export run --round best --level 0.5 --format onnx --out h.onnx\n"
            "  tessera-coordinator export run --format torch --level 1 --out model.pt\n"
            "  tessera-coordinator demo --save digits && "
            "tessera-coordinator export digits --format safetensors --out model.safetensors"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(export)
    export.add_argument("--format", choices=("onnx", "safetensors", "torch"), required=True)
    export.add_argument("--out", type=Path, metavar="FILE", required=True, help="file to write")
    export.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="unlabelled data (.npz with x, or x0, x1 …) for BatchNorm statistics (default: those "
        "of the last evaluation, or those that devices computed)",
    )
    export.add_argument("--force", action="store_true", help="replace an existing file")
    export.add_argument(
        "--untrained", action="store_true", help="export weights that no device ever trained, too"
    )
    export.set_defaults(run=_export)


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="show the accuracy of a run's model, or measure it on data",
        description=(
            "Prints every level of a run's model with its size and accuracy. With --data, the "
            "accuracy is measured now, with the BatchNorm statistics that the run computed for "
            "the level (a level without any gets them from the inputs of the data). Without it, "
            "the accuracy is the one that the run measured. Works while the run is going on."
        ),
        epilog=(
            "examples:\n"
            "  tessera-coordinator evaluate run\n"
            "  tessera-coordinator evaluate run --data test.npz --round best\n"
            "  tessera-coordinator evaluate run --data test.csv --config run.toml\n"
            "  tessera-coordinator evaluate run --data task.py:test_data --level 0.5"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(evaluate)
    evaluate.add_argument(
        "--data",
        metavar="DATA",
        help="files as devices read them (docs/data.md), or file.py:function",
    )
    evaluate.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the run's settings, if their [format] says how to read the data, such as its label",
    )
    evaluate.set_defaults(run=_evaluate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="RUN", help="a run's folder, or a folder made by demo --save"
    )
    parser.add_argument(
        "--round",
        type=_which_round,
        metavar="N|best|last",
        help="round whose model to take (default: the newest); best: the one with the highest "
        "accuracy of the level to deploy",
    )
    parser.add_argument(
        "--level",
        type=float,
        help="level, as a share (default: the one to deploy, else the whole model)",
    )


def _which_round(text: str) -> WhichRound:
    if text == "best":
        return "best"
    if text == "last":
        return "last"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a round's number, best nor last")
    return int(text)


def _read(arguments: argparse.Namespace, *, untrained: bool = False) -> SavedModel:
    from coordinator.run.folder import CHECKPOINTS, MODEL, is_run, read_result
    from coordinator.task.saved_model import read_model

    folder: Path = arguments.model
    if is_run(folder):
        return read_result(folder, "last" if arguments.round is None else arguments.round)
    run = folder.absolute().parent
    within = is_run(run) and (run / CHECKPOINTS).is_dir()  # a report may be called run.json, too
    if folder.absolute().name == MODEL and within and not untrained:
        raise ConfigError(
            f"{folder} holds the weights that the run started with, which nobody trained: name "
            f"the run's folder, {folder.parent}, to get its trained model"
        )
    if arguments.round is not None:
        raise ConfigError(f"--round: {folder} is a saved model, which has no rounds")
    return read_model(folder)


def _export(arguments: argparse.Namespace) -> int:
    from coordinator.task.export import export_model

    model = _read(arguments, untrained=arguments.untrained)
    part = export_model(
        model,
        arguments.format,
        arguments.out,
        level=arguments.level,
        samples=None
        if arguments.samples is None
        else _samples(arguments.samples, model.manifest.data),
        force=arguments.force,
        untrained=arguments.untrained,
    )
    size = arguments.out.stat().st_size
    parameters = sum(array.size for array in part.weights.values())
    print(
        f"{arguments.out}: {arguments.format}, {_words(model)}level {part.level:g}, "
        f"{parameters:,} parameters, {size:,} B"
    )
    score = model.levels.by_level.get(part.level)
    if score is not None and score.accuracy is not None and arguments.samples is None:
        print(f"its accuracy, as the run measured it, is {score.accuracy:.2%}")
    if part.statistics and part.statistics_devices is not None:
        share = part.statistics_share
        held = "" if share is None else f", which have {share:.0%} of the training data"
        print(f"its BatchNorm statistics come from {part.statistics_devices} devices{held}")
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from coordinator.operate.config import read_config

    model = _read(arguments)
    known = model.levels.by_level
    if arguments.level is not None:
        levels = [next((e for e in known if f"{e:g}" == f"{arguments.level:g}"), arguments.level)]
    else:
        levels = list(known) or [1.0]
    if arguments.data is None:
        lines = _recorded(arguments.model, model, levels)
    else:
        form = None if arguments.config is None else read_config(arguments.config).format
        lines = _measured(model, levels, arguments.data, form)
    if model.origin is not None:
        print(f"task {model.origin.task}, run {model.origin.run}, round {model.origin.round}")
    for line in lines:
        print(line)
    return 0


def _recorded(folder: Path, model: SavedModel, levels: list[float]) -> list[str]:
    """Describe the levels as the run measured them. Raises `ConfigError` if it measured none."""
    known = model.levels.by_level
    if not any(each in known and known[each].accuracy is not None for each in levels):
        raise ConfigError(
            f"the run measured no accuracy of this model: give data (tessera-coordinator evaluate "
            f"{folder} --data FILE.npz)"
        )
    return [
        _line(model, each, known[each].groups, known[each].accuracy)
        for each in levels
        if each in known
    ]


def _measured(
    model: SavedModel, levels: list[float], source: str, form: DataFormat | None
) -> list[str]:
    """Measure the levels on data. Raises `ConfigError` for data or levels that do not fit."""
    from coordinator.operate.taskfile import load_evaluation
    from coordinator.task.export import pick_level
    from edge_sdk.train.inference import Predictor

    data = load_evaluation(source, Path(), model.manifest.data, form, what="--data")
    runtime = Predictor(model.plan, model.manifest, model.files)
    needed = any(entry.kind == "statistics" for entry in model.manifest.graphs)
    lines = []
    for each in levels:
        score = model.levels.by_level.get(each)
        own = not needed or (score is not None and bool(score.statistics))
        part = pick_level(model, each, None if own else data.inputs)
        lines.append(_line(model, part.level, part.groups, part.accuracy(runtime, data)))
        if not own:
            lines.append(f"{'':14}with BatchNorm statistics computed from this data")
    return [*lines, f"measured on {len(data)} samples of {source}"]


def _line(model: SavedModel, level: float, groups: Any, accuracy: float | None) -> str:
    share = "not known" if accuracy is None else f"{accuracy:.2%}"
    mark = "  (to deploy)" if level == model.levels.deploy else ""
    parameters = model.plan.submodel_parameters(groups)
    return f"level {level:<6g}  {parameters:>12,} parameters  accuracy {share}{mark}"


def _words(model: SavedModel) -> str:
    return "" if model.origin is None else f"round {model.origin.round}, "


def _samples(path: Path, spec: DataSpec) -> Sequence[Array]:
    """Read unlabelled inputs in the model's form. Raises `ConfigError`."""
    from edge_sdk.data.errors import DataError
    from edge_sdk.data.source import open_data

    try:
        return open_data(str(path)).read(spec, labelled=False).data.inputs
    except DataError as error:
        raise ConfigError(f"--samples {path}: {error}") from error
