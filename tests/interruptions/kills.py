"""Real coordinators, ended with `kill -9` again and again: `bash scripts/crash --processes`.

    bash scripts/crash --processes [--kills 200] [--seconds 1500] [--workers 2] [--folder DIR]
    bash scripts/crash --processes --only 17       one trial again; its logs stay in the folder

A trial is a small federation of real programs on a real Mosquitto (`world.py`). Its coordinator is
killed up to `PER_TRIAL` times, each time in another process:

- before the n-th operation on a file, counted from its start; the first such number goes through
  all operations of a run from trial to trial;
- after a random time, from outside, at any instruction.

Then it finishes the run. A kill survives if the checks of every interruption hold
(`World.finish`) and the model has the bits of a run that nobody killed. Of an asynchronous run, the
bits depend on who comes first, so there only the checks decide.

Outcomes are appended to `kills.jsonl` in the folder, and a further call goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import gettempdir

from coordinator.aggregate.rules import ASYNC_RULES
from tests.interruptions.programs import ROOT, Program
from tests.interruptions.world import Setup, World, made
from tests.waiting import locked

PER_TRIAL = 4
OPERATIONS = 240
"""About as many operations on files as the coordinator of a trial makes."""
STRIDE = 37
"""From one trial's operation to the next one's; it shares no factor with their number."""
MOST_S = 4.0
"""Longest random time until a kill from outside."""
RULES = ("ram-fed", "ccfl-2", "fed-raa", "fedbuff")
RESULTS = "kills.jsonl"

KILLER = """\
import os, signal
left = int(os.environ.pop("KILL_AT", 0))

