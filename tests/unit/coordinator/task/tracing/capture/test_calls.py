"""Models are called by position or by name, and may return more than the tensor to train on."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coordinator.errors import TraceError
from coordinator.task.task import make_task
from coordinator.task.tracing.capture.calls import calling, make_call, pick_output
from coordinator.task.tracing.trace import trace_model

Scores = namedtuple("Scores", ("logits", "extra"))  # as torchvision's are


class ModelOutput(OrderedDict[str, Any]):
    """As transformers' are: a dictionary whose values are attributes too."""


class Pair(nn.Module):
    """Two inputs of different shapes; `pack` says what is returned."""

    def __init__(self, pack: Callable[[Pair, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 8), nn.Linear(5, 8)
        self.head = nn.Linear(8, 2)
        self.pack = pack

    def forward(self, first: Tensor, skipped: None = None, second: Tensor | None = None) -> Any:
        assert second is not None
        hidden = torch.relu(self.left(first) - 2 * self.right(second))
        return self.pack(self, self.head(hidden), hidden)


PACKS: dict[str, Callable[[Pair, Tensor, Tensor], Any]] = {
    "tensor": lambda model, scores, hidden: scores,
    "tuple": lambda model, scores, hidden: (scores, hidden),
    "list": lambda model, scores, hidden: [scores, None],
    "tuple of one": lambda model, scores, hidden: (scores,),
    "dictionary": lambda model, scores, hidden: {"hidden": hidden, "logits": scores},
    "dictionary of one": lambda model, scores, hidden: {"scores": scores, "count": 3},
    "segmentation": lambda model, scores, hidden: {"aux": hidden, "out": scores},
    "output": lambda model, scores, hidden: ModelOutput(loss=None, logits=scores, cache=object()),
    "named tuple in training": lambda model, scores, hidden: (
        Scores(scores, hidden) if model.training else scores
    ),
}


@pytest.mark.parametrize("pack", PACKS)
def test_output_is_found_and_inputs_go_by_name(pack: str) -> None:
    model = Pair(PACKS[pack])
    second, first = torch.randn(4, 5), torch.randn(4, 3)
    # In another order than forward() declares them.
    trace = trace_model(model, {"second": second, "first": first}, groups=4)
    assert [each.shape for each in trace.train.inputs] == [(5,), (3,)]
    assert trace.train.output_shape == trace.evaluate.output_shape == (2,)
    got = trace.predict(
        trace.weights_of(model), trace.buffers_of(model), [second.numpy(), first.numpy()]
    )
    with torch.no_grad():
        hidden = torch.relu(model.left(first) - 2 * model.right(second))
        wanted = model.head(hidden).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert "forward" not in vars(model)


def test_output_of_choice() -> None:
    model = Pair(lambda model, scores, hidden: {"hidden": hidden * 2, "scores": scores})
    example = {"first": torch.randn(4, 3), "second": torch.randn(4, 5)}
    task = make_task(model, example, groups=4, output="scores")
    assert task.train_program.output_shape == (2,)
    with pytest.raises(TraceError, match=r"a dict and no tensor 'logits'.*output='hidden', 'score"):
        make_task(model, example, groups=4, output="logits")


def test_second_of_a_tuple() -> None:
    scores, hidden = torch.ones(2), torch.zeros(2)
    assert pick_output((scores, hidden), 1) is hidden
    assert pick_output(Scores(scores, hidden), "extra") is hidden


def test_forward_of_the_instance_is_put_back() -> None:
    model = nn.Linear(3, 2)
    own: Any = lambda x: (x, x)  # noqa: E731
    model.forward = own  # type: ignore[method-assign]
    with calling(model, make_call(model, torch.ones(1, 3))):
        assert isinstance(model(torch.ones(1, 3)), torch.Tensor)
    assert model.forward is own
