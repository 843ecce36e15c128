"""`tessera-bench attack`: hostile devices, and the defences against them."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, count, listed_choices, names, numbers

if TYPE_CHECKING:
    from benchmarks.studies.attack.study import WantedAttacks

QUICK_ATTACKS = ("absent", "sign-flip", "scaling", "noise")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "attack",
        _measure,
        help="hostile devices: the harm they do under each defence",
        description=(
            "Trains with 20 devices of levels 1, 1/2 and 1/4, of which a fifth are hostile: they "
            "flip the sign of their movement, scale it, send noise, train on wrong labels or plant "
            "a backdoor. Every defence stands beside none: accuracy, honest movements refused, "
            "seconds. The coordinator is the real one, in this process. Finished runs are added "
            "to --record, and the study goes on from there: stop it with Ctrl-C whenever you like."
        ),
        example="attack --data ~/data --settings har --rules ram-fed --limit-min 10",
        quick="digits, ra-fed, three attacks, no defence beside the recommended one",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with uci_har/ and fashion_mnist/ (default: the digits of scikit-learn)",
    )
    for name, what in (
        ("settings", "data and models"),
        ("rules", "server rules"),
        ("attacks", "attacks"),
        ("defences", "defences"),
    ):
        parser.add_argument(
            f"--{name}", type=names, metavar="A,B", help=f"{what}; `list` lists all of them"
        )
    parser.add_argument(
        "--drawn",
        type=numbers,
        metavar="N,M",
        help="devices drawn for every round, of 20 (default 10,20)",
    )
    parser.add_argument(
        "--seeds", type=count, default=1, metavar="N", help="seeds of each (default %(default)s)"
    )
    parser.add_argument(
        "--record",
        type=Path,
        action="append",
        metavar="FILE",
        help=(
            "file of finished runs, to go on from and to add to (default tessera-attack.jsonl); "
            "further ones are only read"
        ),
    )
    parser.add_argument(
        "--limit-min",
        type=float,
        metavar="MIN",
        help="start no further run after so many minutes; 0 only shows what is recorded",
    )
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="a page, such as docs/attacks.md, to update"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.device.report.page import read_page, update_page
    from benchmarks.report.progress import progress
    from benchmarks.studies.attack import page
    from benchmarks.studies.attack.record import append_attack, read_attacks
    from benchmarks.studies.attack.settings import SETTINGS
    from benchmarks.studies.attack.study import AttackStudy
    from benchmarks.studies.attack.trial import run_attack
    from benchmarks.studies.levels.settings import data_of

    if listed := listed_choices(arguments, _choices()):
        return Measured(figures=[], shown=listed)
    wanted = _wanted(arguments)
    if arguments.update:
        read_page(arguments.update, page.BEGIN)
    limit_s = float("inf") if arguments.limit_min is None else 60 * arguments.limit_min
    for name in wanted.settings if limit_s else ():
        data_of(SETTINGS[name].base, arguments.data)
    records = [] if arguments.quick else arguments.record or [Path("tessera-attack.jsonl")]
    done = read_attacks([*records[1:], *records[:1]])
    ends = time.monotonic() + limit_s
    # A device whose training fails under attack says so in every round.
    logging.getLogger("edge_sdk.device").setLevel(logging.ERROR)
    with progress("attack", wanted.count() - sum(case in done for case in wanted.cases())) as begin:
        while time.monotonic() < ends and (case := wanted.next_case(done)) is not None:
            tick = begin(str(case))
            done[case] = run_attack(case, arguments.data)
            if records:
                append_attack(records[0], done[case])
            tick()
    study = AttackStudy(done)
    if arguments.update:
        update_page(arguments.update, page.render_tables(study), page.BEGIN)
    return Measured(
        figures=study.figures(),
        shown=[page.render_tables(study)],
        packages=("torch", "numpy"),
        config={
            "settings": wanted.settings,
            "rules": wanted.rules,
            "drawn": wanted.drawn,
            "attacks": wanted.attacks,
            "defences": wanted.defences,
            "seeds": wanted.seeds,
        },
        data={"runs": [each.plain() for each in done.values()]},
    )


def _choices() -> dict[str, Iterable[str]]:
    from benchmarks.studies.attack.attackers import ATTACKS
    from benchmarks.studies.attack.defences import DEFENCES
    from benchmarks.studies.attack.settings import SETTINGS
    from benchmarks.studies.attack.study import RULES

    return {"settings": SETTINGS, "rules": RULES, "attacks": ATTACKS, "defences": DEFENCES}


def _wanted(arguments: argparse.Namespace) -> WantedAttacks:
    from benchmarks.studies.attack.attackers import ATTACKS
    from benchmarks.studies.attack.defences import DEFENCES, RECOMMENDED
    from benchmarks.studies.attack.settings import DEVICES, SETTINGS
    from benchmarks.studies.attack.study import RULES, WantedAttacks

    real = tuple(name for name, each in SETTINGS.items() if each.base.folder)
    defaults: dict[str, tuple[str, ...]] = {
        "settings": ("digits",) if arguments.quick or arguments.data is None else real,
        "rules": RULES[:1] if arguments.quick else RULES,
        "attacks": QUICK_ATTACKS if arguments.quick else tuple(ATTACKS),
        "defences": (RECOMMENDED,) if arguments.quick else tuple(DEFENCES),
    }
    chosen = {}
    for what, names_known in _choices().items():
        given = getattr(arguments, what)
        if given and (unknown := [name for name in given if name not in names_known]):
            raise UsageError(f"unknown {unknown[0]!r}; --{what} are {', '.join(names_known)}")
        chosen[what] = given or defaults[what]
    drawn = arguments.drawn or ((DEVICES,) if arguments.quick else (DEVICES // 2, DEVICES))
    if max(drawn) > DEVICES:
        raise UsageError(f"--drawn is at most {DEVICES}, the number of devices, not {max(drawn)}")
    return WantedAttacks(**chosen, drawn=drawn, seeds=arguments.seeds)
