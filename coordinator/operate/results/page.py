"""`tessera-coordinator report`: a run as one HTML file to send to a colleague.

The file needs nothing else: no script, no network, no other file; a policy in it forbids them.
Everything that devices say is escaped. A run that did not change gives the same bytes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from html import escape
from typing import Any

from coordinator.operate.results.comparison import LABELS, NAMES, amount, percent, summary
from coordinator.operate.results.drawing import block_map, curve
from coordinator.operate.results.record import COSTS, CostName, RunRecord
from coordinator.rounds.report import accuracy_of
from coordinator.run.errors import RunError
from coordinator.run.folder import (
    MODEL,
    Checkpoint,
    checkpoint_path,
    checkpoint_rounds,
    read_checkpoint,
)
from coordinator.service.overview.lines import joules_of
from coordinator.task.saved_model import PLAN
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.plan import ModelPlan

HistoryLine = Mapping[str, Any]
"""A round in the history."""

WHOLE_ROUNDS = 60
"""Most rounds of which the table shows every one."""
END_ROUNDS = 15
"""First and last rounds that the table of a longer run shows; of those between, every n-th."""
MAX_TENSORS = 400
"""Most rows of the map."""
STYLE = """
:root{color-scheme:light dark;--ink:#1d2126;--paper:#fff;--line:#d8d5cd;--soft:#6b7076}
@media(prefers-color-scheme:dark){:root{--ink:#e6e4df;--paper:#16181b;--line:#3a3e44;--soft:#a0a4aa}}
@media print{:root{--ink:#000;--paper:#fff;--line:#bbb;--soft:#444}details>*{display:block}
section{break-inside:avoid-page}thead{display:table-header-group}tr{break-inside:avoid}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p.sub{color:var(--soft);margin:.2rem 0 1rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.6rem 1rem;margin:0}
dt{color:var(--soft);font-size:.8rem}dd{margin:0;font-size:1.1rem;font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.2rem .5rem;border-bottom:1px solid var(--line);vertical-align:top}
th:first-child,td:first-child,.text{text-align:left;overflow-wrap:anywhere}
svg{width:100%;height:auto}svg.key{width:22px;height:8px}.grid{stroke:var(--line)}
.tick{fill:var(--soft);font-size:11px}.keys span{margin-right:1rem;white-space:nowrap}
.wide{overflow-x:auto}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_page(record: RunRecord) -> str:
    """Return the page of a run."""
    about, last = record.about, record.last
    parts = [
        f"<h1>{escape(about.task)}</h1>",
        f'<p class="sub">run {escape(about.run)}, {escape(record.state)}'
        + (f", last change {_when(record.changed)}" if last is not None else "")
        + "</p>",
        _figures(record),
        _section("Accuracy", _curves(record)),
        _section("Blocks of the model", _blocks(record)),
        _section("Devices", _devices(record)),
        _section("Skips", _skips(record)),
        _section("Rounds", _rounds(record)),
        _section("Other news", _news(record)),
        _section("Settings", _settings(record.settings.items())),
        _section("Versions", _settings(record.versions.items())),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(about.task)}: run {escape(about.run)}</title>\n"
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + "\n"
        "</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>" if content else ""


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _figures(record: RunRecord) -> str:
    found, last = summary(record), record.last
    best = found["best"]
    entries = [
        ("best accuracy", "–" if best is None else percent(best["accuracy"])),
        ("in round", "–" if best is None else str(best["round"])),
        ("last accuracy", percent(found["accuracy"])),
        ("rounds", str(found["rounds"])),
        *(
            (NAMES[cost], amount(None if last is None else last.spent(cost, 0), cost))
            for cost in COSTS[1:]
        ),
        ("trainings", str(found["trained"])),
        ("skips", str(sum(found["skips"].values()))),
        ("devices", str(len(record.devices()))),
    ]
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(v)}</dd></div>" for name, v in entries
    )
    return f"<dl>{items}</dl>"


def _curves(record: RunRecord) -> str:
    levels: dict[str, list[tuple[float, float]]] = {}
    for line in record.lines:
        for level in line.get("levels", ()):
            if level["accuracy"] is not None:
                points = levels.setdefault(f"level {level['level']:g}", [])
                points.append((float(line["round"]), float(level["accuracy"])))
    drawn = [curve(levels, "round", "accuracy of every level")]
    for cost in COSTS[1:]:
        points = [
            (spent, each.accuracy)
            for number, each in enumerate(record.costs, 1)
            if (spent := each.spent(cost, number)) is not None and each.accuracy is not None
        ]
        if points:
            write = partial(_tick, cost=cost)
            drawn.append(curve({"level to deploy": points}, LABELS[cost], "accuracy", write))
    return "\n".join(drawn)


def _tick(value: float, cost: CostName) -> str:
    return f"{value:g}" if cost == "hours" or not value else amount(value, cost)


def _blocks(record: RunRecord) -> str:
    found = _newest(record)
    if found is None:
        return ""
    plan, checkpoint = found
    fleet = checkpoint.fleet
    most = max(1, int(fleet.times_covered.max()))
    rows = []
    for number, tensor in enumerate(plan.tensors[:MAX_TENSORS]):
        ids = [int(each) for each in (plan.block_tensors == number).nonzero()[0]]
        shares = [int(fleet.times_covered[each]) / most for each in ids]
        titles = [
            f"{tensor.name}, block {each}: {int(plan.block_sizes[each])} parameters, covered "
            f"{int(fleet.times_covered[each])} times, last in round {int(fleet.last_covered[each])}"
            for each in ids
        ]
        rows.append((tensor.name, shares, titles))
    more = len(plan.tensors) - len(rows)
    least = int(fleet.times_covered.min())
    said = (
        f"<p>Every cell is a block, darker the more often it was trained: from {least} to {most} "
        f"times by round {checkpoint.round}"
        + (f"; {more} more tensors are not drawn" if more else "")
        + f". The model has {plan.parameters:,} parameters in {plan.block_count:,} blocks.</p>"
    )
    return said + block_map(rows)


def _newest(record: RunRecord) -> tuple[ModelPlan, Checkpoint] | None:
    """Return the plan and the newest checkpoint; None if they cannot be read."""
    try:
        plan = decode_plan((record.folder / MODEL / PLAN).read_bytes())
        rounds = checkpoint_rounds(record.folder)
        return plan, read_checkpoint(checkpoint_path(record.folder, rounds[-1]), plan)
    except (RunError, ProtocolError, OSError, IndexError):
        return None


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, text: Sequence[int] = ()) -> str:
    """Write a table; columns in `text` hold words."""

    def cells(kind: str, row: Sequence[Any]) -> str:
        return "".join(
            f"<{kind}{' class=text' if number in text else ''}>{escape(str(each))}</{kind}>"
            for number, each in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{cells("th", head)}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _devices(record: RunRecord) -> str:
    head = ("device", "trained", "skipped", "traffic", "training", "energy", "newest skip")
    rows = [
        (
            each.device,
            each.trained,
            each.skipped,
            amount(each.bytes, "bytes"),
            f"{each.train_s:.1f} s",
            amount(each.joules, "joules"),
            each.reason,
        )
        for each in record.devices()
    ]
    return _table(head, rows, text=(6,)) if rows else ""


def _skips(record: RunRecord) -> str:
    found = sorted(record.skips.items(), key=lambda each: (-each[1], each[0]))[:20]
    return _table(("reason", "skips"), found) if found else ""


def _rounds(record: RunRecord) -> str:
    lines, said = _few(record.lines)
    head = ("round", "accuracy", "trained", "seconds", "energy", "up", "down", "least coverage")
    rows = []
    for line in lines:
        up, down = (
            sum(each[key] for each in line["devices"]) for key in ("bytes_up", "bytes_down")
        )
        trained = sum(each["level"] is not None for each in line["devices"])
        rows.append(
            (
                line["round"],
                percent(accuracy_of(line)),
                f"{trained} of {len(line['devices'])}",
                f"{line['seconds']:.1f}",
                amount(joules_of(line["devices"]), "joules"),
                amount(up, "bytes"),
                amount(down, "bytes"),
                line.get("coverage_min", "–"),
            )
        )
    if not rows:
        return "<p>No round was committed.</p>"
    return said + _table(head, rows)


def _few(lines: Sequence[HistoryLine]) -> tuple[list[HistoryLine], str]:
    """Return the rounds that the table shows, and a note if it leaves some out."""
    between = len(lines) - 2 * END_ROUNDS
    if len(lines) <= WHOLE_ROUNDS:
        return list(lines), ""
    step = math.ceil(between / (WHOLE_ROUNDS - 2 * END_ROUNDS))
    last = len(lines) - END_ROUNDS
    found = [*lines[:END_ROUNDS], *lines[END_ROUNDS + step - 1 : last : step], *lines[last:]]
    note = (
        f"<p>{len(found)} of {len(lines)} rounds: the first and the last {END_ROUNDS}, and every "
        f"{step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'} between. "
        "<code>tessera-coordinator history</code> tells all.</p>"
    )
    return found, note


def _news(record: RunRecord) -> str:
    return _table(("after round", "what"), record.news, text=(1,)) if record.news else ""


def _settings(entries: Iterable[tuple[str, Any]]) -> str:
    rows = [(name, "–" if each is None else each) for name, each in entries]
    return _table(("key", "value"), rows, text=(1,)) if rows else ""
