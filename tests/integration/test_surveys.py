"""Devices that compute the statistics of every level: in one process, and over Mosquitto."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import AsyncRule, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import About, Run, create_run, read_history, read_result
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.simulate.federation import Federation, Member, MemberTimes
from coordinator.task.export import export_model
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.levels import LevelScore, LevelScores
from coordinator.task.saved_model import SavedModel
from coordinator.task.task import Task, make_task
from edge_sdk import Model
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.observer import Observer
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.participation import TakingPart, load_task
from edge_sdk.device.service.service import DeviceService
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import Logbook
from edge_sdk.device.transfer.fetching import Fetcher, PulledModel
from edge_sdk.machine.snapshot import MemoryState
from edge_sdk.protocol.chunks import Blob, split_blob
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.survey import encode_statistics
from edge_sdk.protocol.messages.transfer import Evaluation, TaskNotice
from edge_sdk.protocol.packs.index import encode_index, pack_model
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.inference import ExportedModel
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.statistics import survey_rows
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.integration.federations import random_data
from tests.messages import make_opening
from tests.unit.edge_sdk.decide.test_observer import Shown
from tests.unit.edge_sdk.device.test_examining import MAINS, Forward

ABOUT = About(task="tiny", run="0123456789abcdef", source="t.py:f", batch_size=8)
LEVELS, SAMPLES, BATCH = (1.0, 0.5), 16, 8
DEVICES = {"big": (1.0, 40), "half": (0.5, 21), "tiny": (0.5, 5)}
"""Level and samples of each: more than a survey wants, and less than a batch."""


def network(first: int, second: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, first), nn.BatchNorm1d(first), nn.Tanh(), nn.Linear(first, second),
        nn.BatchNorm1d(second), nn.Tanh(), nn.Linear(second, 3),
    )  # fmt: skip


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_task(network(16, 8), torch.randn(4, 6), groups=4)


@pytest.fixture(scope="module")
def saved(task: Task) -> SavedModel:
    graphs = compile_graphs(task, levels=LEVELS, batch_sizes=(BATCH,))
    return SavedModel(task.plan, task.weights, task.buffers, graphs.manifest, graphs.files)


def own_data() -> dict[str, ArrayData]:
    random = np.random.default_rng(3)
    return {name: random_data(random, samples) for name, (_, samples) in DEVICES.items()}


def members(**changes: Any) -> list[Member]:
    data = own_data()
    return [
        Member(name, Policy(level=level), data[name], **changes)
        for name, (level, _) in DEVICES.items()
    ]


def rounds(task: Task, **changes: Any) -> RoundsConfig:
    """No rescale, so that a level is a plain torch module."""
    usual: dict[str, Any] = {
        "plan": task.plan,
        "rule": make_rule("ra-fed"),
        "masks": make_masks("nested"),
        "local_rule": LocalRule(learning_rate=0.1, rescale=0.0, widths="sandwich"),
        "steps": 2,
        "batch_size": BATCH,
        "min_devices": 3,
        "min_participants": 3,
        "seed": 3,
        "rounds": 3,
        "levels": LEVELS,
        "survey_every": 2,
        "survey_samples": SAMPLES,
        "bid_s": 600.0,
        "train_deadline_s": 600.0,
    }
    return RoundsConfig(**{**usual, **changes})


def federation(task: Task, saved: SavedModel, config: Any = None, **options: Any) -> Federation:
    return Federation(
        rounds(task) if config is None else config,
        GlobalModel(task.plan, task.weights, task.buffers),
        lambda: OnnxBackend(task.plan, saved.manifest, saved.files),
        options.pop("members", None) or members(),
        **{"runtime": task.traced, **options},
    )


def seen_by_torch(weights: Mapping[str, Array], names: list[str]) -> dict[str, Array]:
    """Mean and variance of all that torch's own BatchNorm layers see of these devices' batches."""
    model = network(len(weights["0.weight"]), len(weights["3.weight"]))
    fresh = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    model.load_state_dict({**model.state_dict(), **fresh})
    model.train()
    seen: dict[str, list[Array]] = {"1": [], "4": []}

    def note(name: str, given: torch.Tensor) -> None:
        seen[name].append(given.detach().double().numpy())

    for name in seen:
        model[int(name)].register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
    data = own_data()
    for device in names:
        rows = survey_rows(len(data[device]), SAMPLES)
        whole = len(rows) // BATCH * BATCH or len(rows)
        for at in range(0, whole, BATCH):
            batch = data[device].inputs[0][rows[:whole][at : at + BATCH]]
            with torch.no_grad():
                model(torch.from_numpy(batch))
    found = {f"{name}.running_mean": np.concatenate(rows).mean(0) for name, rows in seen.items()}
    return found | {
        f"{name}.running_var": np.concatenate(rows).var(0) for name, rows in seen.items()
    }


def expect_statistics_of_torch(model: GlobalModel, level: LevelScore, names: list[str]) -> None:
    wanted = seen_by_torch(model.plan.cut(model.weights, level.groups), names)
    assert level.statistics.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(level.statistics[name], array, rtol=1e-5, atol=1e-6)


def expect_exports(saved: SavedModel, model: GlobalModel, levels: LevelScores, to: Path) -> None:
    """Every level can be exported, and answers as a torch module with its statistics would."""
    result = SavedModel(
        model.plan, model.weights, model.buffers, saved.manifest, saved.files, levels
    )
    x = own_data()["big"].inputs[0]
    for each in levels.levels:
        path = to / f"{each.level:g}.onnx"
        part = export_model(result, "onnx", path, level=each.level)
        assert (part.statistics_devices, part.statistics_share) == (3, 1.0)
        weights = model.plan.cut(model.weights, each.groups)
        oracle = network(len(weights["0.weight"]), len(weights["3.weight"])).eval()
        arrays = {**weights, **each.statistics}
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        oracle.load_state_dict({**oracle.state_dict(), **tensors})
        wanted = oracle(torch.from_numpy(x)).detach().numpy()
        exported = ExportedModel(path)
        np.testing.assert_allclose(
            exported.predict({"x0": x}).outputs, wanted, rtol=1e-4, atol=1e-5
        )
        facts = exported._session.get_modelmeta().custom_metadata_map
        assert facts["tessera.statistics_devices"] == "3"
        assert facts["tessera.statistics_share"] == "1"


@pytest.mark.parametrize("virtual", [False, True])
def test_every_level_is_evaluated_and_exportable_without_data_here(
    task: Task, saved: SavedModel, tmp_path: Path, virtual: bool
) -> None:
    run = federation(
        task,
        saved,
        time="profile" if virtual else "none",
        members=members(times=MemberTimes(step_s=1.0, latency_s=0.1) if virtual else None),
        threads=2,
    )
    reports = list(run.run())
    known = [[each.accuracy is not None for each in report.levels] for report in reports]
    assert known == [[False] * 2, [True] * 2, [True] * 2]  # every second round, and the last one
    assert reports[-1].deploy in LEVELS
    for each in reports[-1].levels:
        assert (each.statistics_devices, each.statistics_share) == (3, 1.0)
    for level in run.levels.levels:
        expect_statistics_of_torch(run.model, level, list(DEVICES))
    expect_exports(saved, run.model, run.levels, tmp_path)
    if virtual:  # forward passes take time, but less than the training of a round
        ends = [report.time_s or 0.0 for report in reports]
        assert ends[1] - ends[0] > ends[0]


def test_survey_changes_neither_the_model_nor_a_run_without_one(
    task: Task, saved: SavedModel
) -> None:
    surveyed, plain = federation(task, saved), federation(task, saved, runtime=None)
    for run in (surveyed, plain):
        list(run.run())
    assert surveyed.model.digest == plain.model.digest
    assert all(not each.statistics for each in plain.levels.levels)


def test_share_of_the_data_is_that_of_devices_which_could_run_the_level(
    task: Task, saved: SavedModel
) -> None:
    poor = replace(MAINS, memory=MemoryState(available_bytes=150e6))
    fleet = [
        replace(each, observe=lambda _: Observer(Policy(), Shown(poor), Forward()))
        if each.name == "big"
        else each
        for each in members()
    ]
    run = federation(task, saved, rounds(task, rounds=1), members=fleet)
    (report,) = run.run()
    whole, half = report.levels
    assert (whole.statistics_devices, whole.statistics_share) == (2, 26 / 66)
    assert (half.statistics_devices, half.statistics_share) == (3, 1.0)
    expect_statistics_of_torch(run.model, run.levels.levels[0], ["half", "tiny"])
    expect_statistics_of_torch(run.model, run.levels.levels[1], list(DEVICES))


def test_level_that_no_device_can_run_has_no_statistics(
    task: Task, saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices without a graph for it: the reports say so, and the export."""
    real = task.traced.moments

    def narrow_only(*args: Any, groups: Any, **options: Any) -> Any:
        if groups == task.plan.all_groups():
            raise ConfigError("too wide for this runtime")
        return real(*args, groups=groups, **options)

    monkeypatch.setattr(type(task.traced), "moments", lambda _, *a, **o: narrow_only(*a, **o))
    run = federation(task, saved, rounds(task, rounds=1))
    (report,) = run.run()
    whole, half = report.levels
    assert (whole.statistics_devices, whole.statistics_share, whole.accuracy) == (0, 0.0, None)
    assert half.statistics_devices == 3
    assert report.deploy == 0.5
    assert not run.levels.levels[0].statistics
    swapped = LevelScores((LevelScore(0.5, half_groups(run), statistics_devices=0),), 0.0)
    result = SavedModel(
        task.plan, run.model.weights, run.model.buffers, saved.manifest, saved.files, swapped
    )
    with pytest.raises(ConfigError, match="no device could run it"):
        export_model(result, "onnx", tmp_path / "half.onnx", level=0.5)


