"""Profiles: what is read is what was written; what is wrong is named with file and key."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_sdk.machine.board import (
    LIMITS,
    SECTIONS,
    BatterySpec,
    Board,
    CoreSpec,
    Kind,
    MemorySpec,
    PowerSpec,
    Quantity,
    SpeedSpec,
    find_board,
    load_board,
    render_board,
    shipped_boards,
    write_board,
)
from edge_sdk.program.settings.types import kinds
from edge_sdk.protocol.errors import ConfigError

PHONE = """
name = "phone_1"
title = "A phone"
kind = "phone"
soc = "Chip 7"

[[cores]]
core = "big"
count = { value = 2, source = "sheet", provenance = "datasheet" }
ghz = { value = 2.5, source = "sheet", provenance = "datasheet" }

[[cores]]
core = "small"
count = { value = 6, source = "sheet", provenance = "datasheet" }

[memory]
memory_mb = { value = 4096, source = "sheet", provenance = "datasheet" }
app_mb = { value = 1024, source = "a quarter", provenance = "assumed" }

[speed]
speed_ratio = { value = 1.5, source = "= 1500 / 1000: points", provenance = "derived" }
one_core_ratio = { value = 0.5, source = "= 500 / 1000: points", provenance = "derived" }

[power]
idle_w = { value = 0.1, source = "meter", provenance = "measured" }
train_w = { value = 4, source = "meter", provenance = "measured" }

[battery]
battery_wh = { value = 15.4, source = "sheet", provenance = "datasheet" }

[network]
link = "wifi"
up_mbit_s = { value = 20, source = "iperf3", provenance = "measured" }

[heat]
sensor = "skin"
throttle_c = { value = 43, source = "sheet", provenance = "datasheet" }

