"""Everything a device needs to take part, checked and said: `tessera-device check`.

Each check gives one line: what is good, odd or bad, and for what is not good what to do. `run`
makes those that need no connection before it connects (`check_start`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from edge_sdk.data.drawing import draw_image, is_drawable
from edge_sdk.data.errors import DataError
from edge_sdk.data.source import SampleSource, describe_read, open_data
from edge_sdk.decide.costs.model import memory_bound
from edge_sdk.decide.costs.work import batch_bytes, work_at
from edge_sdk.decide.observer import Observer
from edge_sdk.device.advice.explanation import KeptChunks, last_task
from edge_sdk.device.advice.reaching import Visit, visit_broker
from edge_sdk.device.advice.standing import pause_words
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.ending import (
    EXIT_BROKER,
    EXIT_CONFIG,
    EXIT_DATA,
    EXIT_DENIED,
    EXIT_FAILED,
    EXIT_TASK,
    BrokerError,
)
from edge_sdk.device.service.participation import (
    CONVERTED,
    MAX_TASK_BYTES,
    FetchBlob,
    LoadedTask,
    load_task,
)
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.movements import device_path
from edge_sdk.device.weighing import make_costing, make_probe
from edge_sdk.program.files import is_held, make_folder
from edge_sdk.program.settings import nearest
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import ConfigError, TesseraError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.transfer import TaskNotice
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.transport.link import OpenLink
from edge_sdk.transport.mqtt.certificates import certificate_advice, read_certificate
from edge_sdk.transport.settings import DeniedError, LinkError

CheckVerdict = Literal["good", "odd", "bad"]
MARKS: dict[str, str] = {"good": "✓", "odd": "!", "bad": "✗"}
WAIT_S = 5.0
"""Seconds that the broker has to answer."""
LEAST_BYTES = 50 * 2**20
"""Free disk below which a device may have no room for a model and its movements."""
CPU = "CPUExecutionProvider"
BATCH = 32
"""Samples of a step, as long as no round says how many."""
MB = 1e6


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One line of the table. `code` is the exit code of `run` for what is bad."""

    name: str
    verdict: CheckVerdict
    text: str
    advice: str = ""
    """What to do."""
    more: tuple[str, ...] = ()
    code: int = 0

    def lines(self) -> Iterator[str]:
        """Write it for a person."""
        yield f"{MARKS[self.verdict]} {self.name:<13} {self.text}"
        for line in (*self.more, *([f"→ {self.advice}"] if self.advice else [])):
            yield f"{'':15} {line}".rstrip()


def check_start(
    config: DeviceConfig, *, now: Callable[[], float] = time.time
) -> Iterator[CheckLine]:
    """Check what needs neither the broker nor the task: backend, disk, clock and certificate."""
    yield _backend(config)
    yield _disk(config)
    yield _clock(config, now)
    yield from _certificate(config)


def check_device(
    config: DeviceConfig, *, wait_s: float = WAIT_S, open_link: OpenLink | None = None
) -> Iterator[CheckLine]:
    """Check everything, and look at the task over the broker, or as it was last seen."""
    yield CheckLine("configuration", "good", f"{config.name} takes part in {config.task}")
    terms = Household(config.state_dir, config.name).pause.terms
    if terms is not None:
        paused = f"its owner paused it {pause_words(asdict(terms), time.time())}"
        yield CheckLine("pause", "odd", paused, "to let it train again: tessera-device resume")
    yield from check_start(config)
    with ExitStack() as stack:
        visit: Visit | None = None
        if _would_evict(config):
            yield CheckLine(
                "broker",
                "odd",
                f"not tried: {config.name} runs, and would lose its own connection",
                "see its log, or stop it and check again",
            )
        else:
            try:
                visit = stack.enter_context(
                    visit_broker(config, wait_s=wait_s, open_link=open_link)
                )
                tls = " with TLS" if config.broker.tls else ""
                yield CheckLine("broker", "good", f"connected to {config.broker.address}{tls}")
            except (BrokerError, LinkError) as error:
                yield _no_broker(error)
        found = _find_task(config, visit)
        task: LoadedTask | None = None
        for line, loaded in _task(config, visit, found):
            task = loaded or task
            yield line
    spec = None if task is None else task.manifest.data
    line, samples = check_data(config, spec)
    yield line
    if task is not None and found is not None:
        yield _memory(config, task, found.opened, samples)


