"""How a model is called: its inputs by position or by name, and the one tensor it is trained on.

Models return tensors, tuples, dictionaries, or the outputs of Hugging Face's classes. Tracing sees
a model that returns one tensor: `calling` makes `forward()` return it for as long as it lasts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from coordinator.errors import TraceError

ExampleInput = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""A batch; several, one for each argument of forward(); or several by the arguments' names."""

USUAL = ("logits", "out")
"""Names under which models return the scores to train on, beside other tensors."""


@dataclass(frozen=True, slots=True)
class Call:
    """The inputs of a call, and the output that is meant."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] = ()
    """Names of the inputs, if they are given by name."""
    output: str | int | None = None
    """Name or position of the tensor to train on; None: the usual one, see `pick_output`."""

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Inputs by position."""
        return () if self.names else self.tensors

    @property
    def keywords(self) -> dict[str, torch.Tensor]:
        """Inputs by name."""
        return dict(zip(self.names, self.tensors, strict=True)) if self.names else {}

    def given(self, tensors: Sequence[torch.Tensor]) -> Call:
        """Return the same call with other inputs."""
        return replace(self, tensors=tuple(tensors))

    def tiled(self, batch: int) -> Call:
        """Return the call with its rows repeated until the batch has this size."""
        first = self.tensors[0]
        for tensor in self.tensors:
            if tensor.ndim == 0 or first.ndim == 0 or len(tensor) != len(first) or not len(tensor):
                raise TraceError("all example inputs need the same number of rows, at least one")
        rows = torch.arange(batch) % len(first)
        return self.given([tensor[rows] for tensor in self.tensors])


def make_call(model: Any, example: Any, output: str | int | None = None) -> Call:
    """Read an example; reject what is no model and what are no tensors."""
    if not isinstance(model, torch.nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else repr(type(model))
        raise TraceError(f"the model must be an instance of torch.nn.Module, not {what}")
    names: tuple[str, ...] = ()
    if isinstance(example, Mapping):
        names, tensors = tuple(map(str, example)), tuple(example.values())
    else:
        tensors = tuple(example) if isinstance(example, (list, tuple)) else (example,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TraceError(
                "the example input must be a tensor, a tuple of tensors, one for each argument of "
                "forward(), or a dictionary of tensors by the arguments' names, not "
                f"{type(tensor).__name__}"
            )
    if not tensors:
        raise TraceError("the example input is empty; give a batch of each argument of forward()")
    return Call(tensors, names, output)


@contextmanager
def calling(model: torch.nn.Module, call: Call) -> Iterator[None]:
    """Make the model's `forward()` return the one tensor that is meant."""
    own = vars(model).get("forward")
    real = model.forward

    @functools.wraps(real)
    def forward(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return pick_output(real(*arguments, **keywords), call.output)

    object.__setattr__(model, "forward", forward)
    try:
        yield
    finally:
        if own is None:
            object.__delattr__(model, "forward")
        else:
            object.__setattr__(model, "forward", own)


def pick_output(returned: Any, wanted: str | int | None = None) -> torch.Tensor:
    """Return the tensor to train on.

    If nothing else is wanted: the only tensor, the one called `logits` or `out`, or the first of a
    tuple. Raises `TraceError`, which lists the choices.
    """
    if isinstance(returned, torch.Tensor):
        return returned  # some models return more only while they train
    found = _tensors(returned)
    if wanted is None:
        usual = [name for name in USUAL if name in found]
        first = [0] if 0 in found and found[0] is not None else []
        tensors = [name for name, value in found.items() if value is not None]
        wanted = next(iter([*usual, *first, *(tensors if len(tensors) == 1 else [])]), None)
    tensor = found.get(wanted) if wanted is not None else None
    if tensor is None:
        choices = ", ".join(repr(name) for name, value in found.items() if value is not None)
        asked = "" if wanted is None else f" and no tensor {wanted!r}"
        raise TraceError(
            f"forward() returns a {type(returned).__name__}{asked}, so it is not clear what to "
            + (
                f"train on: name one of its tensors, output={choices}"
                if choices
                else "train on: wrap the model in a module that returns a tensor"
            )
        )
    return tensor


def _tensors(returned: Any) -> dict[str | int, torch.Tensor | None]:
    """Return the parts by name and by position; None for those that are no tensors."""
    parts: dict[str | int, Any] = {}
    if isinstance(returned, Mapping):
        parts = dict(returned)
    elif isinstance(returned, (tuple, list)):
        names = getattr(returned, "_fields", ())
        parts = {**dict(enumerate(returned)), **dict(zip(names, returned, strict=False))}
    return {
        name: value if isinstance(value, torch.Tensor) else None for name, value in parts.items()
    }
