"""Devices drawn before they decide: in one process, and over Mosquitto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES
from coordinator.operate.broker.embedded import available, embedded_broker
from coordinator.run.folder import About, Run, create_run, read_history
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.simulate.federation import Federation, Member, MemberTimes
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.service import DeviceService
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.wire import decode_message
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.transport.link import Connected, LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.coordinator.service.service_world import PLAN, TASK, rounds_config, saved_model
from tests.waiting import until

SAVED = saved_model()
ABOUT = About(task=TASK, run="0123456789abcdef", source="t.py:f", batch_size=4)


def data(number: int) -> ArrayData:
    random = np.random.default_rng(number)
    inputs = random.normal(size=(12, 4)).astype(np.float32)
    return ArrayData((inputs,), random.integers(0, 3, size=12))


def backend() -> OnnxBackend:
    return OnnxBackend(SAVED.plan, SAVED.manifest, SAVED.files)


@pytest.mark.parametrize("time", ["none", "profile"])
def test_of_a_hundred_devices_ten_are_heard_in_a_round(time: str) -> None:
    config = rounds_config(
        rule=RULES["ccfl-2"](), participants=10, rounds=6, min_devices=100, min_participants=0
    )
    policy = Policy(participation=0.5, schedule="ad-hoc")
    members = [
        Member(f"device-{number:02}", policy, data(number), times=MemberTimes(step_s=number))
        for number in range(100)
    ]
    model = GlobalModel(PLAN, SAVED.weights, SAVED.buffers)
    virtual = time == "profile"
    run = Federation(config, model, backend, members, time="profile" if virtual else "none")
    reports = list(run.run())
    assert [len(report.devices) for report in reports] == [10] * 6
    heard = {device.device for report in reports for device in report.devices}
    assert len(heard) > 30
    for report in reports:
        trained = sum(device.level is not None for device in report.devices)
        assert report.skip_share == pytest.approx(1 - trained / 10)
    # The slowest device of each round is what it waits for, in virtual time.
    assert (reports[-1].time_s is not None) is virtual


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
def test_invited_devices_train_over_mosquitto_and_the_others_stay_silent(tmp_path: Path) -> None:
    """With control variates, which the broker brings too; the bits are those of one process."""
    names, overheard = ("one", "two", "three"), list[LinkEvent]()
    create_run(tmp_path / "run", ABOUT, SAVED)
    with ExitStack() as stack:
        settings = stack.enter_context(embedded_broker(tmp_path / "broker", kind="mosquitto"))
        run = Run(tmp_path / "run")
        stack.callback(run.close)
        machine = rounds_config(
            rule=RULES["scaffold"](),
            **{"participants": 1, "rounds": 6, "steps": 3, "min_devices": 3, "bid_s": 600.0},
        )
        config = ServiceConfig(
            machine=machine,
            down=Encoding(),
            keeping=Keeping(),
            chunk_bytes=1024,
        )
        service = Service(run, config, open_link=partial(open_link, settings))
        stack.callback(service.close)
        watcher = open_link(settings, name="watcher", deliver=overheard.append)
        stack.callback(watcher.close)
        watcher.subscribe(Topics(TASK).up_controls)
        until(lambda: any(isinstance(each, Connected) for each in overheard))
        for number, name in enumerate(names):
            stack.enter_context(device(name, tmp_path, settings, data(number)))
        service.serve(Event())
    heard = [decode_message(each.payload) for each in overheard if isinstance(each, Received)]
    bids = [(each.round, each.device) for each in heard if isinstance(each, Bid)]
    history = [
        (round["round"], line["device"])
        for round in read_history(tmp_path / "run")
        for line in round["devices"]
    ]
    assert set(bids) == set(history)
    assert [round for round, _ in history] == [1, 2, 3, 4, 5, 6]
    assert len({name for _, name in history}) > 1
    model = GlobalModel(PLAN, SAVED.weights, SAVED.buffers, seed=machine.seed)
    members = [Member(name, Policy(), data(number)) for number, name in enumerate(names)]
    assert len(list(Federation(machine, model, backend, members).run())) == 6
    assert service.model.digest == model.digest


@contextmanager
def device(
    name: str, folder: Path, settings: BrokerSettings, own: ArrayData
) -> Iterator[DeviceService]:
    """A device at work in a thread."""
    config = DeviceConfig(
        task=TASK,
        name=name,
        state_dir=folder / name,
        broker=settings,
        weigh=False,
        seed=rounds_config().seed,
    )
    service = DeviceService(config, own)
    thread = Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()
