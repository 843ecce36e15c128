"""Run a coordinator from a configuration: open the run's folder, the broker and the service."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from coordinator.aggregate.bound import reach_of
from coordinator.aggregate.pairings import (
    check_fragments,
    check_local_rule,
    fragment_advice,
    level_advice,
    rule_name,
)
from coordinator.aggregate.published import find_recipe
from coordinator.aggregate.rules import AsyncRule
from coordinator.errors import ConfigError
from coordinator.masks import masks_name
from coordinator.operate.config import ServeConfig
from coordinator.operate.control.forgetting import forget_commands
from coordinator.operate.control.overview import overview_commands
from coordinator.operate.control.quarantine import quarantine_commands
from coordinator.operate.control.steering import back_command, change_report, steering_commands
from coordinator.operate.http.opening import load_page, open_http
from coordinator.operate.serve.charge import take_charge
from coordinator.operate.serve.evaluation import LateEvaluator
from coordinator.operate.serve.notices import Notices
from coordinator.operate.serve.progress import ServeProgress
from coordinator.operate.serve.runs import ServedRun, ServedRuns
from coordinator.operate.serve.start import note_start
from coordinator.operate.taskfile import (
    check_evaluation,
    compile_task,
    load_evaluation,
    make_evaluator,
    make_root,
)
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.report import RoundReport
from coordinator.rounds.synchronous import RoundsConfig, trained_level
from coordinator.run.folder import (
    About,
    Run,
    check_run_free,
    create_run,
    is_run,
    read_history,
)
from coordinator.run.steering.orders import Steering
from coordinator.run.steering.settings import check_fits, values_of, with_settings
from coordinator.run.tensorboard import TensorBoardSink
from coordinator.service.admission.requests import Requests
from coordinator.service.aside import InThreads
from coordinator.service.courses.parts import Evaluator
from coordinator.service.overview.facts import keep_facts
from coordinator.service.overview.folder import overview_for
from coordinator.service.overview.overview import Overview
from coordinator.service.service import Service, ServiceConfig, can_survey
from edge_sdk.program.command import explain_os_error
from edge_sdk.program.control import ControlCommand, ControlSocket
from edge_sdk.program.files import remove, write_whole
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.specs import MAX_GROUPS
from edge_sdk.transport.mqtt.certificates import certificate_advice
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.probe import BrokerFacts, probe_broker
from edge_sdk.transport.settings import BrokerSettings, DeniedError, LinkError, tls_context

if TYPE_CHECKING:
    from coordinator.operate.http.opening import OpenPage
    from coordinator.operate.joining.opening import Entrance, EntranceConfig, Joining

log = logging.getLogger(__name__)

BROKER, BROKER_FILE = "broker", "broker.toml"
EVALUATION = "evaluation"
"""Folder, in the run's, for test data that memory does not hold."""
ROOT_SETTING = "[robust] data"
ROOT_DATA = "root"
"""Folder for the operator's data of `robust = "root"` that memory does not hold."""
RETRY_S = 5.0
NO_TLS = (
    "join       join.enabled is ignored: without TLS every device would get this coordinator's own "
    "password. Use a broker with TLS, or the embedded one (docs/deploy.md)"
)

Say = Callable[[str], None]


class ServeEnd(Enum):
    """The way in which serving a run ended; true only if the run is complete."""

    COMPLETE = "complete"
    ORDERED = "an operator asked for it (tessera-coordinator stop)"
    STOPPED = "the process was asked to end"

    def __bool__(self) -> bool:
        return self is ServeEnd.COMPLETE


class RunSite(Protocol):
    """Things that runs of one process may share: the broker, the way in for devices."""

    def preparing(self, stop: threading.Event) -> AbstractContextManager[object]:
        """Give the right to load the task's code, which takes much memory."""

    def reach(
        self, config: ServeConfig
    ) -> AbstractContextManager[tuple[BrokerSettings, Entrance | None]]:
        """Give the broker and the devices' entrance."""

    def probe(self, settings: BrokerSettings, stop: threading.Event) -> BrokerFacts | None:
        """Try the broker, once it answers. None: a stop was requested. Raises `LinkError`."""

    def join(
        self, config: ServeConfig, run: Path, entrance: Entrance
    ) -> AbstractContextManager[Joining]:
        """Let devices join the run in this folder."""

    @property
    def alone(self) -> bool:
        """True for one run, which tells people where its page is."""

    def page(
        self, config: ServeConfig
    ) -> AbstractContextManager[tuple[ServedRuns, OpenPage | None]]:
        """Give the list of the runs that are served, and the operator's page, if there is one."""


