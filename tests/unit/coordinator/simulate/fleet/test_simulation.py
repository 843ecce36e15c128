"""Simulated fleets: presence, drop-outs, what is spent; training in one process or two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES, make_rule
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig, RoundsState
from coordinator.simulate.federation import Federation, Member
from coordinator.simulate.fleet.cohorts import CohortTraining
from coordinator.simulate.fleet.engines.engine import TrainingEngine
from coordinator.simulate.fleet.population import (
    DeviceKind,
    DevicePopulation,
    load_population,
    population_of,
)
from coordinator.simulate.fleet.shared import DealtData, deal_out
from coordinator.simulate.fleet.simulation import FleetRound, FleetSimulation, reached
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.fleet import find_fleet
from edge_sdk.machine.board import find_board
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import Outcome
from edge_sdk.train.onnx import OnnxBackend
from tests.unit.coordinator.service.service_world import (
    PLAN,
    fragments_config,
    rounds_config,
    saved_model,
)

SAVED = saved_model()


def pis(count: int, **more: Any) -> DeviceKind:
    return DeviceKind(board=find_board("raspberry_pi_4"), name="pi", count=count, **more)


def simulation(population: DevicePopulation, config: Any = None, **more: Any) -> FleetSimulation:
    model = GlobalModel(PLAN, SAVED.weights, SAVED.buffers, seed=7)
    usual = rounds_config(min_devices=1, rounds=3)
    return FleetSimulation(usual if config is None else config, model, population, **more)


def dealt(devices: int) -> DealtData:
    random = np.random.default_rng(1)
    inputs = random.normal(size=(devices * 9, 4)).astype(np.float32)
    data = ArrayData((inputs,), random.integers(0, 3, size=devices * 9))
    return deal_out(data, np.array_split(random.permutation(devices * 9), devices))


def trained(
    population: DevicePopulation,
    config: Any,
    *,
    processes: int = 1,
    cohort: int = 3,
    engine: TrainingEngine | None = None,
) -> tuple[str, list[FleetRound]]:
    shares = dealt(len(population))
    names = {name: place for place, (name, _) in enumerate(population.devices())}
    with CohortTraining(
        PLAN,
        SAVED.manifest,
        SAVED.files,
        shares,
        names,
        seed=config.seed,
        processes=processes,
        cohort=cohort,
        engine=engine,
    ) as training:
        run = simulation(population, config, training=training, samples=shares.counts())
        rounds = list(run.run())
    return run.model.digest, rounds


def test_bits_do_not_depend_on_processes_or_cohorts() -> None:
    population = DevicePopulation(
        kinds=(
            pis(5, policy=Policy(level=0.5)),
            DeviceKind(board=find_board("raspberry_pi_5"), count=4, latency_s=0.3),
        )
    )
    config = rounds_config(
        rule=RULES["ram-fed"](), masks=make_masks("random"), min_devices=9, rounds=3, steps=2
    )
    (alone, rounds), (together, others), (larger, _) = (
        trained(population, config),
        trained(population, config, processes=2),
        trained(population, config, cohort=50),
    )
    assert alone == together == larger
    assert [told(each) for each in rounds] == [told(each) for each in others]


def told(round: FleetRound) -> tuple[float, int, list[tuple[str, float | None, float | None]]]:
    """Lines of a round's report, without the time that it took here."""
    lines = [(line.device, line.level, line.loss) for line in round.report.devices]
    return round.time_s, round.trainings, lines


@pytest.mark.parametrize(
    ("up", "rule"), [("fp32", "ra-fed"), ("int8", "ra-fed"), ("int8", "scaffold")]
)
def test_fleet_learns_what_a_federation_of_whole_apps_learns(up: str, rule: str) -> None:
    population = DevicePopulation(kinds=(pis(4, policy=Policy(level=0.75)),))
    config = rounds_config(
        rule=RULES[rule](), min_devices=4, rounds=3, steps=3, up=Encoding.parse(up)
    )
    digest, _ = trained(population, config)
    shares = dealt(4)
    members = [
        Member(
            name,
            Policy(level=0.75),
            ArrayData(
                tuple(x[shares.part(place)] for x in shares.data.inputs),
                shares.data.targets[shares.part(place)],
            ),
        )
        for place, (name, _) in enumerate(population.devices())
    ]
    model = GlobalModel(PLAN, SAVED.weights, SAVED.buffers, seed=7)
    federation = Federation(
        config, model, lambda: OnnxBackend(PLAN, SAVED.manifest, SAVED.files), members
    )
    assert len(list(federation.run())) == 3
    assert model.digest == digest