def half_groups(run: Federation) -> Any:
    return run.levels.levels[1].groups


def test_asynchronous_run_is_surveyed_at_its_end(task: Task, saved: SavedModel) -> None:
    rule = make_rule("fed-raa")
    assert isinstance(rule, AsyncRule)
    config = FragmentsConfig(
        plan=task.plan,
        rule=rule,
        masks=make_masks("gre-raa"),
        local_rule=LocalRule(learning_rate=0.1, rescale=0.0),
        steps=1,
        batch_size=BATCH,
        min_devices=3,
        seed=3,
        updates=6,
        levels=(1.0,),
        survey_samples=SAMPLES,
    )
    run = federation(task, saved, config)
    reports = list(run.run())
    assert [each.levels[0].statistics_devices for each in reports] == [None, 3]
    assert reports[-1].accuracy is not None
    expect_statistics_of_torch(run.model, run.levels.levels[0], list(DEVICES))


class Given(Fetcher):
    """Chunks that are here already."""

    def __init__(self, chunks: dict[bytes, bytes]) -> None:
        self._chunks = chunks

    def fetch(
        self,
        hashes: Sequence[bytes],
        *,
        take: Callable[[bytes, bytes], object] | None = None,
        **_: Any,
    ) -> Any:
        found = {hash: self._chunks[hash] for hash in hashes}
        if take is not None:
            for hash, chunk in found.items():
                take(hash, chunk)
        return found


