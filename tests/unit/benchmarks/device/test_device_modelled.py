"""What a profile says of a board: by hand, by the emulator itself, and as the page shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.device.kit import CHUNK_BYTES
from benchmarks.device.modelled import HELD_BYTES, board_threads, model_results
from benchmarks.device.report.page import BEGIN, CONFIG, END, PageError, profiles_table, update_page
from benchmarks.device.results import Case, Config, read_results, write_results
from benchmarks.models import FAMILIES
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.costs.model import memory_bound
from edge_sdk.decide.costs.work import batch_bytes, largest_groups, work_at
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.decide.emulation.fleet import FleetMember
from edge_sdk.machine.board import (
    Board,
    MemorySpec,
    PowerSpec,
    Quantity,
    SpeedSpec,
    find_board,
    shipped_boards,
)
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import ConfigError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.packs.index import encode_index, pack_model
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Job
from edge_sdk.train.onnx import OnnxBackend

PAGE = Path(__file__).resolve().parents[4] / "docs" / "devices.md"
STARTED = "2026-01-02T03:04:05Z"
CNN = Config(
    families=("cnn",),
    levels=(1.0, 0.5),
    backends=("onnx",),
    threads=(1, 4),
    batch=32,
    steps=20,
    rounds=3,
    burst_s=1.0,
    data="digits",
)
CNN_MACS = {
    level: int(1024 * 27 * 32 * level)
    + int(256 * (9 * 32 * level) * 64 * level)
    + int(64 * 64 * level * 128 * level)
    + int(128 * level * 10)
    for level in (1.0, 0.5)
}
"""Of a sample's forward pass, by hand: two convolutions, two linear layers."""


class Compiled(NamedTuple):
    tasks: dict[str, tuple[ModelPlan, Manifest]]
    sensor: Task
    graphs: CompiledGraphs
    """Of the sensor family."""


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    tasks, last = {}, None
    for family in ("cnn", "sensor-cnn"):
        model = FAMILIES[family]
        task = make_task(model.model(), model.inputs(2), groups=4)
        graphs = compile_graphs(task, levels=CONFIG.levels, batch_sizes=(8, 32))
        tasks[family] = (task.plan, graphs.manifest)
        last = (task, graphs)
    assert last is not None
    return Compiled(tasks, *last)


@pytest.fixture(scope="module")
def nano() -> Board:
    return find_board("jetson_nano")


def cases_of(board: Board, compiled: Compiled, config: Config) -> dict[tuple[float, int], Case]:
    results = model_results(board, compiled.tasks, config, STARTED)
    return {(case.level, case.threads): case for case in results.cases}


def quantity(value: float) -> Quantity:
    return Quantity(value, "made up", "assumed")


# -- cases ---------------------------------------------------------------------------------------


def test_seconds_are_three_forward_passes_over_the_profiles_speed(
    compiled: Compiled, nano: Board
) -> None:
    cases = cases_of(nano, compiled, CNN)
    assert len(cases) == 4
    for level, macs in CNN_MACS.items():
        for threads, ratio in ((1, 0.229), (4, 0.668)):
            case = cases[level, threads]
            assert case.step_s.median == pytest.approx(3 * 32 * macs / (5e9 * ratio))
            assert case.step_s.p90 == case.step_s.median
            assert case.round_s.median == pytest.approx(20 * case.step_s.median)


def test_seconds_are_those_that_pass_on_an_emulated_device(compiled: Compiled) -> None:
    board = find_board("pixel_6")
    emulation = Emulation(FleetMember(name="phone", board=board, battery_percent=50))
    plan, manifest = compiled.tasks["sensor-cnn"]
    backend = OnnxBackend(plan, manifest, compiled.graphs.files)
    groups = largest_groups(plan, 0.5)
    job = Job(
        groups=groups,
        weights=plan.cut(compiled.sensor.weights, groups),
        buffers={},
        rule=LocalRule(learning_rate=0.1),
        mask_stream=stream(0, "test"),
    )
    batch = Batch((FAMILIES["sensor-cnn"].inputs(32).numpy(),), np.zeros(32, dtype=np.int64))
    emulation.emulated(backend).train(job, [batch] * 5)
    config = replace(CNN, families=("sensor-cnn",), levels=(0.5,), threads=(8,), steps=5)
    case = cases_of(board, compiled, config)[0.5, 8]
    assert case.round_s.median == pytest.approx(emulation.clock())
    assert case.joules is not None
    assert case.joules.gross == pytest.approx(emulation.moment.train_j)


def test_joules_are_the_profiles_watts_with_all_cores_and_unknown_with_one(
    compiled: Compiled,
) -> None:
    cases = cases_of(find_board("raspberry_pi_4"), compiled, CNN)
    assert cases[1.0, 1].joules is None
    joules, seconds = cases[1.0, 4].joules, cases[1.0, 4].round_s.median
    assert joules is not None
    assert joules.gross == pytest.approx(5.0 * seconds)
    assert joules.net == pytest.approx((5.0 - 1.6) * seconds)
    assert "raspberry_pi_4" in joules.source
    assert "measured" in joules.source