@pytest.mark.parametrize(("rule", "parts"), [("ra-fed", 1), ("scaffold", 2)])
def test_bytes_are_those_of_the_submodels_and_devices_without_work_stay_asleep(
    rule: str, parts: int
) -> None:
    """With control variates, the global one comes down beside the model."""
    population = DevicePopulation(kinds=(pis(30),))
    config = rounds_config(rule=RULES[rule](), min_devices=30, rounds=4, participants=3)
    run = simulation(population, config)
    last = list(run.run())[-1]
    size = encoded_size(PLAN, PLAN.full_groups(), Encoding())
    assert last.trainings == 12
    assert last.bytes_down == parts * last.bytes_up == parts * 12 * size
    assert last.metered_bytes == last.money == 0
    assert sum(device.awake for device in run.devices.values()) <= 12


def test_money_is_the_price_of_metered_bytes() -> None:
    limits = {"allow_metered": True}
    policy = Policy(limits=type(Policy().limits)(**limits))  # type: ignore[arg-type]
    kind = DeviceKind(
        board=find_board("pixel_4"),
        battery_percent=(90.0, 90.0),
        network="mobile",
        policy=policy,
    )
    (last,) = simulation(
        DevicePopulation(kinds=(kind,), price_per_gb=5e6), rounds_config(min_devices=1, rounds=1)
    ).run()
    assert last.metered_bytes == last.bytes_down + last.bytes_up > 0
    assert last.money == pytest.approx(5e6 * last.metered_bytes / 1e9)


def test_device_that_drops_out_leaves_comes_back_and_counts() -> None:
    population = DevicePopulation(kinds=(pis(3, drop_out=1.0, back_s=40.0),))
    config = rounds_config(min_devices=3, rounds=2, away_s=500.0, train_deadline_s=5000.0)
    run = simulation(population, config)
    rounds = list(run.run())
    # Everybody vanishes once in every round, and does the work the second time.
    assert run.spending.dropped == 6
    assert run.spending.trainings == 6
    assert [each.time_s for each in rounds] == pytest.approx([40, 80], abs=5)
    assert all(line.level is not None for each in rounds for line in each.report.devices)


def test_device_that_is_gone_too_long_is_a_skip() -> None:
    population = DevicePopulation(kinds=(pis(2), DeviceKind(
        board=find_board("raspberry_pi_5"), drop_out=1.0, back_s=4000.0
    )))  # fmt: skip
    run = simulation(population, rounds_config(min_devices=2, rounds=2, away_s=5.0))
    first, second = run.run()
    assert sum(line.level is not None for line in first.report.devices) == 2
    assert first.time_s == pytest.approx(5, abs=1)
    # The second round opens without it.
    assert len(second.report.devices) == 2


def test_trace_says_who_is_there(tmp_path: Path) -> None:
    (tmp_path / "there.csv").write_text("a,0,500\nb,0,3\nb,100,500\nc,400,500\n")
    (tmp_path / "fleet.toml").write_text(
        'trace = "there.csv"\nrepeat_s = 500\n[[kinds]]\nboard = "raspberry_pi_4"\ncount = 3\n'
    )
    population = load_population(tmp_path / "fleet.toml")
    config = rounds_config(min_devices=2, rounds=40, away_s=1.0)
    run = simulation(population, config)
    rounds = iter(run.run())
    first = next(rounds)
    assert [line.device for line in first.report.devices] == [
        "raspberry-pi-4-0",
        "raspberry-pi-4-1",
    ]
    there = [(each.time_s, len(each.report.devices)) for each in rounds]
    # From 3 s to 100 s the second device is gone, and one alone is too few.
    assert not [time_s for time_s, _ in there if 5 < time_s < 100]
    assert {count for time_s, count in there if 100 < time_s < 400} <= {2}
    state = run.state
    assert isinstance(state, RoundsState)
    assert state.round >= 40


