"""The step benchmark times what it says it times."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks.models import FAMILIES
from benchmarks.training.step import (
    Key,
    StepConfig,
    StepRow,
    Variant,
    make_variants,
    step_figures,
    time_steps,
)
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.plan import LEVELS

CONFIG = StepConfig(batch=8)


@cache
def variants_of(name: str) -> dict[Key, Variant]:
    """Made once: jobs and backends stay as they are when they train."""
    return make_variants(FAMILIES[name], CONFIG)


def batch_of(name: str) -> Batch:
    family = FAMILIES[name]
    labels = np.random.default_rng(0).integers(family.classes, size=CONFIG.batch)
    return Batch((family.inputs(CONFIG.batch).numpy(),), labels)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_zero_masked_variant_takes_the_steps_of_the_slice(name: str) -> None:
    variants = variants_of(name)
    plan = variants["slice", 1.0].backend.plan
    batches = [batch_of(name)] * 3
    for level in LEVELS[1:]:
        narrow, masked = variants["slice", level], variants["zero-mask", level]
        groups = narrow.job.groups
        movement = masked.backend.train(masked.job, batches).movement
        inside = plan.cut(movement, groups)
        wanted = narrow.backend.train(narrow.job, batches).movement
        for tensor in wanted:
            np.testing.assert_allclose(inside[tensor], wanted[tensor], rtol=1e-3, atol=1e-6)
        plan.paste(movement, {key: np.zeros_like(array) for key, array in inside.items()}, groups)
        assert not any(array.any() for array in movement.values())


def test_onnx_variant_takes_the_step_of_the_slice() -> None:
    variants = variants_of("cnn")
    for level in LEVELS:
        narrow, onnx = variants["slice", level], variants["onnx", level]
        # One step: in later ones, rounding may take a value across an edge of ReLU or pooling,
        # in torch as well.
        wanted = narrow.backend.train(narrow.job, [batch_of("cnn")]).movement
        movement = onnx.backend.train(onnx.job, [batch_of("cnn")]).movement
        assert movement.keys() == wanted.keys()
        for tensor in wanted:
            difference = np.linalg.norm(movement[tensor] - wanted[tensor])
            assert difference <= 1e-4 * np.linalg.norm(wanted[tensor])


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mlp-2048", {0.75: 1.2, 0.5: 1.2, 0.25: 1.2}),
        ("cnn", {0.75: None, 0.5: 1.5, 0.25: 2.5}),
        ("mlp", {}),
    ],
)
def test_onnx_is_held_to_the_arithmetic_where_torch_is(
    family: str, targets: dict[float, float | None]
) -> None:
    rows = [
        StepRow(
            family=family,
            level=level,
            parameter_share=level,
            macs_ratio=level,
            steps=1,
            step_ms=1.0,
            quartiles_ms=(1.0, 1.0),
            ratio=level,
            over_macs=1.0,
            zero_mask_ratio=None,
            rescaled_ratio=None,
            onnx_steps=1,
            onnx_ms=2.0,
            onnx_quartiles_ms=(2.0, 2.0),
            onnx_over_torch=2.0,
            onnx_over_macs=3.0,
            ways=None,
        )
        for level in LEVELS
    ]
    figures = {figure.name: figure for figure in step_figures(rows)}
    found = {name: f for name, f in figures.items() if name.endswith(".onnx_over_macs")}
    assert {name: f.target for name, f in found.items()} == {
        f"step.{family}.{level * 100:.0f}.onnx_over_macs": target
        for level, target in targets.items()
    }
    assert all(figure.value == 3.0 for figure in found.values())
    for name in found:
        assert figures[name.replace("onnx_", "")].target == found[name].target


def test_variants_differ_only_in_level_mask_and_rescale() -> None:
    variants = variants_of("mlp")
    plan = variants["slice", 1.0].backend.plan
    for way in ("slice", "onnx"):
        assert {key for key in variants if key[0] == way} == {(way, level) for level in LEVELS}
    for (way, level), variant in variants.items():
        assert variant.job.rule.momentum == 0.9
        assert variant.job.rule.rescale == (0.5 if way == "rescaled" else 0)
        share = 1.0 if way == "zero-mask" else level
        assert plan.levels(variant.job.groups) == {axis.name: share for axis in plan.axes}
        assert plan.submodel_macs(variant.job.groups) == plan.cost_at(share).macs


def test_levels_by_depth_are_shares_of_blocks() -> None:
    config = StepConfig(batch=8, regions="depth")
    variants = make_variants(FAMILIES["vit-subdismo"], config)
    plan = variants["slice", 1.0].backend.plan
    assert {level: variants["onnx", level].job.groups for level in LEVELS} == {
        level: {"blocks": tuple(range(int(4 * level)))} for level in LEVELS
    }
    assert plan.submodel_parameters(variants["slice", 0.25].job.groups) == 55_242


def test_timed_steps_are_as_many_as_asked_and_leave_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    variant = make_variants(FAMILIES["mlp"], StepConfig(batch=8, threads=before + 1))["slice", 0.25]
    times = time_steps(variant, batch_of("mlp"), 4)
    assert len(times) == 4
    assert all(seconds > 0 for seconds in times)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("field", ["batch", "threads", "reps"])
def test_config_below_one_is_refused(field: str) -> None:
    with pytest.raises(TrainingError, match=f"{field} must be at least 1, not 0"):
        replace(StepConfig(), **{field: 0})  # type: ignore[arg-type]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
def test_kept_memory_is_not_faulted_in_again() -> None:
    code = """
import resource, numpy
from benchmarks.training.step import keep_freed_memory

def faults():
    seen = []
    for _ in range(11):
        numpy.ones(64 << 20, numpy.uint8)
        seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return seen[-1] - seen[0]

before = faults()
assert keep_freed_memory()
print(before, faults())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    # 10 × 64 MiB come back in pages of 2 MiB at most, or do not come back at all.
    assert before >= 100
    assert after < 100
