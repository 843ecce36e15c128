"""Mask policies of one's own, by file.py:Class."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.errors import ConfigError
from coordinator.masks import check_masks, make_masks, masks_name
from coordinator.operate.config import read_config
from coordinator.task.graphs.child import locate
from tests.unit.coordinator.masks.fleet import chain, situation_of
from tests.unit.coordinator.service.service_world import PLAN, rounds_config

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples/coordinator/masks.py"
GOOD = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True, kw_only=True)
class Mine:
    uses_norms: ClassVar[bool] = False
    start: int = 0

    def __call__(self, situation):
        {call}

    def longest_gap(self, plan, levels):
        return None

def function():
    return 3
"""
CALL = "return {d: {a.name: (self.start,) for a in situation.plan.axes} for d in situation.levels}"


def written(folder: Path, text: str = GOOD, call: str = CALL) -> str:
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text).replace("{call}", call))
    return f"{path}:Mine"


def test_policy_of_a_file_is_made_with_its_options(tmp_path: Path) -> None:
    policy = make_masks(written(tmp_path), start=1)
    masks = policy(situation_of(chain((2, 2), (3, 3)), [0.5, 1.0]))
    assert masks == {f"d00{n}": {"h0": (1,), "h1": (1,)} for n in range(2)}
    assert masks_name(policy) == "Mine"
    with pytest.raises(ConfigError, match="strat is not a known key; did you mean 'start'"):
        make_masks(written(tmp_path), strat=1)


def test_example_keeps_to_the_contract() -> None:
    policy = make_masks(f"{EXAMPLE}:Striped", stride=3)
    plan = chain((2,) * 4, (3,) * 4)
    check_masks(policy, plan)
    first, second = (policy(situation_of(plan, [0.5], round=round)) for round in (1, 2))
    assert first != second


def test_file_is_relative_to_that_of_the_run(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(
        '[task]\nname = "t"\nsource = "task.py:make"\n[run]\nfolder = "run"\n'
        '[mask]\nname = "mine.py:Mine"\noptions = {start = 0}\n[broker]\nembedded = true\n'
    )
    machine = read_config(path, environment={}).machine(PLAN)
    assert masks_name(machine.masks) == "Mine"
    assert locate("package.module:Mine", tmp_path) == "package.module:Mine"
    assert locate("coverage", tmp_path) == "coverage"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("absent.py:Mine", "there is no file .*absent.py"),
        ("mine.py:Other", "has no class 'Other'"),
        ("mine.py:function", "this is function, not a class"),
        ("no.such.module:Mine", "there is no module 'no.such.module'"),
        ("mine.py:", "is 'path/to/file.py:class'"),
    ],
)
def test_reference_to_nothing_is_refused(tmp_path: Path, reference: str, says: str) -> None:
    written(tmp_path)
    with pytest.raises(ConfigError, match=says):
        make_masks(locate(reference, tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Mine:\n    uses_norms = False\n", "has no longest_gap"),
        ("class Mine:\n    longest_gap = None\n", "has no uses_norms"),
        ("class Mine:\n    uses_norms = longest_gap = None\n", "has no __call__"),
        ("class Mine(\n", "is not Python"),
        ("import no_such_thing\n", "imports 'no_such_thing'"),
        ("1 / 0\n", "cannot be loaded: ZeroDivisionError"),
    ],
)
def test_class_that_is_no_policy_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_masks(written(tmp_path, text))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("return {}", "every offering device"),
        ("return {d: {} for d in situation.levels}", "named for every axis"),
        (CALL.replace("(self.start,)", "()"), "at least one group"),
        (CALL.replace("(self.start,)", "(99,)"), "numbers from 0 to"),
        (CALL.replace("(self.start,)", "[0]"), "a tuple of numbers"),
        (CALL.replace("(self.start,)", "tuple(range(len(a.groups)))"), "more than it offers"),
        ("return situation.nothing", "failed on a made-up round: AttributeError"),
        (
            "import random; " + CALL.replace("self.start", "random.randrange(len(a.groups))"),
            "two answers to one situation",
        ),
    ],
)
def test_policy_that_breaks_the_contract_is_refused_before_the_run(
    tmp_path: Path, call: str, says: str
) -> None:
    policy = make_masks(written(tmp_path, call=call))
    plan = chain((1,) * 60, (1,) * 60)
    with pytest.raises(ConfigError, match=says):
        check_masks(policy, plan)


def test_run_with_a_policy_that_breaks_the_contract_is_refused(tmp_path: Path) -> None:
    policy = make_masks(written(tmp_path, call="return {}"))
    with pytest.raises(ConfigError, match="mask policy Mine: the answer is a dict"):
        replace(rounds_config(), masks=policy)