def test_asynchronous_fleet_applies_updates_in_order_of_their_arrival() -> None:
    population = DevicePopulation(
        kinds=(pis(1, latency_s=10.0), DeviceKind(board=find_board("raspberry_pi_5"), name="five"))
    )
    run = simulation(population, fragments_config(updates=20, min_devices=2))
    lines = [line.device for each in run.run() for line in each.report.devices]
    assert lines.count("five") > 5 * lines.count("pi")


def test_fleet_that_trains_at_night_alone_gets_through_the_day() -> None:
    phone = DeviceKind(
        board=find_board("pixel_4"),
        count=4,
        battery_percent=(20.0, 20.0),
        charging_hours=(22 * 60, 6 * 60),
    )
    fleet = simulation(
        DevicePopulation(kinds=(phone,), starts=7 * 60),
        rounds_config(min_devices=1, rounds=2000, bid_s=60.0),
    )
    first = next(fleet.run())
    assert 15 * 3600 <= first.time_s < 16 * 3600
    assert len(fleet.lowest_percents()) == 4
    assert all(0 < percent < 20 for percent in fleet.lowest_percents().values())


def test_fleet_that_never_trains_is_given_up_after_a_day() -> None:
    phone = DeviceKind(board=find_board("pixel_4"), count=2, battery_percent=(20.0, 20.0))
    fleet = simulation(
        DevicePopulation(kinds=(phone,)), rounds_config(min_devices=1, rounds=100_000, bid_s=60.0)
    )
    with pytest.raises(CoordinatorError, match=r"too long: pixel-4-0: skip: battery"):
        list(fleet.run())


def test_asynchronous_fleet_that_never_trains_is_given_up_too() -> None:
    phone = DeviceKind(board=find_board("pixel_4"), count=3, battery_percent=(20.0, 20.0))
    config = fragments_config(updates=20, min_devices=2, rest_s=600.0)
    with pytest.raises(CoordinatorError, match=r"too long: pixel-4-0: skip: battery"):
        list(simulation(DevicePopulation(kinds=(phone,)), config).run())


def test_first_round_with_an_accuracy_is_found() -> None:
    accuracies = iter([0.2, 0.6, 0.5, 0.9])
    config = rounds_config(min_devices=2, rounds=4)

    def evaluate(_: GlobalModel, levels: Any) -> Any:
        from dataclasses import replace

        accuracy = next(accuracies)
        return replace(
            levels, levels=tuple(replace(each, accuracy=accuracy) for each in levels.levels)
        )

    rounds: Sequence[FleetRound] = list(
        simulation(DevicePopulation(kinds=(pis(2),)), config, evaluate=evaluate).run()
    )
    found = reached(rounds, 0.55)
    assert found is rounds[1]
    assert reached(rounds, 0.95) is None


def test_late_movement_enters_memory() -> None:
    population = DevicePopulation(
        kinds=(pis(2), DeviceKind(board=find_board("raspberry_pi_5"), name="far", latency_s=30.0))
    )
    config = rounds_config(
        rule=RULES["ram-fed"](), min_devices=3, rounds=8, train_deadline_s=45.0, bid_s=80.0
    )
    run = simulation(population, config)
    seen = set()
    for _ in run.run():
        state = run.state
        assert isinstance(state, RoundsState)
        seen |= {each.outcomes.get("far") for each in state.past.values()}
    assert Outcome.MEMORY in seen


def test_shipped_fleet_becomes_a_population() -> None:
    fleet = find_fleet("mixed")
    population = population_of(fleet, 21)
    assert len(population) == 21
    assert [kind.count for kind in population.kinds] == [3, 3, 3, 3, 3, 2, 2, 2]
    assert len(population_of(fleet)) == len(fleet)
    names = [name for name, _ in population.devices()]
    assert len(set(names)) == 21


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[kinds]]\nboard = "pixel_4"', "pixel_4 has a battery"),
        ('[[kinds]]\nboard = "pixel_4"\nbattery_percent = [80, 20]', "lower first"),
        ('[[kinds]]\nboard = "pixel_4"\nbattery_percent = "full"', "a number, or two"),
        ('[[kinds]]\nboard = "raspberry_pi_4"\ncount = 0', "count = 0"),
        ('[[kinds]]\nboard = "raspberry_pi_4"\nwifi_hours = "08:00-09:00"', "mobile"),
        ('[[kinds]]\nboard = "raspberry_pi_4"\nbatery = 3', "unknown|batery"),
        ('starts = "12:00"', "kinds"),
        ('repeat_s = 5\n[[kinds]]\nboard = "raspberry_pi_4"', "no trace"),
        ('[[kinds]]\nboard = "raspberry_pi_4"\n[[kinds]]\nboard = "raspberry_pi_4"', "two are"),
    ],
)
def test_impossible_population_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_population(tmp_path / "fleet.toml")


