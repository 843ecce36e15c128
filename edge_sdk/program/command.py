"""The frame of every command line: errors become one line for people, and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from edge_sdk.program.processes import limit_threads
from edge_sdk.protocol.errors import TesseraError

EXIT_INTERRUPTED = 130


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
        return code
    except KeyboardInterrupt:
        problem, code = "interrupted", EXIT_INTERRUPTED
    except TesseraError as error:
        problem, code = f"{error}", 2
    except ModuleNotFoundError as error:
        needed = f"pip install 'tessera-fl[{extra}]'"
        problem, code = f"{error.name} is not installed; this command needs: {needed}", 2
    except OSError as error:
        problem, code = f"{error}", 1
    print(f"{parser.prog}: {problem}", file=sys.stderr)
    return code
