"""What a person sees while the run goes on: a live table, or a line per version.

Both are pure functions of a ``RunSnapshot``; a ``View`` only puts them on a stream.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Protocol, TextIO

from pipelines.launcher.progress import RunSnapshot
from pipelines.launcher.summary import idle_shares


class View(Protocol):
    """Where progress goes."""

    def show(self, snapshot: RunSnapshot, updates: int, now: float) -> None:
        """Take notice of the newest snapshot. ``now``: Unix seconds."""

    def say(self, text: str) -> None:
        """Tell an event, one line."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_view(stream: TextIO, title: str, *, plain: bool) -> View:
    """Return the live table on a terminal, else (or when ``plain``) one line per version."""
    return LineView(stream) if plain or not stream.isatty() else TableView(stream, title)


class LineView:
    """One line per new version; nothing moves."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._version = -1

    def show(self, snapshot: RunSnapshot, updates: int, now: float) -> None:
        if snapshot.version > self._version:
            self._version = snapshot.version
            if snapshot.trained:
                self.say(progress_line(snapshot, updates))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class TableView:
    """A table that is redrawn in place; events scroll above it."""

    def __init__(self, stream: TextIO, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._console = Console(file=stream)
        # Without its own thread: it is redrawn when something is new, and children are started
        # from this process.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, snapshot: RunSnapshot, updates: int, now: float) -> None:
        self._live.update(run_table(snapshot, updates, now, self._title), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def progress_line(snapshot: RunSnapshot, updates: int) -> str:
    """Return one version's line, e.g. ``version 3/40  reward 0.412  pass 41 %  lag 0 ...``."""
    facts = " ".join(f"{name} {value} " for name, value in headline(snapshot, updates))
    waits = who_waits(snapshot, brief=True)
    return f"{facts}| {waits}" if waits else facts.rstrip()


def headline(snapshot: RunSnapshot, updates: int) -> list[tuple[str, str]]:
    """Return the numbers that matter, named, in the order they are read."""
    last = snapshot.trained[-1] if snapshot.trained else None
    return [
        ("version", f"{max(snapshot.version, 0)}/{updates}"),
        ("reward", f"{last.reward:.3f}" if last else "-"),
        ("pass", f"{last.pass_rate:.0%}" if last else "-"),
        ("lag", str(last.lag) if last else "-"),
        ("rollouts/s", f"{snapshot.rollouts_per_sec:.1f}"),
        ("tokens/s", f"{snapshot.tokens_per_sec:.0f}"),
        ("left", duration(eta_secs(snapshot, updates))),
    ]


def eta_secs(snapshot: RunSnapshot, updates: int) -> float | None:
    """Return the time to the last update at the pace of the newest steps, None while unknown."""
    if snapshot.secs_per_step is None:
        return None
    return max(updates - snapshot.version, 0) * snapshot.secs_per_step


def who_waits(snapshot: RunSnapshot, *, brief: bool = False) -> str:
    """Return one line that says who waits for whom and why; ``brief``: without the why.

    Example: ``trainer waits for 32 trainable groups: 28 are waiting, 35 in flight``.
    """
    waiting = {
        role: str(beat["waiting_for"])
        for role, beat in sorted(snapshot.heartbeats.items())
        if beat.get("waiting_for")
    }
    if brief:
        waiting = {role: re.split(r"[:;]", text)[0] for role, text in waiting.items()}
    return "; ".join(f"{role} waits for {text}" for role, text in waiting.items())


def who_does_what(snapshot: RunSnapshot) -> str:
    """Return one line with every role's state, for when nobody says that it waits."""
    states = (f"{role} {beat['state']}" for role, beat in sorted(snapshot.heartbeats.items()))
    return "; ".join(states) or "no role has said anything"


def duration(secs: float | None) -> str:
    """Return a time span for people.

    >>> duration(None), duration(42), duration(125), duration(7322)
    ('-', '42 s', '2 m 05 s', '2 h 02 m')
    """
    if secs is None:
        return "-"
    minutes, rest = divmod(round(secs), 60)
    if minutes < 1:
        return f"{rest} s"
    return (
        f"{minutes} m {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} m"
    )


def run_table(snapshot: RunSnapshot, updates: int, now: float, title: str) -> Any:
    """Return the live table as a rich renderable."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    numbers = Table.grid(padding=(0, 3))
    facts = headline(snapshot, updates)
    for _ in facts:
        numbers.add_column(justify="right")
    numbers.add_row(*(Text(name, style="dim") for name, _ in facts))
    numbers.add_row(*(Text(value, style="bold") for _, value in facts))

    roles = Table(box=None, padding=(0, 2), header_style="dim", show_edge=False)
    for heading in ("role", "state", "waits for", "idle", "seen"):
        roles.add_column(heading)
    idle = idle_shares(snapshot)
    for role, beat in sorted(snapshot.heartbeats.items()):
        seen = max(now - float(beat.get("at", now)), 0.0)
        roles.add_row(
            role,
            Text(str(beat.get("state", ""))),
            Text(str(beat.get("waiting_for", "")), style="yellow"),
            f"{idle[role]:.0%}" if role in idle else "",
            Text(f"{seen:.0f} s ago", style="red" if seen > 30 else "dim"),
        )
    curve = Text(sparkline([step.pass_rate for step in snapshot.trained]), style="green")
    body = Group(numbers, Text(), Text("pass rate ", style="dim") + curve, Text(), roles)
    return Panel(body, title=title, title_align="left", border_style="dim")


def sparkline(values: list[float], width: int = 60) -> str:
    """Return shares in [0, 1] as a row of blocks, the newest ``width`` of them.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round(min(max(v, 0.0), 1.0) * 7)] for v in values[-width:])
