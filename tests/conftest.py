"""Where everything is installed that tests need, none may be skipped for the lack of it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Laws are tried on the same examples every time, however long the machine takes for them.
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("steady")

NO_SKIPS = "NO_SKIPS"
"""Set by CI, as TESSERA_NO_SKIPS: a skipped test then fails."""
EXCUSED = ("CUDA", "control group", "mount a disk", "real data")
"""What no package brings: a graphics card, rights that a container may not have, data sets."""


def pytest_configure() -> None:
    # A shell starts what it puts in the background with Ctrl-C ignored, and so would the programs
    # that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Programs refuse variables of ours that they do not know.
    if (no_skips := os.environ.pop("TESSERA_NO_SKIPS", None)) is not None:
        os.environ[NO_SKIPS] = no_skips
    # Programs that tests start train what they are told, however this machine is today.
    os.environ.setdefault("TESSERA_WEIGH", "false")
    # A thread for each core in every program and every worker would have them wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share, for what takes long to make."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    """A program that a test runs in this process sets the logging up; put it back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _stop_tracing()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _stop_tracing()


def _stop_tracing() -> None:
    """Let nobody listen to torch's trace: it notes a stack for every tensor of a traced model.

    pytest listens to all loggers that do not propagate, and graphs then take a quarter longer.
    """
    logging.getLogger("torch.__trace").handlers.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    reason = str(report.longrepr)
    excused = hasattr(report, "wasxfail") or any(lack in reason for lack in EXCUSED)
    if report.skipped and not excused and os.environ.get(NO_SKIPS):
        report.outcome = "failed"
        report.longrepr = f"{NO_SKIPS} is set, and this test was skipped: {reason}"
    return report
