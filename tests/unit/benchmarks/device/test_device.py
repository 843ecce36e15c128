"""`tessera-bench kit` and `device`: real processes, real sensors' files, on one small model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.device.kit import KitError, kit_digits, read_kit, read_task, write_kit
from benchmarks.device.measure import Bench, measure, missing, missing_curves
from benchmarks.device.results import FILE, LeftOut, Results, read_results, write_results
from benchmarks.device.trial.fresh import ProcessFailed, call_fresh, run_fresh
from benchmarks.device.trial.learning import learn
from benchmarks.device.trial.machine import look, recognised
from benchmarks.device.trial.process import Asked
from edge_sdk.decide.costs.work import largest_groups
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from tests.unit.edge_sdk.machine import machines
from tests.waiting import HANGS_S, made_once

SMALL = ["--families", "mlp", "--levels", "1,0.25", "--threads", "1", "--batch", "8"]
TWO = [*SMALL, "--backends", "onnx", "--steps", "2", "--quick"]


@pytest.fixture(scope="module")
def kit(shared: Path) -> Path:
    def make(folder: Path) -> None:
        write_kit(folder, ["mlp"], levels=(1.0, 0.25), batch=8)

    return made_once(shared / "mlp-kit", make)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Jetson Nano's files; its rail says 2.5 W whatever happens."""
    return machines.jetson_nano(tmp_path_factory.mktemp("nano"))


WITHOUT_TORCH = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "coordinator", "sklearn"):
            raise ModuleNotFoundError(f"no {name} here", name=name)
sys.meta_path.insert(0, Gone())
from benchmarks.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(kit: Path, nano: Path, shared: Path) -> Path:
    """The folder of one run of the command on the Nano's sensors, where there is no torch."""

    def make(folder: Path) -> None:
        folder.mkdir()
        where = ["--kit", str(kit), "--root", str(nano), "--out", str(folder / "nano")]
        copy = ["--json", str(folder / "copy.json")]
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, "device", *TWO, *where, *copy],
            capture_output=True,
            text=True,
            timeout=HANGS_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return made_once(shared / "device-runs", make) / "nano"


def test_device_measures_every_case_and_writes_a_report(run: Path, kit: Path) -> None:
    results = read_results(run / FILE)
    assert results.complete
    assert results.provenance == "measured"
    assert [case.key for case in results.cases] == [
        ("mlp", 1.0, "onnx", 1),
        ("mlp", 0.25, "onnx", 1),
    ]
    plan, _ = read_task(kit, "mlp")
    for case in results.cases:
        assert case.parameters == plan.cost_at(case.level).parameters
        assert 0 < case.step_s.median <= case.round_s.median
        assert case.round_s.samples >= 3
        assert case.grown_bytes.value < case.peak_bytes.value
        assert case.predicted is not None
        by_name = {each.encoding: each for each in case.bytes}
        for name in ("fp32", "fp16", "int8", "top-k:0.1"):
            size = encoded_size(plan, largest_groups(plan, case.level), Encoding.parse(name))
            assert size < by_name[name].up < size + 512  # what a movement says besides
        assert by_name["top-k:0.1"].down is None
        weights = 4 * plan.cost_at(case.level).parameters
        assert weights < (by_name["fp32"].down or 0) < 1.2 * weights
    assert {path.name for path in run.iterdir()} >= {FILE, "report.md", "time.png", "energy.png"}
    assert read_results(run.parent / "copy.json") == results
    names = {figure["name"] for figure in json.loads((run / FILE).read_text())["figures"]}
    assert {"device.mlp.25.onnx.threads-1.round", "device.quick"} <= names


