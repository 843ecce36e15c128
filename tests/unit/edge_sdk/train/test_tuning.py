"""The fastest ways on this machine: chosen from what runs here, and the same numbers come out."""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

import onnx as onnx_format
from torch import nn

from benchmarks.models import Family
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.costs.calibration import tune
from edge_sdk.protocol.errors import GraphError, NonFiniteError, TrainingError, TrainingStopped
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.codec import fitted, graph_nodes
from edge_sdk.protocol.task.graphs import PLACE, GraphEntry, GraphPlace, GraphWay, Ways
from edge_sdk.train import onnx, tuning
from edge_sdk.train.backend import Job
from edge_sdk.train.onnx import CPU, Graphs, OnnxBackend
from edge_sdk.train.tuning import (
    MOST_EVENTS,
    MOST_RUNS,
    PROFILE_BYTES,
    TOLERANCE,
    Tuned,
    difference,
    fastest,
    ways_at,
)

FAMILY = Family(
    lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 3),
    ),
    (3, 8, 8),
    3,
)


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task(FAMILY.model(), FAMILY.inputs(2), groups=4)


@pytest.fixture(scope="module")
def graphs(task: Task) -> CompiledGraphs:
    return compile_graphs(task)


def backend_of(task: Task, graphs: CompiledGraphs) -> OnnxBackend:
    return OnnxBackend(task.plan, graphs.manifest, graphs.files)


def job_of(task: Task, level: float) -> Job:
    plan = task.plan
    groups = {axis.name: tuple(range(axis.wanted(level))) for axis in plan.axes}
    return Job(
        groups=groups,
        weights=plan.cut(task.weights, groups),
        buffers={},
        rule=LocalRule(learning_rate=0.05, momentum=0.9),
        mask_stream=stream(0, "masks"),
    )


def batches_of(*sizes: int) -> list[Batch]:
    rng = np.random.default_rng(5)
    return [Batch((FAMILY.inputs(n, n).numpy(),), rng.integers(3, size=n)) for n in sizes]


