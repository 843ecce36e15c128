"""Delivered models on disk: read as written, refused when damaged, replaced as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edge_sdk.cli import main
from edge_sdk.protocol.errors import TensorError
from edge_sdk.train.delivered import (
    DeliveredModel,
    Model,
    ModelError,
    arrays_digest,
    read_delivered,
    write_delivered,
)
from tests.unit.edge_sdk.train.handmade import INPUTS, Handmade, Reference, bundle

HALF = {"hidden": (1, 3)}


def make_model(round: int = 3, seed: int = 4, **changes: Any) -> DeliveredModel:
    plan, manifest, files = bundle(Handmade(statistic=True))
    groups = {"hidden": (0, 2)} if round % 2 else plan.full_groups()
    random = np.random.default_rng(seed)
    weights = plan.unflatten(random.normal(size=plan.parameters).astype(np.float32))
    usual: dict[str, Any] = {
        "task": "toy",
        "run": "0123456789abcdef",
        "round": round,
        "level": 0.5,
        "groups": groups,
        "rescale": 0.0,
        "plan": plan,
        "manifest": manifest,
        "graphs": files,
        "weights": plan.cut(weights, groups),
        "buffers": plan.cut_buffers({"mean": np.arange(6, dtype=np.float32)}, groups),
        "accuracy": 0.75,
    }
    return DeliveredModel(**{**usual, **changes})


def place(folder: Path, device: str = "pi") -> Path:
    path = folder / "toy" / device / "model.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("round", [3, 4])
def test_model_predicts_as_the_oracle_does(tmp_path: Path, round: int) -> None:
    """At a level and as a whole; other types of numbers are converted."""
    model = make_model(round)
    write_delivered(place(tmp_path), model)
    opened = Model.open(tmp_path, "toy")
    x = np.random.default_rng(1).normal(size=(300, INPUTS)).astype(np.float32)
    exact = {name: array.astype(np.float64) for name, array in model.weights.items()}
    wanted = Reference().logits(exact, x.astype(np.float64))
    np.testing.assert_allclose(opened(x), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(opened(x.astype(np.float64)), opened(x))
    whole = np.ones((2, INPUTS), np.int64)
    np.testing.assert_array_equal(opened(whole), opened(whole.astype(np.float32)))
    assert (opened.run, opened.round, opened.level) == (model.run, round, 0.5)
    assert (opened.accuracy, opened.classes) == (0.75, ())
    assert opened.delivered.digest == model.digest
    assert opened.delivered.buffers["mean"].tobytes() == model.buffers["mean"].tobytes()
    for wrong in ([x[:, 1:]], [x, x], [x.astype(str)], [x[0, 0]], [x[:0]], []):
        with pytest.raises(TensorError):
            opened(*wrong)


def test_digest_tells_names_types_shapes_and_values_apart() -> None:
    a = {"a": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
    others: list[dict[str, Any]] = [
        {"a": a["a"], "c": a["b"]},
        {"a": a["a"].reshape(3, 2), "b": a["b"]},
        {"a": a["a"].astype(np.int32), "b": a["b"]},
        {"a": a["a"], "b": 2 * a["b"]},
    ]
    digests = {arrays_digest(each) for each in (a, *others)}
    assert len(digests) == 5
    assert arrays_digest(dict(reversed(a.items()))) == arrays_digest(a)


def test_damaged_file_is_refused_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit anywhere, or an end that is missing."""
    path = place(tmp_path)
    write_delivered(path, make_model())
    whole = path.read_bytes()
    np.save(tmp_path / "x.npy", np.zeros((2, INPUTS), np.float32))
    infer = ["infer", "--task", "toy", "--state-dir", str(tmp_path)]
    infer += ["--data", str(tmp_path / "x.npy")]
    assert main(infer) == 0
    assert "round              3" in capsys.readouterr().out
    bits = np.random.default_rng(0).integers(0, 8 * len(whole), 60)
    damages = [bytes(_flipped(whole, int(bit))) for bit in (0, 8 * 20, 8 * 49, *bits)]
    for damaged in (*damages, whole[:-1], whole[:30], b""):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.bin is damaged: .*Delete it"):
            Model.open(tmp_path, "toy")
    assert main(infer) == 2
    assert "Delete it; tessera-device run fetches the model again" in capsys.readouterr().err


def _flipped(data: bytes, bit: int) -> bytearray:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return damaged


