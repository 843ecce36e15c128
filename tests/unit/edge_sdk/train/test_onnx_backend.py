"""The onnx backend against numpy's float64, and how it pads, stops, fails and refuses."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import (
    GraphError,
    GroupError,
    NonFiniteError,
    TensorError,
    TesseraError,
    TrainingError,
    TrainingStopped,
)
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array, Raw
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Job, Trained
from edge_sdk.train.inference import Predictor
from edge_sdk.train.onnx import OnnxBackend
from tests.unit.edge_sdk.train.handmade import CLASSES, INPUTS, Handmade, Reference, bundle

GROUPS = {"hidden": (0, 2)}
KEPT = 3
PLAIN = LocalRule(learning_rate=0.1, rescale=0)
RULES = {
    "plain": PLAIN,
    "momentum": replace(PLAIN, momentum=0.9, weight_decay=0.02),
    "clip": replace(PLAIN, clip_norm=0.05),
    "sam": replace(PLAIN, sam_radius=0.1),
    "proximal": replace(PLAIN, proximal=0.5),
    "rescale": replace(PLAIN, rescale=0.5),
    "all": LocalRule(
        learning_rate=0.1,
        momentum=0.5,
        weight_decay=0.01,
        clip_norm=0.05,
        sam_radius=0.1,
        proximal=0.2,
        rescale=1,
    ),
}


def job_of(plan: ModelPlan, rule: LocalRule = PLAIN) -> Job:
    rng = np.random.default_rng(1)
    full = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in plan.tensors}
    full = {name: np.asarray(array) for name, array in full.items()}
    buffers = {b.name: np.zeros(b.shape, dtype=np.float32) for b in plan.buffers}
    return Job(
        groups=GROUPS,
        weights=plan.cut(full, GROUPS),
        buffers=plan.cut_buffers(buffers, GROUPS),
        rule=rule,
        mask_stream=stream(2, "masks"),
    )


def batches_of(sizes: Sequence[int]) -> list[Batch]:
    rng = np.random.default_rng(3)
    return [
        Batch(
            (rng.standard_normal((size, INPUTS)).astype(np.float32),),
            rng.integers(CLASSES, size=size),
        )
        for size in sizes
    ]


def trained(
    *models: Handmade, rule: LocalRule = PLAIN, sizes: Sequence[int] = (8, 8, 5)
) -> Trained:
    plan, manifest, files = bundle(*models)
    return OnnxBackend(plan, manifest, files).train(job_of(plan, rule), batches_of(sizes))


def test_correction_is_added_to_every_gradient() -> None:
    """The movement is that of single steps without it, each followed by −γ times it."""
    plan, manifest, files = bundle(Handmade())
    backend, job, batches = OnnxBackend(plan, manifest, files), job_of(plan), batches_of([8, 8, 5])
    rng = np.random.default_rng(7)
    added: dict[str, Array] = {
        name: np.asarray(rng.standard_normal(array.shape), dtype=np.float32)
        for name, array in job.weights.items()
    }
    got = backend.train(replace(job, correction=added), batches).movement
    weights = dict(job.weights)
    for batch in batches:
        moved = backend.train(replace(job, weights=weights), [batch]).movement
        weights = {name: weights[name] + moved[name] - 0.1 * added[name] for name in weights}
        weights = {name: np.asarray(array, np.float32) for name, array in weights.items()}
    for name, start in job.weights.items():
        np.testing.assert_allclose(got[name], weights[name] - start, rtol=1e-4, atol=1e-5)
    with pytest.raises(TensorError):
        backend.train(replace(job, correction={}), batches)


@pytest.mark.parametrize("room_bytes", [2**20, None])
def test_room_that_no_gradient_takes_is_left(room_bytes: int | None) -> None:
    """Where no gradient is large, however large the model is."""
    plan, manifest, files = bundle(Handmade())
    room = None if room_bytes is None else np.empty(room_bytes, dtype=np.uint8)
    given: list[Raw | None] = []

    def subtract(_: Mapping[str, Array], lent: Raw | None) -> None:
        given.append(lent)

    job = replace(job_of(plan), owned=True, spare=room, subtract_start=subtract)
    found = OnnxBackend(plan, manifest, files).train(job, batches_of([8, 5]))
    (lent,) = given
    assert lent is room
    assert found.spare is room


def norm(arrays: Mapping[str, Array]) -> float:
    return float(np.sqrt(sum(np.sum(array**2) for array in arrays.values())))


def reference(job: Job, batches: Sequence[Batch], dropout: float = 0.0) -> dict[str, Array]:
    """The movement in float64, as MATH and `LocalRule` say, one formula after another."""
    rule, masks = job.rule, stream(2, "masks")
    model = Reference((6 / KEPT) ** rule.rescale)
    start = {name: array.astype(np.float64) for name, array in job.weights.items()}
    w = dict(start)
    v = {name: np.zeros_like(array) for name, array in start.items()}
    for batch in batches:
        x, mask = batch.inputs[0].astype(np.float64), np.ones(())
        if dropout:
            drawn = masks.random((len(x), KEPT), dtype=np.float32)
            mask = np.where(drawn < dropout, 0, 1 / (1 - dropout))

        def gradient(
            at: Mapping[str, Array], x: Array = x, y: Array = batch.targets, mask: Array = mask
        ) -> dict[str, Array]:
            g = model.gradients(at, x, y, mask)
            return {name: g[name] + rule.proximal * (at[name] - start[name]) for name in g}

        g = gradient(w)
        if rule.sam_radius:
            length = norm(g)
            g = gradient({name: w[name] + rule.sam_radius * g[name] / length for name in g})
        if rule.clip_norm is not None:
            shrink = min(1.0, rule.clip_norm / norm(g))
            g = {name: shrink * g[name] for name in g}
        for name in w:
            v[name] = rule.momentum * v[name] + g[name] + rule.weight_decay * w[name]
            w[name] = w[name] - rule.learning_rate * v[name]
    return {name: w[name] - start[name] for name in w}


def assert_close(got: Mapping[str, Array], wanted: Mapping[str, Array], relative: float) -> None:
    assert set(got) == set(wanted)
    largest = max(np.abs(array).max() for array in wanted.values())
    assert largest > 1e-2
    for name, array in wanted.items():
        assert isinstance(got[name], np.ndarray)
        assert got[name].dtype == np.float32
        assert got[name].shape == array.shape
        np.testing.assert_allclose(got[name], array, rtol=0, atol=relative * largest, err_msg=name)


# -- the oracle ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("rule", RULES)
def test_movement_equals_float64_after_50_steps(rule: str, dropout: float) -> None:
    """A difference of 1e-4 after 50 steps leaves room for float32's rounding alone."""
    plan, manifest, files = bundle(Handmade(dropout=dropout))
    batches = batches_of([8] * 40 + [5] * 10)
    job = job_of(plan, RULES[rule])
    got = OnnxBackend(plan, manifest, files).train(job, batches)
    assert_close(got.movement, reference(job, batches, dropout), 1e-4)


