"""Inline SVG for the page of a run: a curve, and the model as a map of its blocks.

Every text goes through `escape`. Numbers are written with few digits, so that equal runs give equal
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 46, 24, 12, 34
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7F85", "#999933")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
COLD, WARM = (0xF1, 0xEE, 0xE6), (0x0B, 0x4F, 0x7A)
"""Colours of a block that nobody ever trained, and of one trained in every round."""
CELLS = 48
"""Most cells of a row in the map; neighbours share one."""
CELL = 13


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    wanted = (high - low) / 5
    if wanted <= 0:
        return [low]
    power = 10 ** math.floor(math.log10(wanted))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= wanted * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def curve(
    series: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    up: str,
    write: Callable[[float], str] = "{:g}".format,
) -> str:
    """Draw lines through points `(x, share)`; shares are shown as percent, x as `write` does."""
    points = [point for line in series.values() for point in line]
    if not points:
        return "<p>No accuracy was measured.</p>"
    most_x = max(x for x, _ in points) or 1.0
    least_x = min(0.0, *(x for x, _ in points))
    low = min(y for _, y in points)
    high = max(y for _, y in points)
    low, high = max(0.0, low - 0.05), min(1.0, high + 0.05)
    inner_x, inner_y = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + inner_x * (x - least_x) / (most_x - least_x),
            TOP + inner_y * (1 - (y - low) / (high - low)),
        )

    said = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(up)}, by '
        f'{escape(across)}">'
    ]
    for share in ticks(low, high):
        _, y = at(least_x, share)
        said.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{100 * share:.3g}</text>"
        )
    for value in ticks(least_x, most_x):
        x, _ = at(value, low)
        said.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" '
            f'text-anchor="middle">{escape(write(value))}</text>'
        )
    for number, line in enumerate(series.values()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*each) for each in line))
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        said.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" '
            f'stroke-dasharray="{dash}" points="{path}"/>'
        )
        if len(line) == 1:
            x, y = at(*line[0])
            said.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    said.append(
        f'<text class="tick" x="{LEFT + inner_x / 2:.0f}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(across)}</text></svg>'
    )
    keys = "".join(
        f'<span><svg viewBox="0 0 22 8" class="key" aria-hidden="true"><line x1="0" x2="22" y1="4" '
        f'y2="4" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="3" '
        f'stroke-dasharray="{DASHES[number // len(COLOURS) % len(DASHES)]}"/></svg> '
        f"{escape(name)}</span>"
        for number, name in enumerate(series)
    )
    return f'{"".join(said)}<p class="keys">{escape(up)}, %: {keys}</p>'


def colour(share: float) -> str:
    """Return the colour of a share, from cold to warm."""
    mixed = (
        round(c + (w - c) * min(max(share, 0.0), 1.0)) for c, w in zip(COLD, WARM, strict=True)
    )
    return "#" + "".join(f"{each:02x}" for each in mixed)


def block_map(rows: Sequence[tuple[str, Sequence[float], Sequence[str]]]) -> str:
    """Draw a row of cells per tensor: its name, a share and a title for each block.

    Of more than `CELLS` blocks, neighbours share a cell, which shows the least of them.
    """
    wide = 190 + CELL * CELLS
    said = [
        f'<svg viewBox="0 0 {wide} {16 * len(rows)}" role="img" '
        f'aria-label="Blocks of the model, by the share of rounds that trained them">'
    ]
    for number, (name, shares, titles) in enumerate(rows):
        top = 16 * number
        shown = name if len(name) <= 28 else f"…{name[-27:]}"
        said.append(
            f'<text class="tick" x="182" y="{top + 11}" text-anchor="end">{escape(shown)}</text>'
        )
        count = min(len(shares), CELLS)
        for cell in range(count):
            first, behind = cell * len(shares) // count, (cell + 1) * len(shares) // count
            least = min(range(first, behind), key=lambda each: shares[each])
            said.append(
                f'<rect x="{190 + CELL * cell}" y="{top + 1}" width="{CELL - 1}" height="13" '
                f'fill="{colour(shares[least])}"><title>{escape(titles[least])}</title></rect>'
            )
    return "".join([*said, "</svg>"])
