"""Training on a Ray cluster: a task per cohort, which Ray repeats if its process or node is lost.

The data, the graphs and each version of the model are put into the cluster's object store once; a
node's processes map what it holds. Sessions are made once per process. What a cohort makes depends
on its orders, the data and the seed alone, so a repeated task makes the same bits.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import numpy as np

import edge_sdk
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.simulate.fleet.engines.connection import connected, load_ray, split_address
from coordinator.simulate.fleet.engines.engine import Submit, TrainingKit
from coordinator.simulate.fleet.engines.nodes import INSTALL, check_nodes, survey
from coordinator.simulate.fleet.hands import Cohort, CohortResult, Hands
from coordinator.simulate.fleet.shared import arrays_of, dealt_from
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.layout import Array

TIMEOUT_S = 60.0
"""Seconds in which a cluster must answer and have a processor for us."""
LOST_S = 60.0
"""Seconds that we wait for a cluster that lost all its processors."""
RETRIES = 10
"""Lost processes and nodes that one cohort survives."""
LOOK_S = 5.0
"""Seconds between looks at a cluster that we wait for."""
KEPT_MODELS = 4
"""Versions of the model that are kept in the store for cohorts to come."""


class RayEngine:
    """Trains cohorts on a Ray cluster, one for each of its processors at a time."""

    trays = False

    def __init__(
        self,
        address: str | None = None,
        *,
        workers: int | None = None,
        timeout_s: float = TIMEOUT_S,
        lost_s: float = LOST_S,
    ) -> None:
        """`address`: HOST:PORT of a cluster's head node, or "auto" for the one of this machine.

        None starts a cluster here, with so many `workers` (None: one for each core), and shuts it
        down at the end; if the program has called `ray.init` itself, that cluster is used and left
        alone. `timeout_s`: seconds in which a cluster must answer and have a processor free;
        `lost_s`: seconds to wait for new nodes when all are lost. Raises `ConfigError`.
        """
        if workers is not None and workers < 1:
            raise ConfigError(f"workers must be at least 1, not {workers}")
        if workers is not None and address is not None:
            raise ConfigError("workers are for a cluster of this machine: leave the address out")
        if address not in (None, "auto"):
            split_address(address)
        load_ray()
        self._address = address
        self._workers = workers or os.cpu_count() or 1
        self._timeout_s = timeout_s
        self._lost_s = lost_s

    @contextmanager
    def started(self, kit: TrainingKit) -> Iterator[Submit]:
        """See `TrainingEngine`. Raises `ConfigError` and `CoordinatorError`."""
        data = arrays_of(kit.dealt)
        with connected(
            self._address,
            workers=self._workers,
            data_bytes=sum(array.nbytes for array in data),
            timeout_s=self._timeout_s,
        ) as ray:
            check_nodes(survey(ray, self._timeout_s))
            tasks = _Tasks(ray, kit, data, self._lost_s)
            try:
                yield tasks.submit
            finally:
                tasks.cancel()


class _Tasks:
    """Cohorts of one simulation on a cluster."""

    def __init__(self, ray: Any, kit: TrainingKit, data: tuple[Array, ...], lost_s: float) -> None:
        self.ray = ray
        self._lost_s = lost_s
        self._train = ray.remote(num_cpus=1, max_retries=RETRIES)(train)
        self._run = uuid4().hex
        self._models: OrderedDict[tuple[int, int], tuple[Any, Any]] = OrderedDict()
        self._pending: WeakSet[_PendingTask] = WeakSet()
        self._bare_since: float | None = None
        with self.explained():
            self._tools = ray.put((kit.plan.encoded, kit.manifest, dict(kit.files), data, kit.seed))

    def submit(self, cohort: Cohort) -> _PendingTask:
        """Have a cohort trained."""
        with self.explained():
            model = self._model(cohort.theta, cohort.buffers)
            light = replace(cohort, theta=np.zeros(0, dtype=np.float32), buffers={})
            # In a list, a reference comes as such: a process that has the tools needs no more.
            given = self._run, edge_sdk.__version__, [self._tools]
            task = _PendingTask(self, self._train.remote(*given, model, light))
        self._pending.add(task)
        return task

    def cancel(self) -> None:
        """Have nobody work for us any more."""
        for task in self._pending:
            if not task.done():
                self.ray.cancel(task.reference)

    def wait_for(self, reference: Any) -> CohortResult:
        """Return the result of a cohort. Raises `CoordinatorError` if there will be none."""
        with self.explained():
            while (result := self._soon(reference)) is None:
                self._look()
        return result

    def _soon(self, reference: Any) -> CohortResult | None:
        try:
            result: CohortResult = self.ray.get(reference, timeout=LOOK_S)
        except self.ray.exceptions.GetTimeoutError:
            return None
        return result

    def _look(self) -> None:
        """Raise `CoordinatorError` if the cluster has had no processor for too long."""
        now = time.monotonic()
        if self.ray.cluster_resources().get("CPU", 0) >= 1:
            self._bare_since = None
        elif self._bare_since is None:
            self._bare_since = now
        elif now - self._bare_since > self._lost_s:
            raise CoordinatorError(
                f"the Ray cluster has had no processor for {self._lost_s:g} s: its nodes are lost; "
                "start them again (ray start --address), and then the simulation"
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn Ray's errors into ours."""
        errors = self.ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            cause = error.cause or error
            if isinstance(cause, CoordinatorError):
                raise cause from error
            said = str(cause).strip().splitlines()
            raise CoordinatorError(
                f"a task on the Ray cluster failed with {type(cause).__name__}: "
                f"{said[-1] if said else 'no text'}"
            ) from error
        except (errors.WorkerCrashedError, errors.OutOfMemoryError) as error:
            raise CoordinatorError(
                f"processes of the Ray cluster died {RETRIES + 1} times in the training of one "
                "cohort, perhaps for want of memory: use smaller cohorts, or fewer workers per node"
            ) from error
        except errors.RayError as error:
            said = str(error).strip().splitlines()
            raise CoordinatorError(f"Ray: {said[0] if said else type(error).__name__}") from error

    def _model(self, theta: Float32, buffers: Mapping[str, Array]) -> Any:
        """Return the reference of a version of the model, which is put into the store once."""
        key = id(theta), id(buffers)
        if key not in self._models:
            # The values are kept too: others would get their numbers.
            self._models[key] = self.ray.put((theta, dict(buffers))), (theta, buffers)
            if len(self._models) > KEPT_MODELS:
                self._models.popitem(last=False)
        return self._models[key][0]