def test_metrics_are_those_of_the_losses() -> None:
    plan, manifest, files = bundle(Handmade())
    batches, model = batches_of([8, 8, 5]), Reference()
    job = job_of(plan)
    metrics = OnnxBackend(plan, manifest, files).train(job, batches).metrics
    losses = []
    for done, batch in enumerate(batches):
        moved = reference(job, batches[:done])
        w = {name: job.weights[name] + moved[name] for name in moved}
        losses.append(model.loss(w, batch.inputs[0].astype(np.float64), batch.targets))
    assert (metrics.steps, metrics.samples) == (3, 21)
    seen = (metrics.first_loss, metrics.mean_loss, metrics.last_loss)
    assert seen == pytest.approx((losses[0], np.mean(losses), losses[2]), rel=1e-5)


@pytest.mark.parametrize(("radius", "passes"), [(0.0, 1), (0.1, 2)])
def test_statistic_follows_every_pass(radius: float, passes: int) -> None:
    """With SAM a step has two passes, and a model in training mode counts both."""
    plan, manifest, files = bundle(Handmade(statistic=True))
    rule = replace(PLAIN, learning_rate=1e-9, sam_radius=radius * 1e-9)
    job = job_of(plan, rule)
    batches = batches_of([8, 8])
    got = OnnxBackend(plan, manifest, files).train(job, batches)
    mean = np.zeros(KEPT)
    for batch in batches:
        h = np.tanh(batch.inputs[0] @ job.weights["w1"].T + job.weights["b1"]).mean(0)
        for _ in range(passes):
            mean = 0.9 * mean + 0.1 * h
    np.testing.assert_allclose(got.statistics["mean"], mean, rtol=1e-5)
    assert not job.buffers["mean"].any()


