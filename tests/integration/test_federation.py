"""The whole federation in one process, through its public doors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.aggregate.rules import ASYNC_RULES
from coordinator.cli import main
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.rounds.report import RunTerms
from coordinator.rounds.synchronous import RoundsState
from coordinator.simulate.demo.config import DemoConfig
from coordinator.simulate.demo.emulated import full_round_s, observe
from coordinator.simulate.demo.run import make_demo
from coordinator.simulate.demo.view import as_json
from coordinator.simulate.federation import Federation, Member, RoundReport
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation import fleet
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.machine.board import find_board
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.graphs import Manifest
from edge_sdk.train.backend import Job
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import make_federation, random_data
from tests.waiting import HANGS_S

PROGRAM = Path(sys.executable).parent / "tessera-coordinator"


def run_demo(folder: Path, *arguments: str) -> dict[str, Any]:
    """The demo in one process, as a user runs it; its JSON."""
    subprocess.run(
        [PROGRAM, "demo", "--in-process", "--no-compare", "--json", "run.json", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=HANGS_S,
    )
    result: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return result


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(),
            nn.Linear(8, 3),
        )  # fmt: skip
    return make_task(model, torch.randn(4, 6), groups=4)


def make_members(policies: Sequence[Policy], seed: int = 3) -> list[Member]:
    random = np.random.default_rng(seed)
    return [Member(f"device-{n}", p, random_data(random, 40)) for n, p in enumerate(policies)]


def federation(
    task: Task,
    policies: list[Policy],
    rounds: int,
    seed: int = 3,
    members: Sequence[Member] | None = None,
    *,
    rule: str = "ra-fed",
    mask: str = "random",
    encoding: str = "fp32",
    down: str = "fp32",
    **more: Any,
) -> Federation:
    return make_federation(
        task,
        make_members(policies, seed) if members is None else members,
        lambda: TorchBackend(task, threads=1),
        rule=rule,
        length=rounds * len(policies) if rule in ASYNC_RULES else rounds,
        mask=mask,
        down=down,
        run=more,
        local_rule=LocalRule(learning_rate=0.1, momentum=0.5),
        steps=3,
        batch_size=8,
        min_devices=len(policies),
        seed=seed,
        up=Encoding.parse(encoding),
    )


def deterministic(report: RoundReport) -> list[tuple[object, ...]]:
    return [(d.device, d.level, d.reason, d.loss, d.bytes_up) for d in report.devices]


def test_federation_same_seed_same_bits(task: Task) -> None:
    policies = [Policy(level=level, participation=0.7) for level in (1, 0.5, 0.25)]
    runs = [federation(task, policies, rounds=6, seed=seed) for seed in (3, 3, 4)]
    reports = [[deterministic(report) for report in run.run()] for run in runs]
    assert reports[0] == reports[1] != reports[2]
    assert runs[0].model.digest == runs[1].model.digest != runs[2].model.digest


def test_federation_moves_only_covered_blocks(task: Task) -> None:
    run = federation(task, [Policy(level=0.25), Policy(level=0.25)], rounds=1)
    before = run.model.theta.copy()
    (report,) = run.run()
    moved = np.add.reduceat(run.model.theta != before, task.plan.block_offsets[:-1]) > 0
    assert report.coverage_min == 0
    assert 0 < moved.sum() < task.plan.block_count
    whole = [
        block for block in range(task.plan.block_count) if not task.plan.signature(block)
    ]  # the class biases are in every submodel
    assert moved[whole].all()


@pytest.mark.parametrize(("level", "changed"), [(0.25, False), (1.0, True)])
def test_federation_takes_statistics_from_whole_models_alone(
    task: Task, level: float, changed: bool
) -> None:
    run = federation(task, [Policy(level=level)], rounds=1)
    before = run.model.buffers["1.running_mean"].copy()
    list(run.run())
    assert ((run.model.buffers["1.running_mean"] != before) == changed).all()
    assert run.model.buffers["1.num_batches_tracked"] == 0


def test_federation_of_one_full_device_is_local_training(task: Task) -> None:
    """RA-Fed over one full device moves θ by exactly that device's movement."""
    (member,) = make_members([Policy()])
    run = federation(task, [Policy()], rounds=1)
    before = run.model.theta.copy()
    groups = task.plan.all_groups()
    job = Job(
        groups=groups,
        weights=task.weights,
        buffers=task.buffers,
        rule=LocalRule(learning_rate=0.1, momentum=0.5),
        mask_stream=stream(3, member.name, 1, "dropout"),
    )
    batches = member.data.batches(3, 8, stream(3, member.name, 1, "batches"))
    alone = TorchBackend(task, threads=1).train(job, batches)
    (report,) = run.run()
    (device,) = report.devices
    size = encoded_size(task.plan, task.plan.all_groups(), Encoding())
    assert device.bytes_up == device.bytes_down == size
    assert size < 4 * task.plan.parameters + 200
    assert report.coverage_min == 1
    moved = task.plan.scatter(alone.movement, groups).values
    assert np.array_equal(run.model.theta, before + moved)