def test_device_reads_a_boards_own_sensors(run: Path, nano: Path) -> None:
    results = read_results(run / FILE)
    machine = results.machine
    assert machine.board == "jetson_nano"
    assert machine.model is not None
    assert "Jetson Nano" in machine.model
    assert machine.power_mode == "MAXN"
    assert machine.power_sensor is not None
    assert "POM_5V_IN" in machine.power_sensor
    assert machine.sensor_hz is not None
    watts = look(nano).probe.snapshot().power.total_watts
    assert watts is not None
    assert machine.idle_w is not None
    assert machine.idle_w.value == pytest.approx(watts)
    for case in results.cases:
        joules = case.joules
        assert joules is not None
        assert joules.provenance == "measured"
        # The rail never changes: what is drawn is watts × seconds, and nothing is above idle.
        assert joules.net == pytest.approx(0, abs=1e-9)
        assert joules.gross is not None
        # A mean over all rounds, of which half took the median or longer.
        assert joules.gross / watts >= 0.5 * case.round_s.median
        assert case.heat.highest_c == 38.5  # of the CPU; the PMIC's 100 °C are no temperature


def test_curves_are_real_trainings_that_cost_what_rounds_did(run: Path) -> None:
    results = read_results(run / FILE)
    full, quarter = results.curves
    assert (full.family, full.level, full.data) == ("mlp", 1.0, "digits")
    assert len(full.points) == len(quarter.points) == 12
    case = results.case(("mlp", 1.0, "onnx", 1))
    assert case is not None
    for number, point in enumerate(full.points, start=1):
        assert point.round == number
        assert point.seconds == pytest.approx(number * case.round_s.median)
        assert case.joules is not None
        assert case.joules.gross is not None
        assert point.joules == pytest.approx(number * case.joules.gross)


def test_level_learns_real_data(kit: Path) -> None:
    ask = Asked(
        folder=str(kit / "mlp"),
        backend="onnx",
        threads=1,
        levels=(0.25,),
        batch=8,
        steps=40,
        rounds=4,
    )
    first, *_, last = learn(kit, "mlp", kit_digits(kit), ask)
    assert last > max(0.7, first)


def test_resume_measures_only_what_is_missing(run: Path, kit: Path, nano: Path) -> None:
    whole = read_results(run / FILE)
    some = replace(whole, complete=False, cases=whole.cases[:1], curves=whole.curves[:1])
    assert [key[1] for key in missing(some)] == [0.25]
    assert missing_curves(some) == [("mlp", 0.25)]
    bench = Bench(kit, look(nano), kit_digits(kit), nano)
    begun: list[str] = []

    def begin(name: str) -> object:
        begun.append(name)
        return lambda: None

    *_, last = measure(bench, some, begin)  # type: ignore[arg-type]
    assert begun == ["mlp 25% onnx, 1 thread", "mlp 25% learns digits"]
    assert last.complete
    assert last.cases[0] == whole.cases[0]
    assert [case.key for case in last.cases] == [case.key for case in whole.cases]
    assert last.seconds > some.seconds
    # The same weights and data: a run that was interrupted learns the same.
    accuracies = [[point.accuracy for point in curve.points] for curve in last.curves]
    assert accuracies == [[point.accuracy for point in curve.points] for curve in whole.curves]