class OwnSite:
    """The site of a run that has its process to itself."""

    alone = True

    @contextmanager
    def page(self, config: ServeConfig) -> Iterator[tuple[ServedRuns, OpenPage | None]]:
        """See `RunSite`."""
        runs = ServedRuns()
        with open_http(config.http, runs, config.run.folder) as page:
            yield runs, page

    def preparing(self, stop: threading.Event) -> AbstractContextManager[object]:
        """See `RunSite`."""
        return nullcontext(stop)

    def reach(
        self, config: ServeConfig
    ) -> AbstractContextManager[tuple[BrokerSettings, Entrance | None]]:
        """See `RunSite`."""
        return reach_broker(config, config.run.folder)

    def probe(self, settings: BrokerSettings, stop: threading.Event) -> BrokerFacts | None:
        """See `RunSite`."""
        return try_broker(settings, stop)

    def join(
        self, config: ServeConfig, run: Path, entrance: Entrance
    ) -> AbstractContextManager[Joining]:
        """See `RunSite`."""
        from coordinator.operate.joining.opening import open_joining

        return open_joining(config, run, entrance)


def open_run(
    config: ServeConfig,
    say: Say = lambda _: None,
    preparing: AbstractContextManager[object] | None = None,
) -> Run:
    """Open the run in the configured folder, or make a new one, which compiles the task.

    `say` gets the progress of that, line by line; `preparing` is entered for it. Raises
    `ConfigError` when the folder holds a run of another task, and as `create_run` and `Run`.
    """
    folder, task = config.run.folder, config.task
    if not is_run(folder):
        check_run_free(folder)  # before the work, not after it
        if task.evaluation is not None:
            check_evaluation(task.evaluation, config.base)
        if config.robust.data is not None:
            check_evaluation(config.robust.data, config.base, what=ROOT_SETTING)
        levels = {*LEVELS, *config.run.levels, *_fragment_levels(config)}
        with preparing or nullcontext(), ServeProgress("compiles", say) as progress:
            model = compile_task(
                task.source,
                config.base,
                batch_size=config.run.batch_size,
                levels=sorted(levels, reverse=True),
                distillation=config.run.distillation > 0,
                class_masks=config.run.classes != "all",
                half=config.run.precision == "fp16",
                hear=progress.now,
            )
        about = About(
            task=task.name,
            run=secrets.token_hex(8),
            source=task.source,
            batch_size=config.run.batch_size,
        )
        # Report what does not fit before writing anything.
        data = config.described(model.manifest.data)
        model = replace(model, manifest=replace(model.manifest, data=data))
        check_local_rule(config.machine(model.plan).local_rule, model.manifest)
        create_run(folder, about, model)
    run = Run(folder)
    wanted = {"task": task.name, "source": task.source, "batch_size": config.run.batch_size}
    for name, value in wanted.items():
        if (has := getattr(run.about, name)) != value:
            run.close()
            raise ConfigError(
                f"{folder} holds a run with {name} {has!r}, but the configuration says {value!r}: "
                "restore the old value, or name another folder"
            )
    try:
        if config.described(run.task.manifest.data) != run.task.manifest.data:
            raise ConfigError(
                f"{folder} holds a run whose task has other classes or inputs: restore [inputs] "
                "and task.classes, or name another folder"
            )
    except ConfigError:
        run.close()
        raise
    return run


def _fragment_levels(config: ServeConfig) -> list[float]:
    """Return a level that stands for one group of every axis, which is what fragments are."""
    rule = config.make_rule()
    asynchronous = isinstance(rule, AsyncRule) and not rule.whole_models
    return [1 / MAX_GROUPS] if asynchronous or config.mask.name == "gre-raa" else []