def test_net_joules_are_unknown_where_idle_watts_are(compiled: Compiled, nano: Board) -> None:
    assert nano.power.idle_w is None
    joules = cases_of(nano, compiled, CNN)[1.0, 4].joules
    assert joules is not None
    assert joules.net is None
    unknown = replace(nano, power=PowerSpec())
    assert cases_of(unknown, compiled, CNN)[1.0, 4].joules is None


def test_memory_is_the_cost_models_bound_above_what_the_program_holds(
    compiled: Compiled, nano: Board
) -> None:
    plan, manifest = compiled.tasks["cnn"]
    case = cases_of(nano, compiled, CNN)[0.5, 4]
    work = work_at(plan, manifest, 0.5, 32)
    rule = LocalRule(learning_rate=1, momentum=0.5)
    bound = memory_bound(work, batch_bytes(manifest.data, 32), rule, Encoding())
    assert case.grown_bytes.value == pytest.approx(bound)
    assert case.peak_bytes.value == pytest.approx(bound + HELD_BYTES.value)


def test_case_that_may_not_fit_is_left_out_with_the_reason(compiled: Compiled, nano: Board) -> None:
    full, half = (cases_of(nano, compiled, CNN)[level, 4].peak_bytes.value for level in (1.0, 0.5))
    room = (full + half) / 2 / 2**20
    tight = replace(nano, memory=MemorySpec(memory_mb=quantity(4096), app_mb=quantity(room)))
    results = model_results(tight, compiled.tasks, CNN, STARTED)
    assert {case.level for case in results.cases} == {0.5}
    assert {(each.level, each.threads) for each in results.left_out} == {(1.0, 1), (1.0, 4)}
    assert f"{full / 2**20:.0f} MB" in results.left_out[0].why
    assert "app_mb" in results.left_out[0].why


def test_what_a_profile_cannot_tell_is_left_out_with_the_reason(
    compiled: Compiled, nano: Board
) -> None:
    config = replace(CNN, levels=(1.0,), threads=(1, 2, 4), backends=("onnx", "torch"))
    results = model_results(nano, compiled.tasks, config, STARTED)
    assert {case.key for case in results.cases} == {
        ("cnn", 1.0, "onnx", 1),
        ("cnn", 1.0, "onnx", 4),
    }
    why = {each.key: each.why for each in results.left_out}
    assert "one core and of all 4" in why["cnn", 1.0, "onnx", 2]
    assert all("onnx" in why["cnn", 1.0, "torch", threads] for threads in (1, 2, 4))
    one = replace(nano, speed=SpeedSpec(speed_ratio=quantity(1)))
    (left,) = model_results(one, compiled.tasks, replace(CNN, levels=(1.0,)), "").left_out
    assert "one_core_ratio" in left.why


def test_board_without_a_speed_is_refused(compiled: Compiled, nano: Board) -> None:
    with pytest.raises(ConfigError, match=r"jetson_nano .* no speed.speed_ratio"):
        model_results(replace(nano, speed=SpeedSpec()), compiled.tasks, CNN, STARTED)


def test_bytes_are_counted_in_every_encoding(compiled: Compiled, nano: Board) -> None:
    case = cases_of(nano, compiled, CNN)[0.5, 4]
    plan, _ = compiled.tasks["cnn"]
    assert case.parameters == plan.cost_at(0.5).parameters
    sizes = {each.encoding: each for each in case.bytes}
    assert list(sizes) == ["fp32", "fp16", "int8", "top-k:0.1"]
    # The CNN has no buffers: its packs are its values, and the index names their chunks.
    needed = find_packs(plan).of_submodel(plan, plan.choose(largest_groups(plan, 0.5)))
    for name in ("fp32", "fp16"):
        zeros = np.zeros(plan.parameters, np.float32)
        encoded = encode_model(plan, zeros, Encoding.parse(name), stream(0, "test"))
        index, _ = pack_model(plan, encoded, {}, CHUNK_BYTES)
        size = sum(index.packs[number].size for number in needed)
        assert sizes[name].down == len(encode_index(plan, index)) + size
        assert name != "fp32" or size == 4 * case.parameters
    assert 4 * case.parameters < sizes["fp32"].up < 4 * case.parameters + 4096
    ups = [each.up for each in case.bytes]
    assert ups == sorted(ups, reverse=True)
    assert sizes["top-k:0.1"].down is None


