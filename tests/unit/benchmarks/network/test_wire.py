"""What `tessera-bench wire` makes of what it counted, and how it ends."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.network.stage import processes
from benchmarks.network.stage.in_threads import run_in_threads
from benchmarks.network.stage.packets import Packet
from benchmarks.network.stage.programs import Programs
from benchmarks.network.stage.tasks import prepare_perceptron
from benchmarks.network.wire.cases.bidding_process import BUSY
from benchmarks.network.wire.cases.bids import BidsRow, Heard, Way, bids_figures, bids_row, busy_row
from benchmarks.network.wire.cases.bytes_by_level import (
    BytesConfig,
    BytesRow,
    bytes_figures,
    chunk_bytes,
    measure_bytes,
    split_rounds,
)
from benchmarks.network.wire.cases.device import IdleRow, ResidentRow, device_figures, idle_row
from benchmarks.network.wire.cases.fan_out import FanOutRow, fan_out_figures, sent_in_a_round
from benchmarks.network.wire.cases.overhead import OverheadConfig, overhead_figures, overhead_row
from benchmarks.network.wire.cases.serving import ServingRow, serving_figures
from benchmarks.network.wire.config import FULL, QUICK
from benchmarks.report.figures import Figure, FigureError
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.plan import LEVELS
from tests.unit.benchmarks.interruption import interrupted

TOPICS = Topics("t")
CHUNK = TOPICS.chunk(bytes(16))


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


# -- rounds in what passed -----------------------------------------------------------------------


def down(at_s: float, topic: str | None, payload: int = 0, more: int = 50) -> Packet:
    return Packet(at_s, False, payload + more, topic, payload)


def up(at_s: float, topic: str | None, payload: int = 0, more: int = 50) -> Packet:
    return replace(down(at_s, topic, payload, more), up=True)


DEVICE = [
    down(0.5, CHUNK, 9000),  # the task
    down(1.0, TOPICS.round, 300),
    down(1.1, CHUNK, 700),
    up(1.2, TOPICS.up_control("d"), 100),
    down(2.0, TOPICS.round, 300),
    down(2.1, CHUNK, 1000),
    down(2.15, TOPICS.down_chunk("d", bytes(16)), 10),
    up(2.2, TOPICS.up_chunk("d"), 400),
    up(2.3, None, more=4),
    down(3.0, TOPICS.round, 300),
    up(3.1, None, more=2),
]


def test_rounds_are_what_passed_between_two_words_about_them() -> None:
    first, second = split_rounds(DEVICE)
    assert first == DEVICE[1:4]
    assert second == DEVICE[4:9]
    assert split_rounds(DEVICE, up=True) == []
    # A topic that is cleared says nothing about a round.
    assert split_rounds([down(0.1, TOPICS.round), *DEVICE]) == [first, second]


def test_chunks_are_counted_without_their_topics_and_each_way() -> None:
    _, second = split_rounds(DEVICE)
    assert chunk_bytes(second, up=False) == 1010
    assert chunk_bytes(second, up=True) == 400


ROW = BytesRow(
    model="mlp",
    level=0.5,
    up_encoding="top-k:0.1+zstd",
    down_encoding="fp16",
    up_bytes=100.0,
    down_bytes=500.0,
    pulled_bytes=480.0,
    needed_bytes=400.0,
    full_bytes=1000,
)


def test_bytes_are_held_against_the_model_both_ways() -> None:
    assert ROW.share == 0.3
    assert ROW.pulled_over_needed == 1.2
    plain = replace(ROW, up_encoding="fp32", down_encoding="fp32", level=0.25)
    rows = [ROW, plain, replace(plain, level=1.0)]
    figures = by_name(bytes_figures(rows))
    assert {name: (f.value, f.target) for name, f in figures.items()} == {
        "wire.mlp.50.top-k-01_zstd.bytes_over_full": (0.3, None),
        "wire.mlp.50.top-k-01_zstd.pulled_over_needed": (1.2, None),
        "wire.mlp.25.fp32.bytes_over_full": (0.3, None),
        "wire.mlp.25.fp32.pulled_over_needed": (1.2, 1.05),
        "wire.mlp.100.fp32.bytes_over_full": (0.3, None),
    }


def test_run_over_a_broker_moves_what_submodels_hold() -> None:
    task = prepare_perceptron((8, 16, 10))
    assert task.parameters == 8 * 16 + 16 + 16 * 10 + 10
    begun: list[str] = []
    ticks: list[None] = []

    def begin(name: str) -> Any:
        begun.append(name)
        return lambda: ticks.append(None)

    rows = measure_bytes(task, BytesConfig(encodings=(("fp32", "fp32"),), rounds=3), begin)
    assert (len(begun), len(ticks)) == (1, 1)
    assert [row.level for row in rows] == list(LEVELS)
    for row in rows:
        width = int(16 * row.level)
        needed = 4 * (8 * width + width + 10 * width + 10)
        assert row.needed_bytes == needed
        # The index has a hash for each of 5 packs; topics and messages are not chunks.
        assert needed < row.pulled_bytes < needed + 300
        assert row.pulled_bytes < row.down_bytes < row.pulled_bytes + 4000
        assert needed < row.up_bytes < needed + 4000
        assert row.full_bytes == 4 * task.parameters


def test_run_that_fails_is_reported_and_ended(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[task]\n")
    before = threading.active_count()
    with pytest.raises(FigureError, match=r"a run over the broker failed: .*name is missing"):
        run_in_threads(tmp_path / "run.toml", [])
    assert threading.active_count() == before


# -- the coordinator -----------------------------------------------------------------------------


def test_coordinator_sends_a_model_for_each_version() -> None:
    packets = [
        up(0.1, CHUNK, 70),  # the task
        up(0.2, CHUNK, 1000),
        up(1.0, TOPICS.round, 300),
        up(1.5, CHUNK, 1000),
        down(1.6, TOPICS.up_control("d"), 5000),
        up(2.0, TOPICS.round, 300),
        up(2.1, CHUNK, 600),
        up(2.2, TOPICS.down_control("d"), 80),
        up(3.0, TOPICS.round, 300),
        up(3.1, CHUNK, 400),  # of the last version, after the word that the run is over
    ]
    model, control = sent_in_a_round(packets, 2, 70)
    assert model == 1000
    assert control == (300 + 50) + 50 + (80 + 50)
    with pytest.raises(FigureError, match="opened 2 of 3 rounds"):
        sent_in_a_round(packets, 3, 70)


def test_fan_out_figures_compare_with_the_smallest_fleet() -> None:
    rows = [
        FanOutRow(devices=1, model_bytes=1000, control_bytes=500, model_ratio=1.0),
        FanOutRow(devices=11, model_bytes=1100, control_bytes=2500, model_ratio=1.1),
    ]
    figures = by_name(fan_out_figures(rows))
    assert {name: (f.value, f.unit, f.target) for name, f in figures.items()} == {
        "wire.coordinator.11.model_over_1": (1.1, "×", 1.05),
        "wire.coordinator.control_per_further_device": (200.0, "B", None),
    }
    assert fan_out_figures(rows[:1]) == []


# -- seconds and memory --------------------------------------------------------------------------


def entry(time_s: float, *train_s: float) -> dict[str, Any]:
    return {"time": time_s, "devices": [{"train_s": each} for each in train_s]}


def test_overhead_is_the_round_less_its_longest_training() -> None:
    history = [
        entry(100.0, 50.0, 60.0),  # not measured
        entry(101.0, 0.1, 0.4),
        entry(103.0, 0.5, 0.2),
        entry(104.5, 0.25, 0.25),
    ]
    spent = {"coordinator": 0.6, "broker": 0.06, "devices": 1.2}
    config = OverheadConfig(devices=2, rounds=3)
    row = overhead_row(config, history, spent, 0.15, has_broker=True)
    assert row.rounds == 3
    assert row.wall_s == 1.5
    assert row.slowest_training_s == 0.4
    assert row.overhead_s == pytest.approx(1.25)  # of 0.6, 1.5 and 1.25
    assert row.longest_overhead_s == pytest.approx(1.5)
    assert row.coordinator_cpu_s == pytest.approx(0.1)
    assert row.broker_cpu_s == pytest.approx(0.01)
    assert row.device_cpu_s == pytest.approx(0.2)
    assert row.overhead_cpu_s == pytest.approx(0.1 + 0.01 + 0.2 - 0.15)
    figures = by_name(overhead_figures(row))
    assert {name: f.target for name, f in figures.items()} == {
        "wire.round.2.overhead": 1.0,
        "wire.round.2.wall": None,
        "wire.round.2.cpu_per_device": 0.1,
    }
    without = overhead_row(config, history, spent, 0.15, has_broker=False)
    assert without.broker_cpu_s is None
    assert without.overhead_cpu_s == pytest.approx(row.overhead_cpu_s - 0.01)


def test_idle_device_is_charged_for_what_passed_meanwhile() -> None:
    packets = [up(9.9, None, more=1000), up(10.0, None, more=2), down(30.0, None, more=3)]
    row = idle_row([*packets, up(40.0, None, more=1000)], 10.0, 40.0, 0.02)
    assert row == IdleRow(seconds=30.0, up_bytes=2, down_bytes=3, packets=2, cpu_s=0.02)
    memory = ResidentRow(model="mlp", rounds=2, device_mb=90.0, alone_mb=75.0)
    figures = by_name(device_figures(memory, row))
    assert {name: (f.value, f.target) for name, f in figures.items()} == {
        "wire.device.mlp.rss_over_training": (15.0, 20.0),
        "wire.device.mlp.rss": (90.0, None),
        "wire.device.idle.bytes_per_minute": (10.0, None),
        "wire.device.idle.cpu_per_minute": (40.0, None),
    }


@pytest.mark.parametrize(("publishing", "serving", "growth"), [(250, 150, 2.0), (150, 300, 2.5)])
def test_growth_is_the_most_over_a_coordinator_without_the_model(
    publishing: float, serving: float, growth: float
) -> None:
    row = ServingRow(
        devices=8,
        model_mb=100,
        small_mb=50,
        published_mb=140,
        publishing_peak_mb=publishing,
        serving_peak_mb=serving,
        seconds=1.0,
    )
    assert row.growth == growth
    assert row.serving_growth == (serving - 140) / 100
    figures = by_name(serving_figures(row))
    assert figures["wire.serving.8.growth_over_model"].target == 3.0
    assert figures["wire.serving.8.pulling_over_model"].target is None


@pytest.mark.skipif(not processes.MEASURABLE, reason="there is no /proc")
def test_process_is_read_as_psutil_reads_it() -> None:
    own = psutil.Process()
    spent = processes.cpu_s(own.pid)
    times = own.cpu_times()
    assert 0 < spent <= times.user + times.system + 0.02
    before = processes.anonymous_bytes(own.pid)
    # New pages, whatever this process freed before.
    held = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, len(held), 4096):
        held[page] = 1
    assert processes.anonymous_bytes(own.pid) - before > 40_000_000
    assert processes.peak_resident_bytes(own.pid) >= own.memory_info().rss - 2**20
    held.close()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(FigureError, match="has ended while it was measured"):
        processes.cpu_s(child.pid)


# -- bids ----------------------------------------------------------------------------------------


def test_ways_of_bids_are_in_milliseconds() -> None:
    ways = [Way(float(n), n + 0.001 * (n + 1)) for n in range(101)]
    row = bids_row(ways)
    assert row.bids == 101
    assert row.seconds == 100.0
    assert row.moved_mb == 0
    assert row.p50_ms == pytest.approx(51)
    assert row.p95_ms == pytest.approx(96)
    assert row.longest_ms == pytest.approx(101)
    with pytest.raises(FigureError, match="no bid"):
        bids_row([])


def test_bids_count_only_while_something_moves_beside_them() -> None:
    heard = Heard(chunks_s=[10.0, 11.0, 12.0], moved_bytes=3_000_000)
    with pytest.raises(FigureError, match="no bid"):
        busy_row(heard)
    heard.ways[BUSY] += [Way(9.9, 19.9), Way(10.5, 10.6), Way(11.5, 11.7), Way(12.1, 22.1)]
    row = busy_row(heard)
    assert (row.bids, row.moved_mb) == (2, 3.0)
    assert row.longest_ms == pytest.approx(200)
    with pytest.raises(FigureError, match="no chunk"):
        busy_row(Heard())


def test_bids_have_figures_without_targets() -> None:
    quiet = BidsRow(moved_mb=0, seconds=1, bids=9, p50_ms=1, p95_ms=2, longest_ms=3)
    figures = bids_figures([quiet, replace(quiet, p50_ms=4, p95_ms=5)])
    assert [(f.name, f.value, f.target) for f in figures] == [
        ("wire.bid.quiet.p95", 2, None),
        ("wire.bid.busy.p50", 4, None),
        ("wire.bid.busy.p95", 5, None),
    ]


# -- programs ------------------------------------------------------------------------------------

SLEEPS = "import time; print('here', flush=True); time.sleep(600)"


def test_programs_end_with_their_context_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Programs(tmp_path, tmp_path / "bytecode") as programs:  # noqa: PT012
        one = programs.begin("one", ["-c", SLEEPS])
        other = programs.begin("other", ["-c", SLEEPS])
        programs.wait_until(lambda: "here" in one.log.read_text(), "the start")
        programs.stop(other)
        assert other.process.returncode is not None
        assert one.process.poll() is None
        raise KeyboardInterrupt
    assert one.process.returncode is not None


def test_program_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Programs(tmp_path, tmp_path / "bytecode") as programs:
        programs.begin("broken", ["-c", "raise SystemExit('the disk is full')"])
        with pytest.raises(FigureError, match=r"broken ended with code 1:\n  the disk is full"):
            programs.wait_until(lambda: False, "that it works")


# -- the command ---------------------------------------------------------------------------------


def test_quick_measures_the_same_parts_as_the_full_run() -> None:
    assert QUICK.ticks < FULL.ticks
    assert QUICK.fan_out.fleets == FULL.fan_out.fleets == (1, 8, 32)
    assert QUICK.overhead.devices == FULL.overhead.devices == 10
    weights = sum(before * after for before, after in pairwise(FULL.serving.widths))
    assert weights == pytest.approx(25e6, rel=0.02)
    assert {up for up, _ in QUICK.bytes.encodings} <= {up for up, _ in FULL.bytes.encodings}
    for config in (QUICK.bytes, FULL.bytes):
        assert {"fp32", "fp16", "int8", "top-k:0.1"} <= {up for up, _ in config.encodings}


def test_interrupted_wire_ends_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    children: list[psutil.Process] = []

    def look(process: psutil.Process) -> None:
        children.extend(process.children(recursive=True))

    # Its folder is there when it says so.
    said = interrupted(["wire", "--quick"], "wire tasks", tmp_path, look)
    assert said == ["tessera-bench: interrupted"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert not any(child.is_running() for child in children)
