"""Find the inputs that are ids: an id must be a row of the table it is looked up in."""

from __future__ import annotations

from torch import fx

from coordinator.task.tracing.walk import arguments, operator_name, shape_of

_SAME_VALUES = frozenset(
    {
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("permute", "transpose", "t", "expand", "contiguous", "clone", "alias", "detach"),
        *("to", "_to_copy", "slice", "select", "unbind", "chunk", "split", "split_with_sizes"),
        *("getitem", "cat", "stack", "repeat"),
    }
)
"""Operators whose results contain only values of their input."""


def vocabulary(node: fx.Node) -> int | None:
    """Rows of the smallest table that this integer input indexes directly; None: no table.

    Ids computed from the input are not followed.
    """
    if node.meta["val"].is_floating_point():
        return None
    sizes: list[int] = []
    seen, ahead = {node}, [node]
    while ahead:
        value = ahead.pop()
        for user in value.users:
            name = operator_name(user)
            if name in ("embedding", "embedding_bag") and arguments(user)["indices"] is value:
                sizes.append(shape_of(arguments(user)["weight"])[0])
            elif name in _SAME_VALUES and user not in seen:
                seen.add(user)
                ahead.append(user)
    return min(sizes, default=None)
