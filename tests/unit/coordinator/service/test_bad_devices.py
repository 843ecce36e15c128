"""Bad devices at a coordinator over a broker in memory: refused, quarantined, not waited for."""

from __future__ import annotations

import threading

import pytest

from coordinator.aggregate.robust import Robust
from coordinator.cli import main
from coordinator.operate.control.quarantine import quarantine_commands
from coordinator.rounds.reputation import declines
from coordinator.service.admission.requests import Requests
from coordinator.service.service import Service
from edge_sdk.program.control import ControlSocket
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Outcome, Receipt
from tests.unit.coordinator.service.service_world import Worlds, rounds_config


def test_silent_device_holds_one_round_to_its_deadline(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=5, min_devices=3))
    good = world.add("a"), world.add("b")
    world.add("mute", sends=False)
    world.settle()
    assert world.state.round == 1
    world.wait(101)
    assert world.service.finished, "the other four rounds did not wait"
    assert all(each.verdicts == [(n, "counted") for n in range(1, 6)] for each in good)


@pytest.mark.parametrize("clip_norm", [None, 20.0], ids=["the past", "the bound"])
def test_huge_movement_is_refused_after_a_restart(worlds: Worlds, clip_norm: float | None) -> None:
    local = LocalRule(learning_rate=0.1, clip_norm=clip_norm)
    world = worlds.make(rounds_config(rounds=9, min_devices=2, local_rule=local))
    good, evil = world.add("good", value=0.1), world.add("evil", value=0.1, sends=False)
    world.settle()
    for round in range(1, 5):
        evil.value = 0.1 if round < 4 else 9.9e8  # of the next round
        evil.send(round)
    assert world.state.round == 5
    before = world.service.model.digest
    world.restart()
    assert world.service.model.digest == before
    evil.send(5)
    said = evil.all(Receipt)[-1]
    assert said.outcome is Outcome.REJECTED
    assert ("usually sends" if clip_norm is None else "by at most") in said.reason
    assert abs(world.service.model.theta).max() < 10
    assert good.verdicts[-1] == (5, "counted")


def test_quarantine_outlives_the_process_and_an_operator_ends_it(worlds: Worlds) -> None:
    config = rounds_config(rounds=99, min_devices=4, quarantine_after=2)
    world = worlds.make(config)
    good = [world.add(name, value=0.1, sends=False) for name in "abc"]
    evil = world.add("evil", value=50.0)
    world.settle()
    for round in (1, 2):
        for each in good:
            each.send(round)
    assert evil.verdicts == [(1, "rejected"), (2, "rejected"), (3, "rejected")]
    assert "quarantined since round 2, after 2 refusals" in evil.all(Receipt)[-1].reason
    assert [line["quarantined"] for line in world.history] == [[], ["evil"]]
    world.restart()
    standings = world.state.fleet.standings
    assert declines(standings, "evil")
    for each in good:
        each.send(3)
    assert evil.verdicts[-1] == (4, "rejected")
    world.service.helm.allow("evil", by="anna")
    world.settle()
    for each in good:
        each.send(4)
    assert "usually sends" in evil.all(Receipt)[-1].reason, "it was not asked to train"


def test_device_that_leads_away_is_quarantined_although_its_movements_are_of_usual_length(
    worlds: Worlds,
) -> None:
    robust = Robust(name="clip-median", agreement=-0.15)
    world = worlds.make(rounds_config(rounds=9, min_devices=6, robust=robust))
    good = [world.add(f"good-{number}", value=0.1, sends=False) for number in range(5)]
    evil = world.add("evil", value=-0.1)
    world.settle()
    for round in (1, 2, 3):
        for each in good:
            each.send(round)
        if round == 1:
            world.restart()
    assert [line["quarantined"] for line in world.history] == [[], [], ["evil"]]
    # Three rounds counted: one alone says little.
    assert [said for _, said in evil.verdicts[:3]] == ["counted"] * 3
    assert declines(world.state.fleet.standings, "evil").startswith(
        "quarantined since round 3: its movements point away"
    )


def test_quarantined_devices_are_listed_and_released_through_the_socket(
    worlds: Worlds, capsys: pytest.CaptureFixture[str]
) -> None:
    world = worlds.make(rounds_config(rounds=99, min_devices=4, quarantine_after=1))
    good = [world.add(name, value=0.1, sends=False) for name in "abc"]
    world.add("evil", value=50.0)
    world.settle()
    for each in good:
        each.send(1)
    requests: Requests[Service] = Requests()
    control = ControlSocket(world.folder, quarantine_commands(requests))
    control.start()
    stop = threading.Event()

    def answer() -> None:
        while not stop.wait(0.01):
            requests.serve(world.service)

    loop = threading.Thread(target=answer)
    loop.start()
    try:
        assert main(["quarantined", str(world.folder)]) == 0
        assert (
            "evil  since round 1, 1 refusals in a row; the last: block" in capsys.readouterr().out
        )
        assert main(["allow", str(world.folder), "stranger"]) == 2
        assert "'stranger' is not quarantined; quarantined devices: evil" in capsys.readouterr().err
        assert main(["allow", str(world.folder), "evil"]) == 0
        assert main(["quarantined", str(world.folder)]) == 0
        assert "no device is quarantined" in capsys.readouterr().out
    finally:
        stop.set()
        loop.join()
        control.close()
