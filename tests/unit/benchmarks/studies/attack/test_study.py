"""The study of attacks: which runs it asks for, what it concludes, and real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cli import main
from benchmarks.device.report.page import update_page
from benchmarks.report.figures import render_json
from benchmarks.report.options import UsageError
from benchmarks.studies.attack.attackers import ABSENT, ATTACKS, NO_ATTACK
from benchmarks.studies.attack.defences import DEFENCES, NO_DEFENCE, RECOMMENDED
from benchmarks.studies.attack.page import BEGIN, render_tables
from benchmarks.studies.attack.record import append_attack, read_attacks
from benchmarks.studies.attack.settings import DEVICES, SETTINGS
from benchmarks.studies.attack.study import AIMED, AttackStudy, WantedAttacks
from benchmarks.studies.attack.trial import AttackOutcome, AttackTrial, run_attack
from benchmarks.studies.attack.watching import Watch
from benchmarks.studies.levels.settings import data_of
from edge_sdk.protocol.plan.blocks import select_blocks
from edge_sdk.protocol.plan.plan import Groups, ModelPlan

PLACE = ("digits", "ra-fed", DEVICES)
DOCS = Path(__file__).parents[5] / "docs"


def outcome(attack: str, defence: str, accuracy: float, seed: int = 0) -> AttackOutcome:
    """An outcome in which honest devices had 2 of 400 movements refused."""
    case = AttackTrial(*PLACE, attack, defence, ATTACKS[attack].weighting, seed)
    return AttackOutcome(
        case=case,
        accuracy={"1": accuracy, "0.5": 0.5, "0.25": 0.25},
        rounds=30,
        honest=400,
        honest_refused=2,
        hostile=100,
        hostile_refused=90,
        honest_quarantined=0,
        hostile_quarantined=3,
        backdoor=0.4 if attack.startswith("backdoor") else None,
        few_share=0.1,
        few=-0.5,
        many=0.75,
        round_s=0.02,
        seconds=1.0,
    )


def study(*outcomes: AttackOutcome) -> AttackStudy:
    return AttackStudy({each.case: each for each in outcomes})


FOUND = study(
    outcome(NO_ATTACK, NO_DEFENCE, 0.90),
    outcome(NO_ATTACK, RECOMMENDED, 0.89),
    outcome(ABSENT, NO_DEFENCE, 0.89),
    outcome("sign-flip", NO_DEFENCE, 0.10),
    outcome("sign-flip", RECOMMENDED, 0.88),
    outcome("noise", RECOMMENDED, 0.80),
    outcome("backdoor", RECOMMENDED, 0.88),
)


def test_loss_is_against_the_run_with_neither_attackers_nor_defence() -> None:
    assert FOUND.lost(PLACE, "sign-flip", RECOMMENDED) == pytest.approx(2)
    assert FOUND.lost(PLACE, NO_ATTACK, RECOMMENDED) == pytest.approx(1)
    assert FOUND.lost(PLACE, "scaling", RECOMMENDED) is None
    seeds = study(
        outcome(NO_ATTACK, NO_DEFENCE, 0.90),
        outcome("noise", RECOMMENDED, 0.80),
        outcome("noise", RECOMMENDED, 0.10, seed=1),  # nothing to compare it with
    )
    assert seeds.lost(PLACE, "noise", RECOMMENDED) == pytest.approx(10)


def test_figures_name_the_aims_and_their_targets() -> None:
    figures = {figure.name: figure for figure in FOUND.figures()}
    flip = figures["attack.ra-fed.all.sign-flip.lost"]
    assert flip.value == pytest.approx(2)
    assert (flip.unit, flip.target, flip.better) == ("points", 3.0, "lower")
    assert flip.met
    assert not figures["attack.ra-fed.all.noise.lost"].met
    assert figures["attack.ra-fed.all.backdoor.success"].value == pytest.approx(40)
    refused = figures["attack.honest_refused"]
    assert refused.value == pytest.approx(0.5)
    assert (refused.target, refused.better) == (1.0, "lower")
    assert "attack.ra-fed.all.scaling.lost" not in figures
    assert render_json(list(figures.values()), {})
    # The worst setting counts.
    worse = {
        replace(case, setting="har"): replace(each, case=replace(case, setting="har"))
        for case, each in study(
            outcome(NO_ATTACK, NO_DEFENCE, 0.9), outcome("sign-flip", RECOMMENDED, 0.7)
        ).outcomes.items()
    }
    both = AttackStudy({**FOUND.outcomes, **worse})
    figures = {figure.name: figure for figure in both.figures()}
    assert figures["attack.ra-fed.all.sign-flip.lost"].value == pytest.approx(20)


def test_page_shows_accuracies_refusals_and_what_was_not_run() -> None:
    text = render_tables(FOUND)
    assert f"| **{RECOMMENDED}** | 89.0 | – | 88.0 | 80.0 | 88.0 |" in text
    assert "| none | 90.0 | 89.0 | 10.0 | – | – |" in text
    assert "| digits, ra-fed, all a round | 2.0 | 1.0 | – | – | 10.0 | 9.0 | 0.50 % |" in text
    assert f"| **{RECOMMENDED}** | 0.50 % | 0.50 % | 90.00 % | 1,600 | 0 | 9 |" in text
    assert f"| backdoor | **{RECOMMENDED}** | 40.0 |" in text
    assert "Never run, attacks: scaling, label-flip," in text


def test_runs_without_attackers_come_first_and_match_the_weights_of_the_attack() -> None:
    wanted = WantedAttacks(
        settings=("digits",),
        rules=("ra-fed",),
        drawn=(DEVICES,),
        attacks=("sign-flip", "claimed-samples"),
        defences=(RECOMMENDED,),
    )
    cases = list(wanted.cases())
    assert len(cases) == len(set(cases)) == wanted.count()
    assert [(case.attack, case.weighting) for case in cases if case.defence == NO_DEFENCE] == [
        (NO_ATTACK, "uniform"),
        (NO_ATTACK, "samples"),
        ("sign-flip", "uniform"),
        ("claimed-samples", "samples"),
    ]
    done = {case: outcome(NO_ATTACK, NO_DEFENCE, 0.5) for case in cases[:3]}
    assert wanted.next_case(done) == cases[3]
    assert wanted.next_case(dict.fromkeys(cases, next(iter(done.values())))) is None


def test_record_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "attack.jsonl"
    assert read_attacks([path]) == {}
    first, second = outcome("noise", NO_DEFENCE, 0.5), outcome("noise", RECOMMENDED, 0.6)
    append_attack(path, first)
    with path.open("a") as file:
        file.write('{"case": {"sett')
    assert list(read_attacks([path]).values()) == [first]
    path.write_text('{"other": 1}\n{"other": 2}\n')
    with pytest.raises(UsageError, match="line 1"):
        read_attacks([path])
    path.unlink()
    append_attack(path, first)
    append_attack(path, second)
    assert list(read_attacks([path]).values()) == [first, second]


def test_page_of_the_study_agrees_with_its_record(tmp_path: Path) -> None:
    page = tmp_path / "attacks.md"
    page.write_text((DOCS / "attacks.md").read_text(encoding="utf-8"), encoding="utf-8")
    found = AttackStudy(read_attacks([DOCS / "attacks.jsonl"]))
    update_page(page, render_tables(found), BEGIN)
    assert page.read_text(encoding="utf-8") == (DOCS / "attacks.md").read_text(encoding="utf-8")


def test_page_explains_every_attack_and_defence() -> None:
    text = (DOCS / "attacks.md").read_text(encoding="utf-8")
    told = [(name, each.tells) for name, each in ATTACKS.items()]
    told += [(name, each.tells) for name, each in DEFENCES.items()]
    for name, words in told:
        assert f"| `{name}` | {words} |" in text


@pytest.fixture(scope="module")
def plan() -> ModelPlan:
    setting = SETTINGS["digits"].base
    return setting.task(data_of(setting, None), 0).plan


def test_agreement_is_the_cosine_with_honest_devices_by_coverage(plan: ModelPlan) -> None:
    draws = np.random.default_rng(0)
    whole, narrow = plan.full_groups(), {axis.name: (0,) for axis in plan.axes}
    moves = {name: draws.standard_normal(plan.parameters).astype(np.float32) for name in "abcd"}
    groups: dict[str, Groups] = {"a": whole, "b": narrow, "c": narrow, "d": whole}
    inside = np.repeat(plan.covers(plan.choose(narrow)), plan.block_sizes)
    watch = Watch(plan, 0.5)
    for name, each in groups.items():
        ids = plan.block_ids(plan.choose(each))
        watch.made[name] = select_blocks(moves[name], ids, plan.block_offsets)
    before = np.zeros(plan.parameters, np.float32)
    after = draws.standard_normal(plan.parameters).astype(np.float32)
    watch.closed(before, after, counted=set("abcd"), honest=set("abc"))
    # Blocks of the narrow submodel have four devices, the others two: a, and d who is hostile.
    mean = np.where(inside, (moves["a"] + moves["b"] + moves["c"]) / 3, moves["a"])

    def cosine(rows: np.ndarray, step: np.ndarray) -> float:
        return float(step[rows] @ mean[rows]) / float(
            np.linalg.norm(step[rows]) * np.linalg.norm(mean[rows])
        )

    assert watch.few == [pytest.approx(cosine(~inside, after), rel=1e-4)]
    assert watch.many == [pytest.approx(cosine(inside, after), rel=1e-4)]
    assert watch.few_share == [pytest.approx((~inside).mean())]
    # The server's momentum is none of the next round's movements.
    for name, each in groups.items():
        ids = plan.block_ids(plan.choose(each))
        watch.made[name] = select_blocks(moves[name], ids, plan.block_offsets)
    further = draws.standard_normal(plan.parameters).astype(np.float32)
    watch.closed(after, after + 0.5 * after + further, counted=set("abcd"), honest=set("abc"))
    assert watch.many[1] == pytest.approx(cosine(inside, further), rel=1e-3)


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = SETTINGS["digits"]
    short = replace(setting, base=replace(setting.base, rounds=2, steps=1))
    monkeypatch.setitem(SETTINGS, "digits", short)


@pytest.mark.usefixtures("_short")
def test_honest_run_follows_honest_devices_exactly_and_repeats_itself() -> None:
    case = AttackTrial("digits", "ra-fed", DEVICES, NO_ATTACK, NO_DEFENCE)
    found = run_attack(case, None)
    assert found.many == pytest.approx(1, abs=1e-4)
    assert (found.few, found.few_share) == (None, 0.0)
    assert (found.rounds, found.honest, found.hostile) == (2, 2 * DEVICES, 0)
    assert found.honest_refused == 0
    assert set(found.accuracy) == {"1", "0.5", "0.25"}
    again = run_attack(case, None)
    assert replace(again, seconds=0, round_s=0) == replace(found, seconds=0, round_s=0)


@pytest.mark.usefixtures("_short")
def test_hostile_run_is_led_astray_and_counts_movements_of_both_kinds() -> None:
    flip = run_attack(AttackTrial("digits", "ram-fed", 10, "sign-flip", NO_DEFENCE), None)
    assert flip.honest + flip.hostile == 20
    assert flip.many is not None
    assert flip.many < 0.99
    assert flip.backdoor is None
    claimed = AttackTrial("digits", "ra-fed", DEVICES, "claimed-samples", NO_DEFENCE, "samples")
    found = run_attack(claimed, None)
    assert found.hostile == 2


def test_command_lists_what_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attack", "--defences", "list", "--rules", "list"]) == 0
    rules, defences = capsys.readouterr().out.splitlines()
    assert rules.startswith("--rules: ")
    assert defences.startswith("--defences: none, ")


def test_command_refuses_nonsense_before_it_runs_anything(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record = ["--record", str(tmp_path / "none.jsonl")]
    for arguments, said in (
        (["--attacks", "sign-flop"], "unknown 'sign-flop'; --attacks are none, absent"),
        (["--drawn", "21"], "at most 20"),
        (["--settings", "har"], "--data is not given"),
        (["--update", str(tmp_path / "no.md")], "cannot be read"),
    ):
        assert main(["attack", *record, *arguments]) == 2
        assert said in capsys.readouterr().err


def test_command_shows_a_record_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, written = tmp_path / "attack.jsonl", tmp_path / "attack.json"
    for each in FOUND.outcomes.values():
        append_attack(record, each)
    files = ["--record", str(record), "--json", str(written)]
    assert main(["attack", *files, "--limit-min", "0"]) == 0
    assert "Backdoors" in capsys.readouterr().out
    document = json.loads(written.read_text(encoding="utf-8"))
    assert document["command"] == "attack"
    names = {figure["name"] for figure in document["figures"]}
    assert {f"attack.ra-fed.all.{name}.lost" for name in AIMED} - names == {
        "attack.ra-fed.all.scaling.lost"
    }
    assert len(document["runs"]) == len(FOUND.outcomes)