@contextmanager
def reach_broker(
    config: EntranceConfig, folder: Path
) -> Iterator[tuple[BrokerSettings, Entrance | None]]:
    """Give the broker and the devices' entrance for the duration of the context.

    Starts an embedded broker if configured, with its files in `folder`. None: devices cannot join
    with codes.
    """
    # Needs cryptography, which a run without codes does not.
    from coordinator.operate.joining.opening import open_embedded, open_entrance

    broker = config.broker
    if broker.embedded:
        with open_embedded(config, folder / BROKER) as (settings, entrance):
            settings = replace(settings, chunk_bytes=broker.chunk_bytes)
            path = folder / BROKER_FILE
            write_whole(path, broker_table(settings).encode(), mode=0o600)
            try:
                yield settings, entrance
            finally:
                remove(path)
    elif config.can_join:
        with open_entrance(config, folder / BROKER) as entrance:
            yield broker, entrance
    else:
        yield broker, None


def check_ports(config: EntranceConfig) -> None:
    """Raise `PortError` if the broker or joining is to have a port that is in use."""
    if config.broker.embedded or config.can_join:
        from coordinator.operate.joining.opening import check_wanted

        check_wanted(config)


def broker_table(settings: BrokerSettings) -> str:
    """Return a broker's settings as the `[broker]` table of a configuration."""
    values = {
        "host": settings.host,
        "port": settings.port,
        "username": settings.username,
        "password": settings.password,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None]
    return "\n".join(["[broker]", *lines]) + "\n"


def try_broker(settings: BrokerSettings, stop: threading.Event) -> BrokerFacts | None:
    """Probe the broker's features, waiting until it is reachable. None: a stop was requested.

    Raises `LinkError`, which says what to change, when the broker is unsuitable or refuses us.
    """
    tls_context(settings)
    while not stop.is_set():
        try:
            facts = probe_broker(settings, name=f"tessera-probe-{os.getpid()}")
        except DeniedError:
            raise
        except LinkError as error:
            log.warning("%s: %s; trying again", settings.address, error)
            stop.wait(RETRY_S)
            continue
        if facts.refusal is not None:
            raise LinkError(f"{settings.address}: {facts.refusal}")
        return facts
    return None


