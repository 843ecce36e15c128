"""Settings classes: what types allow, what is read, what is said, what `init` would write."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from edge_sdk.program.settings import (
    ConfigError,
    Count,
    Example,
    Flat,
    Share,
    Within,
    check_fields,
    load_settings,
    read_table,
    same_as,
)
from edge_sdk.program.settings.reference import add_flags, meanings, render_example, render_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Oven:
    """The oven."""

    watts: Annotated[float, Within(least=1, below=5000)] = 900.0
    """Power it draws."""
    mode: Literal["top", "fan"] = "fan"
    """Where heat comes from."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A shelf."""

    height: Count
    """Its place from below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    """A kitchen."""

    cook: Annotated[str, Example("Ada")]
    """Who cooks."""
    oven: Annotated[Oven, Flat] = field(default_factory=Oven)
    spare: Oven | None = None
    watts_now: Annotated[float | None, Example(10.0)] = same_as(Oven, "watts")
    shares: tuple[Share, ...] = (1.0, 0.5)
    """Shares of the cake."""
    book: Path = Path("book")
    """The recipes."""
    shelves: tuple[Shelf, ...] = ()
    """Its shelves."""
    prices: dict[str, float] = field(default_factory=dict)
    """Prices by name."""


def load(folder: Path, text: str, **variables: str) -> Kitchen:
    path = folder / "kitchen.toml"
    path.write_text(text)
    return load_settings(Kitchen, path, environment=variables)


def test_tables_lists_paths_and_flat_keys_are_read(tmp_path: Path) -> None:
    text = (
        'cook = "Bo"\nwatts = 1000\nshares = [1]\nbook = "b"\n[spare]\nmode = "top"\n'
        "[prices]\negg = 1\n[[shelves]]\nheight = 2\n"
    )
    assert load(tmp_path, text, TESSERA_MODE="top") == Kitchen(
        cook="Bo",
        oven=Oven(watts=1000.0, mode="top"),
        spare=Oven(mode="top"),
        shares=(1.0,),
        book=tmp_path / "b",
        prices={"egg": 1.0},
        shelves=(Shelf(height=2),),
    )


def test_empty_optional_table_of_a_program_stands_for_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, 'cook = "Bo"\n[spare]').spare is None
    assert read_table(Kitchen, {"cook": "Bo", "spare": {}}).spare == Oven()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cook is missing; set it in the file, or as TESSERA_COOK"),
        ("cook = 1", "cook = 1: must be a text in quotes"),
        ("cook = 'x'\nwatts = 5000", "watts = 5000: must be at least 1 and below 5000"),
        ("cook = 'x'\nmode = 'x'", "mode = 'x': must be one of top, fan"),
        ("cook = 'x'\n[spare]\nwats = 1", "spare.wats is not a known key; did you mean 'watts'?"),
        ("cook = 'x'\nheigth = 1", "did you mean 'height' in [shelves]?"),
        ("cook = 'x'\nshelves = 1", "shelves = 1: must be a list of tables [[shelves]]"),
        ("cook = 'x'\n[[shelves]]\nheight = 0", "shelves[0].height = 0: must be at least 1"),
        ("cook = 'x'\n[prices]\negg = 'x'", "must be a table, each value a number"),
        ("cook = 'x'\nspare = 1", "spare = 1: must be a table"),
    ],
)
def test_mistake_is_one_line_with_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'kitchen.toml'}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_class_made_in_python_is_checked_by_the_same_types() -> None:
    with pytest.raises(ConfigError, match=r"^watts = 0: must be at least 1 and below 5000$"):
        Oven(watts=0)
    mode: Any = "off"
    with pytest.raises(ConfigError, match=r"^mode = 'off': must be one of top, fan$"):
        Oven(mode=mode)


def test_default_and_meaning_of_another_field_stand_once() -> None:
    assert Kitchen(cook="Bo").watts_now == 900.0
    assert meanings(Kitchen)["watts_now"] == "Power it draws."


def test_file_to_start_from_sets_what_is_given_and_shows_the_rest(tmp_path: Path) -> None:
    text = render_example(Kitchen, {"cook": "Bo"}, "A kitchen.")
    assert load(tmp_path, text) == Kitchen(cook="Bo")
    assert 'cook = "Bo"\n' in text
    assert "# Power it draws.\n# watts = 900.0\n" in text
    assert "# [spare]\n" in text


def test_documentation_has_a_row_for_every_key() -> None:
    page = render_tables(Kitchen, variables=True)
    assert "| `cook` | text | required | Who cooks. | `TESSERA_COOK` |" in page
    row = "| `watts` | number, at least 1 and below 5000 | `900.0` | Power it draws. |"
    assert f"{row} `TESSERA_WATTS` |" in page
    assert f"{row} `TESSERA_SPARE_WATTS` |" in page
    assert "### `[[shelves]]`" in page


def test_flags_have_the_meaning_as_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Kitchen, ["cook", "mode"])
    assert vars(parser.parse_args(["--mode", "top"])) == {"cook": None, "mode": "top"}
    assert "who cooks" in parser.format_help()