def test_results_are_modelled_throughout_and_survive_their_file(
    compiled: Compiled, tmp_path: Path
) -> None:
    board = find_board("jetson_orin_nano")
    config = replace(CNN, threads=board_threads(board))
    results = model_results(board, compiled.tasks, config, STARTED)
    assert results.provenance == "modelled"
    assert results.complete
    assert len(results.cases) == 4
    for case in results.cases:
        assert {case.step_s.provenance, case.round_s.provenance} == {"modelled"}
        assert {case.peak_bytes.provenance, case.grown_bytes.provenance} == {"modelled"}
        assert {each.provenance for each in case.bytes} == {"modelled"}
        assert case.joules is None or case.joules.provenance == "modelled"
        assert case.predicted is None
    machine = results.machine
    assert (machine.board, machine.power_mode) == ("jetson_orin_nano", "15 W mode")
    assert (machine.cores, machine.fed_by) == (6, "mains")
    assert machine.clocks[0].max_mhz == pytest.approx(1510)
    assert machine.memory_bytes == 8192 * 2**20
    write_results(tmp_path / "results.json", results, [])
    assert read_results(tmp_path / "results.json") == results


@pytest.mark.parametrize(
    ("name", "mode"), [("jetson_tx2", "mode 3, MAXP_CORE_ARM"), ("jetson_nano", None)]
)
def test_power_mode_is_that_of_the_title(compiled: Compiled, name: str, mode: str | None) -> None:
    results = model_results(find_board(name), compiled.tasks, CNN, STARTED)
    assert results.machine.power_mode == mode


def test_curves_have_real_accuracies_and_sums_of_modelled_rounds(
    compiled: Compiled, nano: Board
) -> None:
    accuracies = {("cnn", 0.5): [0.25, 0.5, 0.75], ("cnn", 0.1): [0.5]}
    results = model_results(nano, compiled.tasks, CNN, STARTED, accuracies=accuracies)
    (curve,) = results.curves
    case = results.case(("cnn", 0.5, "onnx", 4))
    assert case is not None
    assert case.joules is not None
    assert (curve.family, curve.level, curve.data) == ("cnn", 0.5, "digits")
    assert curve.provenance == "modelled"
    assert [point.accuracy for point in curve.points] == [0.25, 0.5, 0.75]
    last = curve.points[-1]
    assert last.round == 3
    assert last.seconds == pytest.approx(3 * case.round_s.median)
    assert last.joules == pytest.approx(3 * (case.joules.gross or 0))
    assert last.bytes == 3 * (case.bytes[0].up + (case.bytes[0].down or 0))


def test_threads_of_a_board_are_one_and_all() -> None:
    assert board_threads(find_board("pixel_8")) == (1, 9)


# -- the page ------------------------------------------------------------------------------------


def test_page_has_what_the_command_produces(compiled: Compiled) -> None:
    table = profiles_table([find_board(name) for name in shipped_boards()], compiled.tasks)
    text = PAGE.read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table}\n{END}" in text, (
        "run tessera-bench device --emulate all --update docs/devices.md"
    )


def test_table_marks_numbers_and_says_what_is_missing(compiled: Compiled, nano: Board) -> None:
    small = MemorySpec(memory_mb=quantity(512), app_mb=quantity(145))
    boards = [
        find_board("pixel_6"),
        replace(nano, title="Tight", memory=small),
        replace(nano, title="Dark", power=PowerSpec()),
    ]
    lines = profiles_table(boards, compiled.tasks, replace(CONFIG, families=("cnn",))).splitlines()
    head, _, phone, tight, dark = ([c.strip() for c in line.split("|")[1:-1]] for line in lines)
    assert head[0] == "cnn"
    assert len(head) == len(phone) == 10
    seconds = 100 * 3 * 32 * CNN_MACS[1.0] / (5e9 * 2.706)
    charge = 17.8 * 3600 / (3.55 * seconds)
    assert float(phone[1].removeprefix("~")) == pytest.approx(seconds, rel=0.05)
    assert float(phone[-1].removeprefix("~")) == pytest.approx(charge, rel=0.05)
    assert all(cell.startswith("~") for cell in phone[1:])
    assert tight[1] == tight[4] == tight[7] == "no room"
    assert all(tight[column].startswith("~") for column in (2, 3, 5, 6, 8))
    assert dark[4:7] == ["–", "–", "–"]
    assert dark[-1] == "–"


def test_update_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"one\n<!-- end -->\n{BEGIN}\nold\ntable\n{END}\ntwo\n<!-- end -->\n")
    update_page(page, "| new |")
    text = page.read_text(encoding="utf-8")
    assert text == f"one\n<!-- end -->\n{BEGIN}\n| new |\n{END}\ntwo\n<!-- end -->\n"
    update_page(page, "| new |")
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("text", ["", f"{BEGIN}\nold\n", f"{END}\n{BEGIN}\n"])
def test_update_of_a_page_without_markers_changes_nothing(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(PageError, match=r"page\.md has no place"):
        update_page(page, "| new |")
    assert page.read_text() == text


def test_update_of_a_page_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="cannot be read"):
        update_page(tmp_path / "none.md", "")
