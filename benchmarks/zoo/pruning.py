"""The share of a model's parameters that torch-pruning leaves at half of every width."""

from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.names import CLASSES
from coordinator.task.tracing.capture.calls import ExampleInput, pick_output

RATIO = 0.5
LIMIT_S = 60.0
"""Seconds of computing after which it counts as failed."""


def pruned_share(model: nn.Module, example: ExampleInput) -> tuple[float | None, str]:
    """Return the share that is left, or None and why it failed; no reason: it is not installed.

    The result must still run. Heads of attention are told to it where a module states them, as in
    its own examples; otherwise it is used as it comes.
    """
    if find_spec("torch_pruning") is None:
        return None, ""
    torch_pruning: Any = import_module("torch_pruning")
    pruned = copy.deepcopy(model).eval()
    before = sum(each.numel() for each in pruned.parameters())
    heads = {
        module.qkv: module.num_heads
        for module in pruned.modules()
        if hasattr(module, "qkv") and isinstance(getattr(module, "num_heads", None), int)
    }
    last = [
        module
        for module in pruned.modules()
        if getattr(module, "out_features", getattr(module, "out_channels", None)) == CLASSES
    ]
    given: Any = dict(example) if isinstance(example, Mapping) else example
    try:
        _limit(LIMIT_S)
        pruner = torch_pruning.pruner.BasePruner(
            pruned,
            given,
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=RATIO,
            ignored_layers=last,
            num_heads=heads,
            output_transform=lambda out: pick_output(out).sum(),
        )
        pruner.step()
        _state_heads(pruned, pruner.num_heads)
        with torch.no_grad():
            pruned(**given) if isinstance(given, dict) else pruned(given)
    except Exception as error:  # of another package: said, not mended
        _limit(0)
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
    finally:
        _limit(0)
    after = sum(each.numel() for each in pruned.parameters())
    return (after / before, "") if after < before else (None, "it prunes nothing")


def _limit(seconds: float) -> None:
    """Raise `TimeoutError` here after so many seconds of computing; 0: no longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    while not seconds:  # a last signal may come in between
        with suppress(TimeoutError):
            # The timer first: a signal without a handler ends the process.
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
            return
    signal.signal(signal.SIGVTALRM, stop)
    # Again every second: what is raised may be caught on the way.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)


def _state_heads(pruned: nn.Module, heads: Mapping[nn.Module, int]) -> None:
    """Tell the modules how many heads they are left with, as torch-pruning's examples do."""
    modules: list[Any] = list(pruned.modules())
    for module in modules:
        if getattr(module, "qkv", None) in heads:
            module.num_heads = heads[module.qkv]
            module.head_dim = module.qkv.out_features // (3 * module.num_heads)
