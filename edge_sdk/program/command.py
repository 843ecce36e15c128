"""The frame of every command line: errors become one line for people, and an exit code."""

from __future__ import annotations

import argparse
import errno
import getpass
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from edge_sdk.program.files import DiskFull
from edge_sdk.program.processes import limit_threads
from edge_sdk.protocol.errors import ConfigError, TesseraError

EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141
"""As a shell reports a program that SIGPIPE ended."""

_CURES = {
    errno.EACCES: "this account ({account}) may not do that: change its owner or permissions, or "
    "run this as another account",
    errno.EPERM: "this account ({account}) may not do that: change its owner or permissions, or "
    "run this as another account",
    errno.ENOSPC: "the disk is full: make room there (df -h shows how much there is)",
    errno.EDQUOT: "the quota of this account ({account}) is used up: make room",
    errno.EROFS: "this file system is read-only: name another folder",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "this is a folder, and a file is needed",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EIO: "the disk or its connection fails: check it (dmesg)",
    errno.EADDRINUSE: "the port is in use by another program: stop it, or choose another port",
}


def run_command(
    make_parser: Callable[[], argparse.ArgumentParser], argv: Sequence[str] | None, extra: str
) -> int:
    """Run the function `run` of the parsed arguments and return the exit code.

    `extra` is the one of tessera-fl that has every package its commands need.
    """
    limit_threads(os.environ)  # before numpy is loaded
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        problem, code = "interrupted", EXIT_INTERRUPTED
    except TesseraError as error:
        problem, code = f"{error}", 2
    except ModuleNotFoundError as error:
        needed = f"pip install 'tessera-fl[{extra}]'"
        problem, code = f"{error.name} is not installed; this command needs: {needed}", 2
    except BrokenPipeError:
        # Whoever read our output has enough, as in `history | head`. Python would complain once
        # more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except OSError as error:
        problem, code = explain_os_error(error), 1
    print(f"{parser.prog}: {problem}", file=sys.stderr)
    return code


class WrappedHelp(argparse.RawDescriptionHelpFormatter):
    """Wraps a description or epilog of one line; one that has lines of its own keeps them."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class LaterParser(argparse.ArgumentParser):
    """A command's parser that gets its arguments when they are first looked at.

    For arguments that take imports to make: `--help` of the program needs none of them. Given to
    `add_subparsers` as `parser_class`. Its help is a `WrappedHelp` unless another is named.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._later: Callable[[], object] | None = None
        named.setdefault("formatter_class", WrappedHelp)
        super().__init__(*arguments, **named)

    def fill_later(self, fill: Callable[[], object]) -> None:
        """Call `fill`, which adds arguments, before anything looks at them."""
        self._later = fill

    @property
    def _actions(self) -> list[argparse.Action]:
        # All that argparse does with arguments begins here.
        if self._later is not None:
            fill, self._later = self._later, None
            fill()
        return self._all

    @_actions.setter
    def _actions(self, actions: list[argparse.Action]) -> None:
        self._all = actions


def explain_os_error(error: OSError) -> str:
    """Return a sentence for a system's error: the path, what is wrong, and what to do."""
    cure = _CURES.get(error.errno or 0)
    if cure is None:
        return str(error)
    if isinstance(error.filename, bytes):
        path = os.fsdecode(error.filename)
    else:
        path = "" if error.filename is None else str(error.filename)
    if isinstance(error, DiskFull):
        cure += f"; {error.needed:,} bytes are needed, {error.free:,} are free"
    return f"{path}{': ' if path else ''}{cure.format(account=account())}"


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone. Raises `ConfigError` unless it is confirmed.

    `yes`: confirmed already, by `--yes`. Without a terminal nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Nothing was changed: add --yes to confirm")
    if input(f"{question} Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was changed")


def account() -> str:
    """Return the name of the account that this process runs as."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in a container
        return str(os.getuid()) if hasattr(os, "getuid") else "?"