def test_wrong_numbers_are_refused() -> None:
    population = DevicePopulation(kinds=(pis(2),))
    with pytest.raises(ConfigError, match="min_devices is 5"):
        simulation(population, rounds_config(min_devices=5))
    with pytest.raises(ConfigError, match="samples are given for 3"):
        simulation(population, samples=[1, 2, 3])
    with pytest.raises(ConfigError, match="dealt to 3 devices"):
        CohortTraining(PLAN, SAVED.manifest, SAVED.files, dealt(3), {"pi-0": 0}, seed=0)
    with pytest.raises(CoordinatorError, match="has not started"):
        _ = simulation(population).state
    config: RoundsConfig = rounds_config(min_devices=2, up=Encoding.parse("top-k:0.5"))
    with pytest.raises(CoordinatorError, match="top-k"):
        trained(population, config)


@pytest.mark.parametrize(("horizon", "warns"), [(3, True), ("none", False)])
def test_horizon_that_drops_many_old_movements_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, horizon: Any, warns: bool
) -> None:
    population = DevicePopulation(
        kinds=(pis(6, policy=Policy(participation=1 / 8, schedule="ad-hoc")),)
    )
    config = rounds_config(
        rule=make_rule("ccfl-2", horizon=horizon),
        masks=make_masks("random"),
        min_devices=6,
        rounds=30,
        min_participants=0,
    )
    rounds = list(simulation(population, config).run())
    told = [each.getMessage() for each in caplog.records if "horizon" in each.getMessage()]
    before = [each for each in told if "drops about 67%" in each]
    after = [each for each in told if "skips so far did not count" in each]
    assert (len(before), len(after), len(told)) == ((1, 1, 2) if warns else (0, 0, 0))
    assert (sum(each.report.outdated for each in rounds) > 0) == warns
    reports = [each.report for each in rounds]
    terms = rounds[-1].terms
    assert terms.coverage == min(each.trained_coverage_min or 99 for each in reports)
    assert terms.regions == min(each.trained_regions for each in reports) == 0
    assert terms.staleness == max(each.oldest_memory or 0 for each in reports)


def test_ccfl_1_without_an_age_limit_replays_what_is_older_than_max_staleness() -> None:
    population = DevicePopulation(
        kinds=(pis(3, policy=Policy(participation=1 / 8, phase="common")),)
    )

    def replays(horizon: Any) -> list[int]:
        config = rounds_config(
            rule=make_rule("ccfl-1", horizon=horizon, absent="zero"),
            masks=make_masks("random"),
            min_devices=3,
            rounds=9,
            min_participants=0,
            max_staleness=2,
        )
        rounds = simulation(population, config).run()
        return [sum(line.replayed for line in each.report.devices) for each in rounds]

    assert replays("none") == [0, 3, 3, 3, 3, 3, 3, 3, 0]
    assert replays(8) == [0, 3, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({"coverage": 1}, (1, 4, 3)),
        ({"coverage": 2, "staleness": 7}, (2, 4, 6)),
        ({"regions": 1}, (10, 1, 3)),
        ({"coverage": 2, "staleness": "none"}, (2, 4, 11)),
    ],
)
def test_run_has_the_terms_that_its_schedule_is_told(
    options: dict[str, Any], terms: tuple[int, int, int]
) -> None:
    """At the end of a round, memory has just been renewed: its age is one less than the wait."""
    levels = Policy(level=0.25, levels=(0.25,))
    config = rounds_config(
        rule=make_rule("ram-fed", warmup_rounds=1),
        masks=make_masks("scheduled", **options),
        min_devices=10,
        rounds=12,
    )
    *_, last = simulation(DevicePopulation(kinds=(pis(10, policy=levels),)), config).run()
    assert (last.terms.coverage, last.terms.regions, last.terms.staleness) == terms