def serve(
    config: ServeConfig,
    stop: threading.Event,
    say: Say,
    watchdog: Watchdog | None = None,
    *,
    qr: bool = False,
    take_over: bool = False,
    site: RunSite | None = None,
) -> ServeEnd:
    """Run the coordinator until the run is complete, or a stop is requested.

    `say` gets the start-up report, line by line; see `Watchdog` for `watchdog`. `qr`: draw the line
    for devices, too. `take_over`: stop another coordinator of the task, if there is one. `site`:
    what it shares with other runs of the process; None: it is alone. Raises `FencedError` if
    another has the task, or takes it.
    """
    site = OwnSite() if site is None else site
    with ExitStack() as stack:
        if site.alone and not is_run(config.run.folder):
            check_ports(config)  # before the work, not after it
        run = stack.enter_context(open_run(config, say, site.preparing(stop)))
        run.note_starting(True)
        if config.http.enabled:  # while the broker starts and is tried
            threading.Thread(target=load_page, name="page", daemon=True).start()
        requests: Requests[Service] = Requests()
        evaluate = None
        if config.task.evaluation is not None:
            making = partial(_make_evaluator, config, config.task.evaluation, run, site, stop)
            evaluate = LateEvaluator(making, requests)
            stack.callback(evaluate.close)
        settings, entrance = stack.enter_context(site.reach(config))
        root = None
        if config.robust.data is not None:
            spec, cache = run.task.manifest.data, run.folder / ROOT_DATA
            with site.preparing(stop):
                found = load_evaluation(
                    config.robust.data, config.base, spec, config.format, cache, what=ROOT_SETTING
                )
            root = make_root(run.task, found)
        facts = site.probe(settings, stop) if config.broker.probe else None
        opener = partial(open_link, settings)
        epoch = take_charge(run, opener, take_over=take_over, stop=stop)
        if epoch is None or stop.is_set():
            return ServeEnd.STOPPED
        machine = config.machine(run.plan)
        steering = Steering(run)
        steering.begin(values_of(machine))
        changed = changed_machine(machine, config, run, steering)
        check_local_rule(machine.local_rule, run.task.manifest)
        _check_levels(machine, run)
        levels, batch = machine.levels, machine.batch_size
        check_fragments(machine.masks, run.task.manifest, run.plan, levels, batch)
        service_config = ServiceConfig(
            machine=machine,
            down=config.run.down,
            keeping=config.keeping,
            chunk_bytes=settings.chunk_bytes if facts is None else facts.chunk_bytes,
            retained_chunks=facts is None or facts.retained_chunks,
            max_devices=config.round.max_devices,
            canary=config.delivery,
            demands=config.devices,
            view_s=config.broker.status_s if config.broker.status_topics else None,
        )
        watches: list[Callable[[RoundReport], object]] = []
        if config.run.tensorboard is not None:
            watches.append(stack.enter_context(TensorBoardSink(config.run.tensorboard)).write)
        shown = replace(service_config, machine=changed)
        for line in start_report(config, run, shown, settings, facts):
            say(line)
        for line in change_report(run.folder, steering.steered):
            say(line)
        overview = overview_for(run, changed)
        stack.callback(overview.stopped)  # also if it never begins
        keep_facts(run.folder, overview.facts)
        notices = None
        if config.notify.url is not None:
            notices = Notices(
                config.notify,
                task=run.about.task,
                run=run.about.run,
                history=read_history(run.folder),
                is_quiet=lambda: is_quiet(overview),
            )
            watches.append(stack.enter_context(notices).watch)
        commands = {
            **forget_commands(requests),
            **quarantine_commands(requests),
            **steering_commands(requests, run.folder),
            **overview_commands(overview),
        }
        runs, page = stack.enter_context(site.page(config))
        if page is not None:
            commands |= page.commands()
        joining = stack.enter_context(_join(site, config, run, entrance, commands))
        run.note_starting(False)
        if config.join.enabled and not config.can_join:
            say(NO_TLS)
        for line in join_report(run, entrance, joining, qr=qr):
            say(line)
        if page is not None and site.alone:
            for line in page.report(links=not is_journal(sys.stdout)):
                say(line)
        say(f"waits for  {changed.min_devices} device{'s' * (changed.min_devices > 1)}")
        watchdog = watchdog or Watchdog()
        runs.add(ServedRun(run.about.task, run.folder, overview, commands, watchdog.silent_s))
        stack.callback(runs.retire, run.about.task)
        service = Service(
            run,
            service_config,
            open_link=opener,
            evaluate=evaluate,
            watch=partial(_show_all, watches) if watches else None,
            root=root,
            watchdog=watchdog,
            requests=requests,
            epoch=epoch,
            steering=steering,
            overview=overview,
            aside=InThreads(),
        )
        note_start(run.folder, config)
        if evaluate is not None:
            evaluate.begin()
        try:
            service.serve(stop)
            if service.finished:
                if notices is not None:
                    notices.finished()
                return ServeEnd.COMPLETE
            return ServeEnd.ORDERED if service.helm.stops else ServeEnd.STOPPED
        finally:
            service.close()
            keep_facts(run.folder, overview.facts)


def _make_evaluator(
    config: ServeConfig, evaluation: str, run: Run, site: RunSite, stop: threading.Event
) -> Evaluator:
    """Read the test data, and make an evaluator. Raises `ConfigError`."""
    spec, cache = run.task.manifest.data, run.folder / EVALUATION
    with site.preparing(stop):
        data = load_evaluation(evaluation, config.base, spec, config.format, cache)
    return make_evaluator(run.task, data)


def is_quiet(overview: Overview) -> bool:
    """True if no round comes because none is to: the run is paused, or complete."""
    status = overview.status()
    return status["paused"] is not None or status["state"] == "finished"


def _show_all(watches: Sequence[Callable[[RoundReport], object]], report: RoundReport) -> None:
    for watch in watches:
        watch(report)


def changed_machine(
    machine: RoundsConfig | FragmentsConfig, config: ServeConfig, run: Run, steering: Steering
) -> RoundsConfig | FragmentsConfig:
    """Return the settings with what operators changed. Raises `ConfigError`, with the way back."""
    settings = steering.steered.settings
    try:
        changed: RoundsConfig | FragmentsConfig
        if isinstance(machine, RoundsConfig):
            changed = with_settings(machine, settings)
        else:
            changed = with_settings(machine, settings)
        measured, most = config.task.evaluation is not None, config.round.max_devices
        check_fits(changed, measured=measured, max_devices=most)
        return changed
    except ConfigError as error:
        ways = "; or ".join(
            back_command(run.folder, name, steering.steered.file.get(name))
            for name in steering.steered.changes
        )
        raise ConfigError(
            f"settings that were changed while the run was served do not fit run.toml: {error}. "
            f"Go back with {ways}"
        ) from error