# -- graphs made for one size -------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kept", [KEPT, None])
def test_static_batch_padded_gives_the_same(kept: int | None, dropout: float) -> None:
    exact = trained(Handmade(dropout=dropout), rule=RULES["all"])
    padded = trained(Handmade(dropout=dropout, kept=kept, batch=11), rule=RULES["all"])
    assert_close(padded.movement, exact.movement, 1e-5)
    assert padded.metrics.samples == exact.metrics.samples
    assert padded.metrics.mean_loss == pytest.approx(exact.metrics.mean_loss, rel=1e-5)


def test_static_batch_with_a_statistic_is_not_padded() -> None:
    """Samples without weight would still count in a batch's mean."""
    model = Handmade(statistic=True, batch=8)
    assert trained(model, sizes=(8,)).metrics.steps == 1
    with pytest.raises(GraphError, match="batch 5"):
        trained(model, sizes=(5,))


def test_static_widths_refuse_others() -> None:
    with pytest.raises(GraphError, match=r"widths \[3\].*widths \[4\]"):
        trained(Handmade(kept=4))


def test_many_static_graphs_take_turns() -> None:
    """More graphs than are kept open; each is opened again when its batch comes again."""
    sizes = (1, 2, 3, 4, 5, 6) * 2
    models = [Handmade(batch=size) for size in range(1, 7)]
    assert_close(
        trained(*models, sizes=sizes).movement, trained(Handmade(), sizes=sizes).movement, 1e-5
    )


# -- memory -------------------------------------------------------------------------------------


def test_movement_survives_the_backend() -> None:
    """onnxruntime's arrays may be views of its memory: free it, fill it again, look."""
    plan, manifest, files = bundle(Handmade(statistic=True))
    rule = replace(PLAIN, momentum=0.9)
    backend = OnnxBackend(plan, manifest, files)
    got = backend.train(job_of(plan, rule), batches_of([8] * 5))
    before = {name: array.tobytes() for name, array in (got.movement | got.statistics).items()}
    del backend
    gc.collect()
    other = OnnxBackend(plan, manifest, files)
    garbage = [np.full(size, np.nan, dtype=np.float32) for size in (1, 3, 9, 12, 64) * 200]
    other.train(job_of(plan, replace(rule, learning_rate=3)), batches_of([64] * 5))
    after = {name: array.tobytes() for name, array in (got.movement | got.statistics).items()}
    assert len(garbage) == 1000
    assert before == after
    for array in (*got.movement.values(), *got.statistics.values()):
        # Memory of numpy's own: the movement's arrays lie in one piece of it.
        owner = array if array.base is None else array.base
        assert isinstance(owner, np.ndarray)
        assert owner.flags.owndata


def test_movement_does_not_depend_on_the_callers_arrays() -> None:
    """Weights that the caller overwrites while the training runs are not the training's."""
    plan, manifest, files = bundle(Handmade(statistic=True))
    backend, batches = OnnxBackend(plan, manifest, files), batches_of([8] * 3)
    wanted = backend.train(job_of(plan, RULES["proximal"]), batches)
    job = job_of(plan, RULES["proximal"])

    def meddling() -> Iterator[Batch]:
        for batch in batches:
            yield batch
            for array in (*job.weights.values(), *job.buffers.values()):
                array[...] = np.nan

    got = backend.train(job, meddling())
    for name, array in (wanted.movement | wanted.statistics).items():
        np.testing.assert_array_equal((got.movement | got.statistics)[name], array)