# -- this machine -----------------------------------------------------------------------------


def _backend(config: DeviceConfig) -> CheckLine:
    if find_spec("onnxruntime") is None:
        return CheckLine(
            "backend",
            "bad",
            "onnxruntime is not installed",
            "pip install 'tessera-fl[onnx]'",
            code=EXIT_CONFIG,
        )
    words = f"onnxruntime {metadata.version('onnxruntime')} on {', '.join(config.providers)}"
    available = [CPU]
    if config.providers != (CPU,):  # every onnxruntime has it, and loading one takes time
        import onnxruntime

        available = onnxruntime.get_available_providers()
    if missing := [name for name in config.providers if name not in available]:
        return CheckLine(
            "backend",
            "bad",
            f"this onnxruntime has no provider {missing[0]!r}",
            f"set providers to some of {', '.join(available)}, or install the onnxruntime that "
            "has it",
            code=EXIT_CONFIG,
        )
    threads = f"{config.threads} thread{'' if config.threads == 1 else 's'}"
    return CheckLine("backend", "good", f"{words}, {threads}")


def _disk(config: DeviceConfig) -> CheckLine:
    place = config.state_dir.absolute()
    there = next(each for each in (place, *place.parents) if each.exists())
    if not there.is_dir():
        return CheckLine(
            "disk",
            "bad",
            f"state_dir: {there} is a file",
            "name a folder in state_dir",
            code=EXIT_FAILED,
        )
    if not os.access(there, os.W_OK | os.X_OK):
        return CheckLine(
            "disk",
            "bad",
            f"state_dir: {there} is not writable for this user",
            f"give it to this user (chown), or set state_dir to a folder of its own, not {place}",
            code=EXIT_FAILED,
        )
    free = shutil.disk_usage(there).free
    if free < LEAST_BYTES:  # not bad: a device whose disk is full keeps movements in memory
        return CheckLine(
            "disk",
            "odd",
            f"state_dir: {free / MB:.0f} MB are free on the disk of {place}",
            f"free at least {LEAST_BYTES / MB:.0f} MB, or set state_dir to another disk",
        )
    return CheckLine("disk", "good", f"{free / MB:,.0f} MB free for {place}")


def _clock(config: DeviceConfig, now: Callable[[], float]) -> CheckLine:
    """Compare with what must lie in the past: this program's files, and the device's own."""
    moments = [Path(__file__).stat().st_mtime]
    folder = device_path(config.state_dir, config.task, config.name)
    if folder.is_dir():
        moments.append(folder.stat().st_mtime)
    said = datetime.fromtimestamp(now(), timezone.utc)
    if now() < max(moments) - 86_400:
        return CheckLine(
            "clock",
            "odd",
            f"{said:%Y-%m-%d %H:%M} UTC, but files here are of "
            f"{datetime.fromtimestamp(max(moments), timezone.utc):%Y-%m-%d}",
            "set the clock (timedatectl set-ntp true): certificates and quiet hours need it",
        )
    return CheckLine("clock", "good", f"{said:%Y-%m-%d %H:%M} UTC")


def _certificate(config: DeviceConfig) -> Iterator[CheckLine]:
    broker = config.broker
    if broker.certificate is None:
        return
    own = read_certificate(broker.certificate)
    now = datetime.now(timezone.utc)
    if own is None:
        yield CheckLine(
            "certificate",
            "bad",
            f"{broker.certificate} cannot be read as a certificate",
            "join or enrol this device again",
            code=EXIT_CONFIG,
        )
        return
    advice = list(
        certificate_advice((broker.certificate, broker.bulk_certificate), config.name, now)
    )
    text = f"for {own.name!r}, until {own.until:%Y-%m-%d}"
    if advice:
        yield CheckLine("certificate", "odd", text, more=tuple(advice))
    else:
        yield CheckLine("certificate", "good", text)


# -- broker and task -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FoundTask:
    notice: TaskNotice
    opened: RoundOpen | None
    fetch: FetchBlob
    where: str