@contextmanager
def _join(
    site: RunSite,
    config: ServeConfig,
    run: Run,
    entrance: Entrance | None,
    commands: dict[str, ControlCommand],
) -> Iterator[Joining | None]:
    """Let devices join, if they can, and answer commands about the run."""
    with ExitStack() as stack:
        joining = None
        if entrance is not None:
            joining = stack.enter_context(site.join(config, run.folder, entrance))
            commands |= joining.commands()
            commands["broker.reload"] = entrance.reload
        control = ControlSocket(run.folder, commands)
        stack.callback(control.close)
        control.start()
        yield joining


def _check_levels(machine: RoundsConfig | FragmentsConfig, run: Run) -> None:
    """Raise `ConfigError` for a level that devices are to train and that has no graph."""
    if machine.local_rule.widths == "own":
        return
    plan, manifest = run.plan, run.task.manifest
    for level in machine.levels:
        kept = tuple(axis.atoms_at(level) for axis in plan.axes)
        try:
            manifest.pick("gradient", kept, machine.batch_size)
        except GraphError as error:
            raise ConfigError(
                f"this run was made without a graph for level {level:g}: set run.levels as it was, "
                "or start a new run in another folder"
            ) from error


def _precision_advice(config: ServeConfig, run: Run) -> str:
    """Say why a run's graphs are not as the configuration wants them; empty if they are.

    Nothing in a run tells if its graphs in float16 were too coarse or not wanted when it was made.
    """
    has = any(entry.kind == "gradient-fp16" for entry in run.task.manifest.graphs)
    if has == (config.run.precision == "fp16"):
        return ""
    if has:
        return (
            "this run was made with graphs in float16, which devices may go on choosing; "
            'run.precision = "fp32" is for a new run in another folder'
        )
    return (
        "this run has no graphs in float16, so devices multiply in fp32: they were too coarse when "
        'it was made, or run.precision = "fp16" was not set then and is for a new run in another '
        "folder"
    )


def start_report(
    config: ServeConfig,
    run: Run,
    service: ServiceConfig,
    settings: BrokerSettings,
    facts: BrokerFacts | None,
) -> Iterator[str]:
    """Describe, for people, what is about to run."""
    machine, plan = service.machine, run.plan
    done = run.rounds()[-1]
    if isinstance(machine, RoundsConfig):
        length = f"{machine.rounds} rounds"
        if machine.server_optimizer.name != "none":
            length += f", server optimiser {machine.server_optimizer.name}"
        if machine.robust.active:
            length += f", robust {machine.robust.name}"
            if machine.judges_agreement:
                length += f", agreement {machine.robust.agreement:g}"
    else:
        length = f"{machine.updates} updates"
    yield f"task       {run.about.task} ({run.about.source})"
    yield f"run        {run.about.run} in {run.folder}"
    yield f"model      {plan.parameters:,} parameters in {plan.block_count:,} blocks"
    yield f"data       {run.task.manifest.data.describe()}"
    yield f"rule       {rule_name(machine.rule)}, masks {masks_name(machine.masks)}, {length}"
    if config.run.recipe is not None:
        recipe = find_recipe(config.run.recipe)
        yield f"recipe     {config.run.recipe}: {recipe.source}"
        if recipe.differs:
            yield f"{'':10} differs: {recipe.differs}"
    if machine.local_rule.widths != "own":
        levels = ", ".join(f"{level:.0%}" for level in machine.levels)
        chosen = "" if config.run.widths else " (chosen: run.widths is not set; docs/levels.md)"
        yield f"widths     {machine.local_rule.widths}{chosen}, levels {levels}"
    if isinstance(machine, RoundsConfig) and machine.grow:
        newest = run.latest()
        grown = machine.growth(newest.committed, trained_level(machine, newest.fleet))
        chosen = " (chosen: run.grow is not set)" if config.run.grow is None else ""
        yield f"grows      {grown + chosen if grown else 'no more: it trains the whole model'}"
    for number, sentence in enumerate(
        level_advice(
            machine.rule,
            machine.masks,
            machine.local_rule.widths,
            plan,
            has_data=config.task.evaluation is not None,
            survey_every=machine.survey_every if can_survey(run.task, machine.levels) else None,
        )
    ):
        yield f"{'' if number else 'levels':10} {sentence}"
    if advice := fragment_advice(machine.masks, plan):
        yield f"fragments  warning: {advice}"
    if advice := _precision_advice(config, run):
        yield f"precision  warning: {advice}"
    elif config.run.precision == "fp16":
        yield "precision  there are graphs in float16 too, for devices on CUDA or TensorRT"
    if config.delivery.share is not None:
        yield (
            f"delivery   {config.delivery.share:.0%} of the devices try a new model first, at "
            f"least {config.delivery.min_devices}; only those with `evaluate_every` and `deliver = "
            '"latest"` in device.toml can judge it'
        )
    yield f"screening  {screening(machine)}"
    if isinstance(machine, RoundsConfig) and config.run.robust is None and not config.run.recipe:
        yield (
            f"{'':10} devices are trusted otherwise; if nobody vouches for them, set robust in "
            "[run] and agreement in [robust] (docs/attacks.md)"
        )
    yield f"encoding   movements {machine.up}, model {service.down}"
    yield f"starts     after round {done}" if done else "starts     from scratch"
    table = run.folder / BROKER_FILE
    where = f"; for programs on this machine: {table}" if table.exists() else ""  # not if shared
    yield f"broker     {settings.address}{f' (embedded{where})' if config.broker.embedded else ''}"
    certificates = (settings.certificate, settings.bulk_certificate)
    for advice in certificate_advice(certificates, None, datetime.now(timezone.utc)):
        yield f"           {advice}"
    for finding in () if facts is None else facts.findings():
        if finding.verdict != "good":
            yield f"           {finding.name}: {finding.text}"


