"""Charts as inline SVG: pure functions from numbers to text, no script, no network.

Colours come from the page's CSS (``.s0`` to ``.s7``), so light and dark need no second drawing.
Every text is escaped. A point says its value when the mouse rests on it (``<title>``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 24
MOST_POINTS = 240
COLOURS = 8

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line. Points in ascending x; those whose y is not finite are left out."""

    name: str
    points: Sequence[Point]
    marks_only: bool = False
    """Draw the points as rings, without a line (e.g. the two held-out evaluations)."""
    whiskers: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): vertical intervals."""


def line_chart(series: Sequence[Series], *, include: Sequence[float] = ()) -> Markup:
    """Draw lines over a common x. The y range holds every value, and those of ``include``.

    Returns an empty string when there is nothing to draw.
    """
    series = [_thinned(s) for s in series]
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    ys += [y for s in series for _, low, high in s.whiskers for y in (low, high)]
    if not xs:
        return Markup()
    ys += include
    low, high = min(ys), max(ys)
    if high - low < 1e-12:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    frame = _Frame(x0=min(xs), x1=max(max(xs), min(xs) + 1), y0=low, y1=high)
    body = [_draw(s, frame, i % COLOURS) for i, s in enumerate(series) if s.points]
    return _svg(frame, body)


def stacked_bars(xs: Sequence[float], parts: Mapping[str, Sequence[float]]) -> Markup:
    """Draw one bar per x, its parts on top of each other in the order given (all >= 0)."""
    if not xs or not parts:
        return Markup()
    stride = math.ceil(len(xs) / MOST_POINTS)
    xs = list(xs)[::stride]
    columns = {name: list(values)[::stride] for name, values in parts.items()}
    totals = [sum(column) for column in zip(*columns.values(), strict=True)]
    frame = _Frame(x0=min(xs) - 0.5, x1=max(xs) + 0.5, y0=0.0, y1=max(*totals, 1e-9))
    width = max((frame.x(xs[0] + stride) - frame.x(xs[0])) * 0.82, 0.8)
    bottoms = [0.0] * len(xs)
    body = []
    for i, (name, values) in enumerate(columns.items()):
        for j, value in enumerate(values):
            top = frame.y(bottoms[j] + value)
            tall = frame.y(bottoms[j]) - top
            if tall > 0.05:
                body.append(
                    f'<rect class="s{i % COLOURS}" x="{frame.x(xs[j]) - width / 2:.1f}" '
                    f'y="{top:.1f}" width="{width:.1f}" height="{tall:.1f}">'
                    f"<title>{escape(name)}, step {number(xs[j])}: {value:.2f} s</title></rect>"
                )
            bottoms[j] += value
    return _svg(frame, body)


def number(value: float) -> str:
    """Return a number for people: three significant digits, no trailing zeros.

    >>> number(0.12345), number(1234.5), number(0.00001)
    ('0.123', '1,234', '1e-05')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers within [low, high], about ``count`` of them.

    >>> ticks(0, 1)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Maps data to the drawing's coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def _svg(frame: _Frame, body: Sequence[str]) -> Markup:
    grid = []
    for tick in ticks(frame.y0, frame.y1):
        y = frame.y(tick)
        grid.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        grid.append(f'<text class="ylabel" x="{LEFT - 6}" y="{y + 3.5:.1f}">{number(tick)}</text>')
    for tick in ticks(frame.x0, frame.x1, 6):
        if tick == int(tick):
            x = frame.x(tick)
            grid.append(f'<text class="xlabel" x="{x:.1f}" y="{HEIGHT - 7}">{number(tick)}</text>')
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return Markup("\n".join([head, *grid, *body, "</svg>"]))


def _draw(s: Series, frame: _Frame, colour: int) -> str:
    at = [(frame.x(x), frame.y(y), x, y) for x, y in s.points]
    parts = [
        f'<line class="w{colour}" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" '
        f'y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}"/>'
        for x, low, high in s.whiskers
    ]
    if not s.marks_only:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in at)
        parts.append(f'<polyline class="l{colour}" points="{path}"/>')
    kind, radius = (f"m{colour}", 4.5) if s.marks_only else (f"d{colour}", 2.2)
    for px, py, x, y in at:
        parts.append(
            f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}">'
            f"<title>{escape(s.name)}, {number(x)}: {number(y)}</title></circle>"
        )
    return "\n".join(parts)


def _thinned(s: Series) -> Series:
    """Keep finite points; average neighbours when there are more than can be seen."""
    points = [(x, y) for x, y in s.points if math.isfinite(y)]
    stride = math.ceil(len(points) / MOST_POINTS) if points else 1
    if stride > 1:
        chunks = [points[i : i + stride] for i in range(0, len(points), stride)]
        points = [(c[-1][0], sum(y for _, y in c) / len(c)) for c in chunks]
    return Series(name=s.name, points=points, marks_only=s.marks_only, whiskers=s.whiskers)