def test_failing_device_becomes_a_skip_and_the_round_goes_on(task: Task) -> None:
    members = make_members([Policy(), Policy()])
    members[1].data.inputs[0][:] = np.nan
    run = federation(task, [Policy(), Policy()], rounds=2, members=members)
    for report in run.run():
        good, bad = report.devices
        assert good.level == 1
        assert bad.level is None
        assert "loss is nan" in bad.reason
    assert np.isfinite(run.model.theta).all()


@pytest.mark.parametrize("spoil", ["label", "dtype", "width"])
def test_device_with_bad_data_harms_nobody_else(task: Task, spoil: str) -> None:
    good, bad = make_members([Policy(), Policy()])
    data = {
        "label": ArrayData(bad.data.inputs, np.full(40, 99)),
        "dtype": ArrayData((bad.data.inputs[0].astype(np.float64),), bad.data.targets),
        "width": ArrayData((bad.data.inputs[0][:, :5],), bad.data.targets),
    }[spoil]
    run = federation(task, [Policy(), Policy()], rounds=2, members=[good, replace(bad, data=data)])
    for report in run.run():
        assert [device.level for device in report.devices] == [1, None]
        assert report.devices[1].reason.startswith("skip: ")


def test_federation_that_waits_for_more_than_its_members_is_refused(task: Task) -> None:
    with pytest.raises(ConfigError, match="min_devices"):
        federation(task, [Policy(), Policy()], rounds=1, members=[])


POLICIES = [
    Policy(),
    Policy(level=0.5),
    Policy(level=0.75, participation=0.6),
    Policy(level=0.25, participation=0.5, keeps_copy=False),
]


@pytest.mark.parametrize(
    ("rule", "mask", "encoding"),
    [
        ("fedavg", "random", "int8"),
        ("ra-fed", "coverage", "top-k:0.3"),
        ("ram-fed", "greedy", "fp16"),
        ("ccfl-1", "rolling", "fp32"),
        ("ccfl-2", "static", "int8"),
        ("ccfl-3", "disjoint", "fp32"),
        ("strategy-1", "random", "fp32"),
        ("strategy-2", "coverage", "fp32"),
        ("subdismo", "rolling", "fp16"),
        ("fedvarp", "random", "fp32"),
        ("fed-raa", "gre-raa", "fp32"),
        ("fedasync", "random", "fp32"),
        ("fedbuff", "random", "int8"),
        ("ra-fed", "gre-raa", "fp32"),
    ],
)
def test_every_rule_runs_and_gives_the_same_bits_with_any_number_of_threads(
    task: Task, rule: str, mask: str, encoding: str
) -> None:
    runs = [
        federation(task, POLICIES, 5, rule=rule, mask=mask, encoding=encoding, threads=threads)
        for threads in (1, 3)
    ]
    before = runs[0].model.theta.copy()
    reports = [list(run.run()) for run in runs]
    assert runs[0].model.digest == runs[1].model.digest
    assert [[deterministic(r) for r in run] for run in reports[:1]] == [
        [deterministic(r) for r in run] for run in reports[1:]
    ]
    assert [report.round for report in reports[0]] == [1, 2, 3, 4, 5]
    assert np.isfinite(runs[0].model.theta).all()
    assert not np.array_equal(runs[0].model.theta, before)