def screening(machine: RoundsConfig | FragmentsConfig) -> str:
    """Say in a line what bounds the movement of a device."""
    reach = reach_of(machine.local_rule, machine.steps)
    beside = "those of its round" if isinstance(machine, RoundsConfig) else "the past"
    if reach is None:
        return (
            "gradients are not clipped, so nothing bounds a movement before others are known; it "
            f"is judged beside {beside} (run.clip_norm)"
        )
    decay = f" + {reach.decay:.3g} of the weights' norm" if reach.decay else ""
    clip = machine.local_rule.clip_norm
    return (
        f"a movement is at most {reach.gradients:.4g}{decay} long (clip_norm {clip:g}), and is "
        f"judged beside {beside}"
    )


def join_report(
    run: Run, entrance: Entrance | None, joining: Joining | None, *, qr: bool = False
) -> Iterator[str]:
    """Say how devices join: the one line to paste on them, where it is safe to print it."""
    if entrance is None or joining is None:
        yield "join       with a bundle (tessera-coordinator enroll); codes are off"
        return
    broker = entrance.broker
    how = "TLS" if broker.tls else "without TLS, on this machine only"
    yield f"devices    {broker.address} ({how}); they join at {entrance.host}:{entrance.port}"
    more = f"tessera-coordinator codes create {shlex.quote(str(run.folder))}"
    if joining.shared:  # one code may be for several tasks
        yield f"join       with a code: {more}"
        return
    entry = joining.current()
    if entry is None:
        yield f"join       enough devices have joined; for more: {more}"
    elif is_journal(sys.stdout):
        yield f"join       codes are not printed into the journal; to get one: {more}"
    else:
        left = entry.devices - len(entry.guests)
        yield (
            f"join       paste this on a device (for {left} device{'s' * (left > 1)}, until "
            f"{entry.until:%Y-%m-%d %H:%M} UTC; for more: {more})"
        )
        yield ""
        line = f"tessera-device join {entry.code.text}"
        yield f"  {line}"
        yield ""
        if qr:
            from coordinator.operate.joining.qr import draw_qr

            yield draw_qr(line)


def explain_failure(error: BaseException) -> str:
    """Say why a run failed, in a line."""
    if isinstance(error, OSError):
        return explain_os_error(error)
    cause = error.__cause__
    words = explain_os_error(cause) if isinstance(cause, OSError) else str(cause or "")
    return f"{error}{words and f': {words}'}"


def is_journal(stream: TextIO) -> bool:
    """True if what is written there is kept in systemd's journal, where others may read it."""
    try:
        device, inode = map(int, os.environ["JOURNAL_STREAM"].split(":"))
        status = os.fstat(stream.fileno())
    except (KeyError, ValueError, OSError):
        return False
    return (status.st_dev, status.st_ino) == (device, inode)