def _no_broker(error: TesseraError) -> CheckLine:
    if isinstance(error, DeniedError):
        return CheckLine(
            "broker",
            "bad",
            str(error),
            "correct username, password or certificate in [broker], or join again",
            code=EXIT_DENIED,
        )
    if isinstance(error, LinkError):
        return CheckLine("broker", "bad", str(error), "correct [broker]", code=EXIT_CONFIG)
    return CheckLine(
        "broker",
        "bad",
        str(error),
        "start the coordinator or its broker, or correct host and port in [broker]; a firewall may "
        "be in the way",
        code=EXIT_BROKER,
    )


def _would_evict(config: DeviceConfig) -> bool:
    """True if the device runs with a certificate, by which a broker allows one connection."""
    folder = device_path(config.state_dir, config.task, config.name)
    return config.broker.certificate is not None and is_held(folder)


def _find_task(config: DeviceConfig, visit: Visit | None) -> _FoundTask | None:
    """Return the task on the broker, or else as the device saw it last."""
    folder = device_path(config.state_dir, config.task, config.name)
    kept = KeptChunks(folder / "chunks")
    if visit is not None and visit.notice is not None:
        fetch = visit.fetch

        def either(blob: Blob, max_bytes: int, what: str) -> bytes:
            try:
                return kept.fetch(blob, max_bytes, what)
            except TesseraError:
                return fetch(blob, max_bytes, what)

        return _FoundTask(visit.notice, visit.opened, either, "offered")
    try:
        notice, opened = last_task(folder)
    except (OSError, TesseraError):
        return None
    return _FoundTask(notice, opened, kept.fetch, "as last seen")


def _task(
    config: DeviceConfig, visit: Visit | None, found: _FoundTask | None
) -> Iterator[tuple[CheckLine, LoadedTask | None]]:
    if visit is not None and visit.notice is None:
        line = CheckLine(
            "task",
            "odd",
            f"nobody offers {config.task!r} on this broker"
            + (nearest(config.task, visit.tasks) if visit.tasks else ", and it has no other task"),
            "start its coordinator, or correct task",
        )
        yield line, None
    if found is None:
        if visit is None:
            words = "not known yet: the broker cannot be asked, and this device never took part"
            yield CheckLine("task", "odd", words), None
        return
    notice = found.notice
    yield CheckLine("task", "good", f"{notice.task}, run {notice.run}, {found.where}"), None
    if find_spec("onnxruntime") is None:
        return
    try:
        loaded = load_task(notice, config, found.fetch)
    except TesseraError as error:
        line = CheckLine(
            "plan",
            "bad",
            f"this device cannot train the task: {error}",
            "update this device's software, or ask the coordinator's operator",
            code=EXIT_TASK,
        )
        yield line, None
        return
    plan = loaded.backend.plan
    levels = ", ".join(f"{level:.0%}" for level in loaded.fitted(config).policy.offered_levels())
    yield (
        CheckLine(
            "plan",
            "good",
            f"{plan.parameters:,} parameters, plan {plan.hash[:12]}…; levels {levels}",
            more=(f"wants {loaded.manifest.data.describe()}",),
        ),
        loaded,
    )


# -- data and memory -----------------------------------------------------------------------------


def check_data(config: DeviceConfig, spec: DataSpec | None) -> tuple[CheckLine, int]:
    """Read the data for this task; None: it is not known, and the data is only found.

    Returns the line, and the number of samples; 0: not known.
    """
    if config.data is None:
        return (
            CheckLine(
                "data",
                "bad",
                "data is missing",
                'write data = "…" into the configuration: a file or folder (docs/data.md), or '
                "file.py:function",
                code=EXIT_CONFIG,
            ),
            0,
        )
    try:
        source = open_data(config.data, config.format)
        if spec is None:
            words = f"{source.describe()}; read when the task is known"
            return CheckLine("data", "good", words), 0
        folder = device_path(config.state_dir, config.task, config.name)
        limit = None if config.data_mb is None else config.data_mb * 2**20
        read = source.read(spec, cache=folder / CONVERTED, limit_bytes=limit)
    except DataError as error:
        return CheckLine(
            "data", "bad", str(error), "docs/data.md says what is read", code=EXIT_DATA
        ), 0
    picture = tuple(draw_image(read.data.inputs[0][0], spec)) if is_drawable(spec) else ()
    more = (*read.notes, *(f"! {each}" for each in read.warnings))
    if picture:
        more = (*more, f"the first sample, {_target(read.data.targets[0], spec)}:", *picture)
    verdict: CheckVerdict = "odd" if read.warnings else "good"
    line = CheckLine("data", verdict, describe_read(read, spec), more=more)
    return line, len(read.data)