@pytest.mark.parametrize("rule", ["ram-fed", "ccfl-2", "ccfl-3", "strategy-2"])
def test_memory_on_disk_gives_the_same_bits_as_in_ram(
    task: Task, rule: str, tmp_path: Path
) -> None:
    ram = federation(task, POLICIES, 6, rule=rule)
    disk = federation(task, POLICIES, 6, rule=rule, memory_dir=tmp_path / "memory")
    reports = list(ram.run())
    assert [memory_terms(r) for r in reports] == [memory_terms(r) for r in disk.run()]
    assert ram.model.digest == disk.model.digest
    shares = [r.memory_trust for r in reports] + [r.memory_trust_alone for r in reports]
    if rule == "ram-fed":
        assert all(share is not None and 0 <= share <= 1 for share in shares)
        assert any(shares), "movements of neighbouring rounds agree"
        assert [r.memory_ratio is None for r in reports] == [True] + 5 * [False]
    else:
        assert shares == [None] * 12
    assert any((tmp_path / "memory").iterdir())
    assert reports[-1].oldest_memory is not None


def memory_terms(report: RoundReport) -> tuple[object, ...]:
    shares = report.memory_trust, report.memory_trust_alone
    return report.oldest_memory, *shares, report.memory_ratio


def test_replays_reach_the_rule(task: Task) -> None:
    """A copy kept by the device speaks for it as the coordinator's memory would."""
    policies = [Policy(level=0.5), Policy(participation=0.5)]
    replayed, remembered = (
        federation(task, policies, 6, rule=rule) for rule in ("ccfl-1", "ccfl-2")
    )
    lines = [device for report in replayed.run() for device in report.devices if device.replayed]
    list(remembered.run())
    assert lines
    assert all(line.level is None and line.bytes_up > 0 for line in lines)
    assert replayed.model.digest == remembered.model.digest


def test_reports_hold_the_theorems_terms(task: Task) -> None:
    """Every quantity, from who trained what as the devices' own lines tell it."""
    policies = [Policy(level=0.5), Policy(level=0.25, participation=0.7), Policy(participation=0.3)]
    run = federation(task, policies, 9, rule="ram-fed")
    plan = task.plan
    theta, covered, trained = run.model.theta.copy(), np.zeros(plan.block_count), [0, 0, 0]
    made = np.zeros((3, plan.block_count))
    terms = RunTerms()
    least: dict[str, list[int]] = {"Γ": [], "S": [], "regions": [], "τ": []}
    for report, assigned in zip(run.run(), assignments(run), strict=False):
        norms = np.array([float((part.astype(np.float64) ** 2).sum()) for part in np.split(
            theta, plan.block_offsets[1:-1])])  # fmt: skip
        coverage = np.zeros(plan.block_count, dtype=int)
        for number, line in enumerate(report.devices):
            assert (line.level is None) == (line.device not in assigned)
            if line.level is None:
                assert line.reduction_noise is None
                continue
            held = plan.covers(plan.choose(assigned[line.device]))
            assert line.parameters == plan.block_sizes[held].sum()
            assert line.reduction_noise == pytest.approx(norms[~held].sum() / norms.sum())
            coverage += held
            made[number, held] = report.round
            trained[number] = report.round
        covered[coverage > 0] = report.round
        assert report.coverage_min == coverage.min()
        assert report.coverage_mean == pytest.approx(coverage.mean())
        assert report.trained_coverage_min == (coverage[coverage > 0].min() if any(coverage) else 0)
        assert report.trained_blocks == (coverage > 0).sum()
        groups = {
            (axis, group) for each in assigned.values() for axis in each for group in each[axis]
        }
        assert report.trained_regions == len(groups)
        least["Γ"] += [int(each) for each in coverage if each]
        least["S"].append(int((coverage > 0).sum()))
        least["regions"].append(len(groups))
        least["τ"].append(-(report.round - int(made[made > 0].min())))
        terms = terms.after(report)
        assert terms.coverage == min(least["Γ"])
        assert (terms.blocks, terms.regions) == (min(least["S"]), min(least["regions"]))
        assert terms.staleness == -min(least["τ"])
        assert report.oldest_uncovered == report.round - covered.min()
        assert report.oldest_memory == report.round - made[made > 0].min()
        assert report.skip_share == pytest.approx(1 - len(assigned) / 3)
        assert report.longest_skip == 1 + report.round - min(trained)
        assert report.gap_bound == (0 if any(line.level == 1 for line in report.devices) else None)
        assert report.compression_noise == 0
        theta = run.model.theta.copy()
    assert max(trained) == 9


