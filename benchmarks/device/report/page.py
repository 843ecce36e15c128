"""The table of all profiles in docs/devices.md, and its insertion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import floor, log10
from pathlib import Path

from benchmarks.device.modelled import Tasks, board_threads, model_results
from benchmarks.device.results import Case, Config
from edge_sdk import TesseraError
from edge_sdk.machine.board import Board

BEGIN = "<!-- tessera-bench device --emulate all -->"
END = "<!-- end -->"
CONFIG = Config(
    families=("cnn", "sensor-cnn"),
    levels=(1.0, 0.5, 0.25),
    backends=("onnx",),
    threads=(),
    batch=32,
    steps=100,
    rounds=0,
    burst_s=0.0,
    data="",
)
"""Parameters of the table; with all of each board's cores."""

SECONDS, JOULES, PEAKS = (1.0, 0.5, 0.25), (1.0, 0.5, 0.25), (1.0, 0.25)
"""The levels of the columns."""
NO_ROOM = "no room"


class PageError(TesseraError):
    """A page without a place for the table; names it and says what to do."""


def profiles_table(boards: Sequence[Board], tasks: Tasks, config: Config = CONFIG) -> str:
    """Return Markdown: for each family, a table with a row for each board, with all its cores.

    The same on every machine. Unknown numbers are dashes; a level that may not fit into the board's
    memory says so. Raises as `model_results`.
    """
    parts = []
    for family in config.families:
        header = [
            family,
            *(f"s/round, {level:.0%}" for level in SECONDS),
            *(f"J/round, {level:.0%}" for level in JOULES),
            *(f"MB at most, {level:.0%}" for level in PEAKS),
            "rounds per charge, 100%",
        ]
        rows = [header, ["---", *("--:" for _ in header[1:])]]
        rows += [_row(board, tasks, replace(config, families=(family,))) for board in boards]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def update_page(path: Path, table: str, marker: str = BEGIN) -> None:
    """Put the table between its markers. Raises `PageError`, and writes nothing, without them."""
    before, after = read_page(path, marker)
    path.write_text(f"{before}{table}\n{after}", encoding="utf-8", newline="\n")


def read_page(path: Path, marker: str = BEGIN) -> tuple[str, str]:
    """Return the text before and after the table, including markers. Raises `PageError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PageError(f"{path} cannot be read: {error}") from error
    before, begin, rest = text.partition(f"{marker}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PageError(
            f"{path} has no place for the table: give it the lines {marker} and, where the table "
            f"ends, {END}"
        )
    return before + begin, end + after


def _row(board: Board, tasks: Tasks, config: Config) -> list[str]:
    threads = max(board_threads(board))
    results = model_results(board, tasks, replace(config, threads=(threads,)), "")
    (family,) = config.families
    cases = {level: results.case((family, level, "onnx", threads)) for level in config.levels}
    return [
        board.title,
        *(_cell(cases[level], _seconds) for level in SECONDS),
        *(_cell(cases[level], _gross) for level in JOULES),
        *(_cell(cases[level], _peak) for level in PEAKS),
        "–" if board.battery is None else _charge(cases[1.0], board.battery.battery_wh.value),
    ]


def _cell(case: Case | None, number: Callable[[Case], float | None]) -> str:
    return NO_ROOM if case is None else _about(number(case))


def _seconds(case: Case) -> float:
    return case.round_s.median


def _gross(case: Case) -> float | None:
    return None if case.joules is None else case.joules.gross


def _peak(case: Case) -> float:
    return case.peak_bytes.value / 1e6


def _charge(case: Case | None, battery_wh: float) -> str:
    def rounds(case: Case) -> float | None:
        joules = _gross(case)
        return None if joules is None else 3600 * battery_wh / joules

    return _cell(case, rounds)


def _about(value: float | None) -> str:
    """Round to two significant digits: a profile is not more exact than that."""
    if value is None:
        return "–"
    places = 1 - floor(log10(value))
    return f"~{round(value, places):.{max(0, places)}f}"
