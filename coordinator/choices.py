"""Choices by name: rules and mask policies as configuration and the command line spell them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from coordinator.errors import ConfigError

T = TypeVar("T")


def make_named(kind: str, known: Mapping[str, type[T]], name: str, options: Mapping[str, Any]) -> T:
    """The choice called `name` with these options.

    Raises `ConfigError`: an unknown name with all known ones, an unknown option with the nearest.
    """
    if name not in known:
        raise ConfigError(f"there is no {kind} {name!r}; the known ones are:\n{listing(known)}")
    takes = inspect.signature(known[name]).parameters
    for option in options:
        if option not in takes:
            near = get_close_matches(option, takes, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(takes) or 'none'}"
            )
            raise ConfigError(f"{kind} {name!r} has no option {option!r}; {hint}")
    hints = get_type_hints(known[name])
    for option, value in options.items():
        if not _fits(value, hints[option]):
            wanted = _words(hints[option])
            raise ConfigError(f"{kind} {name!r}: {option} is {wanted}, not {value!r}")
    return known[name](**options)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def listing(known: Mapping[str, type[Any]]) -> str:
    """One line a choice: its name, and the first line of what its docstring says."""
    width = max(map(len, known))
    return "\n".join(f"  {name:<{width}}  {_first_line(known[name])}" for name in known)


def _first_line(choice: type[Any]) -> str:
    return (inspect.getdoc(choice) or "").partition("\n")[0]