def test_training_leaves_its_input_alone() -> None:
    plan, manifest, files = bundle(Handmade(statistic=True))
    job, batches = job_of(plan, RULES["all"]), batches_of([8] * 5)
    arrays = [*job.weights.values(), *job.buffers.values()]
    arrays += [array for batch in batches for array in (*batch.inputs, batch.targets)]
    before = [array.tobytes() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    backend = OnnxBackend(plan, manifest, files)
    first = backend.train(job, batches)
    again = backend.train(replace(job, mask_stream=stream(2, "masks")), batches)
    assert [array.tobytes() for array in arrays] == before
    for name, array in first.movement.items():
        assert array.tobytes() == again.movement[name].tobytes()


# -- stopping and failing -----------------------------------------------------------------------


def test_training_stops_when_told() -> None:
    plan, manifest, files = bundle(Handmade())
    answers = iter([False, False, True])
    with pytest.raises(TrainingStopped) as stopped:
        OnnxBackend(plan, manifest, files).train(
            job_of(plan), batches_of([8] * 5), should_stop=lambda: next(answers)
        )
    assert stopped.value.steps_done == 2


def test_training_without_batches_is_an_error() -> None:
    plan, manifest, files = bundle(Handmade())
    with pytest.raises(TrainingError, match="no data"):
        OnnxBackend(plan, manifest, files).train(job_of(plan), [])


@pytest.mark.parametrize("steps", [1, 4])
def test_training_that_runs_away_returns_nothing(steps: int) -> None:
    with pytest.raises(NonFiniteError):
        trained(
            Handmade(), rule=replace(PLAIN, learning_rate=1e39, momentum=0.9), sizes=[8] * steps
        )


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ((zeros(8, 5),), zeros(8, dtype=np.int64), "x0: .* float32 4, the data is float32 5"),
        ((zeros(7, 4),), zeros(8, dtype=np.int64), "7 samples but 8 targets"),
        ((zeros(8, 4, dtype=np.float64),), zeros(8, dtype=np.int64), "float32 4, .* float64 4"),
        ((zeros(8, 4),), zeros(8, dtype=np.int32), "targets: .* int64 numbers, .* int32 numbers"),
        ((zeros(8, 4),), zeros(8, 1, dtype=np.int64), "targets: .* int64 numbers, .* int64 1"),
        ((zeros(8, 4),), np.full(8, 3), "label 3 at sample 0.*0 to 2"),
        ((zeros(8, 4),), np.full(8, -1), "label -1 at sample 0.*0 to 2"),
        ((), zeros(8, dtype=np.int64), "needs 1 inputs, the data has 0"),
        (([[0.0] * 4] * 8,), zeros(8, dtype=np.int64), "float32 4, the data is list"),
    ],
)
@pytest.mark.parametrize("batch", [None, 11], ids=["symbolic", "static"])
def test_batch_of_the_wrong_kind_is_refused(
    inputs: tuple[Array, ...], targets: Array, words: str, batch: int | None
) -> None:
    plan, manifest, files = bundle(Handmade(batch=batch))
    with pytest.raises(TensorError, match=words):
        OnnxBackend(plan, manifest, files).train(job_of(plan), [Batch(inputs, targets)])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"groups": {"hidden": (0, 9)}}, GroupError),
        ({"groups": {"hidden": (0, 1)}}, TensorError),
        ({"weights": {}}, TensorError),
        ({"buffers": {"mean": zeros(3)}}, TensorError),
    ],
)
def test_job_that_does_not_fit_is_refused(
    change: dict[str, Any], error: type[TesseraError]
) -> None:
    plan, manifest, files = bundle(Handmade())
    with pytest.raises(error):
        OnnxBackend(plan, manifest, files).train(replace(job_of(plan), **change), batches_of([8]))


# -- graphs that do not belong ------------------------------------------------------------------


def altered(model: Handmade, data: bytes) -> tuple[ModelPlan, Manifest, dict[str, bytes]]:
    """A manifest that names these bytes as the gradient graph, hash and size included."""
    plan, manifest, files = bundle(model)
    gradient, evaluate = manifest.graphs
    digest = hashlib.sha256(data).hexdigest()
    entry = replace(gradient, sha256=digest, size_bytes=len(data))
    return plan, replace(manifest, graphs=(entry, evaluate)), files | {digest: data}


