"""The table of docs/models.md, and the figures, from the outcomes of the zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report.figures import Figure
from benchmarks.zoo.names import ZOO
from benchmarks.zoo.outcome import ZooOutcome, by_source

BEGIN = "<!-- tessera-bench zoo -->"

AIMS = {"torchvision": 16, "timm": 51, "transformers": 5, "own": 6}
"""Models of each source that should trace, compile and train right."""

COMPILED = {
    "torchvision/mobilenet_v2": "zoo.compile_s.mobilenet_v2",
    "torchvision/mobilenet_v3_small": "zoo.compile_s.mobilenet_v3_small",
}
"""Models whose time to compile is a figure."""
COMPILE_S = 5.0


def zoo_figures(outcomes: Mapping[str, ZooOutcome]) -> list[Figure]:
    """Return how many models pass, by source; an aim only where all of a source were tried."""
    figures = []
    for source, aim in AIMS.items():
        found = by_source(outcomes, source)
        if not found:
            continue
        whole = len(found) == sum(model.source == source for model in ZOO.values())
        for what, count in (
            ("traced", sum(each.traced for each in found)),
            ("compiled", sum(each.compiled for each in found)),
            ("passed", sum(each.passed for each in found)),
        ):
            target = aim if whole and what == "passed" else None
            figures.append(
                Figure(f"zoo.{source}.{what}", count, "models", target=target, better="higher")
            )
    for key, name in COMPILED.items():
        if key in outcomes and (seconds := outcomes[key].compile_s) is not None:
            figures.append(Figure(name, seconds, "s", target=COMPILE_S))
    raw = sum(each.raw for each in outcomes.values())
    figures.append(Figure("zoo.raw_tracebacks", raw, "models", target=0))
    return figures


def render_table(outcomes: Mapping[str, ZooOutcome]) -> str:
    """Return Markdown: a count, and a table, for each source."""
    parts = []
    for source in AIMS:
        if found := by_source(outcomes, source):
            passed = sum(each.passed for each in found)
            heading = f"**{source}**: {passed} of {len(found)} trace, compile and train right."
            if missing := sum(model.source == source for model in ZOO.values()) - len(found):
                heading += f" {missing} more were not tried."
            parts.append(f"{heading}\n\n{_table(found)}")
    if (versions := len({each.code for each in outcomes.values()})) > 1:
        parts.append(
            f"These outcomes were found by {versions} versions of the code that traces and "
            "compiles; `--again` tries again what other versions found."
        )
    return "\n\n".join(parts)


def _table(found: Sequence[ZooOutcome]) -> str:
    header = [
        "model", "parameters", "left at ½", "`submodel`", "by torch-pruning", "trace", "compile",
        "graphs", "error ÷ torch's", "right",
    ]  # fmt: skip
    rows = [header, ["---", *("--:" for _ in header[1:-1]), "---"]]
    for each in found:
        ratio = None
        if each.error is not None and each.torch_error:
            ratio = each.error / each.torch_error
        only = each.layer_norm == "submodel"
        rows.append(
            [
                each.key.partition("/")[2],
                _text(each.parameters, "{:,.2f} M", 1e-6),
                _text(None if only else each.share, "{:.2f}"),
                _text(each.share if only else each.submodel_share, "{:.2f}"),
                _text(each.pruned_share, "{:.2f}") if not each.pruning_failed else "fails",
                _text(each.trace_s, "{:.0f} s"),
                _text(each.compile_s, "{:.0f} s"),
                _text(each.graph_bytes, "{:,.0f} KB", 1e-3),
                _text(ratio, "{:.1f}"),
                _verdict(each),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _verdict(outcome: ZooOutcome) -> str:
    if not outcome.passed:
        return f"no: {_escaped(outcome.reason) or 'not finished'}"
    return "yes" if outcome.layer_norm == "whole" else "yes, as `submodel`"


def _text(value: float | None, form: str, factor: float = 1.0) -> str:
    return "–" if value is None else form.format(value * factor)


def _escaped(text: str) -> str:
    short = text if len(text) <= 160 else f"{text[:157]}…"
    return short.replace("|", "\\|").replace("<", "\\<")
