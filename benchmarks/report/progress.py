"""Progress of a command, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Begin = Callable[[str], Callable[[], None]]
"""Begins a named part; the result is called at each of its ticks."""


def silent(_name: str) -> Callable[[], None]:
    """Begin a part without printing anything."""
    return lambda: None


@contextmanager
def progress(what: str, ticks: int) -> Iterator[Begin]:
    """Show a bar with the time left on a terminal's stderr, otherwise a line per part.

    Yields a function that begins a named part and returns what to call at each of its ticks.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=ticks)
        started, done = time.monotonic(), 0

        def advance() -> None:
            nonlocal done
            done += 1
            progress.advance(task)

        def begin(name: str) -> Callable[[], None]:
            progress.update(task, description=f"{what} {name}")
            if not console.is_terminal:
                left = (ticks - done) * (time.monotonic() - started) / done if done else None
                more = "" if left is None else f" about {duration(left)} left"
                console.print(f"{what} {name} …{more}", highlight=False, soft_wrap=True)
            return advance

        yield begin


def duration(seconds: float) -> str:
    """Format seconds, such as `40 s`, `2 min 5 s`, `1 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
