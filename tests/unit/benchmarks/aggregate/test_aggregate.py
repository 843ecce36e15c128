"""The aggregate benchmark measures what it says, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.aggregate.closes import CASES as CLOSES
from benchmarks.aggregate.closes import ClosesConfig, ClosesRow, closes_figures, measure_closes
from benchmarks.aggregate.command import measure_aggregate
from benchmarks.aggregate.config import FULL, QUICK, AggregateConfig, check_disk
from benchmarks.aggregate.members import MembersConfig
from benchmarks.aggregate.rounds import (
    LEARNING_RATE,
    closing_of,
    device_name,
    fill,
    perceptron_plan,
    random_groups,
    random_values,
)
from benchmarks.aggregate.scale import (
    ScaleConfig,
    measure_scale,
    scale_figures,
    scale_row,
)
from benchmarks.aggregate.throughput import (
    CASES,
    ThroughputConfig,
    Turn,
    measure_throughput,
    throughput_figures,
    throughput_row,
)
from benchmarks.aggregate.traffic import (
    TrafficConfig,
    encodings,
    measure_traffic,
    random_weights,
    traffic_figures,
)
from benchmarks.report.command import run_command
from benchmarks.report.figures import FigureError
from benchmarks.report.imports import child_environment
from coordinator.aggregate.memory import MemoryConfig, RamMemory
from edge_sdk.program.processes import run_child
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.streams import stream
from tests.unit.benchmarks.interruption import interrupted

THROUGHPUT = ThroughputConfig(
    inputs=5, widths=(16, 24), outputs=3, devices=4, threads=2, warm=1, turns=2
)
SMALL = ClosesConfig(inputs=5, widths=(16, 24), outputs=3, devices=4, rounds=2)
SCALE = ScaleConfig(
    fleets=(4, 10), inputs=5, widths=(16,), outputs=3, devices=3, batch=4, warm=1, turns=2
)
TRAFFIC = TrafficConfig(inputs=32, widths=(64, 64), outputs=10)
MEMBERS = MembersConfig(fleets=(4, 40), participants=3, warm=1, turns=3)
TINY = AggregateConfig(
    throughput=THROUGHPUT, closes=SMALL, scale=SCALE, members=MEMBERS, traffic=TRAFFIC
)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; must be empty in the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_members_fewer_than_take_part_are_refused() -> None:
    with pytest.raises(FigureError, match="10 members take part, and a fleet has 9"):
        MembersConfig(fleets=(9, 100))


def test_aggregate_writes_all_parts_and_leaves_no_files(
    tmp_path: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "aggregate.json"
    asked = Namespace(json=path, quick=True)
    assert run_command("aggregate", lambda _: measure_aggregate(TINY), asked) == 0
    assert list(scratch.iterdir()) == []
    run = json.loads(path.read_text(encoding="utf-8"))
    assert (run["schema"], run["command"]) == (1, "aggregate")
    assert run["config"]["throughput"]["devices"] == 4
    assert run["config"]["quick"] is True
    assert set(run["method"]) == {"throughput", "closes", "devices", "members", "bytes"}
    figures = {figure["name"]: figure for figure in run["figures"]}

    assert [(row["rule"], row["dtype"]) for row in run["throughput"]] == list(CASES)
    # 5-16-24-3 at half of both widths, by hand; four devices, four bytes a value.
    received = 4 * 4 * ((5 * 8 + 8) + (8 * 12 + 12) + (12 * 3 + 3))
    for row in run["throughput"]:
        assert row["received_mb"] == pytest.approx(received / 1e6)
        stem = ".".join(filter(None, ("aggregate.0m", row["rule"], row["dtype"])))
        assert figures[f"{stem}.over_copy"]["value"] == row["over_copy"] > 0
        assert figures[f"{stem}.over_copy"]["better"] == "higher"
        assert (f"{stem}.over_copy_with_commit" in figures) == (row["dtype"] is not None)
        assert (row["commit_s"] > 0) == (row["dtype"] is not None)

    assert [(row["rule"], row["dtype"], row["encoding"]) for row in run["closes"]] == list(CLOSES)
    assert "aggregate.0m.ram-fed.fp16.anonymous_over_model" in figures

    small, large = run["devices"]
    assert (small["devices"], large["devices"]) == (4, 10)
    assert (small["time_ratio"], small["memory_ratio"]) == (1, 1)
    for row in (small, large):
        assert 0 < row["move_ms"] < row["round_ms"]
        assert row["disk_mb"] * 1e6 >= row["devices"] * 2 * (5 * 16 + 16 + 16 * 3 + 3)
    for what, ratio in (("round", "time_ratio"), ("anonymous", "memory_ratio")):
        figure = figures[f"aggregate.devices.10.{what}_over_4"]
        assert (figure["value"], figure["target"]) == (large[ratio], 1.2)
        assert f"aggregate.devices.4.{what}_over_4" not in figures

    for which, (few, many) in (("", run["members"][:2]), ("_there", run["members"][2:])):
        assert few["there"] is many["there"] is bool(which)
        assert (few["members"], many["members"]) == (4, 40)
        assert (few["machine_ratio"], few["process_ratio"]) == (1, 1)
        for what in ("machine", "process"):
            assert few[f"{what}_ms"] > 0
            figure = figures[f"aggregate.members{which}.40.{what}_over_4"]
            assert (figure["value"], figure["target"]) == (many[f"{what}_ratio"], 1.2)
            assert f"aggregate.members{which}.4.{what}_over_4" not in figures

    assert len(run["bytes"]) == len(LEVELS) * len(encodings())
    assert figures["aggregate.bytes.50.top-k-01.up_over_full"]["target"] is None
    printed = capsys.readouterr()
    assert "of 6 targets met" in printed.out
    # Once something is done, lines also say how much time is left.
    assert [line.partition(" about ")[0] for line in printed.err.splitlines()] == [
        "aggregate ra-fed …",
        "aggregate ram-fed fp32 …",
        "aggregate ram-fed fp16 …",
        "closes ra-fed fp32 …",
        "closes ra-fed fp16 …",
        "closes ram-fed fp32 fp32 …",
        "closes ram-fed fp16 fp32 …",
        "devices fill 4 devices …",
        "devices fill 10 devices …",
        "devices rounds …",
        "members state machine …",
        "members one process …",
        "members state machine, all there …",
        "members one process, all there …",
        "bytes by level and encoding …",
    ]


def test_runs_are_of_the_sizes_they_are_said_to_be() -> None:
    assert FULL.throughput.plan_name == "25m"
    assert QUICK.throughput.plan_name == "5m"
    assert (FULL.throughput.devices, FULL.throughput.level, FULL.throughput.threads) == (32, 0.5, 2)
    assert FULL.scale.plan.parameters == pytest.approx(100_000, rel=0.02)
    assert FULL.scale.fleets == (100, 1_000, 10_000)
    assert FULL.scale.devices == 32
    # What 10,000 devices hold in half precision, were it all live, and what 32 do in full.
    assert FULL.scale.disk_bytes > 10_000 * FULL.scale.plan.parameters * 2
    assert FULL.throughput.disk_bytes > 32 * FULL.throughput.plan.parameters * 4


# -- plans and rounds ----------------------------------------------------------------------------


def test_plan_is_a_perceptron_with_an_axis_for_each_hidden_layer() -> None:
    plan = perceptron_plan(5, (16, 24), 3)
    assert plan.parameters == (5 * 16 + 16) + (16 * 24 + 24) + (24 * 3 + 3)
    assert [tensor.shape for tensor in plan.tensors] == [
        *((16, 5), (16,), (24, 16), (24,), (3, 24), (3,))
    ]
    assert [axis.groups for axis in plan.axes] == [(2,) * 8, (3,) * 8]


def test_groups_are_as_many_as_the_level_means_and_differ() -> None:
    plan, draws = perceptron_plan(5, (16, 24), 3), stream(0, "test")
    drawn = [plan.choose(random_groups(plan, 0.5, draws)) for _ in range(20)]
    assert {len(groups) for chosen in drawn for groups in chosen} == {4}
    assert len(set(drawn)) > 10
    assert any(first != second for first, second in drawn)


def test_closing_holds_the_blocks_of_each_device_uncopied() -> None:
    plan, draws = perceptron_plan(5, (16, 24), 3), stream(0, "test")
    values = [random_values(plan.parameters, draws) for _ in range(3)]
    movements = [(device_name(n), value) for n, value in enumerate(values)]
    closing = closing_of(plan, 7, movements, 0.5, draws, registered=9, threads=2)
    assert [part.device for part in closing.fresh] == sorted(name for name, _ in movements)
    assert (closing.round, closing.registered, closing.threads) == (7, 9, 2)
    for part, value in zip(closing.fresh, values, strict=True):
        assert part.made == 7
        part.blocks.check(part.blocks.ids, plan.block_sizes)
        assert np.shares_memory(part.blocks.values, value)
    assert len({part.blocks.ids.tobytes() for part in closing.fresh}) > 1


def test_filled_memory_holds_every_device_in_full() -> None:
    plan = perceptron_plan(5, (16, 24), 3)
    memory = RamMemory(plan, MemoryConfig(memory_type="fp32"))
    values = random_values(plan.parameters + 5, stream(0, "test"))
    fill(memory, range(2), values)
    fill(memory, range(2, 3), values)
    assert memory.entries.tolist() == [3] * plan.block_count
    for number in range(3):
        (piece,) = memory.recall(device_name(number))
        np.testing.assert_array_equal(piece.blocks.values, values[: plan.parameters])
    expected = 3 * values[: plan.parameters].astype(np.float64) / LEARNING_RATE
    np.testing.assert_allclose(memory.total, expected, rtol=1e-12)


# -- throughput ----------------------------------------------------------------------------------


def test_throughput_is_of_the_median_turn_and_commits_of_all() -> None:
    turns = [
        Turn(copy_s=copy, move_s=move, commit_s=commit, copy_cpu_s=0.5, move_cpu_s=2.0)
        for copy, move, commit in ((1.0, 2.0, 1.0), (1.0, 4.0, 9.0), (3.0, 30.0, 1.0))
    ]
    row = throughput_row("25m", "ram-fed", "fp32", 8_000_000_000, turns)
    assert (row.copy_gb_s, row.move_gb_s) == (8.0, 2.0)
    assert row.over_copy == 0.25  # of 0.5, 0.25 and 0.1
    assert row.over_copy_with_commit == pytest.approx(5 / 47)
    assert (row.commit_s, row.longest_commit_s) == (1.0, 9.0)


@pytest.mark.parametrize(
    ("plan", "targets"), [("25m", [0.5, 0.12, 0.08]), ("5m", [None, None, None])]
)
def test_targets_are_for_the_large_plan_without_commit(
    plan: str, targets: list[float | None]
) -> None:
    turn = Turn(copy_s=1.0, move_s=2.0, commit_s=1.0, copy_cpu_s=1.0, move_cpu_s=2.0)
    rows = [throughput_row(plan, rule, dtype, 1000, [turn]) for rule, dtype in CASES]
    figures = throughput_figures(rows)
    main_ones = [figure for figure in figures if figure.name.endswith(".over_copy")]
    assert [figure.target for figure in main_ones] == targets
    assert all(figure.target is None for figure in figures if figure not in main_ones)


def test_throughput_ticks_as_often_as_it_says(scratch: Path) -> None:
    ticks: list[str] = []

    def begin(name: str) -> Callable[[], None]:
        return lambda: ticks.append(name)

    rows = measure_throughput(replace(THROUGHPUT, turns=1), begin)
    assert len(ticks) == replace(THROUGHPUT, turns=1).ticks == 6
    assert [row.plan for row in rows] == ["0m"] * 3
    assert list(scratch.iterdir()) == []


def test_throughput_without_turns_is_refused() -> None:
    with pytest.raises(FigureError, match="turns must be at least 1"):
        ThroughputConfig(turns=0)


# -- scale ---------------------------------------------------------------------------------------


def test_scale_ratios_are_within_turns_and_memory_the_most() -> None:
    def round(move_s: float, commit_s: float, anonymous: float) -> dict[str, float]:
        return {"move_s": move_s, "commit_s": commit_s, "anonymous_bytes": anonymous}

    small = [round(0.1, 0.1, 50e6), round(0.2, 0.2, 40e6), round(0.3, 0.7, 30e6)]
    large = [round(0.2, 0.2, 60e6), round(0.3, 0.3, 75e6), round(0.3, 0.7, 70e6)]
    row = scale_row(1000, large, small, 9_000_000)
    assert row.time_ratio == pytest.approx(1.5)  # of 2, 1.5 and 1
    assert row.move_ratio == pytest.approx(1.5)
    assert row.memory_ratio == pytest.approx(75 / 50)
    assert row.round_ms == pytest.approx(600)
    assert row.disk_mb == 9.0
    missed = [f.name for f in scale_figures([scale_row(100, small, small, 1), row]) if not f.met]
    aimed = [name for name in missed if "_over_" in name]
    assert aimed == [
        "aggregate.devices.1000.round_over_100",
        "aggregate.devices.1000.anonymous_over_100",
    ]


def test_anonymous_memory_counts_what_is_touched() -> None:
    # In a process of its own: what other tests left may be freed at any time.
    code = """
