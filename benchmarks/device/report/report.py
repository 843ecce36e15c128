"""One Markdown file about a run: parameters, time, machine, tables, plots, gaps.

Equal results with equal plots beside it give equal text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from statistics import median

from benchmarks.device.report.lines import (
    NOT_RUN,
    accuracy_lines,
    accuracy_sheet,
    case_sheets,
    foretold,
    how,
    kilobytes,
    left_out_lines,
    legend,
    machine_facts,
    memory_ratio,
    one_per_level,
    provenance_lines,
    time_ratio,
)
from benchmarks.device.report.plots import why_not
from benchmarks.device.results import Case, Results
from benchmarks.device.validity import faults
from benchmarks.report.sheet import DASH, Sheet, escaped, percent, printable
from edge_sdk.machine.board import shipped_boards

FILE = "report.md"
DIGITS = "digits"
"""Name of the data set that needs no folder."""
_CAPTIONS = {
    "time": "Seconds of a round by level",
    "energy": "Joules of a round by level",
    "memory": "Peak memory by level",
    "bytes": "Bytes sent in a round by encoding and level",
    "predicted": "Predicted against measured",
    "accuracy": "Accuracy against what it costs",
}


def write_report(results: Results, folder: Path) -> Path:
    """Write `report.md` beside the plots of `write_plots`; returns its path. Raises `OSError`."""
    path = folder / FILE
    path.write_text(report(results, folder), encoding="utf-8")
    return path


def report(results: Results, folder: Path) -> str:
    """Return the text; it shows the plots in `folder` that belong to these results."""

    def picture(name: str) -> Iterator[str]:
        if reason := why_not(results, name):
            yield f"No picture ({name}): {reason}."
        elif (folder / f"{name}.png").is_file():
            yield f"![{_CAPTIONS[name]}]({name}.png)"

    parts = [
        f"# {escaped(results.title)}: what a level costs",
        *_warnings(results),
        _what_was_run(results),
        "## The machine",
        Sheet(
            title="",
            columns=("", "value"),
            rows=tuple(machine_facts(results.machine)),
            texts=2,
        ).markdown(),
        "\n".join(f"- {escaped(line)}" for line in provenance_lines(results)),
        "## Costs",
        escaped(legend(results)),
        *(f"### {escaped(sheet.title)}\n\n{sheet.markdown()}" for sheet in case_sheets(results)),
        *(line for name in ("time", "energy", "memory") for line in picture(name)),
        "## Bytes of a round",
        *_bytes(results),
        *picture("bytes"),
        "## Predicted against measured",
        *_predictions(results),
        *picture("predicted"),
        "## Accuracy",
        *_accuracy(results),
        *picture("accuracy"),
        "## Left out",
        "\n".join(f"- {escaped(line)}" for line in left_out_lines(results))
        or "Nothing that was asked for.",
        "## Reproduce",
        f"```sh\n{command(results)}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _warnings(results: Results) -> Iterator[str]:
    if results.provenance == "modelled":
        yield f"> **Modelled.** {NOT_RUN}"
    if not results.complete:
        yield (
            "> **Incomplete.** The run was ended before all that was asked for was measured; "
            "`--resume` goes on with it."
        )
    if found := faults(results):
        yield f"> **Invalid.** These numbers are not to be compared: {escaped('; '.join(found))}."


def _what_was_run(results: Results) -> str:
    config = results.config
    how_long = (
        f"Modelled from profile `{results.machine.board}`"
        if results.provenance == "modelled"
        else f"Measured in {results.seconds:.0f} s, each case in a process of its own"
    )
    quick = " A `--quick` run: fewer rounds, wider errors." if config.quick else ""
    return escaped(
        f"{how_long}, on {results.started}. A round has {config.steps} steps of {config.batch} "
        f"samples. Cases: {len(results.cases)}; left out: {len(results.left_out)}.{quick}"
    )


def _bytes(results: Results) -> Iterator[str]:
    """List all encodings, up and, if the model travels in it, down."""
    cases = list(one_per_level(results))
    encodings = list(dict.fromkeys(each.encoding for case in cases for each in case.bytes))
    if not cases:
        return
    rows = []
    for case in cases:
        sizes = {each.encoding: each for each in case.bytes}
        row = [case.family, percent(case.level), f"{case.parameters:,}"]
        for encoding in encodings:
            size = sizes.get(encoding)
            up = kilobytes(size, None if size is None else size.up)
            down = kilobytes(size, None if size is None else size.down)
            row.append(up if down == DASH else f"{up} / {down}")
        rows.append(tuple(row))
    columns = ("family", "level", "parameters", *encodings)
    yield "kB up / down, by encoding; one number: the model does not travel down like this."
    yield Sheet(title="", columns=columns, rows=tuple(rows), texts=2).markdown()


def _predictions(results: Results) -> Iterator[str]:
    """Report the errors of the SDK's cost model; nothing if nothing was predicted."""
    for what, ratio in (("Seconds of a round", time_ratio), ("Memory a round adds", memory_ratio)):
        known = [(case, found) for case in foretold(results) if (found := ratio(case)) is not None]
        if known:
            yield f"{what}: {_errors(known)}"


def _errors(ratios: Sequence[tuple[Case, float]]) -> str:
    error: Callable[[tuple[Case, float]], float] = lambda pair: abs(pair[1] - 1)  # noqa: E731
    case, worst = max(ratios, key=error)
    return (
        f"the median error of {len(ratios)} predictions is {median(map(error, ratios)):.0%}; "
        f"the worst, {escaped(case.family)} at {percent(case.level)} on {how(case)}, is "
        f"{worst:.2f} times what was measured."
    )


def _accuracy(results: Results) -> Iterator[str]:
    if gaps := accuracy_lines(results):
        yield "\n".join(f"- {escaped(line)}" for line in gaps)
    curves = [curve for curve in results.curves if curve.points]
    if not curves:
        return
    sources = dict.fromkeys(curve.joules_source or "not known" for curve in curves)
    yield escaped(
        "The device trains alone, a submodel of each level on "
        f"{', '.join(dict.fromkeys(curve.data for curve in curves))}; the accuracies are of real "
        f"trainings. Joules: {'; '.join(sources)}."
    )
    yield accuracy_sheet(results).markdown()


def command(results: Results) -> str:
    """Return the command that repeats the run."""
    config, board = results.config, results.machine.board
    if board is not None and board not in shipped_boards():
        board += ".toml"
    options: dict[str, str | None] = {
        "emulate" if results.provenance == "modelled" else "board": board,
        "families": ",".join(config.families),
        "levels": ",".join(f"{level:g}" for level in config.levels),
        "backends": ",".join(config.backends),
        "threads": ",".join(map(str, config.threads)),
        "repeats": None if results.provenance == "modelled" else str(config.repeats),
        "batch": str(config.batch),
        "steps": str(config.steps),
        "data": "DIR" if results.curves and config.data != DIGITS else None,
    }
    words = [f"--{name} {quote(printable(value))}" for name, value in options.items() if value]
    quick = ["--quick"] if config.quick else []
    return " ".join(["tessera-bench device", *words, *quick])
