"""The profiles that ship: every number sourced, derivations that add up, a page that is current."""

from __future__ import annotations

import ast
import operator
import re
from pathlib import Path

import pytest

from devices.table import MARKS, device_table, provenance_table, read_profiles, tables
from edge_sdk.decide.emulation.fleet import find_fleet, load_fleet
from edge_sdk.machine.board import (
    SECTIONS,
    find_board,
    load_board,
    render_board,
    shipped_boards,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "devices.md"

WANTED = {
    "pixel_4", "pixel_6", "pixel_8", "galaxy_s10", "galaxy_s23", "redmi_note_8", "redmi_7a",
    "iphone_14",
    "jetson_nano", "jetson_tx2", "jetson_xavier_nx", "jetson_agx_xavier", "jetson_orin_nano",
    "jetson_orin_nx", "jetson_agx_orin",
    "raspberry_pi_zero_2_w", "raspberry_pi_3b_plus", "raspberry_pi_4", "raspberry_pi_5",
}  # fmt: skip

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(text: str) -> float:
    """The value of an expression of numbers, + - × / and parentheses; nothing else is one."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return float(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        assert isinstance(node, ast.Constant), f"{text!r} is no arithmetic"
        assert isinstance(node.value, int | float), f"{text!r} is no arithmetic"
        return float(node.value)

    return value(ast.parse(text.replace("×", "*"), mode="eval").body)


def test_named_devices_ship() -> None:
    assert set(shipped_boards()) >= WANTED


@pytest.mark.parametrize("name", shipped_boards())
def test_profile_gives_what_the_emulator_needs(name: str) -> None:
    board = find_board(name)
    assert board.name == name
    for quantity in (
        board.memory.app_mb,
        board.speed.speed_ratio,
        board.speed.one_core_ratio,
        board.power.train_w,
        board.network.up_mbit_s,
        board.network.down_mbit_s,
    ):
        assert quantity is not None
    assert (board.battery is not None) == (board.kind == "phone")
    assert (board.heat.throttle_c is None) == (board.heat.sensor is None)


@pytest.mark.parametrize("name", shipped_boards())
def test_derived_numbers_show_arithmetic_that_gives_them(name: str) -> None:
    derived = [(key, q) for key, q in find_board(name).quantities() if q.provenance == "derived"]
    assert derived
    for key, quantity in derived:
        found = re.match(r"= ([^:]+): \S", quantity.source)
        assert found, f"{key}: a derived number's source starts with '= arithmetic: '"
        assert calculate(found[1]) == pytest.approx(quantity.value, rel=0.005), key


@pytest.mark.parametrize("name", shipped_boards())
def test_assumed_numbers_say_why(name: str) -> None:
    for key, quantity in find_board(name).quantities():
        if quantity.provenance == "assumed":
            assert len(quantity.source.split()) > 5, f"{key}: give the reasoning"


@pytest.mark.parametrize("name", shipped_boards())
def test_profile_is_written_as_write_board_does(name: str) -> None:
    text = shipped_boards()[name].read_text(encoding="utf-8")
    assert render_board(find_board(name)) == text


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        # sbc-bench, 7-zip on all cores: 5060, 13230, 13650, 21590 and 39450 MIPS
        ("jetson_nano", "jetson_xavier_nx"),
        ("jetson_xavier_nx", "jetson_agx_xavier"),
        ("jetson_orin_nano", "jetson_agx_xavier"),
        ("jetson_agx_xavier", "jetson_agx_orin"),
        # sbc-reviews, Geekbench 5: 303, 760 points; Geekbench 6: 653, 2164
        ("raspberry_pi_3b_plus", "raspberry_pi_4"),
        ("raspberry_pi_4", "raspberry_pi_5"),
        # "There is still a big gap to the SoCs with bigger performance cores": Notebookcheck, 439
        ("redmi_7a", "redmi_note_8"),
    ],
)
def test_speeds_are_ordered_as_in_the_sources(slower: str, faster: str) -> None:
    low, high = (find_board(name).speed.speed_ratio for name in (slower, faster))
    assert low is not None
    assert high is not None
    assert low.value < high.value


def test_mixed_fleet_is_eight_devices_some_of_them_low_on_battery() -> None:
    members = find_fleet("mixed")
    assert len({member.board.name for member in members}) == 8
    assert members[0].board.name == "redmi_7a"
    assert members[-1].board.name == "jetson_agx_orin"
    levels = [(m.battery_percent, m.charging) for m in members if m.battery_percent is not None]
    assert any(percent < 30 and not charging for percent, charging in levels)
    assert any(percent < 30 and charging for percent, charging in levels)
    assert any(percent > 50 for percent, _ in levels)
    assert any(member.metered for member in members)


# -- the page ------------------------------------------------------------------------------------


def test_page_has_the_tables_of_the_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"<!-- python -m devices.table -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert found
    assert found[1] == tables(), "run python -m devices.table and put its output into the page"


def test_page_says_that_no_device_was_run() -> None:
    assert "No phone and no board was run" in PAGE.read_text(encoding="utf-8")


def test_examples_of_the_page_load(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    board, fleet = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(board, encoding="utf-8")
    assert load_board(path).speed.speed_ratio is not None
    path.write_text(fleet, encoding="utf-8")
    (member,) = load_fleet(path)
    assert member.name == "kitchen-phone"


def test_page_lists_every_table_and_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    board_keys = {
        key.rpartition(".")[2] for name in WANTED for key, _ in find_board(name).quantities()
    }
    for word in (*SECTIONS, *board_keys):
        assert f"`{word}`" in text or f"`[{word}]`" in text


# -- the tables ----------------------------------------------------------------------------------

TWO = """
title = "{name}"
[[cores]]
core = "A"
count = {{ value = 2, source = "s", provenance = "datasheet" }}
ghz = {{ value = 1.5, source = "s", provenance = "{ghz}" }}
[[cores]]
core = "B"
count = {{ value = 4, source = "s", provenance = "assumed" }}
[power]
idle_w = {{ value = 2.50, source = "s", provenance = "measured" }}
"""


def test_tables_show_values_marks_and_gaps(tmp_path: Path) -> None:
    for name, ghz in (("beta", "derived"), ("alpha", "assumed")):
        (tmp_path / "phones").mkdir(exist_ok=True)
        (tmp_path / "phones" / f"{name}.toml").write_text(TWO.format(name=name, ghz=ghz))
    profiles = read_profiles(tmp_path)
    lines = device_table(profiles).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:2] == ["alpha (`alpha`)", "2 × 1.5 GHz + 4"]
    assert cells.count("2.5 m") == 1
    assert cells.count("–") == len(cells) - 3
    assert lines[3].startswith("| beta ")
    counted = provenance_table(profiles).splitlines()[2:]
    assert counted == [
        "| `cores.count` | – | 2 | – | 2 |",
        "| `cores.ghz` | – | – | 1 | 1 |",
        "| `power.idle_w` | 2 | – | – | – |",
    ]
    assert list(MARKS) == ["measured", "datasheet", "derived", "assumed"]