def assignments(run: Federation) -> Iterator[dict[str, Any]]:
    """What each device was assigned, round by round, read off the machine."""
    while True:
        state = run.state
        assert isinstance(state, RoundsState)
        past = state.past[max(state.past)]
        yield {name: past.expected[name].groups for name in past.outcomes}


@pytest.fixture(scope="module")
def manifest(task: Task) -> Manifest:
    return compile_graphs(task, batch_sizes=(8,)).manifest


def half_a_device(task: Task, manifest: Manifest, name: str) -> Member:
    """A device that weighs what it can afford: half of the model, in the time that a round has."""
    policy, random = Policy(levels=(1.0, 0.5)), np.random.default_rng(7)
    inputs = random.normal(size=(40, 6)).astype(np.float32)
    data = ArrayData((inputs,), random.integers(0, 3, size=40))
    board = fleet.FleetMember(name=name, board=find_board("raspberry_pi_4"))
    full_s = full_round_s(Emulation(board), task.plan, LocalRule(learning_rate=0.1), 3, 8)
    emulation = Emulation(board, work=1.2 * 600 / full_s)
    watch = partial(observe, emulation, manifest=manifest, policy=policy, data=data)
    return Member(name, policy, data, emulation, watch)


@pytest.mark.parametrize("rule", ["ra-fed", "fedavg"])
def test_device_that_affords_half_skips_for_its_own_reason_where_only_all_is_of_use(
    task: Task, manifest: Manifest, rule: str
) -> None:
    members = [half_a_device(task, manifest, name) for name in ("device-0", "device-1")]
    run = federation(task, [Policy()] * 2, 1, members=members, rule=rule)
    (report,) = run.run()
    state = run.state
    assert isinstance(state, RoundsState)
    assert len(report.devices) == 2
    for line in report.devices:
        answer = state.bids[line.device]
        assert answer.code == "deadline"  # what stands against all of it
        if rule == "ra-fed":
            assert (answer.level, line.level) == (0.5, 0.5)
        else:
            assert (answer.level, line.level) == (None, None)
            assert answer.reason == line.reason
            assert re.fullmatch(r"skip: full model needs \d+ s, the round has 600 s", line.reason)


def test_asynchronous_reports_name_everybody_and_count_in_rounds(
    task: Task, manifest: Manifest
) -> None:
    strong = federation(task, [Policy()] * 3, 4)._members
    members = [strong[0], half_a_device(task, manifest, "device-1"), strong[2]]
    reports = list(federation(task, [Policy()] * 3, 4, members=members, rule="fedasync").run())
    assert [report.round for report in reports] == [1, 2, 3, 4]
    last = reports[-1]
    (weak,) = [line for line in last.devices if line.device == "device-1"]
    assert weak.level is None
    assert weak.reason.startswith("skip: full model needs")
    assert last.longest_skip == 5  # device-1 has not trained in any of four rounds
    assert last.oldest_uncovered == 0
    assert last.gap_bound is None
    assert last.skip_share == pytest.approx(1 / 3)


def test_asynchronous_run_keeps_to_what_owners_allow(task: Task) -> None:
    policies = [Policy(), Policy(level=0.5), Policy(participation=0.5)]
    reports = list(federation(task, policies, 4, rule="fedasync").run())
    last = reports[-1]
    (less,) = [line for line in last.devices if line.device == "device-1"]
    assert less.level is None
    assert less.reason == "skip: full model is more than this device's owner allows"
    assert last.longest_skip == 5
    skipped = sum(line.level is None for line in last.devices)
    assert skipped in (1, 2)  # device-1, and every other time device-2
    assert last.skip_share == pytest.approx(skipped / 3)


def test_asynchronous_run_in_which_nobody_can_train_ends_with_the_reasons(
    task: Task, manifest: Manifest
) -> None:
    members = [half_a_device(task, manifest, name) for name in ("device-0", "device-1")]
    run = federation(task, [Policy()] * 2, 4, members=members, rule="fedasync")
    with pytest.raises(CoordinatorError, match="device-1: skip: full model needs"):
        list(run.run())