def tuned_to(way: str, graphs: CompiledGraphs, kept: tuple[int, ...]) -> Tuned:
    (gradient,) = (entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    ways = {p.name: way for p in gradient.places if way in {option.name for option in p.options}}
    assert ways
    return Tuned(level=1.0, kept=kept, ways=ways, places=9, default_s=1.0, step_s=0.5)


def everywhere_blocked(task: Task, graphs: CompiledGraphs) -> tuple[Tuned, ...]:
    return (tuned_to("blocked", graphs, tuple(axis.atoms for axis in task.plan.axes)),)


@pytest.mark.parametrize("way", ["blocked", "samples"])
@pytest.mark.parametrize("level", [1.0, 0.5])
def test_training_in_other_ways_gives_the_same_movement(
    way: str, level: float, task: Task, graphs: CompiledGraphs
) -> None:
    """With short batches among them, at which some ways do not work."""
    usual, other = backend_of(task, graphs), backend_of(task, graphs)
    job, batches = job_of(task, level), batches_of(16, 16, 5, 3)
    other.tuned = (tuned_to(way, graphs, task.plan.kept_atoms(task.plan.choose(job.groups))),)
    wanted, got = usual.train(job, batches), other.train(job, batches)
    largest = max(np.abs(array).max() for array in wanted.movement.values())
    differs = False
    for name, array in wanted.movement.items():
        np.testing.assert_allclose(got.movement[name], array, atol=1e-4 * largest)
        differs |= bool((got.movement[name] != array).any())
    assert differs  # in rounding: it was another way


def test_without_tuning_equal_jobs_give_equal_bits(task: Task, graphs: CompiledGraphs) -> None:
    job, batches = job_of(task, 1.0), batches_of(16, 5)
    first, again = (backend_of(task, graphs).train(job, batches) for _ in range(2))
    for name, array in first.movement.items():
        np.testing.assert_array_equal(again.movement[name], array)


def test_tuning_takes_ways_that_there_are_and_changes_nothing_else(
    task: Task, graphs: CompiledGraphs
) -> None:
    backend = backend_of(task, graphs)
    found = tune(backend, graphs.manifest, levels=(0.5, 1.0), limit_s=8.0)
    assert found is not None
    assert backend.tuned == ()
    assert [each.level for each in found] == [0.5, 1.0]
    (gradient,) = (entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    ways = {place.name: {o.name for o in place.options[1:]} for place in gradient.places}
    for each in found:
        assert each.kept == tuple(axis.atoms_at(each.level) for axis in task.plan.axes)
        assert each.places == len(gradient.places)
        assert 0 < each.step_s <= each.default_s
        assert all(way in ways[place] for place, way in each.ways.items())
    backend.tuned = found
    backend.train(job_of(task, 1.0), batches_of(16))


def test_tuning_stops_when_told_to(task: Task, graphs: CompiledGraphs) -> None:
    with pytest.raises(TrainingStopped):
        tune(backend_of(task, graphs), graphs.manifest, levels=(1.0,), should_stop=lambda: True)


def test_levels_found_before_a_stop_are_not_tuned_again(task: Task, graphs: CompiledGraphs) -> None:
    asked: list[float] = []

    class Asked(OnnxBackend):
        def tune(self, job: Job, batch: Batch, *, level: float, **_: Any) -> Tuned:
            asked.append(level)
            if asked == [0.25, 0.5, 1.0]:
                raise TrainingStopped(0)
            return Tuned(level=level, kept=(1,), default_s=1.0, step_s=1.0)

    backend = Asked(task.plan, graphs.manifest, graphs.files)
    found: dict[float, Tuned] = {}
    with pytest.raises(TrainingStopped):
        tune(backend, graphs.manifest, levels=(0.25, 0.5, 1.0), found=found)
    again = tune(backend, graphs.manifest, levels=(0.25, 0.5, 1.0), found=found)
    assert again is not None
    assert [each.level for each in again] == [0.25, 0.5, 1.0]
    assert asked == [0.25, 0.5, 1.0, 1.0]


def test_levels_without_room_or_time_are_not_tuned(task: Task, graphs: CompiledGraphs) -> None:
    backend = backend_of(task, graphs)
    assert tune(backend, graphs.manifest, levels=(1.0,), room_bytes=1.0) is None
    assert tune(backend, graphs.manifest, levels=(1.0,), limit_s=0.0) == ()


def test_times_that_the_runtime_notes_need_room(
    task: Task, graphs: CompiledGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in its memory until they are written."""
    monkeypatch.setattr("edge_sdk.decide.costs.calibration.memory_bound", lambda *_: 0.0)
    backend = backend_of(task, graphs)
    room = PROFILE_BYTES - 1
    assert tune(backend, graphs.manifest, levels=(1.0,), room_bytes=room, limit_s=0.0) is None
    room = PROFILE_BYTES
    assert tune(backend, graphs.manifest, levels=(1.0,), room_bytes=room, limit_s=0.0) == ()


def test_constants_that_make_no_numbers_are_tried_otherwise(
    task: Task, graphs: CompiledGraphs
) -> None:
    class Masked(OnnxBackend):
        asked = 0

        def tune(self, job: Job, batch: Batch, *, level: float, **_: Any) -> Tuned:
            self.asked += 1
            if self.asked == 1:
                raise NonFiniteError("nan")
            return Tuned(level=level, kept=(1,), default_s=1.0, step_s=1.0)

    backend = Masked(task.plan, graphs.manifest, graphs.files)
    found = tune(backend, graphs.manifest, levels=(1.0,))
    assert found is not None
    assert [each.level for each in found] == [1.0]


def test_without_a_choice_nothing_is_tuned(task: Task, graphs: CompiledGraphs) -> None:
    """Other providers have ways of their own, and graphs in float16 have one."""
    assert backend_of(task, graphs).has_ways
    gradient = next(entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    plain = replace(gradient, places=(), slots=())
    half = replace(plain, kind="gradient-fp16", sha256=plain.sha256[::-1])
    for entries in ((plain,), (gradient, half)):
        manifest = replace(graphs.manifest, graphs=entries)
        assert not OnnxBackend(task.plan, manifest, {}, precision="fp16").has_ways
    backend = backend_of(task, graphs)
    backend._graphs._providers = ("CUDAExecutionProvider", *CPU)
    assert not backend.has_ways
    assert tune(backend, graphs.manifest, levels=(1.0,)) == ()


def test_ways_of_the_nearest_level_are_taken() -> None:
    def at(*kept: int, way: str) -> Tuned:
        return Tuned(level=1.0, kept=kept, ways={"x": way}, default_s=1.0, step_s=1.0)

    measured = (at(8, 8, way="a"), at(32, 32, way="b"))
    assert ways_at(measured, (8, 8)) == {"x": "a"}
    assert ways_at(measured, (30, 16)) == {"x": "b"}
    assert ways_at(measured, (9, 12)) == {"x": "a"}
    assert ways_at(measured, (8, 8, 8)) == {}
    assert ways_at((), (8,)) == {}


def test_runtime_that_refuses_a_way_falls_back(
    task: Task, graphs: CompiledGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes are not what they should be: the default must not notice."""
    (gradient,) = (entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    file = graphs.files[gradient.sha256]
    broken = file.replace(b"com.microsoft.nchwc", b"com.microsoft.nchwx")
    backend, usual = backend_of(task, graphs), backend_of(task, graphs)
    data = {**graphs.files, gradient.sha256: broken}
    backend._graphs._files = data
    backend._graphs._sessions.clear()
    backend._graphs._checked_file = lambda entry: data[entry.sha256]  # type: ignore[method-assign]
    backend.tuned = everywhere_blocked(task, graphs)
    got = backend.train(job_of(task, 1.0), batches_of(16, 16, 5))
    wanted = usual.train(job_of(task, 1.0), batches_of(16, 16, 5))
    for name, array in wanted.movement.items():
        np.testing.assert_array_equal(got.movement[name], array)
    assert not backend.tuned  # and nobody takes them again
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert backend._graphs._sessions.keys() == usual._graphs._sessions.keys()
    found = tune(backend, graphs.manifest, levels=(1.0,))
    assert found is not None
    assert "blocked" not in {way for each in found for way in each.ways.values()}


def test_way_that_fails_as_it_runs_is_forgotten(
    task: Task,
    graphs: CompiledGraphs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, usual = backend_of(task, graphs), backend_of(task, graphs)
    backend.tuned = everywhere_blocked(task, graphs)
    bound = onnx._run_bound
    failing = iter([True])

    def run(session: Any, *more: Any) -> Any:
        if next(failing, False):
            raise RuntimeError("no such kernel")
        return bound(session, *more)

    monkeypatch.setattr(onnx, "_run_bound", run)
    monkeypatch.setattr(onnx, "LARGE_BYTES", 1)
    got = backend.train(job_of(task, 1.0), batches_of(16, 16))
    assert not backend.tuned
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    wanted = usual.train(job_of(task, 1.0), batches_of(16, 16))
    for name, array in wanted.movement.items():
        np.testing.assert_array_equal(got.movement[name], array)


def test_failure_that_the_default_shares_costs_no_ways(
    task: Task, graphs: CompiledGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as too little memory."""

    def run(*_: Any) -> Any:
        raise RuntimeError("bad allocation")

    monkeypatch.setattr(onnx, "_run_bound", run)
    monkeypatch.setattr(onnx, "LARGE_BYTES", 1)
    backend = backend_of(task, graphs)
    backend.tuned = tuned = everywhere_blocked(task, graphs)
    with pytest.raises(TrainingError, match="bad allocation"):
        backend.train(job_of(task, 1.0), batches_of(16))
    assert backend.tuned == tuned


def test_graph_that_is_not_here_costs_no_ways(task: Task, graphs: CompiledGraphs) -> None:
    """The default fails, too, so the ways are not at fault."""
    backend = OnnxBackend(task.plan, graphs.manifest, {})
    backend.tuned = tuned = everywhere_blocked(task, graphs)
    with pytest.raises(GraphError, match="fetch it first"):
        backend.train(job_of(task, 1.0), batches_of(16))
    assert backend.tuned == tuned


def test_file_with_unknown_operators_is_refused(task: Task, graphs: CompiledGraphs) -> None:
    """Only known sets of operators, and none but the standard one in the default ways."""
    (gradient,) = (entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    file = graphs.files[gradient.sha256]
    head = b"\x42\x17\x0a\x13com.microsoft.nchwc\x10\x01"  # imported for all
    for data in (file.replace(b"com.microsoft.nchwc", b"com.microsoft.other"), file + head):
        digest = hashlib.sha256(data).hexdigest()
        entry = replace(gradient, sha256=digest, size_bytes=len(data))
        manifest = replace(graphs.manifest, graphs=(entry,))
        with pytest.raises(GraphError, match="opsets"):
            OnnxBackend(task.plan, manifest, {digest: data})


def test_way_that_brings_operators_to_light_is_not_loaded(
    task: Task, graphs: CompiledGraphs
) -> None:
    """Behind the default they are the text of a comment; cut it out, and they are read."""
    (gradient,) = (entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    file, comment = graphs.files[gradient.sha256], b"\x32\x01x"
    hidden = b"\x42\x0c\x0a\x08unheard!\x10\x01"
    text = hidden.replace(b"\x0c", bytes([len(hidden) - 2]), 1) + comment
    start = len(file)
    data = file + b"\x32" + bytes([len(text)]) + comment + text
    ways = (GraphWay("plain", start, start + 2), GraphWay("odd", start + 2, start + 5))
    entry = replace(
        gradient,
        sha256=(digest := hashlib.sha256(data).hexdigest()),
        size_bytes=len(data),
        places=(*gradient.places, GraphPlace("x", ways)),
    )
    manifest = replace(graphs.manifest, graphs=(entry,))
    opened = Graphs(task.plan, manifest, {digest: data})
    kept = tuple(axis.atoms for axis in task.plan.axes)
    assert opened.session(entry, kept, 4, {}) is not None
    with pytest.raises(GraphError, match="other operators"):
        opened.session(entry, kept, 4, {"x": "odd"})


# -- the choice, on a runtime whose times are known ------------------------------------------------


class Runtime:
    """Sessions whose places take given times; `seconds` by (place, way)."""

    def __init__(self, entry: GraphEntry, seconds: Mapping[tuple[int, str], float]) -> None:
        self.entry = entry
        self.seconds = seconds
        self.opened: list[Ways] = []
        self.hidden: dict[str, float] = {}
        """Seconds that a way takes outside of its own nodes."""
        self.untimed: set[int] = set()
        """Places whose nodes no profile names."""
        self.nodes: int | None = 100
        self.wrong: dict[str, float] = {}
        """Ways that compute something else, and by how much of the largest gradient."""
        self.broken: dict[str, float] = {}
        """Ways whose gradients hold this number."""
        self.profiled: list[_Session] = []

    def open(self, ways: Ways, profile: str | None) -> Any:
        if "bad" in ways.values():
            raise GraphError("unknown operators")
        self.opened.append(dict(ways))
        return _Session(self, self.entry.options(ways, (4,), 16), profile)


class _Session:
    def __init__(self, runtime: Runtime, taken: tuple[GraphWay, ...], profile: str | None) -> None:
        self._times = [runtime.seconds[n, way.name] for n, way in enumerate(taken)]
        self._named = [n for n, _ in enumerate(taken) if n not in runtime.untimed]
        self._hidden = sum(runtime.hidden.get(way.name, 0.0) for way in taken)
        off = sum(runtime.wrong.get(way.name, 0.0) for way in taken)
        self._off = off + sum(runtime.broken.get(way.name, 0.0) for way in taken)
        self._profile = profile
        self.runs = 0
        if profile is not None:
            runtime.profiled.append(self)
            weakref.finalize(self, RELEASED.add, profile)

    def run(self, names: Any, feeds: Any) -> list[Any]:
        self.runs += 1
        CLOCK[0] += sum(self._times) + self._hidden
        return [np.array([50.0, 50 * self._off]) for _ in names or ()]

    def end_profiling(self) -> str:
        assert self._profile is not None
        first = [  # slow, as a first run is
            {"cat": "Node", "name": f"{PLACE}{n}.0_kernel_time", "dur": 1e7} for n in self._named
        ]
        later = [
            {
                "cat": "Node",
                "name": f"fused {PLACE}{n}.{part}/x_kernel_time",
                "dur": self._times[n] * 5e5,
            }
            for _ in range(self.runs - 1)
            for n in self._named
            for part in (0, 1)
        ]
        other = [{"cat": "Node", "name": "Conv_3_kernel_time", "dur": 1e9}, {"cat": "Session"}]
        path = Path(self._profile)
        path.write_text("[\n" + ",\n".join(map(json.dumps, [*first, *later, *other])) + "\n]\n")
        return str(path)


CLOCK = [0.0]
RELEASED: set[str] = set()
"""Files of sessions that are gone."""


@pytest.fixture
def entry(graphs: CompiledGraphs, monkeypatch: pytest.MonkeyPatch) -> GraphEntry:
    numbers = count(step=10)

    def way(name: str) -> GraphWay:
        return GraphWay(name, start := next(numbers), start + 10)

    names = (("usual", "fast"), ("usual", "fast", "bad"), ("usual", "fast", "lean"))
    places = tuple(GraphPlace(f"p{n}", tuple(map(way, each))) for n, each in enumerate(names))
    monkeypatch.setattr("edge_sdk.train.tuning.time.perf_counter", lambda: CLOCK[0])
    (gradient,) = (each for each in graphs.manifest.graphs if each.kind == "gradient")
    return replace(gradient, slots=(), places=places)


def chosen(runtime: Runtime, limit_s: float = 1e3) -> Tuned | None:
    return fastest(
        runtime.entry,
        (4,),
        16,
        runtime.open,
        {},
        (GraphError,),
        nodes=lambda _: runtime.nodes,
        level=0.5,
        limit_s=limit_s,
        should_stop=lambda: False,
    )


SECONDS = {
    **{(0, "usual"): 1.0, (0, "fast"): 0.5},
    **{(1, "usual"): 1.0, (1, "fast"): 2.0},
    **{(2, "usual"): 1.0, (2, "fast"): 0.9, (2, "lean"): 0.6},
}


def test_each_place_takes_its_fastest_way(entry: GraphEntry) -> None:
    found = chosen(Runtime(entry, SECONDS))
    assert found is not None
    assert found.ways == {"p0": "fast", "p2": "lean"}
    assert found.places == 3
    assert found.default_s == pytest.approx(3.0)
    assert found.step_s == pytest.approx(2.1)
    assert str(found) == "1 fast, 1 lean of 3: 0.70 of the default's time"


def test_way_that_makes_a_whole_step_slower_is_not_taken(entry: GraphEntry) -> None:
    runtime = Runtime(entry, SECONDS)
    runtime.hidden = {"fast": 0.7}
    found = chosen(runtime)
    assert found is not None
    assert found.ways == {"p2": "lean"}


def test_place_that_no_profile_names_keeps_its_default(entry: GraphEntry) -> None:
    runtime = Runtime(entry, SECONDS)
    runtime.untimed = {0}
    found = chosen(runtime)
    assert found is not None
    assert found.ways == {"p2": "lean"}


@pytest.mark.parametrize("gain", [1.0, 0.99])
def test_way_without_a_gain_is_not_taken(entry: GraphEntry, gain: float) -> None:
    equal = {key: gain if key[1] != "usual" else 1.0 for key in SECONDS}
    found = chosen(Runtime(entry, equal))
    assert found is not None
    assert found.ways == {}
    assert str(found) == "the default for all 3: 1.00 of the default's time"


@pytest.mark.parametrize("off", [0.01, math.nan, math.inf])
def test_way_that_computes_something_else_is_not_taken(
    entry: GraphEntry, off: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kernels differ from machine to machine."""
    runtime = Runtime(entry, SECONDS)
    runtime.wrong = {"fast": off}
    found = chosen(runtime)
    assert found is not None
    assert found.ways == {"p2": "lean"}
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "'fast' computes something else" in record.getMessage()


def test_rounding_is_no_difference(entry: GraphEntry) -> None:
    runtime = Runtime(entry, SECONDS)
    runtime.wrong = {"fast": TOLERANCE / 4}  # in three places
    found = chosen(runtime)
    assert found is not None
    assert found.ways == {"p0": "fast", "p2": "lean"}


def test_default_without_numbers_cannot_be_compared_with(entry: GraphEntry) -> None:
    runtime = Runtime(entry, SECONDS)
    runtime.broken = {"usual": math.nan}
    with pytest.raises(NonFiniteError):
        chosen(runtime)


def test_differences_are_of_the_largest_gradient_or_of_an_output_itself() -> None:
    def outputs(loss: float, small: float, large: float) -> dict[str, Any]:
        return {k: np.array([v]) for k, v in {"loss": loss, "g:a": small, "g:b": large}.items()}

    wanted = outputs(2.0, 1e-3, 10.0)
    assert difference(wanted, wanted) == 0
    assert difference(outputs(2.0, 2e-3, 10.0), wanted) == pytest.approx(1e-4)
    assert difference(outputs(2.02, 1e-3, 10.0), wanted) == pytest.approx(1e-2)
    assert difference(outputs(math.nan, 1e-3, 10.0), wanted) == math.inf


@pytest.mark.parametrize(("nodes", "runs"), [(100, 1 + MOST_RUNS), (MOST_EVENTS // 3, 3)])
def test_large_graph_is_run_less_often(entry: GraphEntry, nodes: int, runs: int) -> None:
    """The runtime keeps the time of every node of every run in memory."""
    runtime = Runtime(entry, SECONDS)
    runtime.nodes = nodes
    assert chosen(runtime) is not None
    assert {session.runs for session in runtime.profiled} == {runs}


@pytest.mark.parametrize("nodes", [MOST_EVENTS // 2 + 1, None])
def test_graph_with_too_many_times_is_not_tuned(entry: GraphEntry, nodes: int | None) -> None:
    runtime = Runtime(entry, SECONDS)
    runtime.nodes = nodes
    assert chosen(runtime) is None
    assert runtime.opened == []


def test_session_is_gone_when_its_times_are_read(
    entry: GraphEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notes, and what it computed with, would be in memory beside them."""
    runtime = Runtime(entry, SECONDS)
    runtime.profiled = _Forgetful()
    read = tuning._read
    gone = []

    def reading(lines: Any) -> dict[int, float]:
        gone.append(lines.name in RELEASED)
        return read(lines)

    monkeypatch.setattr(tuning, "_read", reading)
    assert chosen(runtime) is not None
    assert gone == [True] * 3


class _Forgetful(list[Any]):
    def append(self, _: Any) -> None:
        """Keep nothing alive."""


def test_times_are_read_line_by_line() -> None:
    """An event a line, so that a large file is never in memory as a whole."""
    event = {"cat": "Node", "name": f"{PLACE}0.0_kernel_time", "dur": 5e5}

    def lines() -> Iterator[bytes]:
        yield b"[\n"
        for _ in range(3):
            yield json.dumps(event).encode() + b",\n"
        yield b'{"cat" : "Session","name" :"model_run"}\n'
        yield b"]\n"

    assert tuning._read(lines()) == {0: pytest.approx(0.5)}


def test_nodes_of_a_file_are_counted(task: Task, graphs: CompiledGraphs) -> None:
    (gradient,) = (entry for entry in graphs.manifest.graphs if entry.kind == "gradient")
    kept = tuple(axis.atoms for axis in task.plan.axes)
    data = fitted(gradient, graphs.files[gradient.sha256], kept, 16)
    model = onnx_format.load_from_string(data)
    assert graph_nodes(data) == len(model.graph.node) > 10
    body = onnx_format.GraphProto(name="body")
    model.graph.node[3].attribute.append(onnx_format.helper.make_attribute("body", body))
    assert graph_nodes(model.SerializeToString()) is None


def test_too_little_time_tells_nothing(entry: GraphEntry) -> None:
    assert chosen(Runtime(entry, SECONDS), limit_s=5.0) is None
