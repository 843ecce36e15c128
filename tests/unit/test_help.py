"""Every program explains itself: a version, help with examples that parse, shell completion."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable

import pytest

import benchmarks.cli
import coordinator.cli
import edge_sdk
import edge_sdk.cli
from edge_sdk.program.completion import completion_script

PROGRAMS: list[Callable[[], argparse.ArgumentParser]] = [
    edge_sdk.cli.make_parser,
    coordinator.cli.make_parser,
    benchmarks.cli.make_parser,
]


def helps() -> list[tuple[str, argparse.ArgumentParser, str]]:
    """The full name of every command, the parser of its program, and its epilogue."""
    found = []
    for make in PROGRAMS:
        parser = make()
        found.append((parser.prog, parser, parser.epilog or ""))
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [
                    (each.prog, parser, each.epilog or "") for each in action.choices.values()
                ]
    return found


@pytest.mark.parametrize(
    ("name", "parser", "epilogue"), helps(), ids=[name for name, *_ in helps()]
)
def test_help_has_examples_that_parse(
    name: str, parser: argparse.ArgumentParser, epilogue: str
) -> None:
    _, found, examples = epilogue.partition("example")
    assert found, f"{name} --help has no example"
    # A comment stands behind two spaces, another program behind &&, > or |, prose behind a stop.
    commands = re.findall(rf"{parser.prog} (?:(?!  |; |\. |&&|>|\||\n).)+", f"{examples}  ")
    assert any(command.startswith(name) for command in commands), epilogue
    for command in commands:
        words = shlex.split(command.rstrip())
        if words[-1] not in ("--help", "--version"):
            parser.parse_args(words[1:])


@pytest.mark.parametrize("make", PROGRAMS)
def test_version(
    make: Callable[[], argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        make().parse_args(["--version"])
    assert capsys.readouterr().out == f"tessera-fl {edge_sdk.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["hist"], ["history"]),
        (["--ver"], ["--version"]),
        (["export", "run", "--form"], ["--format"]),
        (["export", "--format", ""], ["onnx", "safetensors", "torch"]),
        (["broker-config", "m"], ["mosquitto"]),
        (["export", "--out", ""], []),  # the shell then completes file names
    ],
)
def test_bash_completes(typed: list[str], offered: list[str]) -> None:
    script = completion_script(coordinator.cli.make_parser(), "bash")
    words = shlex.join(["tessera-coordinator", *typed])
    ended = subprocess.run(
        ["bash", "--norc"],
        input=f"{script}COMP_WORDS=({words}) COMP_CWORD={len(typed)}\n_tessera_coordinator\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == offered
    assert not ended.stderr


@pytest.mark.parametrize("make", PROGRAMS)
def test_scripts_of_other_shells_name_every_command(
    make: Callable[[], argparse.ArgumentParser],
) -> None:
    parser = make()
    zsh, fish = completion_script(parser, "zsh"), completion_script(parser, "fish")
    assert zsh.splitlines()[0].endswith("bashcompinit")
    for name, program, _ in helps():
        if program.prog == parser.prog and name != parser.prog:
            command = name.removeprefix(f"{parser.prog} ")
            assert f'"{command} "*)' in zsh
            assert f"-f -a {command} -d" in fish
