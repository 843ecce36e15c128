"""How the demo deals out its data and its devices, and what it shows of them."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from coordinator.aggregate.rules import make_rule
from coordinator.cli import _demo_config, make_parser
from coordinator.errors import ConfigError
from coordinator.rounds.report import DeviceRound, RoundReport
from coordinator.simulate.demo.config import DemoConfig
from coordinator.simulate.demo.digits import deal, load_digits
from coordinator.simulate.demo.emulated import Chronicle, choose_members, emulate_all, moment_of
from coordinator.simulate.demo.run import (
    Demo,
    choose_masks,
    choose_policies,
    make_demo,
    run_full,
)
from coordinator.simulate.demo.view import as_json, screen, summarise, watch
from edge_sdk.decide.emulation.emulation import Moment
from edge_sdk.decide.emulation.fleet import find_fleet

CONFIG = DemoConfig(rounds=3, devices=4)
WATTS = {"galaxy-s23": 5.72, "jetson-nano": 10, "pixel-4": 5.72, "redmi-7a": 1.7}


@pytest.fixture(scope="module")
def demo() -> Demo:
    made = make_demo(CONFIG)
    watch(made, Console(file=io.StringIO()))
    return made


@pytest.fixture(scope="module")
def full(demo: Demo) -> Demo:
    ran = run_full(CONFIG, demo.initial)
    assert ran is not None
    return ran


def shown(width: int = 160, height: int = 40) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return Text.from_ansi(console.file.getvalue()).plain


def test_shares_are_the_same_for_the_same_seed() -> None:
    one, two, other = (deal(load_digits(seed).train, "abcdefgh", seed) for seed in (1, 1, 2))
    for a, b in zip(one.values(), two.values(), strict=True):
        assert np.array_equal(a.inputs[0], b.inputs[0])
        assert np.array_equal(a.targets, b.targets)
    assert any(len(one[name]) != len(other[name]) for name in one)


def test_digits_test_set_is_not_trained_on() -> None:
    digits = load_digits(0)
    assert len(digits.train) + len(digits.test) == 1797
    images = np.concatenate([digits.train.inputs[0], digits.test.inputs[0]])
    assert images.shape[1:] == (1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1


def test_data_is_dealt_out_by_name() -> None:
    digits = load_digits(0).train
    shares = deal(digits, ("a", "b", "c"), 0)
    assert list(shares) == ["a", "b", "c"]
    assert sum(len(share) for share in shares.values()) == len(digits)


# -- devices -------------------------------------------------------------------------------------


def test_members_are_spread_over_the_fleet_or_begin_anew() -> None:
    fleet = find_fleet("mixed")
    names = [member.name for member in fleet]
    assert list(choose_members(fleet, 8)) == names
    assert list(choose_members(fleet, 2)) == ["redmi-7a", "galaxy-s23"]
    assert list(choose_members(fleet, 1)) == ["redmi-7a"]
    many = choose_members(fleet, 18)
    assert list(many) == [*names, *(f"{name}-2" for name in names), "redmi-7a-3", "redmi-note-8-3"]
    assert many["redmi-7a-3"] is many["redmi-7a"] is fleet[0]
    clash = replace(fleet, members=(replace(fleet[0], name="a"), replace(fleet[1], name="a-2")))
    with pytest.raises(ConfigError, match="--devices 3: two would be called 'a-2'"):
        choose_members(clash, 3)


def moment(round: int, **values: float) -> Moment:
    zeros = {"opened_s": 0.0, "now_s": 0.0, "battery_j": 0.0, "train_s": 0.0, "train_j": 0.0}
    return Moment(round=round, **{**zeros, **values})


def test_moment_of_a_round_is_its_last_one() -> None:
    story = [moment(1), moment(1, train_s=5), moment(2, train_s=5), moment(4, train_s=9)]
    assert moment_of(story, 1) == story[1]
    assert moment_of(story, 3) == story[2]
    assert moment_of(story, None) == story[3]
    assert moment_of(story, 0) is moment_of([], None) is None


def test_chronicle_tells_what_each_round_took() -> None:
    fleet = find_fleet("mixed")
    emulations = emulate_all(fleet, choose_members(fleet, 8))
    chronicle = Chronicle({"pixel-4": emulations["pixel-4"]})
    device = DeviceRound("pixel-4", 0.5, "", bytes_down=34_500_000, bytes_up=26_300_000)
    report = RoundReport(
        round=1, devices=(device,), coverage_min=0, coverage_mean=0, trained_coverage_min=0,
        trained_blocks=0, thin_share=0.0, oldest_uncovered=0, gap_bound=None, oldest_memory=None,
        compression_noise=0, skip_share=0, longest_skip=0, seconds=0,
    )  # fmt: skip
    half_j = 0.5 * 10.8 * 3600
    first, second = (
        moment(1, battery_j=half_j, train_s=5, train_j=7),
        moment(2, train_s=6, train_j=9),
    )
    (lived,) = chronicle.close(report, {"pixel-4": first})
    assert (lived.train_s, lived.joules) == (5, 7)
    assert lived.transfer_s == pytest.approx(16)
    assert lived.percent == pytest.approx(50)
    (lived,) = chronicle.close(report, {"pixel-4": second})
    assert (lived.train_s, lived.joules, lived.percent) == (1, 2, 0)
    (lived,) = chronicle.close(report, {})
    assert (lived.train_s, lived.joules) == (0, 0)


def test_rounds_say_what_the_devices_lived_through(demo: Demo, full: Demo) -> None:
    names = [device.device for device in demo.rounds[0].report.devices]
    assert names == ["galaxy-s23", "jetson-nano", "pixel-4", "redmi-7a"]
    for done in demo.rounds:
        for device, lived in zip(done.report.devices, done.lived, strict=True):
            assert lived.train_s >= 0.999 * device.train_s  # more where a round was given up
            assert (lived.percent is None) == (device.device == "jetson-nano")
            assert lived.joules == pytest.approx(lived.train_s * WATTS[device.device])
        assert done.joules < done.full_joules
        assert done.train_s < done.full_train_s


def test_full_training_is_what_it_was_said_to_be(demo: Demo, full: Demo) -> None:
    assert all(device.level == 1 for done in full.rounds for device in done.report.devices)
    for done, every in zip(demo.rounds, full.rounds, strict=True):
        assert every.joules == pytest.approx(done.full_joules)
        assert every.train_s == pytest.approx(done.full_train_s)
        assert every.bytes_moved == pytest.approx(done.full_bytes, rel=1e-3)  # headers


@pytest.mark.parametrize("kind", ["tied", "alternate", "rotating"])
def test_demo_says_how_much_of_the_model_fragments_leave_out(
    demo: Demo, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    make_demo(DemoConfig(rule="fed-raa", mask_options={"fragments": kind}), demo.initial)
    said, plan = [record.getMessage() for record in caplog.records], demo.plan
    if kind != "tied":
        assert said == []
        return
    between = sum(
        int(plan.block_sizes[block])
        for block in range(plan.block_count)
        if len({group for _, group in plan.signature(block)}) > 1
    )
    (told,) = said
    assert f"{between / plan.parameters:.1%} of the parameters lie between tied" in told


@pytest.mark.parametrize("rule", ["ra-fed", "fedbuff"])
def test_demo_stops_when_its_accuracy_is_reached(demo: Demo, rule: str) -> None:
    ran = make_demo(DemoConfig(rounds=4, rule=rule, target_accuracy=0.01), demo.initial)
    assert len(list(ran.run())) == 1


def test_fragments_in_rounds_are_compared_with_whole_models(demo: Demo) -> None:
    config = DemoConfig(rounds=1, rule="ra-fed", mask="gre-raa")
    ran = make_demo(config, demo.initial)
    (done,) = ran.run()
    whole = run_full(config, demo.initial)
    assert whole is not None
    most = max(device.parameters for device in done.report.devices)
    trained = {device.parameters for device in whole.rounds[0].report.devices}
    assert trained == {demo.plan.parameters}
    assert 0 < most < demo.plan.parameters


def test_asynchronous_rule_has_no_full_training_to_compare_with() -> None:
    assert run_full(DemoConfig(rule="fed-raa")) is None


def test_asynchronous_devices_are_told_once_each(demo: Demo) -> None:
    console = shown()
    ran = make_demo(DemoConfig(rounds=1, rule="fed-raa"), demo.initial)
    watch(ran, Console(file=io.StringIO()))
    names = [device.device for device in ran.rounds[0].report.devices]
    assert len(names) > len(set(names)) == 8  # while others skip, some are there twice
    summarise(ran, console, plot=None)
    rows = text_of(console).split("\n")
    assert sorted(row.split()[0] for row in rows if row.startswith(tuple(names))) == sorted(
        set(names)
    )


def flags(*given: str) -> DemoConfig:
    return _demo_config(make_parser().parse_args(["demo", *given]))


def test_flags_give_recipes_presets_and_options_of_papers() -> None:
    config = flags("--recipe", "ram-fed-paper", "--preset", "MIX")
    assert (config.rule, config.mask, config.max_staleness) == ("ram-fed", "random", 1000)
    assert config.rule_options["damping"] == 1
    policies = choose_policies(config, ["a", "b", "c"])
    assert [each.offered_levels() for each in policies.values()] == [(0.5,), (0.25,), (0.5,)]
    with pytest.raises(ConfigError, match="there is no preset 'XL'"):
        choose_policies(flags("--preset", "XL"), ["a"])
    config = flags(
        "--rule", "ccfl-2", "--rule-option", "horizon=none", "--rule-option", "absent=zero"
    )
    rule, _ = choose_masks(config)
    assert rule == make_rule("ccfl-2", horizon="none", absent="zero")


def test_recipe_of_a_paper_with_a_preset_runs(demo: Demo) -> None:
    config = replace(flags("--recipe", "ram-fed-paper", "--preset", "S"), rounds=3, devices=4)
    ran = make_demo(config, demo.initial)
    watch(ran, Console(file=io.StringIO()))
    levels = [{each.level for each in done.report.devices} - {None} for done in ran.rounds]
    assert levels[0] == {1.0}  # the warm-up
    assert all(each <= {0.25} for each in levels[1:])
    told = as_json(ran)
    assert told["terms"]["regions"] == min(each["trained_regions"] for each in told["rounds"])
    assert told["preset"] == "S"


# -- what a person sees --------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (100, 12)])
def test_live_view_fits_the_terminal_and_says_why(demo: Demo, width: int, height: int) -> None:
    console = shown(width, height)
    console.print(screen(demo, width, height))
    text = text_of(console)
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "Round 3 of 3" in text
    assert re.search(r"galaxy-s23 +\d+ % +100% +\d+ +\d+ +full model: all of it", text)
    if height >= 24:
        assert "…" not in text.split("emulated:")[0]  # nothing is cut but the last line
        words = " ".join(text.split())
        for device in demo.rounds[-1].report.devices:
            assert device.reason.split()[-1] in words


def test_summary_fits_80_columns_and_cuts_nothing(demo: Demo, full: Demo) -> None:
    console = shown(80)
    summarise(demo, console, plot=None, full=full)
    text = text_of(console)
    _, rest = text.split("model sha256", 1)
    assert max(map(len, text.split("\n"))) <= 80
    assert "…" not in rest.split("\n", 1)[1]
    assert re.search(r"device +levels +trained +skipped +MB +seconds +kJ +battery", text)
    words = " ".join(text.split())
    for device in demo.rounds[-1].report.devices:
        assert f"{device.device} {device.reason}" in words or device.reason.split()[-1] in words
    assert "least coverage of a trained block" in words


def test_lines_tell_every_change_with_its_reason(demo: Demo) -> None:
    console = Console(file=io.StringIO())
    again = make_demo(CONFIG, demo.initial)
    watch(again, console)
    text = text_of(console)
    assert "A step stands for 1500 of theirs" in text
    assert len(re.findall(r"^round", text, re.MULTILINE)) == 3
    assert len(re.findall(r"^ +jetson-nano +mains +level 75 %", text, re.MULTILINE)) == 1
    assert [done.lived for done in again.rounds] == [done.lived for done in demo.rounds]


def test_summary_compares_with_everybody_training_everything(demo: Demo, full: Demo) -> None:
    console = shown()
    summarise(demo, console, plot=None, full=full)
    text = text_of(console)
    kj = sum(done.joules for done in full.rounds) / 1e3
    assert re.search(rf"energy of training +[\d.]+ kJ +{kj:.1f} kJ +\d+%", text)
    assert re.search(rf"accuracy +[\d.]+% +{full.rounds[-1].accuracy:.1%}", text)
    assert re.search(r"galaxy-s23 +100% +3 +0 .* 18 % → \d+ %", text)


def test_summary_has_a_row_for_every_level_and_marks_the_one_to_deploy(demo: Demo) -> None:
    console = shown()
    summarise(demo, console, plot=None)
    text = text_of(console)
    last = demo.rounds[-1].report
    assert [each.level for each in last.levels] == [1, 0.75, 0.5, 0.25]
    for each in last.levels:
        mark = "deploy" if each.level == last.deploy else ""
        row = (
            rf"^ *{each.level:.0%} +{each.parameters:,} +{each.accuracy:.1%} +{each.devices} "
            rf"+{each.data_share:.0%} *{mark} *$"
        )
        assert re.search(row, text, re.MULTILINE)
    assert f"level {last.deploy:.0%}, accuracy {last.best:.1%}" in text
    assert as_json(demo)["rounds"][-1]["deploy"] == last.deploy


def test_summary_without_a_second_run_says_that_it_is_modelled(demo: Demo) -> None:
    console = shown()
    summarise(demo, console, plot=None)
    text = text_of(console)
    kj = sum(done.full_joules for done in demo.rounds) / 1e3
    assert "all train everything (modelled)" in text
    assert re.search(rf"energy of training +[\d.]+ kJ +{kj:.1f} kJ", text)
    assert re.search(r"accuracy +[\d.]+% +not run", text)