class _PendingTask:
    """A cohort on the cluster."""

    def __init__(self, tasks: _Tasks, reference: Any) -> None:
        self._tasks = tasks
        self._result: CohortResult | None = None
        self.reference = reference

    def result(self) -> CohortResult:
        """See `PendingCohort`."""
        if self._result is None:
            self._result = self._tasks.wait_for(self.reference)
        return self._result

    def done(self) -> bool:
        """See `PendingCohort`."""
        return bool(self._tasks.ray.wait([self.reference], timeout=0)[0])


_hands: dict[str, Hands] = {}
"""Per simulation, what trains in this process: of the last one alone."""


def train(
    run: str,
    version: str,
    tools: list[Any],
    model: tuple[Float32, Mapping[str, Array]],
    cohort: Cohort,
) -> CohortResult:
    """Train a cohort in a process of a cluster."""
    if run not in _hands:
        _hands.clear()
        _hands[run] = _begin(version, tools[0])
    theta, buffers = model
    return CohortResult(_hands[run].work(replace(cohort, theta=theta, buffers=buffers)))


def _begin(version: str, reference: Any) -> Hands:
    import platform

    import ray

    from edge_sdk.train.onnx import OnnxBackend

    own = edge_sdk.__version__
    if own != version:
        raise CoordinatorError(
            f"the node {platform.node()} has tessera-fl {own}: {INSTALL.format(version)}"
        )
    plan_bytes, manifest, files, data, seed = ray.get(reference)
    plan = decode_plan(plan_bytes)
    return Hands(plan, OnnxBackend(plan, manifest, files), dealt_from(data), seed)
