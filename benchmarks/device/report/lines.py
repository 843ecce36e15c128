"""Results as tables and sentences: printed, and repeated in the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.device.results import (
    Amount,
    Case,
    Joules,
    Machine,
    Provenance,
    Results,
    RoundBytes,
    TimeSpread,
)
from benchmarks.device.validity import QUALITY, reached, verdict
from benchmarks.report.sheet import (
    DASH,
    MODELLED,
    Sheet,
    listed,
    number,
    percent,
    printable,
    without_unknown,
    yes_or_no,
)

if TYPE_CHECKING:
    from rich.console import Console

PLAIN = "fp32"
"""Encoding with which all others are compared."""
NOT_RUN = (
    "No such device was run: every number is modelled from a profile, or counted; accuracies are "
    "those of trainings on another machine."
)


def print_results(results: Results, console: Console) -> None:
    """Print the tables, omitted cases with reasons, the machine, and the sources of numbers."""

    def say(text: str) -> None:
        console.print(printable(text), markup=False, highlight=False)

    for line in headline(results):
        say(line)
    for sheet in (*case_sheets(results), bytes_sheet(results), accuracy_sheet(results)):
        if sheet.rows:
            sheet.print(console)
    say(legend(results))
    for line in left_out_lines(results):
        say(f"left out: {line}")
    say(machine_line(results.machine))
    for line in provenance_lines(results):
        say(line)
    for line in accuracy_lines(results):
        say(line)


def headline(results: Results) -> list[str]:
    """Return the title, and warnings to read before any number."""
    lines = [f"{results.title}: {results.provenance}, {results.started}"]
    if results.provenance == "modelled":
        lines.append(NOT_RUN)
    if not results.complete:
        lines.append(f"Incomplete: the run ended early, after {len(results.cases)} cases.")
    if (invalid := verdict(results)) is not None:
        lines.append(invalid)
    return lines


def legend(results: Results) -> str:
    """Explain the columns of the tables."""
    parts = [f"{MODELLED} modelled from a profile, not measured; {DASH} not known."]
    if results.provenance == "modelled":
        parts.append("A step is of a whole batch; a modelled round is its training alone.")
    else:
        parts.append(
            "A step is of a whole batch; a round goes from the model's chunks on disk to the "
            "movement on disk, without the link. Training is all steps of a round, the first of "
            "them slower; the rest of a round unpacks the model, encodes the movement and writes "
            "it to disk, with fsync."
        )
    parts.append("MB, kB: 10⁶, 10³ bytes.")
    if any(case.joules for case in results.cases):
        parts.append("J gross: all that was drawn meanwhile; net: above idle.")
    if any(case.spread is not None for case in results.cases):
        parts.append(
            f"Each case was measured in {results.config.repeats} processes, and times are the "
            "medians of these; ±: their largest distance from it."
        )
    if any(case.heat.throttled is not None for case in results.cases):
        parts.append("slowed: whether the processor was throttled.")
    if foretold(results):
        parts.append(
            "pred.: predicted ÷ measured, of the seconds of a round's training and of the memory "
            "it adds."
        )
    return " ".join(parts)


def families(results: Results) -> dict[str, list[Case]]:
    """Return the cases of each family, in the requested order; large levels first."""
    found: dict[str, list[Case]] = {name: [] for name in results.config.families}
    for case in sorted(results.cases, key=lambda case: (-case.level, case.backend, case.threads)):
        found.setdefault(case.family, []).append(case)
    return {name: cases for name, cases in found.items() if cases}


def case_sheets(results: Results) -> list[Sheet]:
    """Return a sheet per family with a row for each case, without columns that are empty in all."""
    config = results.config
    mark = ", modelled" if results.provenance == "modelled" else ""
    sheets = [
        Sheet(
            title=f"{name}: {config.steps} steps of {config.batch} samples in a round{mark}",
            columns=(
                *("level", "backend,\nthreads", "ms/step\nmedian", "\np90", "s/round\nmedian"),
                *("\np90", "\n±", "s of\ntraining", "peak\nMB", "J/round\ngross", "\nJ net"),
                *("°C\nmax", "\nslowed", "pred.\n÷ s", "pred.\n÷ MB"),
            ),
            rows=tuple(_case_row(case) for case in cases),
            texts=2,
        )
        for name, cases in families(results).items()
    ]
    return without_unknown(sheets)


def _case_row(case: Case) -> tuple[str, ...]:
    joules, energy_modelled = case.joules, is_modelled(case.joules)
    memory_modelled = is_modelled(case.peak_bytes)
    return (
        percent(case.level),
        how(case),
        *_median_and_p90(case.step_s, 1e3),
        *_median_and_p90(case.round_s),
        DASH if case.spread is None else f"{case.spread:.0%}",
        _median_and_p90(case.train_s)[0],
        number(case.peak_bytes.value / 1e6, modelled=memory_modelled),
        number(None if joules is None else joules.gross, modelled=energy_modelled),
        number(None if joules is None else joules.net, modelled=energy_modelled),
        DASH if case.heat.highest_c is None else f"{case.heat.highest_c:.0f}",
        yes_or_no(case.heat.throttled),
        number(time_ratio(case)),
        number(memory_ratio(case)),
    )


def _median_and_p90(spread: TimeSpread | None, scale: float = 1.0) -> tuple[str, str]:
    """Format median and p90; a dash for a p90 without repeated measurements."""
    if spread is None:
        return DASH, DASH
    modelled = is_modelled(spread)
    p90 = spread.p90 * scale if spread.samples else None
    return number(spread.median * scale, modelled=modelled), number(p90, modelled=modelled)


def how(case: Case) -> str:
    """Return backend and threads, as `onnx × 4`."""
    return f"{case.backend} × {case.threads}"


def foretold(results: Results) -> list[Case]:
    """Return the cases whose round was both predicted and measured."""
    return [case for case in results.cases if time_ratio(case) is not None]


def time_ratio(case: Case) -> float | None:
    """Predicted ÷ measured seconds of training; None: one of the two is missing."""
    if case.predicted is None or case.train_s is None or is_modelled(case.train_s):
        return None
    return case.predicted.seconds / case.train_s.median


def memory_ratio(case: Case) -> float | None:
    """Predicted ÷ measured growth; None: one of the two is missing, or nothing grew."""
    grown = case.grown_bytes
    if case.predicted is None or is_modelled(grown) or not grown.value:
        return None
    return case.predicted.grown_bytes / grown.value


def bytes_sheet(results: Results) -> Sheet:
    """Payload of a round in fp32 and in the encoding that sends least, by family and level."""
    rows = []
    for case in one_per_level(results):
        plain = next((each for each in case.bytes if each.encoding == PLAIN), None)
        least = min(case.bytes, key=lambda each: each.up)
        rows.append(
            (
                case.family,
                percent(case.level),
                f"{case.parameters:,}",
                kilobytes(plain, None if plain is None else plain.up),
                kilobytes(plain, None if plain is None else plain.down),
                kilobytes(least, least.up),
                least.encoding,
            )
        )
    sheet = Sheet(
        title="Bytes of a round",
        columns=(
            *("family", "level", "parameters", f"kB up\n{PLAIN}", f"kB down\n{PLAIN}"),
            *("kB up\nsmallest", "smallest\nencoding"),
        ),
        rows=tuple(rows),
        texts=2,
    )
    return without_unknown([sheet])[0]


def kilobytes(of: RoundBytes | None, size_bytes: int | None) -> str:
    """Format one of the sizes in `of`; a dash for None."""
    size = None if size_bytes is None else size_bytes / 1e3
    return number(size, modelled=is_modelled(of))


def one_per_level(results: Results) -> Iterator[Case]:
    """One case with bytes for every family and level: backends and threads send the same."""
    for cases in families(results).values():
        by_level: dict[float, Case] = {}
        for case in cases:
            if case.bytes:
                by_level.setdefault(case.level, case)
        yield from by_level.values()


def left_out_lines(results: Results) -> list[str]:
    """List, for each reason, the cases that were not measured."""
    reasons: dict[str, list[str]] = {}
    for each in results.left_out:
        case = f"{each.family} {percent(each.level)} {each.backend} × {each.threads}"
        reasons.setdefault(each.why, []).append(case)
    return [f"{', '.join(cases)}: {why}" for why, cases in reasons.items()]


def machine_facts(machine: Machine) -> list[tuple[str, str]]:
    """Return (name, value) of all conditions of the numbers; a dash for unknown ones."""
    sensor = machine.power_sensor
    if sensor is not None and machine.sensor_hz is not None:
        sensor += f", read at {machine.sensor_hz:.0f} Hz"
    idle = machine.idle_w
    clocks = [
        f"{clock.cores} × {DASH if clock.max_mhz is None else f'{clock.max_mhz:.0f} MHz'}"
        + (f", governor {clock.governor}" if clock.governor else "")
        + ("" if clock.pinned is None else ", pinned" if clock.pinned else ", not pinned")
        for clock in machine.clocks
    ]
    memory = machine.memory_bytes
    return [
        ("model", machine.model or DASH),
        ("profile", machine.board or DASH),
        ("power mode", machine.power_mode or DASH),
        ("cores", DASH if machine.cores is None else f"{machine.cores:g}"),
        ("clocks", "; ".join(clocks) or DASH),
        ("load before", DASH if machine.load is None else f"{machine.load:g}"),
        ("cooling", machine.cooling or DASH),
        ("fed by", machine.fed_by or DASH),
        ("power sensor", sensor or DASH),
        (
            "idle",
            DASH if idle is None else f"{number(idle.value, modelled=is_modelled(idle))} W",
        ),
        ("memory", DASH if memory is None else f"{memory / 1e6:.0f} MB"),
        ("system", machine.system),
        ("Python", machine.python),
        *((name, text) for name, text in sorted(machine.versions.items())),
    ]


def machine_line(machine: Machine) -> str:
    """Describe the most important conditions in one line."""
    facts = dict(machine_facts(machine))
    named = ("power mode", "clocks", "cooling", "fed by", "power sensor", "idle")
    model = machine.model or (f"profile {machine.board}" if machine.board else "model not known")
    return f"machine: {model}; " + "; ".join(f"{name} {facts[name]}" for name in named)


def provenance_lines(results: Results) -> list[str]:
    """List which numbers are measured, modelled and counted, and the source of joules."""
    said: dict[Provenance, dict[str, None]] = {"measured": {}, "modelled": {}, "counted": {}}
    for case in results.cases:
        said[case.round_s.provenance]["seconds"] = None
        said[case.peak_bytes.provenance]["memory"] = None
        if case.joules is not None:
            said[case.joules.provenance][f"energy ({case.joules.source})"] = None
        for each in case.bytes:
            said[each.provenance]["bytes"] = None
    lines = [f"{name}: {listed(list(what))}" for name, what in said.items() if what]
    unknown = [case for case in results.cases if case.joules is None]
    if unknown:
        part = "" if len(unknown) == len(results.cases) else f" ({len(unknown)} of the cases)"
        lines.append(f"not known: energy{part}: {no_joules(results)}")
    return lines


def no_joules(results: Results) -> str:
    """Explain why a case has no joules."""
    counts = "count only with as many threads as the board has cores"
    if results.provenance == "modelled":
        return f"a profile's watts {counts}"
    return f"no sensor tells the power, and a profile's watts (--board) {counts}"


def accuracy_sheet(results: Results) -> Sheet:
    """Return each level's accuracy when trained alone, and its total cost."""
    rows = []
    goal = QUALITY.get(results.config.data)
    for curve in results.curves:
        if curve.points:
            there = reached(curve)
            last, modelled = curve.points[-1], curve.provenance == "modelled"
            rows.append(
                (
                    curve.family,
                    percent(curve.level),
                    str(last.round),
                    f"{100 * last.accuracy:.1f}",
                    number(last.seconds, modelled=modelled),
                    number(last.joules, modelled=curve.joules_provenance == "modelled"),
                    number(last.bytes / 1e6, modelled=modelled),
                    number(None if there is None else there.seconds, modelled=modelled),
                    number(
                        None if there is None else there.joules,
                        modelled=curve.joules_provenance == "modelled",
                    ),
                )
            )
    to_goal = "" if goal is None else f"to {percent(goal)}"
    sheet = Sheet(
        title=f"Accuracy on {results.config.data} after the last round",
        columns=(
            "family",
            "level",
            "rounds",
            "accuracy\n%",
            "s",
            "J\ngross",
            "MB\nfp32",
            f"s\n{to_goal}",
            f"J\n{to_goal}",
        ),
        rows=tuple(rows),
        texts=2,
    )
    return without_unknown([sheet])[0]


def accuracy_lines(results: Results) -> list[str]:
    """Explain missing accuracies; nothing if there is no gap."""
    config = results.config
    learned = {curve.family for curve in results.curves if curve.points}
    lines = []
    if not learned:
        lines.append(f"no accuracy: {no_accuracy(results)}")
    elif config.quick and len(config.families) > 1:
        lines.append(
            f"accuracy of {listed(sorted(learned))} alone: with --quick only the first family "
            f"learns that takes samples of {config.data}"
        )
    lines += dict.fromkeys(
        f"no accuracy of {curve.family} at {percent(curve.level)}: {curve.failed}"
        for curve in results.curves
        if curve.failed
    )
    return lines


def no_accuracy(results: Results) -> str:
    """Explain why nothing learned, for results without a curve that has points."""
    config = results.config
    if any(curve.failed for curve in results.curves):
        return "every training failed"
    if config.learners:
        return "the run ended before any family learned"
    return f"none of {listed(config.families)} takes samples of {config.data}"


def is_modelled(what: TimeSpread | Amount | Joules | RoundBytes | None) -> bool:
    """True if it comes from a profile; unknown values do not."""
    return what is not None and what.provenance == "modelled"