def _target(target: object, spec: DataSpec) -> str:
    try:
        number = int(target)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return f"target {target}"
    return f"class {spec.classes[number]}" if spec.classes else f"target {target}"


def _memory(
    config: DeviceConfig, task: LoadedTask, opened: RoundOpen | None, samples: int
) -> CheckLine:
    """Measure what the levels cost, unless that is known, and compare memory with what is free."""
    config = task.fitted(config)
    if not config.weigh:
        words = f"not weighed (weigh = false): level {config.policy.level:.0%} is always trained"
        return CheckLine("memory", "good", words)
    if opened is None:
        return _bounds(config, task)
    folder = device_path(config.state_dir, config.task, config.name)
    try:
        make_folder(folder)
        probe = make_probe(config)
        costs = make_costing(
            config, probe, task.backend, task.manifest, folder, samples or opened.batch_size
        )
        sight = Observer(config.policy, probe, costs).look(opened)
    except (TesseraError, OSError) as error:
        return CheckLine("memory", "odd", f"the cost of levels cannot be measured: {error}")
    free = sight.snapshot.memory.available_bytes
    if free is None or not sight.costs:
        return CheckLine("memory", "odd", "free memory, or the cost of levels, is not known")
    levels = ", ".join(f"{each.level:.0%} {each.peak_bytes / MB:.0f} MB" for each in sight.costs)
    room = config.policy.limits.memory_share * free
    text = f"{levels}; {room / MB:,.0f} MB may be used of {free / MB:,.0f} MB free"
    smallest = min(each.peak_bytes for each in sight.costs)
    largest = max(each.peak_bytes for each in sight.costs)
    if smallest > room:
        return CheckLine(
            "memory",
            "bad",
            text,
            "no level fits: end other programs, raise memory_share, or allow smaller levels",
            code=EXIT_TASK,
        )
    if largest > room:
        return CheckLine("memory", "odd", text, "larger levels are left out while memory is short")
    return CheckLine("memory", "good", text)


def _bounds(config: DeviceConfig, task: LoadedTask) -> CheckLine:
    """Estimate the most that the levels take: no round says yet how large a batch is.

    What they do take is measured when the device takes the task, or here once a round is open.
    """
    plan, manifest = task.backend.plan, task.manifest
    data = batch_bytes(manifest.data, BATCH)
    try:
        found = {
            level: memory_bound(
                work_at(plan, manifest, level, BATCH),
                data,
                LocalRule(learning_rate=0.1),
                Encoding(),
            )
            for level in config.policy.offered_levels()
        }
    except TesseraError as error:
        return CheckLine("memory", "odd", f"the cost of levels is not known: {error}")
    levels = ", ".join(f"{level:.0%} {bound / MB:.0f} MB" for level, bound in found.items())
    text = f"estimate for batches of {BATCH}: {levels}; measured when the device first takes part"
    return CheckLine("memory", "good", text)


def check_known_data(config: DeviceConfig, source: SampleSource) -> str | None:
    """Read the data for the task as the device saw it last; return what is wrong, or None.

    The task may have changed since, so this is advice; the data is checked again when it comes.
    """
    folder = device_path(config.state_dir, config.task, config.name)
    try:
        notice, _ = last_task(folder)
        fetch = KeptChunks(folder / "chunks").fetch
        manifest = decode_manifest(fetch(notice.manifest, MAX_TASK_BYTES, "the manifest"))
    except (OSError, TesseraError):
        return None
    limit = None if config.data_mb is None else config.data_mb * 2**20
    try:
        source.read(manifest.data, cache=folder / CONVERTED, limit_bytes=limit)
    except DataError as error:
        return f"the data does not fit the task as it was last seen: {error}"
    return None


def raise_bad(config: DeviceConfig) -> list[CheckLine]:
    """Make the checks before a start; return the odd lines.

    Raises `ConfigError`, or `OSError` if the disk is at fault, for a bad one.
    """
    odd = []
    for line in check_start(config):
        if line.verdict == "bad":
            if line.code == EXIT_FAILED:
                raise OSError(f"{line.text}; {line.advice}")
            raise ConfigError(f"{line.text}; {line.advice}")
        if line.verdict == "odd":
            odd.append(line)
    return odd
