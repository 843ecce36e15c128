"""Parameters and multiply-accumulates of plans against counts that know nothing of plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.coordinator.task.tracing.oracle import RATIOS, traced
from tests.unit.coordinator.task.tracing.zoo import MODELS

BATCH = 3


def macs_per_sample(model: nn.Module, inputs: torch.Tensor) -> int:
    """By torch's own counter, two operations each; of attention it knows only the unfused form."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.eval()(inputs)
    return int(counter.get_total_flops()) // (2 * len(inputs))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_model(name: str) -> None:
    model, trace = traced(name)
    trained = (each.numel() for each in model.parameters() if each.requires_grad)
    assert trace.plan.parameters == sum(trained)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("lstm", "gru")])
def test_macs_of_model(name: str) -> None:
    family, plan = MODELS[name], traced(name)[1].plan
    counted = macs_per_sample(family.model(), family.inputs(BATCH))
    assert plan.submodel_macs(plan.all_groups()) == counted


def test_macs_of_recurrent_models() -> None:
    """Torch's counter does not know recurrent layers."""
    steps, head = 6, 12 * 5
    lstm = steps * 4 * 10 * (7 + 10) + 10 * 12 + head
    both_directions = 2 * 3 * 5 * ((7 + 5) + (2 * 5 + 5))
    gru = steps * both_directions + 5 * 12 + head
    for name, macs in (("lstm", lstm), ("gru", gru)):
        plan = traced(name)[1].plan
        assert plan.submodel_macs(plan.all_groups()) == macs


def narrow_mlp(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, first), nn.Linear(first, second), nn.Linear(second, 10)
    )


def narrow_cnn(first: int, second: int, third: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * second, third),
        nn.Linear(third, 10),
    )


MLP_GROUPS = {"1": (1,), "3": (0, 4)}
CNN_GROUPS = {"0": (0, 1, 3), "3": (2,), "7": (1, 2)}


@pytest.mark.parametrize(
    ("name", "narrow", "groups"),
    [
        ("mlp", narrow_mlp(20, 10 + 70), MLP_GROUPS),  # ratios of 200: 10, 20, 40, 60, 70
        ("cnn", narrow_cnn(3 * 8, 16, 2 * 32), CNN_GROUPS),
    ],
)
def test_costs_of_submodel(
    name: str, narrow: nn.Module, groups: dict[str, tuple[int, ...]]
) -> None:
    plan = traced(name, RATIOS if name == "mlp" else 4)[1].plan
    assert plan.submodel_parameters(groups) == sum(each.numel() for each in narrow.parameters())
    counted = macs_per_sample(narrow, MODELS[name].inputs(BATCH))
    assert plan.submodel_macs(groups) == counted
