"""Run a coordinator from a configuration: open the run's folder, the broker and the service."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from coordinator.aggregate.pairings import check_local_rule, level_advice, rule_name
from coordinator.aggregate.published import find_recipe
from coordinator.errors import ConfigError
from coordinator.masks import MASKS
from coordinator.operate.broker.embedded import embedded_broker
from coordinator.operate.config import ServeConfig
from coordinator.operate.taskfile import compile_task, load_evaluation, make_evaluator
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import About, Run, create_run, is_run
from coordinator.service.service import Service, ServiceConfig, can_survey
from edge_sdk.program.files import remove, write_whole
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.transport.mqtt.certificates import certificate_advice
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.probe import BrokerFacts, probe_broker
from edge_sdk.transport.settings import BrokerSettings, DeniedError, LinkError, tls_context

log = logging.getLogger(__name__)

BROKER, BROKER_FILE = "broker", "broker.toml"
RETRY_S = 5.0

Say = Callable[[str], None]


def open_run(config: ServeConfig) -> Run:
    """Open the run in the configured folder, or make a new one, which compiles the task.

    Raises `ConfigError` when the folder holds a run of another task, and as `create_run` and `Run`.
    """
    folder, task = config.run.folder, config.task
    if not is_run(folder):
        model = compile_task(
            task.source,
            config.base,
            batch_size=config.run.batch_size,
            levels=sorted({*LEVELS, *config.run.levels}, reverse=True),
            distillation=config.run.distillation > 0,
            class_masks=config.run.classes != "all",
        )
        about = About(
            task=task.name,
            run=secrets.token_hex(8),
            source=task.source,
            batch_size=config.run.batch_size,
        )
        # Report what does not fit before writing anything.
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
    return run


@contextmanager
def reach_broker(config: ServeConfig) -> Iterator[BrokerSettings]:
    """Give the broker for the duration of the context, starting an embedded one if configured."""
    if not config.broker.embedded:
        yield config.broker
        return
    broker, folder = config.broker, config.run.folder
    with embedded_broker(
        folder / BROKER, port=broker.port or None, password=broker.password
    ) as settings:
        settings = replace(settings, chunk_bytes=broker.chunk_bytes)
        path = folder / BROKER_FILE
        write_whole(path, broker_table(settings).encode(), mode=0o600)
        try:
            yield settings
        finally:
            remove(path)


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
    config: ServeConfig, stop: threading.Event, say: Say, watchdog: Watchdog | None = None
) -> bool:
    """Run the coordinator until the run is complete (True) or a stop is requested (False).

    `say` gets the start-up report, line by line; see `Watchdog` for `watchdog`.
    """
    evaluation = config.task.evaluation
    with open_run(config) as run, reach_broker(config) as settings:
        evaluate = None
        if evaluation is not None:
            evaluate = make_evaluator(run.task, load_evaluation(evaluation, config.base))
        facts = try_broker(settings, stop) if config.broker.probe else None
        if stop.is_set():
            return False
        machine = config.machine(run.plan)
        check_local_rule(machine.local_rule, run.task.manifest)
        _check_levels(machine, run)
        service_config = ServiceConfig(
            machine=machine,
            down=config.run.down,
            keeping=config.keeping,
            chunk_bytes=settings.chunk_bytes if facts is None else facts.chunk_bytes,
            retained_chunks=facts is None or facts.retained_chunks,
            max_devices=config.round.max_devices,
        )
        for line in start_report(config, run, service_config, settings, facts):
            say(line)
        service = Service(
            run,
            service_config,
            open_link=partial(open_link, settings),
            evaluate=evaluate,
            watchdog=watchdog,
        )
        try:
            service.serve(stop)
            return service.finished
        finally:
            service.close()


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


def start_report(
    config: ServeConfig,
    run: Run,
    service: ServiceConfig,
    settings: BrokerSettings,
    facts: BrokerFacts | None,
) -> Iterator[str]:
    """Describe, for people, what is about to run."""
    machine, plan = service.machine, run.plan
    masks = next(name for name, kind in MASKS.items() if type(machine.masks) is kind)
    done = run.rounds()[-1]
    if isinstance(machine, RoundsConfig):
        length = f"{machine.rounds} rounds"
        if machine.server_optimizer.name != "none":
            length += f", server optimiser {machine.server_optimizer.name}"
    else:
        length = f"{machine.updates} updates"
    yield f"task       {run.about.task} ({run.about.source})"
    yield f"run        {run.about.run} in {run.folder}"
    yield f"model      {plan.parameters:,} parameters in {plan.block_count:,} blocks"
    yield f"rule       {rule_name(machine.rule)}, masks {masks}, {length}"
    if config.run.recipe is not None:
        recipe = find_recipe(config.run.recipe)
        yield f"recipe     {config.run.recipe}: {recipe.source}"
        if recipe.differs:
            yield f"{'':10} differs: {recipe.differs}"
    if machine.local_rule.widths != "own":
        levels = ", ".join(f"{level:.0%}" for level in machine.levels)
        chosen = "" if config.run.widths else " (chosen: run.widths is not set; docs/levels.md)"
        yield f"widths     {machine.local_rule.widths}{chosen}, levels {levels}"
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
    yield f"encoding   movements {machine.up}, model {service.down}"
    yield f"starts     after round {done}" if done else "starts     from scratch"
    own = f" (embedded; devices find it in {run.folder / BROKER_FILE})"
    yield f"broker     {settings.address}{own if config.broker.embedded else ''}"
    certificates = (settings.certificate, settings.bulk_certificate)
    for advice in certificate_advice(certificates, None, datetime.now(timezone.utc)):
        yield f"           {advice}"
    for finding in () if facts is None else facts.findings():
        if finding.verdict != "good":
            yield f"           {finding.name}: {finding.text}"
    yield f"waits for  {machine.min_devices} devices"