import numpy as np
from benchmarks.aggregate.scale import anonymous_bytes
before = anonymous_bytes()
held = np.ones(50_000_000, dtype=np.uint8)
print(anonymous_bytes() - before)
del held
print(anonymous_bytes() - before)
"""
    done = run_child([sys.executable, "-c", code], child_environment(None))
    assert done.returncode == 0, done.stderr
    touched, freed = map(int, done.stdout.split())
    assert 49e6 < touched < 60e6
    assert freed < 10e6


def test_scale_that_is_interrupted_leaves_no_process_and_no_file(scratch: Path) -> None:
    def begin(name: str) -> Callable[[], None]:
        def tick() -> None:
            if name == "rounds":
                raise KeyboardInterrupt

        return tick

    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        measure_scale(SCALE, begin)
    assert list(scratch.iterdir()) == []
    assert set(psutil.Process().children()) <= before


def test_scale_process_that_fails_is_reported_with_its_reason(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('no numbers here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FigureError, match=r"4 devices (.|\n)*no numbers here"):
        measure_scale(SCALE)
    assert list(scratch.iterdir()) == []


def test_fleet_smaller_than_a_round_is_refused() -> None:
    with pytest.raises(FigureError, match="32 devices take part, and a fleet has 20"):
        ScaleConfig(fleets=(20, 100))


# -- closes --------------------------------------------------------------------------------------


def test_closes_receive_every_movement_and_leave_no_files(scratch: Path) -> None:
    ticks: list[None] = []
    rows = measure_closes(SMALL, lambda _: lambda: ticks.append(None))
    assert len(ticks) == SMALL.ticks
    assert list(scratch.iterdir()) == []
    values = 4 * ((5 * 8 + 8) + (8 * 12 + 12) + (12 * 3 + 3))
    for row in rows:
        size = 2 if row.encoding == "fp16" else 4
        # Headers of some hundred bytes, and for fp16 an exponent for each block.
        assert 0 < row.received_mb * 1e6 - size * values < 4 * 1000
        assert row.anonymous_mb >= 0
        assert row.mapped_mb > 0


def test_closes_figures_are_in_models_and_aimed_at_for_the_large_one() -> None:
    row = ClosesRow(
        plan="25m",
        rule="ram-fed",
        dtype="fp32",
        encoding="fp32",
        model_mb=100.0,
        received_mb=800.0,
        idle_mb=340.0,
        anonymous_mb=150.0,
        mapped_mb=900.0,
        receive_s=1.0,
        close_s=1.5,
        close_cpu_s=2.0,
        commit_s=0.5,
    )
    figures = {each.name: each for each in closes_figures([row, replace(row, encoding="fp16")])}
    aimed = figures["aggregate.25m.ram-fed.fp32.anonymous_over_model"]
    assert (aimed.value, aimed.target, aimed.met) == (1.5, 2.2, True)
    assert figures["aggregate.25m.ram-fed.fp32.mapped"].value == 900
    assert figures["aggregate.25m.ram-fed.fp32.close_rate"].value == pytest.approx(0.4)
    assert "aggregate.25m.ram-fed.fp32.from_fp16.mapped" in figures
    small = closes_figures([replace(row, plan="5m")])
    assert small[0].target is None


def test_closes_without_rounds_are_refused() -> None:
    with pytest.raises(FigureError, match="at least 1"):
        ClosesConfig(rounds=0)


# -- traffic -------------------------------------------------------------------------------------


def test_traffic_is_what_the_submodel_holds() -> None:
    ticks: list[None] = []
    rows = measure_traffic(TRAFFIC, lambda: ticks.append(None))
    assert len(ticks) == len(encodings())
    plan = perceptron_plan(TRAFFIC.inputs, TRAFFIC.widths, TRAFFIC.outputs)
    plain = {}
    for row in rows:
        assert row.full_bytes == 4 * (32 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10)
        encoding = Encoding.parse(row.encoding)
        groups = {axis.name: range(round(8 * row.level)) for axis in plan.axes}
        most = encoded_size(plan, groups, encoding)
        if not encoding.zstd:
            plain[row.level, encoding.kind] = row
            assert row.up_bytes == row.down_bytes == most
        else:
            assert max(row.up_bytes, row.down_bytes) <= most
    for level in LEVELS:
        w = round(64 * level)
        values = 32 * w + w + w * w + w + w * 10 + 10
        # A header of some hundred bytes, and for the short types a number for each block.
        assert 0 < plain[level, "fp32"].up_bytes - 4 * values < 200
        assert 0 < plain[level, "fp16"].up_bytes - 2 * values < 400
        assert 0 < plain[level, "int8"].up_bytes - values < 700
        assert plain[level, "top-k"].up_bytes < values


def test_traffic_figures_are_shares_of_a_full_exchange() -> None:
    rows = measure_traffic(TRAFFIC)
    figures = {figure.name: figure for figure in traffic_figures(rows)}
    assert len(figures) == 2 * len(rows)
    row = next(row for row in rows if (row.level, row.encoding) == (0.5, "fp16"))
    figure = figures["aggregate.bytes.50.fp16.down_over_full"]
    assert figure.value == row.down_bytes / row.full_bytes
    assert figure.unit == "×"


def test_weights_have_the_variance_of_their_layer() -> None:
    plan = perceptron_plan(100, (400, 800), 10)
    weights = plan.unflatten(random_weights(plan, stream(0, "test")))
    assert weights["0.weight"].std() == pytest.approx(0.1, rel=0.05)
    assert weights["1.weight"].std() == pytest.approx(0.05, rel=0.05)
    assert not weights["1.bias"].any()


# -- refusing and ending -------------------------------------------------------------------------


def test_disk_without_room_is_refused_with_what_to_do(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_disk(tmp_path, 0 if free > 2**31 else -(2**31))
    with pytest.raises(FigureError, match=r"memories take up to .* GB.*set TMPDIR"):
        check_disk(tmp_path, free)


def test_aggregate_refuses_a_full_disk_before_it_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(FigureError, match="set TMPDIR"):
        measure_aggregate(replace(TINY, scale=replace(SCALE, fleets=(10, 10**12))))
    assert capsys.readouterr().err == ""


def test_interrupted_aggregate_ends_with_130_and_leaves_no_files(tmp_path: Path) -> None:
    # Its folder is there when it says so.
    said = interrupted(["aggregate", "--quick"], "ram-fed fp32", tmp_path)
    assert said == ["tessera-bench: interrupted"]
    assert list(tmp_path.iterdir()) == []