def counted(function):
    def counting(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return counting

if left:
    for name in ("write", "pwrite", "fsync", "replace", "unlink", "mkdir", "ftruncate",
                 "posix_fallocate"):
        setattr(os, name, counted(getattr(os, name)))
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a coordinator is killed: before an operation on a file, or after some seconds."""

    operation: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"operation {self.operation}" if self.operation else f"{self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """What became of a trial; `problem` is empty if all its kills survived."""

    trial: int
    rule: str
    kills: tuple[str, ...]
    problem: str
    seconds: float


def moments_of(trial: int) -> list[Moment]:
    """Return the kills of a trial, always the same."""
    stream = random.Random(trial)
    first = Moment(operation=1 + trial * STRIDE % OPERATIONS)
    others = [
        Moment(seconds=stream.uniform(0.2, MOST_S)),
        Moment(operation=stream.randrange(1, 90)),
        Moment(operation=stream.randrange(1, 90)),
    ]
    return [first, *others][:PER_TRIAL]


def setup_of(trial: int) -> Setup:
    """Return the world of a trial."""
    rule = RULES[trial % len(RULES)]
    if rule in ASYNC_RULES:
        return Setup(rule=rule, rounds=6, asynchronous=True, chunk_bytes=1024)
    return Setup(rule=rule, rounds=3, chunk_bytes=1024)


def run_trial(trial: int, folder: Path) -> TrialOutcome:
    """Kill, finish and compare."""
    begun, setup, problem = time.monotonic(), setup_of(trial), ""
    place, shared = folder / f"trial{trial}", folder / "shared"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    kills: list[str] = []
    with made(World(place, setup, shared)) as world:
        try:
            _kill(world, moments_of(trial), kills)
            outcome = world.finish(whole_log=False)
            if not setup.asynchronous and world.digest() != undisturbed_digest(setup, shared):
                problem = f"the model of rounds {outcome.rounds} has other bits"
        except AssertionError as error:
            problem = str(error)
    if not problem:
        shutil.rmtree(place)
    rule = RULES[trial % len(RULES)]
    return TrialOutcome(trial, rule, tuple(kills), problem, time.monotonic() - begun)


def _kill(world: World, moments: Sequence[Moment], kills: list[str]) -> None:
    """Start everything, and kill the coordinator at these moments, until it finishes."""
    hook = world.folder / "killer"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(KILLER)
    coordinator = world.coordinator
    for number, moment in enumerate(moments):
        coordinator.environment = {"PYTHONPATH": f"{hook}:{ROOT}", "KILL_AT": str(moment.operation)}
        if number:
            coordinator.start()
        else:
            world.start()
        if not _killed(coordinator, moment):
            return
        kills.append(str(moment))
    coordinator.environment = {}
    coordinator.start()


def _killed(coordinator: Program, moment: Moment) -> bool:
    """Wait for a kill; False if the coordinator finished the run before."""
    process = coordinator.process
    assert process is not None
    if not moment.operation:
        with suppress(TimeoutExpired):
            process.wait(moment.seconds)
        process.kill()
    code = coordinator.wait()
    assert code in (0, -signal.SIGKILL), f"ended with {code}\n{coordinator.tail()}"
    return code != 0


def undisturbed_digest(setup: Setup, shared: Path) -> str:
    """Return the digest of a run that nobody kills."""
    name = f"calm.{setup.key}"
    path = shared / f"{name}.digest"
    with locked(shared / f"{name}.lock"):
        if not path.exists():
            shutil.rmtree(shared / name, ignore_errors=True)
            (shared / name).mkdir()
            with made(World(shared / name, setup, shared)) as world:
                world.start()
                world.finish()
                path.write_text(world.digest())
    return path.read_text()


def trials(folder: Path, *, kills: int, seconds: float, workers: int) -> Iterator[TrialOutcome]:
    """Run trials behind those that are recorded, until there are so many kills or time is up."""
    shared, by = folder / "shared", time.monotonic() + seconds
    shared.mkdir(parents=True, exist_ok=True)
    earlier = read_results(folder)
    numbers = (n for n in count() if n not in {each.trial for each in earlier})
    done = sum(len(each.kills) for each in earlier)
    with ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(run_trial, next(numbers), folder) for _ in range(workers)}
        while running:
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            for outcome in (each.result() for each in ready):
                with (folder / RESULTS).open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                done += len(outcome.kills)
                yield outcome
                if done < kills and time.monotonic() < by:
                    running.add(pool.submit(run_trial, next(numbers), folder))


def read_results(folder: Path) -> list[TrialOutcome]:
    """Return the recorded outcomes."""
    path = folder / RESULTS
    lines = path.read_text().splitlines() if path.is_file() else []
    found = [json.loads(line) for line in lines]
    return [TrialOutcome(**{**each, "kills": tuple(each["kills"])}) for each in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is the exit code."""
    parser = argparse.ArgumentParser(
        prog="bash scripts/crash --processes", description=(__doc__ or "").split("\n\n")[2]
    )
    parser.add_argument("--kills", type=int, default=200, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no trial after these")
    parser.add_argument("--workers", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", type=int, metavar="TRIAL", help="one trial again")
    place = Path(gettempdir()) / "tessera-kills"
    parser.add_argument("--folder", type=Path, default=place, help="results; default %(default)s")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only is not None:
        (options.folder / "shared").mkdir(exist_ok=True)
        outcome = run_trial(options.only, options.folder)
        _tell(outcome)
        return 1 if outcome.problem else 0
    limits = {"kills": options.kills, "seconds": options.seconds, "workers": options.workers}
    for outcome in trials(options.folder, **limits):
        _tell(outcome)
        survived, tried = survivors(read_results(options.folder))
        print(f"survived {survived} of {tried} kills so far", flush=True)
    outcomes = read_results(options.folder)
    survived, tried = survivors(outcomes)
    print(f"survived {survived} of {tried} kills in {len(outcomes)} runs")
    return 1 if survived < tried else 0


def survivors(outcomes: Sequence[TrialOutcome]) -> tuple[int, int]:
    """Return the kills that survived, and all; a trial that failed has no survivor."""
    tried = sum(len(each.kills) for each in outcomes)
    return tried - sum(len(each.kills) for each in outcomes if each.problem), tried


def _tell(outcome: TrialOutcome) -> None:
    said = outcome.problem.splitlines()[0] if outcome.problem else "survived"
    kills = ", ".join(outcome.kills) or "no kill"
    print(f"trial {outcome.trial} ({outcome.rule}; {kills}; {outcome.seconds:.0f} s): {said}")


if __name__ == "__main__":
    sys.exit(main())
