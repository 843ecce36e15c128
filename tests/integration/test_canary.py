"""Canary delivery over Mosquitto: devices try models, vote, and go back."""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.run.folder import Run, create_run, read_history
from coordinator.service.outgoing.canary import CanarySettings, CanaryState
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.task.saved_model import SavedModel
from coordinator.task.task import Task
from edge_sdk.device.delivering import Judgement
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.train.delivered import Model, read_delivered
from edge_sdk.transport.opening import open_link
from tests.integration.federations import random_data
from tests.integration.test_delivery import ABOUT, configured, device
from tests.integration.test_surveys import rounds, saved, task  # noqa: F401  fixtures
from tests.waiting import HANGS_S

NAMES = ("one", "two", "three", "four")


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
def test_worse_model_is_rolled_back_on_the_devices_that_tried_it(
    task: Task,  # noqa: F811
    saved: SavedModel,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first model is promoted; later ones are worse, by what the devices measure.

    The coordinator is killed after an answer to the first model.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("edge_sdk.device.service.training_thread.DELIVERY_S", 0.05)
    monkeypatch.setattr("edge_sdk.device.service.training_thread.RETRY_S", 0.05)
    folder = tmp_path / "run"
    create_run(folder, ABOUT, saved)
    first: list[int] = []

    def told() -> list[tuple[str, int]]:
        lines = [each["canary"] for each in read_history(folder) if "canary" in each]
        return [(each["what"], each["round"]) for each in lines]

    def judged(model: Model, *_: object) -> Judgement:
        first[:] = first or [told()[0][1]]
        return Judgement(0.8 if model.delivered.round == first[0] else 0.3, 1.0)

    monkeypatch.setattr("edge_sdk.device.delivering.judge", judged)
    config = ServiceConfig(
        machine=rounds(task, min_devices=4, min_participants=4),
        down=Encoding(),
        keeping=Keeping(keep_last=1),
        chunk_bytes=1024,
        canary=CanarySettings(share=0.3, min_devices=2),
    )
    random = np.random.default_rng(5)

    def held() -> dict[str, int]:
        paths = {name: tmp_path / name / ABOUT.task / name / "model.bin" for name in NAMES}
        return {name: read_delivered(path).round for name, path in paths.items() if path.exists()}

    def pumped(service: Service, done: Any) -> None:
        until = time.monotonic() + HANGS_S
        while not done():
            assert time.monotonic() < until, (told(), held())
            service.pump()
            time.sleep(0.002)

    def answered(state: CanaryState) -> bool:
        return state.decided > 0 or (state.trial is not None and bool(state.trial.votes))

    with ExitStack() as stack:
        broker = stack.enter_context(embedded_broker(tmp_path / "broker", kind="mosquitto"))
        for name in NAMES:
            changes: dict[str, Any] = {"stay": True, "evaluate_every": 1, "deliver_margin": 1.0}
            stack.enter_context(
                device(
                    configured(name, tmp_path / name, broker, **changes), random_data(random, 20)
                )
            )
        with Run(folder) as run:
            service = Service(run, config, open_link=partial(open_link, broker))
            rollout = service._parts.rollout
            assert rollout is not None
            pumped(service, lambda: answered(rollout.state))
            service.kill()
        with Run(folder) as run:
            service = Service(run, config, open_link=partial(open_link, broker))
            rollout = service._parts.rollout
            assert rollout is not None
            pumped(service, lambda: service.finished and not rollout.undecided)
            pumped(service, lambda: held() == dict.fromkeys(NAMES, first[0]))
            service.close()
    (begun, promoted, *later) = told()
    assert (begun, promoted) == (("started", first[0]), ("promoted", first[0]))
    assert later[-1][0] == "rolled_back"
    assert {what for what, _ in later} == {"started", "rolled_back"}
    ready = re.findall(r"the model of round (\d+), level \S+, is ready", caplog.text)
    tried = {int(each) for each in ready} - set(first)
    assert tried, "nobody had a later model"
    assert ready.count(str(first[0])) > len(NAMES), "nobody returned to the first one"


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
def test_devices_that_leave_at_the_end_of_a_run_have_its_last_model(
    task: Task,  # noqa: F811
    saved: SavedModel,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They judge late, so the last model is made while an earlier one is on trial."""
    monkeypatch.setattr("edge_sdk.device.service.training_thread.DELIVERY_S", 1.0)
    monkeypatch.setattr("edge_sdk.device.service.training_thread.RETRY_S", 0.05)
    monkeypatch.setattr("edge_sdk.device.delivering.judge", lambda *_: Judgement(0.5, 1.0))
    folder, names = tmp_path / "run", NAMES[:2]
    create_run(folder, ABOUT, saved)
    config = ServiceConfig(
        machine=rounds(task, rounds=4, min_devices=2, min_participants=2),
        down=Encoding(),
        keeping=Keeping(),
        chunk_bytes=1024,
        canary=CanarySettings(share=0.5, min_devices=1),
    )
    random = np.random.default_rng(5)
    with ExitStack() as stack:
        broker = stack.enter_context(embedded_broker(tmp_path / "broker", kind="mosquitto"))
        threads = [
            stack.enter_context(
                device(
                    configured(name, tmp_path / name, broker, evaluate_every=2),
                    random_data(random, 20),
                )
            )
            for name in names
        ]
        run = stack.enter_context(Run(folder))
        service = Service(run, config, open_link=partial(open_link, broker))
        service.serve(threading.Event())
        for thread in threads:
            thread.join(HANGS_S)
            assert not thread.is_alive()
        service.close()
    paths = [tmp_path / name / ABOUT.task / name / "model.bin" for name in names]
    assert [read_delivered(path).round for path in paths] == [4, 4]
