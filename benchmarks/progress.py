"""How far a command has come, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Begin = Callable[[str], Callable[[], None]]
"""Begins a named part; the result is called at each of its ticks."""


def silent(_name: str) -> Callable[[], None]:
    """A `Begin` that says nothing."""
    return lambda: None


@contextmanager
def progress(what: str, ticks: int) -> Iterator[Begin]:
    """A bar on a terminal's stderr, a line per part elsewhere.

    Yields a function that begins a named part and returns what to call at each of its ticks.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=ticks)

        def begin(name: str) -> Callable[[], None]:
            progress.update(task, description=f"{what} {name}")
            if not console.is_terminal:
                console.print(f"{what} {name} …", highlight=False)
            return lambda: progress.advance(task)

        yield begin