def test_file_with_another_hash_is_refused() -> None:
    plan, manifest, files = bundle(Handmade())
    name = manifest.graphs[0].sha256
    flipped = bytearray(files[name])
    flipped[len(flipped) // 2] ^= 1
    for data, words in ((bytes(flipped), "altered"), (files[name] + b"\0", "bytes; the manifest")):
        with pytest.raises(GraphError, match=words):
            OnnxBackend(plan, manifest, files | {name: data})


def test_file_that_is_missing_is_named() -> None:
    plan, manifest, files = bundle(Handmade())
    name = manifest.graphs[0].sha256
    backend = OnnxBackend(plan, manifest, {key: files[key] for key in files if key != name})
    with pytest.raises(GraphError, match=name[:12]):
        backend.train(job_of(plan), batches_of([8]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan_hash": "0" * 64}, "made for plan 000000000000…, not "),
        ({"opset": 17}, "{'': 18}.*{'': 17}"),
        ({"ir_version": 8}, "IR 9.*IR 8"),
        ({"min_onnxruntime": "99.1"}, r"need onnxruntime 99\.1 or newer; this is 1\."),
    ],
)
def test_manifest_of_something_else_is_refused(changes: dict[str, Any], words: str) -> None:
    plan, manifest, files = bundle(Handmade(), **changes)
    with pytest.raises(GraphError, match=words):
        OnnxBackend(plan, manifest, files)


def test_file_that_onnxruntime_cannot_load_is_refused() -> None:
    """The outermost fields are right, the graph is none: IR 9, opset 18, a graph of no nodes."""
    data = bytes([0x08, 9, 0x42, 2, 0x10, 18, 0x3A, 0])
    plan, manifest, files = altered(Handmade(), data)
    with pytest.raises(GraphError):
        OnnxBackend(plan, manifest, files).train(job_of(plan), batches_of([8]))


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\x7fab", b"\x0b", b""])
def test_file_that_is_no_graph_is_refused(data: bytes) -> None:
    plan, manifest, _ = bundle(Handmade())
    entry = replace(
        manifest.graphs[0],
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=max(1, len(data)),
    )
    manifest = replace(manifest, graphs=(entry,))
    with pytest.raises(GraphError):
        OnnxBackend(plan, manifest, {entry.sha256: data})


def test_file_with_other_inputs_than_the_manifest_is_refused() -> None:
    _, data = Handmade(dropout=0.5).graph("gradient")
    plan, manifest, files = altered(Handmade(), data)
    with pytest.raises(GraphError, match="'m0' is float32 with 2 dimensions in the file, absent"):
        OnnxBackend(plan, manifest, files).train(job_of(plan), batches_of([8]))


# -- providers ----------------------------------------------------------------------------------


def test_provider_unknown_lists_the_available() -> None:
    with pytest.raises(TrainingError, match=r"'Quantum'.*CPUExecutionProvider"):
        OnnxBackend(*bundle(Handmade()), providers=("Quantum",))


@pytest.mark.parametrize("bad", [{"providers": ()}, {"threads": 0}])
def test_backend_refuses_nonsense(bad: dict[str, Any]) -> None:
    with pytest.raises(TrainingError):
        OnnxBackend(*bundle(Handmade()), **bad)


def test_providers_are_reported() -> None:
    plan, manifest, files = bundle(Handmade())
    backend = OnnxBackend(plan, manifest, files, threads=2)
    assert backend.providers == ("CPUExecutionProvider",)
    backend.train(job_of(plan), batches_of([8]))
    assert backend.providers == ("CPUExecutionProvider",)


# -- predicting ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 4, 16])
@pytest.mark.parametrize("batch_size", [3, 256])
def test_predictions_equal_the_model(batch: int | None, batch_size: int) -> None:
    """Ten samples at once, in parts, and padded; as the whole model and as a submodel."""
    plan, manifest, files = bundle(Handmade(batch=batch))
    predictor = Predictor(plan, manifest, files)
    ((x,), _) = batches_of([10])[0]
    rng = np.random.default_rng(5)
    full = {t.name: np.array(rng.normal(size=t.shape), dtype=np.float32) for t in plan.tensors}
    got = predictor.predict(full, {}, [x], batch_size=batch_size)
    np.testing.assert_allclose(got, Reference().logits(full, x), rtol=1e-5, atol=1e-6)

    part = plan.cut(full, GROUPS)
    got = predictor.predict(part, {}, [x], groups=GROUPS, batch_size=batch_size)
    wanted = Reference().logits(part, x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inputs", [[], [zeros(0, 4)], [zeros(3, 5)], [zeros(3, 4), zeros(2, 4)]])
def test_predictor_refuses_wrong_inputs(inputs: list[Array]) -> None:
    plan, manifest, files = bundle(Handmade())
    weights = {t.name: np.zeros(t.shape, dtype=np.float32) for t in plan.tensors}
    with pytest.raises(TensorError):
        Predictor(plan, manifest, files).predict(weights, {}, inputs)


def test_predictor_without_a_graph_says_so() -> None:
    plan, manifest, files = bundle(Handmade())
    manifest = replace(manifest, graphs=manifest.graphs[:1])
    weights = {t.name: np.zeros(t.shape, dtype=np.float32) for t in plan.tensors}
    with pytest.raises(GraphError, match="no evaluate graph fits"):
        Predictor(plan, manifest, files).predict(weights, {}, [zeros(3, 4)])


def test_onnxruntime_makes_no_identifier_and_reports_to_nobody(tmp_path: Path) -> None:
    """Its newer builds do both, in the home folder, as soon as they are loaded."""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    program = "import edge_sdk.train.onnx, onnxruntime; print(onnxruntime.__version__)"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