def test_infer_reads_files_as_training_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table, with labels and without; classes by name."""
    model = make_model()
    data = model.manifest.data.described(classes=("ant", "bee", "cat"))
    write_delivered(place(tmp_path), replace(model, manifest=replace(model.manifest, data=data)))
    x = np.random.default_rng(1).normal(size=(20, INPUTS)).astype(np.float32)
    found = Model.open(tmp_path, "toy")(x).argmax(1)
    names = [data.classes[number] for number in found]
    rows = [",".join(map(str, row)) for row in x.tolist()]
    (tmp_path / "new.csv").write_text("\n".join(["a,b,c,d", *rows]))
    labelled = ["a,b,c,d,label", *(f"{row},{name}" for row, name in zip(rows, names, strict=True))]
    (tmp_path / "old.csv").write_text("\n".join(labelled))
    out = tmp_path / "out.json"
    for name, accuracy in (("new.csv", None), ("old.csv", 1.0)):
        infer = ["infer", "--task", "toy", "--state-dir", str(tmp_path), "--out", str(out)]
        assert main([*infer, "--data", str(tmp_path / name)]) == 0
        said = json.loads(out.read_text())
        assert (said["accuracy"], said["predicted"]) == (accuracy, names)
        assert f"{names[0]}: {names.count(names[0])}×" in capsys.readouterr().out


def test_infer_scales_a_single_file_of_arrays_as_training_does(tmp_path: Path) -> None:
    write_delivered(place(tmp_path), make_model())
    raw = np.random.default_rng(1).integers(0, 256, (5, INPUTS), np.uint8)
    np.save(tmp_path / "x.npy", raw)
    np.savez(tmp_path / "x.npz", x=raw.astype(np.float64))
    config, out = tmp_path / "device.toml", tmp_path / "out.npy"
    config.write_text(
        f'task = "toy"\nname = "pi"\nstate_dir = "{tmp_path}"\n[format]\nrange = [0, 255]\n'
    )
    wanted = Model.open(tmp_path, "toy")((raw / 255).astype(np.float32))
    for name in ("x.npy", "x.npz"):
        infer = ["infer", "--config", str(config), "--out", str(out)]
        assert main([*infer, "--data", str(tmp_path / name)]) == 0
        np.testing.assert_allclose(np.load(out), wanted, rtol=1e-5, atol=1e-6)


def test_missing_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no device's state"):
        Model.open(tmp_path / "none", "toy")
    place(tmp_path)
    with pytest.raises(ModelError, match=r"no model of task 'toi': it has toy"):
        Model.open(tmp_path, "toi")
    with pytest.raises(ModelError, match=r"was delivered to .* yet: .*deliver"):
        Model.open(tmp_path, "toy")
    for number, name in enumerate(("pi", "tv"), 3):
        write_delivered(place(tmp_path, name), make_model(number))
    with pytest.raises(ModelError, match=r"several devices \(pi, tv\): name one"):
        Model.open(tmp_path, "toy")
    assert Model.open(tmp_path, "toy", device="tv").round == 4


def test_open_model_stays_until_it_is_refreshed(tmp_path: Path) -> None:
    path = place(tmp_path)
    write_delivered(path, make_model(3))
    model, x = Model.open(tmp_path, "toy"), np.ones((1, INPUTS), np.float32)
    before = model(x)
    assert not model.refresh()
    write_delivered(path, make_model(4, seed=9))
    assert np.array_equal(model(x), before)
    assert model.refresh()
    assert model.round == 4
    assert not np.array_equal(model(x), before)
    path.write_bytes(b"damaged")
    after = model(x)
    with pytest.raises(ModelError):
        model.refresh()
    assert np.array_equal(model(x), after)


class Killed(BaseException):
    """The process ends here."""


def test_replacement_that_is_cut_short_anywhere_leaves_a_usable_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call of the system, as a kill would."""
    path, old, new = place(tmp_path), make_model(3), make_model(4)
    names = ("open", "write", "fsync", "close", "replace")
    seen: set[int] = set()
    for fatal in range(100):
        write_delivered(path, old)
        calls = 0

        def dying(name: str, fatal: int = fatal) -> Any:
            real = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > fatal:
                    raise Killed
                return real(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for name in (*names, "unlink"):
                patch.setattr(f"edge_sdk.program.files.os.{name}", dying(name))
            try:
                write_delivered(path, new)
                ended = True
            except Killed:
                ended = False
        seen.add(read_delivered(path).round)
        if ended:
            break
    assert fatal > 5
    assert seen == {3, 4}


WRITER = """
import sys
from pathlib import Path
from tests.unit.edge_sdk.train.test_delivered import make_model, write_delivered
path, models = Path(sys.argv[1]), (make_model(3), make_model(4))
print("ready", flush=True)
while True:
    for model in models:
        write_delivered(path, model)
"""


def test_process_killed_while_it_replaces_leaves_a_usable_model(tmp_path: Path) -> None:
    path = place(tmp_path)
    write_delivered(path, make_model(3))
    rounds = set()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for _ in range(50):  # readers see whole models all along
            rounds.add(Model.open(tmp_path, "toy").round)
        writer.send_signal(signal.SIGKILL)
    assert rounds <= {3, 4}
    assert Model.open(tmp_path, "toy").round in (3, 4)
    write_delivered(path, replace(make_model(3), round=5))
    assert Model.open(tmp_path, "toy").round == 5