def test_interrupted_run_keeps_what_is_done(kit: Path, nano: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    program = "import sys; from benchmarks.cli import main; sys.exit(main(sys.argv[1:]))"
    where = ["--kit", str(kit), "--root", str(nano), "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", program, "device", *TWO, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "25% onnx" in line:  # the first case is kept, the second has begun
                os.killpg(process.pid, signal.SIGINT)
                break
        said, errors = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    results = read_results(folder / FILE)
    assert not results.complete
    assert [case.level for case in results.cases] == [1.0]
    assert "--resume" in errors
    assert (folder / "report.md").is_file()
    assert "mlp" in said


def place(kit: Path, out: Path, root: Path) -> list[str]:
    return ["--kit", str(kit), "--out", str(out), "--root", str(root)]


def test_resume_refuses_another_machine_and_other_options(
    run: Path, kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pi = machines.raspberry_pi_5(tmp_path / "pi")
    where = ["--kit", str(kit), "--out", str(run)]
    assert main(["device", "--resume", *where, "--root", str(pi)]) == 2
    assert "model was NVIDIA Jetson Nano" in capsys.readouterr().err
    assert main(["device", *where]) == 2
    assert "add --resume" in capsys.readouterr().err


def test_resume_refuses_other_data(
    run: Path, kit: Path, nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path
    text = (run / FILE).read_text(encoding="utf-8").replace('"data": "digits"', '"data": "mnist"')
    (copy / FILE).write_text(text, encoding="utf-8")
    assert main(["device", "--resume", *place(kit, copy, nano)]) == 2
    assert "started with the data 'mnist': give its --data" in capsys.readouterr().err


def test_torch_is_not_asked_for_where_there_is_none(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.device.commands.device.find_spec", lambda _: None)
    where = ["--kit", str(kit), "--out", str(tmp_path / "run")]
    assert main(["device", *where, "--backends", "torch"]) == 2
    assert "torch is not installed here" in capsys.readouterr().err
    assert main(["device", "--out", str(tmp_path / "run")]) == 2
    assert "give --kit DIR" in capsys.readouterr().err


def test_sensor_that_does_not_follow_the_training_is_told_of(run: Path) -> None:
    """The rail says 2.5 W at rest and while training."""
    for case in read_results(run / FILE).cases:
        assert case.joules is not None
        assert "POM_5V_CPU, which does not follow the training" in case.joules.source
        assert case.joules.net is not None
        assert case.joules.gross is not None
        assert case.joules.net == 0 or case.joules.net > 1e-9 * case.joules.gross


def test_resume_refuses_other_data_of_the_same_name(
    run: Path, kit: Path, nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = read_results(run / FILE)
    assert whole.config.samples == kit_digits(kit).samples
    copy = tmp_path
    fewer = replace(whole.config, samples=100)
    write_results(copy / FILE, replace(whole, config=fewer, curves=whole.curves[:1]), [])
    assert main(["device", "--resume", *place(kit, copy, nano)]) == 2
    assert "started with 100 samples of 'digits'" in capsys.readouterr().err


def test_resume_of_a_run_that_has_all_completes_it(
    run: Path, kit: Path, nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = read_results(run / FILE)
    copy = tmp_path
    write_results(copy / FILE, replace(whole, complete=False), [])  # it was ended just then
    assert (
        main(
            ["device", "--resume", *place(kit, copy, nano), "--json", str(tmp_path / "again.json")]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert "is complete" in printed.err
    assert "Incomplete" not in printed.out
    for path in (copy, tmp_path / "again.json"):
        assert read_results(path) == whole


def test_resume_tries_again_what_failed(kit: Path, nano: Path, run: Path, tmp_path: Path) -> None:
    copy = tmp_path
    whole = read_results(run / FILE)
    failed = replace(whole.curves[1], points=(), failed="no memory")
    left = LeftOut(family="mlp", level=0.25, backend="onnx", threads=1, why="no memory")
    some = replace(whole, cases=whole.cases[:1], left_out=(left,), curves=(whole.curves[0], failed))
    write_results(copy / FILE, some, [])
    assert main(["device", "--resume", *place(kit, copy, nano)]) == 0
    again = read_results(copy / FILE)
    assert [case.key for case in again.cases] == [case.key for case in whole.cases]
    assert (again.left_out, again.curves[1].failed) == ((), None)


def test_resume_refuses_other_options(
    run: Path, kit: Path, nano: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["device", "--resume", *TWO, "--steps", "3", *place(kit, run, nano)]) == 2
    assert "--steps 2, not 3" in capsys.readouterr().err


def test_case_that_does_not_fit_into_memory_is_left_out(
    run: Path, kit: Path, tmp_path: Path
) -> None:
    root = machines.jetson_nano(tmp_path / "full")
    bench = Bench(kit, look(root), None, root)
    empty = replace(_without_curves(read_results(run / FILE)), cases=(), complete=False)
    begun: list[str] = []

    def begin(name: str) -> object:
        if not begun:  # what the calibration found is gone when the case begins
            content = machines.kernel("0-3", 4_059_000, 3_000_000)
            machines.build(root, content)
        begun.append(name)
        return lambda: None

    meminfo = root / "proc/meminfo"
    results = empty
    for results in measure(bench, empty, begin):  # type: ignore[arg-type]  # noqa: B007
        text = meminfo.read_text().replace("MemAvailable:   3000000 kB", "MemAvailable:   9000 kB")
        meminfo.write_text(text)
    first, second = results.cases, results.left_out
    assert [case.level for case in first] == [1.0]
    assert "MB are free" in second[0].why
    assert results.complete


def test_case_whose_process_fails_is_left_out(run: Path, kit: Path, nano: Path) -> None:
    empty = replace(_without_curves(read_results(run / FILE)), cases=(), complete=False)
    broken = replace(empty.config, families=("vgg",), levels=(1.0,))
    bench = Bench(kit, look(nano), None, nano)
    *_, last = measure(bench, replace(empty, config=broken))
    [left] = last.left_out
    assert "calibrating failed" in left.why
    assert "vgg" in left.why


def test_process_that_is_killed_says_so() -> None:
    with pytest.raises(ProcessFailed, match="SIGKILL; the system does that where memory runs out"):
        call_fresh("os", "system", "kill -9 $PPID")


def test_torch_case_trains_the_same_submodel(kit: Path) -> None:
    ask = Asked(
        folder=str(kit / "mlp"), backend="torch", threads=1, levels=(0.25,), batch=8, steps=2
    )
    onnx, torch = (
        run_fresh("case", replace(ask, backend=name, sized=True)) for name in ("onnx", "torch")
    )
    assert torch["parameters"] == onnx["parameters"]
    assert torch["bytes"][0] == onnx["bytes"][0]
    assert torch["peak_bytes"] > onnx["peak_bytes"]  # torch alone is 200 MB


def test_kit_says_what_is_wrong(kit: Path, tmp_path: Path) -> None:
    with pytest.raises(KitError, match="tessera-bench kit --out"):
        read_kit(tmp_path)
    (tmp_path / "kit.json").write_text(
        '{"version": 9, "tessera": "1", "batch": 8, "levels": [1], "families": ["mlp"]}'
    )
    with pytest.raises(KitError, match="version 9"):
        read_kit(tmp_path)
    (tmp_path / "kit.json").write_text(
        '{"version": 1, "tessera": "1", "batch": 8, "levels": [1], "families": ["../x"]}'
    )
    with pytest.raises(KitError, match="is no family's name"):
        read_kit(tmp_path)
    (tmp_path / "kit.json").write_text('{"version": 1, "familes": []}')
    with pytest.raises(KitError, match="did you mean 'families'"):
        read_kit(tmp_path)


def test_kit_takes_the_place_of_its_older_self_alone(kit: Path, tmp_path: Path) -> None:
    copy = tmp_path / "kit"
    shutil.copytree(kit, copy)
    (copy / "bench-results").mkdir()
    with pytest.raises(KitError, match="at least 1 sample"):
        write_kit(copy, ["mlp"], batch=0)
    assert read_kit(copy).batch == 8
    write_kit(copy, ["mlp"], levels=(0.5,), batch=4)
    assert (read_kit(copy).batch, read_kit(copy).levels) == (4, (0.5,))
    assert (copy / "bench-results").is_dir()


def test_kit_is_not_written_over_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(KitError, match="is not a kit"):
        write_kit(tmp_path, ["mlp"])
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--families", "cnn"], "has no family 'cnn'"),
        (["--levels", "0.5"], "was made for levels 1.0, 0.25"),
        (["--batch", "16"], "batches of 8, not 16"),
        (["--update", "page.md"], "--update needs --emulate all"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--board", "raspbery_pi_4"], "did you mean 'raspberry_pi_4'"),
        (["--emulate", "jetson_nano"], "--root is for measuring"),
        (["--emulate", "all", "--root", "/"], "table of all needs cnn and sensor-cnn: make a kit"),
        (["--emulate", "all", "--root", "/", "--update", "no.md"], "no.md cannot be read"),
        (["--levels", "1,0.3"], "no level 0.3: models are cut into 4 groups, so levels are 0.25,"),
    ],
)
def test_device_says_what_is_wrong(
    options: list[str],
    words: str,
    kit: Path,
    nano: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--kit", str(kit), "--root", str(nano), "--out", str(tmp_path / "run")]
    assert main(["device", *where, *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Raspberry Pi 4 Model B Rev 1.4", "raspberry_pi_4"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3", "raspberry_pi_3b_plus"),
        ("NVIDIA Orin Nano Developer Kit", "jetson_orin_nano"),
        ("FriendlyElec NanoPi R4S", None),
        ("Somebody's Nano Board", None),
        ("NVIDIA Jetson Nano Developer Kit", "jetson_nano"),
        ("NVIDIA Jetson Orin Nano Developer Kit", "jetson_orin_nano"),
        ("Jetson-AGX", None),
        ("Intel(R) Xeon(R) Processor", None),
        (None, None),
    ],
)
def test_board_is_recognised_by_what_the_machine_calls_itself(
    model: str | None, name: str | None
) -> None:
    board = recognised(model)
    assert (None if board is None else board.name) == name


def test_board_with_other_memory_is_another_board() -> None:
    model = "NVIDIA Jetson Nano 2GB Developer Kit"
    assert recognised(model, 3.9e9) is not None
    assert recognised(model, 2e9) is None
    assert recognised("NVIDIA Jetson Orin Nano Developer Kit", 4e9) is None


def test_sensor_that_falls_silent_gives_no_joules(kit: Path, tmp_path: Path) -> None:
    root = machines.jetson_nano(tmp_path / "nano")
    ask = Asked(
        folder=str(kit / "mlp"),
        backend="onnx",
        threads=1,
        levels=(0.25,),
        batch=8,
        steps=2,
        rounds=3,
        root=str(root),
    )
    assert run_fresh("case", ask)["energy"] is not None
    [rail] = root.rglob("in_power0_input")
    rail.write_text("")
    assert run_fresh("case", ask)["energy"] is None


def test_machine_tells_its_clocks_and_fans(tmp_path: Path) -> None:
    root = machines.raspberry_pi_5(tmp_path)
    policy = "sys/devices/system/cpu/cpufreq/policy0"
    machines.build(
        root,
        {
            f"{policy}/scaling_governor": "performance\n",
            f"{policy}/scaling_min_freq": "2400000\n",
            f"{policy}/scaling_max_freq": "2400000\n",
            "sys/class/thermal/cooling_device0/type": "pwm-fan\n",
            "sys/class/thermal/cooling_device0/cur_state": "3\n",
            "sys/class/thermal/cooling_device0/max_state": "4\n",
        },
    )
    machine = look(root).machine
    assert machine.board == "raspberry_pi_5"
    [clock] = machine.clocks
    assert (clock.cores, clock.max_mhz, clock.governor, clock.pinned) == (
        4,
        2400,
        "performance",
        True,
    )
    assert machine.cooling == "pwm-fan at 3 of 4"
    assert look(root, cooling="a bucket of ice").machine.cooling == "a bucket of ice"


def _without_curves(results: Results) -> Results:
    return replace(results, curves=(), config=replace(results.config, learners=()))


def test_memory_does_not_grow_with_the_number_of_rounds(kit: Path) -> None:
    ask = Asked(folder=str(kit / "mlp"), backend="onnx", threads=1, levels=(1.0,), batch=8, steps=1)
    few, many = (run_fresh("case", replace(ask, rounds=rounds)) for rounds in (3, 60))
    # A movement of the whole model is 0.8 MB: fifty of them would show.
    assert many["grown_bytes"] < few["grown_bytes"] + 15e6