[gpu]
title = "GPU 3"
"""


def load(folder: Path, text: str) -> Board:
    path = folder / "phone.toml"
    path.write_text(text, encoding="utf-8")
    return load_board(path)


def changed(old: str, new: str) -> str:
    assert PHONE.count(old) == 1, old
    return PHONE.replace(old, new)


def test_profile_is_read_as_it_stands(tmp_path: Path) -> None:
    board = load(tmp_path, PHONE)
    assert (board.name, board.title, board.kind, board.soc) == (
        "phone_1", "A phone", "phone", "Chip 7"
    )  # fmt: skip
    assert [cores.core for cores in board.cores] == ["big", "small"]
    assert board.cores[0].ghz == Quantity(2.5, "sheet", "datasheet")
    assert board.memory.app_mb == Quantity(1024, "a quarter", "assumed")
    assert board.power.train_w == Quantity(4.0, "meter", "measured")
    assert board.network.link == "wifi"
    assert board.gpu is not None
    assert board.gpu.title == "GPU 3"


def test_missing_numbers_stay_missing(tmp_path: Path) -> None:
    board = load(tmp_path, PHONE)
    assert board.cores[1].ghz is None
    assert board.power.wifi_send_w is None
    assert board.network.down_mbit_s is None
    assert board.heat.sustained_ratio is None
    assert board.gpu is not None
    assert board.gpu.fp32_gflops is None


def test_absent_tables_are_empty_and_no_battery_is_mains(tmp_path: Path) -> None:
    text = PHONE.partition("[speed]")[0].replace('kind = "phone"', 'kind = "board"')
    board = load(tmp_path, text)
    assert board.battery is None
    assert board.gpu is None
    assert board.speed == SpeedSpec()
    assert board.power == PowerSpec()


def test_quantities_are_all_numbers_of_the_file(tmp_path: Path) -> None:
    quantities = dict(load(tmp_path, PHONE).quantities())
    assert len(quantities) == PHONE.count("value =")
    assert quantities["cores[1].count"].value == 6
    assert quantities["heat.throttle_c"].value == 43


MISTAKES = """\
soc = "Chip 7" | sock = "Chip 7" | sock | did you mean 'soc'?
idle_w = | idle_watt = | power.idle_watt | did you mean 'idle_w'?
app_mb = | train_w = | memory.train_w | 'train_w' in [power]?
title = "A phone" | batery_wh = 1 | batery_wh | [battery]?
soc = "Chip 7" | xyzzy = 1 | xyzzy | known are name, title, kind
value = 43 | valeu = 43 | heat.throttle_c.valeu | 'value'?
ghz = | mhz = | cores[0].mhz | did you mean 'ghz'?
value = 43,  |  | heat.throttle_c.value | is missing
value = 43, source = "sheet", | value = 43, | heat.throttle_c.source | is missing
value = 43, source = "sheet" | value = 43, source = "  " | heat.throttle_c.source | the number comes
value = 43, source = "sheet" | value = 43, source = 7 | heat.throttle_c.source | a text in quotes
"assumed" | "guessed" | memory.app_mb.provenance | measured, datasheet, derived, assumed
ghz = { value | ghz = 2.5 # { value | cores[0].ghz | with value, source, provenance
value = 43 | value = "43" | heat.throttle_c.value | must be a number
value = 43 | value = true | heat.throttle_c.value | must be a number
value = 43 | value = nan | heat.throttle_c.value | must be a finite number
value = 15.4 | value = inf | battery.battery_wh.value | finite number
value = 0.1 | value = 0 | power.idle_w.value | must be from 0.001
value = 4096 | value = 4_294_967_296 | memory.memory_mb.value | must be from 64
value = 6 | value = 6.5 | cores[1].count.value | whole number
value = 1024 | value = 8192 | memory.app_mb.value | cannot exceed memory_mb = 4096
value = 4, | value = 0.05, | power.idle_w.value | cannot exceed train_w
value = 0.5 | value = 2 | speed.one_core_ratio.value | cannot exceed speed_ratio
kind = "phone" | kind = "tablet" | kind | phone, board, computer
link = "wifi" | link = "wlan" | network.link | wifi, ethernet, mobile
sensor = "skin" | sensor = "air" | heat.sensor | skin, chip
name = "phone_1" | name = "Phone 1" | name | lower-case letters
title = "A phone" |  | title | is missing
title = "A phone" | title = 3 | title | a text in quotes
title = "GPU 3" |  | gpu.title | is missing
"""
"""What is written instead of what, the key that is named, and what is said."""


@pytest.mark.parametrize(
    ("old", "new", "key", "advice"),
    [[each.strip() for each in line.split("|")] for line in MISTAKES.splitlines()],
)
def test_mistake_is_named_with_file_key_and_advice(
    tmp_path: Path, old: str, new: str, key: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed(old, new))
    where, _, rest = str(error.value).partition("phone.toml: ")
    assert where == f"{tmp_path}/"
    assert re.match(re.escape(key) + r"[ :]", rest), rest
    assert advice in rest


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PHONE.partition("[battery]")[0], "battery: a phone has one"),
        (PHONE.partition("[memory]")[0], "memory is missing"),
        (re.sub(r"\[\[cores.*?\n\n", "", PHONE, flags=re.DOTALL), "cores is missing"),
        (
            "cores = []\n" + re.sub(r"\[\[cores.*?\n\n", "", PHONE, flags=re.DOTALL),
            "cores: give at",
        ),
        ("cores = 8\n" + re.sub(r"\[\[cores.*?\n\n", "", PHONE, flags=re.DOTALL), "[[cores]]"),
        ("power = 5\n" + PHONE.partition("[power]")[0], "power = 5: must be a table"),
        ("name = ", "cannot be read"),
        ("", "name is missing"),
    ],
    ids=["battery", "memory", "cores", "no cores", "cores number", "table", "broken", "empty"],
)
def test_incomplete_profile_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load(tmp_path, text)


def test_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none.toml is not there"):
        load_board(path)
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"none.toml cannot be read"):
        load_board(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_board(tmp_path)


def test_missing_toml_reader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install tomli"):
        load(tmp_path, PHONE)


LINES = PHONE.strip().splitlines()


@settings(max_examples=150)
@given(
    index=st.integers(0, len(LINES) - 1),
    line=st.one_of(
        st.sampled_from([*LINES, "", "[power]", "cores = 1", "[battery.battery_wh]", "value = 1"]),
        st.text(max_size=30),
    ),
)
def test_altered_profile_loads_or_raises_only_its_own_error(
    tmp_path: Path, index: int, line: str
) -> None:
    text = "\n".join([*LINES[:index], line, *LINES[index + 1 :]])
    try:
        board = load(tmp_path, text)
    except ConfigError as error:
        assert "phone.toml" in str(error)  # noqa: PT017
    else:
        assert isinstance(board, Board)


# -- writing -------------------------------------------------------------------------------------

TEXTS = st.text(min_size=1, max_size=20).filter(lambda text: bool(text.strip()))


def quantities(key: str) -> st.SearchStrategy[Quantity]:
    least, greatest = LIMITS[key].least or 0, LIMITS[key].most or 0
    values: st.SearchStrategy[float] = (
        st.integers(int(least), int(greatest)).map(float)
        if key == "count"
        else st.floats(least, greatest)
    )
    return st.builds(
        Quantity, values, TEXTS, st.sampled_from(["measured", "datasheet", "derived", "assumed"])
    )


def sections(section: type[Any]) -> st.SearchStrategy[Any]:
    """Any instance: optional fields present or absent."""

    def strategy(name: str) -> st.SearchStrategy[Any]:
        if name in LIMITS:
            return quantities(name)
        choices = get_args(kinds(section)[name].plain)
        return st.sampled_from(choices) if choices else TEXTS

    values = {
        each.name: strategy(each.name) | st.none() if each.default is None else strategy(each.name)
        for each in dataclasses.fields(section)
    }
    return st.builds(section, **values)


@st.composite
def boards(draw: st.DrawFn) -> Board:
    values = {name: draw(sections(section)) for name, section in SECTIONS.items()}
    # What must not exceed another is left out where it would.
    for name, low, high in (
        ("memory", "app_mb", "memory_mb"),
        ("power", "idle_w", "train_w"),
        ("speed", "one_core_ratio", "speed_ratio"),
    ):
        less, more = getattr(values[name], low), getattr(values[name], high)
        if less is not None and more is not None and less.value > more.value:
            values[name] = dataclasses.replace(values[name], **{low: None})
    if draw(st.booleans()):
        values["gpu"] = None
    kind: Kind = draw(st.sampled_from(get_args(Kind)))
    if kind != "phone" and draw(st.booleans()):
        values["battery"] = None
    return Board(
        name=draw(st.from_regex(r"[a-z0-9_]{1,10}", fullmatch=True)),
        title=draw(TEXTS),
        kind=kind,
        soc=draw(TEXTS),
        cores=tuple(draw(st.lists(sections(CoreSpec), min_size=1, max_size=3))),
        **values,
    )


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(board=boards())
def test_written_board_is_read_back_equal(tmp_path: Path, board: Board) -> None:
    path = tmp_path / "board.toml"
    write_board(path, board)
    again = load_board(path)
    assert again == board
    assert render_board(again) == path.read_text(encoding="utf-8")


def test_writing_where_nothing_can_be_names_the_file(tmp_path: Path) -> None:
    board = load(tmp_path, PHONE)
    with pytest.raises(ConfigError, match=r"missing/x.toml cannot be written"):
        write_board(tmp_path / "missing" / "x.toml", board)


def make_board(kind: Kind, memory_mb: float, **more: Any) -> Board:
    count, memory = Quantity(4, "s", "measured"), Quantity(memory_mb, "s", "measured")
    cores, memory_spec = (CoreSpec(core="c", count=count),), MemorySpec(memory_mb=memory)
    return Board(name="x", title="X", kind=kind, soc="X", cores=cores, memory=memory_spec, **more)


def test_board_made_in_code_is_checked_as_one_from_a_file() -> None:
    with pytest.raises(ConfigError, match=r"memory\.memory_mb\.value"):
        make_board("board", memory_mb=1e9)


@pytest.mark.parametrize("value", [True, "4", None])
def test_quantity_takes_numbers_only(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be a number"):
        Quantity(value, "somewhere", "measured")


# -- profiles that ship --------------------------------------------------------------------------


def test_shipped_profile_is_found_by_name() -> None:
    board = find_board("jetson_nano")
    assert board.title == "NVIDIA Jetson Nano (4 GB)"
    assert "jetson_nano" in shipped_boards()
    assert list(shipped_boards()) == sorted(shipped_boards())


def test_unknown_profile_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'jetson_nan'; did you mean 'jetson_nano'\?"):
        find_board("jetson_nan")
    with pytest.raises(ConfigError, match="known are galaxy_s10, galaxy_s23"):
        find_board("../../etc/passwd")


def test_every_number_has_limits_and_every_limit_is_used() -> None:
    tables: list[type[Any]] = [CoreSpec, *SECTIONS.values()]
    names = {each.name for table in tables for each in dataclasses.fields(table)}
    assert names - set(LIMITS) == {"core", "title", "link", "sensor"}
    assert all(0 < (each.least or 0) < (each.most or 0) < math.inf for each in LIMITS.values())


def test_battery_is_the_only_table_that_a_phone_needs_beyond_memory() -> None:
    battery = BatterySpec(battery_wh=Quantity(10, "s", "measured"))
    board = make_board("phone", memory_mb=1024, battery=battery)
    assert [key for key, _ in board.quantities()] == [
        "cores[0].count",
        "memory.memory_mb",
        "battery.battery_wh",
    ]
    assert render_board(board).count("\n[") == 4
