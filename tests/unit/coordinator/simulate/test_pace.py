"""A device's virtual time: a step takes the share of the work of all widths that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from coordinator.simulate.pace import DeviceClock
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.messages.local_rule import LocalRule, Widths
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, MacTerm, Tensor
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Job, Metrics, Trained

PLAN = ModelPlan(
    axes=(Axis("a", (1, 1, 1, 1)),),
    tensors=(Tensor("w", "float32", (Dim(4, 0),)),),
    macs=(MacTerm(5, (0,)),),
)


class Still:
    """A backend that takes its steps and moves nothing."""

    plan = PLAN
    data: DataSpec | None = None

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        steps = len(list(batches))
        return Trained({}, {}, Metrics(steps, steps, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("widths", "passes", "seconds"),
    [("own", 2, 7 * 1.5), ("sandwich", 2, 7 * (1.5 + 0.5)), ("sandwich", 1, None)],
)
def test_steps_take_the_time_of_their_widths(
    widths: Widths, passes: int, seconds: float | None
) -> None:
    job = Job(
        groups={"a": (0, 1, 2)},
        weights={},
        buffers={},
        rule=LocalRule(learning_rate=0.1, widths=widths),
        mask_stream=stream(1, "masks"),
        widths=({"a": (1,)},),
        width_stream=stream(1, "widths"),
        passes=passes,
    )
    random = stream(1, "widths")
    turns = [(1.5, 0.5)[width] for _ in range(4) for width in random.permutation(2)]
    clock = DeviceClock(2.0)
    batch = Batch((np.zeros((1, 1), dtype=np.float32),), np.zeros(1))
    clock.emulated(Still()).train(job, [batch] * 7)
    assert clock.clock() == pytest.approx(sum(turns[:7]) if seconds is None else seconds)
