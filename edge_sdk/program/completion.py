"""Shell completion: a script for bash, zsh or fish, made from a program's own parser.

The script is text: completing a word starts no Python. It knows commands, options and choices;
where none of these fit, the shell completes file names.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Any, parser: argparse.ArgumentParser) -> None:
    """Add the command `completion`, which prints the script for `parser`."""
    program = parser.prog
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in a shell",
        description=(
            f"Prints a script that makes the shell complete the commands, options and choices of\n"
            f"{program}. Print it again after an update."
        ),
        epilog=(
            "examples:\n"
            f"  {program} completion bash >> ~/.bashrc\n"
            f"  {program} completion zsh >> ~/.zshrc       after compinit\n"
            f"  {program} completion fish > ~/.config/fish/completions/{program}.fish"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(run=partial(_print_script, parser))


def _print_script(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    print(completion_script(parser, arguments.shell), end="")
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for one of `SHELLS`."""
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish_lines(parser))
    begin = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return begin + _bash_script(parser)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _choices(action: argparse.Action) -> list[str]:
    return [str(choice) for choice in action.choices or ()]


def _bash_script(parser: argparse.ArgumentParser) -> str:
    commands = _commands(parser)
    function = f"_{parser.prog.replace('-', '_')}"
    cases = []
    for name, command in commands.items():
        for action in command._actions:
            choices = _choices(action)
            if choices and action.option_strings:
                options = " | ".join(f'"{name} {option}"' for option in action.option_strings)
                cases.append(f"    {options}) words={_words(choices)} ;;")
        places = [c for a in command._actions if not a.option_strings for c in _choices(a)]
        cases.append(
            f'    "{name} "*) [[ $word == -* ]] && words={_words(_options(command))}'
            f" || words={_words(places)} ;;"
        )
    return f"""{function}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
  case "${{COMP_WORDS[1]}} $before" in
{chr(10).join(cases)}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words={_words([*commands, *_options(parser)])}; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F {function} {parser.prog}
"""


def _words(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


def _fish_lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    commands = _commands(parser)
    start = f"complete -c {parser.prog}"
    yield from _fish_options(f"{start} -n __fish_use_subcommand", parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                about = shlex.quote(choice.help or "")
                yield f"{start} -n __fish_use_subcommand -f -a {choice.dest} -d {about}"
    for name, command in commands.items():
        yield from _fish_options(f"{start} -n '__fish_seen_subcommand_from {name}'", command)


def _fish_options(start: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        choices = _choices(action)
        offer = f" -x -a {_words(choices)}" if choices else " -r" if action.nargs != 0 else ""
        if not action.option_strings:
            if choices and not isinstance(action, argparse._SubParsersAction):
                yield f"{start} -f -a {_words(choices)}"
            continue
        names = "".join(
            f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
            for option in action.option_strings
        )
        yield f"{start}{names}{offer}"