def test_evaluation_in_a_round_uses_the_statistics_of_its_opening(
    task: Task, saved: SavedModel, tmp_path: Path
) -> None:
    plan, chunks = task.plan, dict[bytes, bytes]()

    def blob(data: bytes) -> Blob:
        made, pieces = split_blob(data, 4096)
        chunks.update(pieces)
        return made

    encoded = encode_model(plan, plan.flatten(task.weights), Encoding(), stream(0))
    index, packed = pack_model(plan, encoded, dict(task.buffers), 4096)
    chunks.update(packed)
    wanted = seen_by_torch(task.weights, ["big"])
    notice = TaskNotice(
        task=ABOUT.task,
        run=ABOUT.run,
        plan=blob(plan.encoded),
        manifest=blob(saved.manifest.encoded),
        graphs={name: blob(file) for name, file in saved.files.items()},
        chunk_bytes=4096,
    )
    opening = make_opening(
        plan_hash=plan.hash,
        run=ABOUT.run,
        model=blob(encode_index(plan, index)),
        statistics=blob(encode_statistics({1.0: wanted, 0.5: {}})),
    )
    config = DeviceConfig(
        task=ABOUT.task,
        name="big",
        state_dir=tmp_path,
        weigh=False,
        evaluate_every=1,
        policy=Policy(participation=1e-9),
    )
    fetcher = Given(chunks)
    part = TakingPart(
        notice,
        config,
        own_data()["big"],
        task=load_task(notice, config, fetcher.fetch_blob),
        model=PulledModel(plan, fetcher),
        folder=tmp_path / "run",
        state=tmp_path,
        probe=None,
        should_stop=lambda: False,
        fetch=fetcher.fetch_blob,
        household=Household(tmp_path, "big"),
        book=Logbook(ABOUT.task, tmp_path),
    )
    part.receive(opening)  # it skips
    (said,) = part.evaluate_if_due()
    assert isinstance(said, Evaluation)
    oracle, data = network(16, 8).eval(), own_data()["big"]
    arrays = {**task.weights, **wanted}
    tensors = {name: torch.tensor(np.asarray(array, "f4")) for name, array in arrays.items()}
    oracle.load_state_dict({**oracle.state_dict(), **tensors})
    outputs = oracle(torch.from_numpy(data.inputs[0])).detach()
    loss = nn.functional.cross_entropy(outputs, torch.from_numpy(data.targets))
    assert said.loss == pytest.approx(float(loss), rel=1e-4)
    assert said.accuracy == np.mean(outputs.numpy().argmax(1) == data.targets)


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
def test_survey_over_mosquitto_outlives_a_coordinator_that_is_killed_in_it(
    task: Task, saved: SavedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    create_run(folder, ABOUT, saved)
    config = ServiceConfig(
        machine=rounds(task, survey_s=600.0), down=Encoding(), keeping=Keeping(), chunk_bytes=1024
    )
    data = own_data()
    with ExitStack() as stack:
        settings = stack.enter_context(embedded_broker(tmp_path / "broker", kind="mosquitto"))
        run = Run(folder)
        service = Service(run, config, open_link=partial(open_link, settings))
        for name, (level, _) in DEVICES.items():
            stack.enter_context(device(name, tmp_path, settings, data[name], level))
        while service.course.surveying.deadline is None:  # until the first survey is said
            service.pump()
            time.sleep(0.002)
        assert [line["round"] for line in read_history(folder)] == [1]
        service.kill()
        run.close()
        run = Run(folder)
        stack.callback(run.close)
        service = Service(run, config, open_link=partial(open_link, settings))
        stack.callback(service.close)
        service.serve(Event())
    history = list(read_history(folder))
    assert [line["round"] for line in history] == [1, 2, 3]
    known = [[level["statistics_devices"] for level in line["levels"]] for line in history]
    assert known == [[None, None], [3, 3], [3, 3]]
    assert all(level["statistics_share"] == 1.0 for level in history[-1]["levels"])
    result, calm = read_result(folder), federation(task, saved)
    reports = list(calm.run())
    assert service.model.digest == calm.model.digest
    told = [[level["accuracy"] for level in line["levels"]] for line in history]
    assert told == [[level.accuracy for level in report.levels] for report in reports]
    for score, other in zip(result.levels.levels, calm.levels.levels, strict=True):
        expect_statistics_of_torch(service.model, score, list(DEVICES))
        for name, array in other.statistics.items():  # by torch there, by onnxruntime here
            np.testing.assert_allclose(score.statistics[name], array, rtol=1e-5, atol=1e-6)
    expect_exports(saved, service.model, result.levels, tmp_path)
    for name, (level, _) in DEVICES.items():  # each has its level, with the statistics of it
        kept = Model.open(tmp_path / name, ABOUT.task)
        assert kept.level in (level, 0.5)
        for buffer, array in result.levels.by_level[kept.level].statistics.items():
            assert kept.delivered.buffers[buffer].tobytes() == array.tobytes()
    assert "1.running_mean" in result.buffers
    whole = result.levels.by_level[1.0].statistics["1.running_mean"]
    assert result.buffers["1.running_mean"].tobytes() == whole.tobytes()


@contextmanager
def device(
    name: str, folder: Path, settings: BrokerSettings, own: ArrayData, level: float
) -> Iterator[None]:
    """A device at work in a thread."""
    config = DeviceConfig(
        task=ABOUT.task,
        name=name,
        state_dir=folder / name,
        broker=settings,
        weigh=False,
        seed=3,
        evaluate_every=1,
        deliver_margin=1.0,
        policy=Policy(level=level),
    )
    service = DeviceService(config, own)
    thread = Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        service.stop()
        thread.join()