def test_federation_that_never_ran_holds_nothing_open(task: Task, tmp_path: Path) -> None:
    federation(task, [Policy()], 1, rule="ram-fed", memory_dir=tmp_path / "memory")
    again = federation(task, [Policy()], 1, rule="ram-fed", memory_dir=tmp_path / "memory")
    assert len(list(again.run())) == 1


def test_downlink_encoding_shows_as_compression_noise(task: Task) -> None:
    run = federation(task, [Policy()], rounds=1, down="int8")
    theta, sent = run.model.theta.copy(), run.model.serve().decoded.copy()
    (report,) = run.run()
    expected = ((sent - theta) ** 2).sum() / (theta**2).sum()
    assert report.compression_noise == pytest.approx(expected, rel=1e-4)
    assert report.devices[0].bytes_down < report.devices[0].bytes_up / 2


def test_demo_learns_reports_and_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = run_demo(tmp_path, "--rounds", "2", "--seed", "1")
    assert (tmp_path / "tessera-demo.png").read_bytes().startswith(b"\x89PNG")
    again = make_demo(DemoConfig(rounds=2, seed=1))  # in another process: this one
    demo = make_demo(DemoConfig(rounds=10, seed=1), again.initial)
    for _ in (*again.run(), *demo.run()):
        pass
    first, repeated = (json.loads(json.dumps(as_json(each))) for each in (demo, again))
    monkeypatch.chdir(tmp_path)
    arguments = ["--in-process", "--no-compare", "--rounds", "2", "--seed", "2", "--devices", "3"]
    assert main(["demo", *arguments, "--backend", "torch", "--json", "other.json"]) == 0
    other = json.loads((tmp_path / "other.json").read_text())
    assert short["rounds"] == repeated["rounds"]
    assert short["model_sha256"] == repeated["model_sha256"]
    assert len({run["model_sha256"] for run in (short, first, other)}) == 3
    assert len(other["rounds"][0]["devices"]) == 3
    assert (first["backend"], other["backend"]) == ("onnx", "torch")
    assert [entry["round"] for entry in first["rounds"]] == list(range(1, 11))
    assert first["rounds"][-1]["accuracy"] > 0.7
    levels = {d["level"] for entry in first["rounds"] for d in entry["devices"]}
    assert levels >= {1.0, 0.75, 0.5, None}
    for entry in first["rounds"]:
        assert entry["coverage_min"] >= 1
        for device in entry["devices"]:
            assert (
                device["skip"] == (device["level"] is None) == device["reason"].startswith("skip")
            )
    assert first["bytes"] < first["bytes_full_training"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--devices", "0"], "--devices"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "99999999999999999999999"], "--seed"),
        (["--json", "nowhere/run.json"], "nowhere"),
        (["--json", "."], "cannot write"),
        (["--plot", "accuracy.foo"], "--plot"),
        (["--rule", "best"], "ccfl-2, "),
        (["--mask", "zigzag"], ", gre-raa"),
        (["--rule", "ram-fed", "--rule-option", "dampng=1"], "damping"),
        (["--rule", "fedavg", "--mask", "coverage"], "whole models"),
        (["--rule", "ram-fed", "--up", "top-k"], "top-k"),
        (["--up", "fp17"], "fp16"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_demo_refuses_nonsense_in_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code: object
    try:
        code = main(["demo", *arguments])
    except SystemExit as end:  # how argparse refuses
        code = end.code
    assert code in (1, 2)
    assert says in capsys.readouterr().err


def test_program_that_refuses_nonsense_says_no_more(tmp_path: Path) -> None:
    result = subprocess.run(
        [PROGRAM, "demo", "--rule", "ram-fed", "--rule-option", "dampng=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert result.returncode == 2
    assert re.fullmatch("tessera-coordinator: .*damping.*\n", result.stderr)
    assert result.stdout == ""


def test_demo_stops_cleanly_on_interrupt(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PROGRAM, "demo", "--in-process", "--rounds", "100000", "--json", "run.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        while "round   2/" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=HANGS_S)
        except subprocess.TimeoutExpired:  # Python drops a signal that arrives in a destructor
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "stopped after" in output
    rounds = json.loads((tmp_path / "run.json").read_text())["rounds"]
    assert len(rounds) >= 2
