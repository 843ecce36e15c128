"""The commands of `tessera-coordinator` that manage certificates for the broker."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.operate.identity.errors import IdentityError
from edge_sdk.program.command import confirm

# Load only what argparse needs: `cryptography` is loaded by the commands that sign.
if TYPE_CHECKING:
    from coordinator.operate.identity.access import WrittenRules
    from coordinator.operate.identity.authority import Authority, Passes
    from coordinator.operate.identity.index import AllowedTasks, BrokerPlace, Enrolment

FOLDER = Path("identity")
AUTHORITY_DAYS = 3_650
PARTICIPANT_DAYS = 365
PORT = 8_883
MOSQUITTO = "mosquitto"
"""Name of the broker's program, of its account, and of the folder for its files."""
BUSY_S = 5.0
"""Seconds to wait for a run that is letting a device join."""

READ_S = 10.0
"""Seconds that the broker of a run may take to read the list."""

_RELOAD = "Make the broker read it: systemctl reload mosquitto, or kill -HUP."


def add_commands(commands: Any) -> None:
    """Add these commands to those of `tessera-coordinator`."""
    _add_authority(commands)
    _add_enroll(commands)
    _add_grant(commands)
    _add_withdraw(commands)
    _add_revoke(commands)
    _add_identities(commands)
    _add_broker_config(commands)


def _add_authority(commands: Any) -> None:
    authority = commands.add_parser(
        "authority",
        help="create the authority that issues certificates",
        description=(
            "Creates the certificate authority (CA) of a deployment: its certificate, its key and "
            "an empty list of revoked certificates. enroll and broker-config also create one when "
            "there is none; use this command to choose how long it lasts. Keep the folder private "
            "and back it up: whoever has ca.key can connect as anybody, and without it nobody can "
            "be enrolled or revoked."
        ),
        epilog="example: tessera-coordinator authority --days 3650",
    )
    _add_folder(authority)
    authority.add_argument(
        "--days",
        type=int,
        default=AUTHORITY_DAYS,
        help="days that it, and everything it signs, is valid (default %(default)s)",
    )
    authority.set_defaults(run=_authority)


def _add_enroll(commands: Any) -> None:
    enroll = commands.add_parser(
        "enroll",
        help="issue certificates and a ready bundle for a device, a coordinator or a viewer",
        description=(
            "Issues two certificates, one for each connection (<name> and <name>-bulk), and puts\n"
            "them with their keys and a configuration into a bundle, <device>.tar.gz. Bring it to\n"
            "the device over a channel you trust, unpack it, fill in where its data is, and start\n"
            "tessera-device run --config <device>/device.toml. The bundle holds the only copy of\n"
            "the keys: delete it once it is installed. The broker has to read its access rules\n"
            "again: one that serve started does so at once, another when you reload it."
        ),
        epilog=(
            "examples:\n"
            "  tessera-coordinator enroll robot --broker broker.example.org --task digits\n"
            "  tessera-coordinator enroll robot --task digits --task weather    best task first\n"
            "  tessera-coordinator enroll robot --renew       before its certificates expire\n"
            "  tessera-coordinator enroll --coordinator       for run.toml\n"
            "  tessera-coordinator enroll --coordinator eu    for a second one: coordinator-eu\n"
            "  tessera-coordinator enroll --viewer grafana    a dashboard that reads view/#"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    who = enroll.add_mutually_exclusive_group(required=True)
    who.add_argument("device", nargs="?", metavar="DEVICE", help="the device's name")
    who.add_argument(
        "--coordinator",
        nargs="?",
        const="",
        metavar="NAME",
        help="enroll the coordinator instead; if there are several, give each a name",
    )
    who.add_argument(
        "--viewer",
        nargs="?",
        const="",
        metavar="NAME",
        help="enroll a dashboard, which may read what runs tell dashboards and nothing else "
        "(status_topics in run.toml)",
    )
    _add_folder(enroll)
    enroll.add_argument(
        "--days",
        type=int,
        default=PARTICIPANT_DAYS,
        help="days the certificates are valid (default %(default)s)",
    )
    enroll.add_argument(
        "--broker",
        metavar="HOST[:PORT]",
        help=f"address of the broker (default: the last one given; port {PORT})",
    )
    enroll.add_argument(
        "--task",
        action="append",
        metavar="NAME",
        help="task to train, and the only one it may take part in; repeatable, the most important "
        "first. Without it, the device may take part in every task",
    )
    enroll.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=(
            "the bundle: an archive if it ends in .tar.gz, otherwise a folder (default "
            "<device>.tar.gz; for a coordinator the folder <name>-identity)"
        ),
    )
    enroll.add_argument(
        "--renew",
        action="store_true",
        help="issue new certificates while the old ones are valid; those stay valid until they end",
    )
    enroll.set_defaults(run=_enroll)


def _add_grant(commands: Any) -> None:
    grant = commands.add_parser(
        "grant",
        help="let enrolled devices take part in a further task",
        description=(
            "Adds tasks to those that devices may take part in, without new certificates. Brokers "
            "of runs that are being served read the new access rules at once, and no connection "
            "ends; others when you reload them. With --only, the devices may take part in these "
            "tasks and no others: so an enrolment for every task is narrowed."
        ),
        epilog=(
            "examples: tessera-coordinator grant robot --task weather; "
            "tessera-coordinator grant robot kitchen-pi --task digits --only; "
            "tessera-coordinator grant robot --every-task"
        ),
    )
    grant.add_argument("devices", nargs="+", metavar="DEVICE", help="name, see identities")
    _add_folder(grant)
    which = grant.add_mutually_exclusive_group(required=True)
    which.add_argument("--task", action="append", metavar="NAME", help="the task; repeatable")
    which.add_argument(
        "--every-task", action="store_true", help="all tasks, those of the future included"
    )
    grant.add_argument("--only", action="store_true", help="take all other tasks away")
    grant.set_defaults(run=_grant)


def _add_withdraw(commands: Any) -> None:
    withdraw = commands.add_parser(
        "withdraw",
        help="take a task away from enrolled devices",
        description=(
            "Takes tasks away from those that devices may take part in. Once a broker has read "
            "the new access rules, it drops what they send for these tasks and gives them nothing "
            "more; to the run they are silent. Their certificates and other tasks stay; revoke "
            "shuts a device out altogether."
        ),
        epilog="example: tessera-coordinator withdraw robot --task weather",
    )
    withdraw.add_argument("devices", nargs="+", metavar="DEVICE", help="name, see identities")
    _add_folder(withdraw)
    withdraw.add_argument(
        "--task", action="append", metavar="NAME", required=True, help="the task; repeatable"
    )
    withdraw.set_defaults(run=_withdraw)


def _add_revoke(commands: Any) -> None:
    revoke = commands.add_parser(
        "revoke",
        help="revoke a device's certificates",
        description=(
            "Adds all valid certificates of a device (or a coordinator) to the revocation list, "
            "and to its copies beside the brokers of this authority that are on this machine: that "
            "of broker-config, and those of all runs. Brokers of runs that are being served read "
            "it at once; others when you reload them. Once a broker has read it, the connections "
            "that the device has there are ended. The output says what was reached; after you "
            "reload a broker, repeat the command to end the connections there. Enrolling the name "
            "again issues new certificates."
        ),
        epilog="example: tessera-coordinator revoke robot",
    )
    revoke.add_argument("name", metavar="NAME", help="name, see tessera-coordinator identities")
    _add_folder(revoke)
    revoke.add_argument("--yes", action="store_true", help="do not ask")
    revoke.set_defaults(run=_revoke)


def _add_identities(commands: Any) -> None:
    identities = commands.add_parser(
        "identities",
        help="list enrolled and revoked names, with dates and tasks",
        description=(
            "Prints the authority and everybody it enrolled, oldest first, with the tasks that "
            "devices may take part in."
        ),
        epilog="example: tessera-coordinator identities --dir identity",
    )
    _add_folder(identities)
    identities.add_argument("--json", action="store_true", help="as JSON, for scripts")
    identities.set_defaults(run=_identities)


def _add_broker_config(commands: Any) -> None:
    config = commands.add_parser(
        "broker-config",
        help="write the broker's files: TLS, access rules, revoked certificates",
        description=(
            "Writes a folder that lets Mosquitto identify everybody by certificate: its "
            "configuration, its own certificate and key, the access rules and the revocation "
            "list. Only enrolled names can connect; the client id is the name in the "
            "certificate; a device reads and writes only its own topics, in the tasks that it was "
            "enrolled for. enroll, grant, withdraw and revoke keep the access rules current, if "
            "the files are on this machine; reload the broker then. Run it again after you "
            "enroll a named coordinator, or before the broker's certificate expires; it replaces "
            "existing files."
        ),
        epilog=(
            "example: tessera-coordinator broker-config mosquitto --host broker.example.org && "
            "mosquitto -c identity/mosquitto/mosquitto.conf"
        ),
    )
    config.add_argument("kind", choices=(MOSQUITTO,), help="the broker")
    _add_folder(config)
    config.add_argument(
        "--host",
        action="append",
        metavar="NAME",
        help=(
            "name or address under which participants reach the broker; repeatable "
            "(default: as last time). With loopback only, it listens on this machine alone"
        ),
    )
    config.add_argument("--port", type=int, help=f"default: as last time, or {PORT}")
    config.add_argument(
        "--out", type=Path, metavar="DIR", help=f"where to write (default <dir>/{MOSQUITTO})"
    )
    config.add_argument(
        "--at",
        type=Path,
        metavar="DIR",
        help="folder of the files on the broker's machine, if different",
    )
    config.add_argument(
        "--user",
        metavar="NAME",
        help=(
            "account Mosquitto runs under when root starts it; it will own the files "
            f"(default: {MOSQUITTO} if that account exists)"
        ),
    )
    config.add_argument(
        "--every-task",
        action="store_true",
        help="let every enrolled device into every task: the rules then name no device, and "
        "enrolling one changes nothing at the broker",
    )
    config.set_defaults(run=_broker_config)


def _add_folder(command: Any) -> None:
    command.add_argument(
        "--dir",
        type=Path,
        default=FOLDER,
        metavar="DIR",
        help="the authority's folder (default %(default)s)",
    )


# -- the commands --------------------------------------------------------------------------------


def _authority(arguments: argparse.Namespace) -> int:
    from coordinator.operate.identity.authority import Authority

    with Authority(arguments.dir, create_days=arguments.days) as authority:
        if not authority.is_new:
            raise IdentityError(
                f"{arguments.dir} already holds an authority, until {authority.until:%Y-%m-%d}: "
                "name another folder with --dir"
            )
        _say_new(authority)
    return 0


def _enroll(arguments: argparse.Namespace) -> int:
    from coordinator.operate.identity.access import write_rules
    from coordinator.operate.identity.authority import (
        Authority,
        coordinator_name,
        device_name,
        viewer_name,
    )
    from coordinator.operate.identity.bundles import (
        coordinator_bundle,
        device_bundle,
        viewer_bundle,
    )
    from coordinator.operate.identity.files import check_free, folder_in, write_bundle

    is_device = arguments.device is not None
    if is_device:
        name = device_name(arguments.device)
    elif arguments.viewer is not None:
        name = viewer_name(arguments.viewer)
    else:
        name = coordinator_name(arguments.coordinator)
    out = arguments.out or Path(f"{name}.tar.gz" if is_device else f"{name}-identity")
    check_free(out)
    tasks = _checked_tasks(arguments.task)
    with Authority(arguments.dir, create_days=AUTHORITY_DAYS) as authority:
        _say_new(authority)
        broker = _place(authority, arguments.broker)
        pair = authority.enroll(name, days=arguments.days, renew=arguments.renew, tasks=tasks)
        if is_device:
            files = device_bundle(authority, pair, broker, tasks or ())
        elif arguments.viewer is not None:
            files = viewer_bundle(authority, pair)
        else:
            files = coordinator_bundle(authority, pair, broker, folder_in(out))
        try:
            write_bundle(out, files)
        except OSError as error:
            raise IdentityError(
                f"{name} is enrolled, but {out} cannot be written ({error}): enroll it again with "
                "--renew"
            ) from error
        until = authority.index.of(name)[-1].until
        allowed = authority.tasks(name) if is_device else None
        written = write_rules(authority)
    print(f"{name} is enrolled until {until:%Y-%m-%d}; its bundle, with the only copy of its keys:")
    print(f"  {out}")
    if is_device:
        print(f"It may take part in {_say_tasks(allowed)}.")
        if allowed is None:
            print(f"To narrow that: tessera-coordinator grant {name} --task NAME --only")
    if is_device:
        steps = _device_steps(folder_in(out), tasks)
    elif arguments.viewer is not None:
        steps = _viewer_steps(name, out, broker, tasks)
    else:
        steps = _own_steps(name, out)
    for line in steps:
        print(line)
    return 0 if _tell_brokers(written) else 1


def _grant(arguments: argparse.Namespace) -> int:
    added = _checked_tasks(arguments.task)
    if arguments.only and added is None:
        raise IdentityError("--only and --every-task contradict each other: leave one out")
    return _change(
        arguments, lambda has: added if added is None or arguments.only else _joined(has, added)
    )


def _withdraw(arguments: argparse.Namespace) -> int:
    gone = _checked_tasks(arguments.task) or ()

    def without(has: AllowedTasks) -> AllowedTasks:
        if has is None:
            raise IdentityError(
                "it may take part in every task, and one of them cannot be taken away: name those "
                "it keeps with tessera-coordinator grant DEVICE --task NAME --only"
            )
        if missing := sorted(set(gone) - set(has)):
            raise IdentityError(f"it has no task {missing[0]!r}: its tasks are {_say_tasks(has)}")
        return tuple(each for each in has if each not in gone)

    return _change(arguments, without)


def _change(arguments: argparse.Namespace, change: Callable[[AllowedTasks], AllowedTasks]) -> int:
    """Change the tasks of devices: all of them, or none if one cannot be changed."""
    from coordinator.operate.identity.access import write_rules
    from coordinator.operate.identity.authority import Authority

    with Authority(arguments.dir, wait_s=BUSY_S) as authority:
        wanted = {}
        for name in arguments.devices:
            has = authority.tasks(name)
            try:
                wanted[name] = change(has)
            except IdentityError as error:
                raise IdentityError(f"{name}: {error}") from error
        for name, tasks in wanted.items():
            word = "now may" if authority.allow(name, tasks) else "already could"
            print(f"{name} {word} take part in {_say_tasks(authority.tasks(name))}.")
        written = write_rules(authority)
    return 0 if _tell_brokers(written) else 1


def _joined(has: AllowedTasks, added: AllowedTasks) -> AllowedTasks:
    return None if has is None or added is None else (*has, *added)


def _say_tasks(tasks: AllowedTasks) -> str:
    if tasks is None:
        return "every task"
    return ", ".join(tasks) or "no task"


def _tell_brokers(written: WrittenRules) -> bool:
    """Let brokers read their new access rules, say what is left to do; False: one was missed."""
    from coordinator.operate.identity.access import reload_brokers

    for folder, reason in written.failures:
        print(f"NOT REACHED: {folder} ({reason}): its access rules are the old ones.")
    missed = reload_brokers(written.folders)
    for folder, reason in missed:
        print(f"NOT REACHED: the broker in {folder} has not read its access rules: {reason}")
    if written.own is not None and written.own.files is not None:
        print(f"The access rules in {written.own.files} are new. {_RELOAD}")
    elif written.own is not None:
        print(
            f"The broker at {written.own.host} needs new access rules: repeat tessera-coordinator "
            f"broker-config {MOSQUITTO} as before, copy the file acl there. {_RELOAD}"
        )
    return not (written.failures or missed)


def _device_steps(folder: str, tasks: AllowedTasks) -> Iterator[str]:
    yield "Unpack it on the device, then"
    yield f"  {folder}/device.toml    fill in {'' if tasks else 'task and '}data, and run"
    yield f"  tessera-device run --config {folder}/device.toml"


def _viewer_steps(
    name: str, out: Path, broker: BrokerPlace, tasks: tuple[str, ...] | None
) -> Iterator[str]:
    yield "Give its files to the dashboard. It may read, once the broker has read its rules:"
    for task in tasks or ("+",):
        yield (
            f"  mosquitto_sub -h {broker.host} -p {broker.port} -i {name} "
            f"--cafile {out / 'ca.pem'} --cert {out / name}.pem --key {out / name}.key "
            f"-t 'tessera/v1/{task}/view/#'"
        )


def _own_steps(name: str, out: Path) -> Iterator[str]:
    yield f"Replace the [broker] table of run.toml with the one in {out / 'broker.toml'}."
    if name != "coordinator":
        yield f"Tell the broker: tessera-coordinator broker-config {MOSQUITTO}, for {name}; reload."


def _revoke(arguments: argparse.Namespace) -> int:
    from coordinator.operate.identity.access import write_rules
    from coordinator.operate.identity.authority import CRL, Authority
    from coordinator.operate.identity.index import BrokerPlace

    name: str = arguments.name
    with Authority(arguments.dir, wait_s=BUSY_S) as authority:
        is_valid = bool(authority.valid(name))
    if is_valid:  # asked while others can use the authority
        confirm(
            f"{name} will be shut out; to come back, it needs new certificates.", yes=arguments.yes
        )
    with Authority(arguments.dir, wait_s=BUSY_S) as authority:
        ended = authority.revoke(name)
        serials = ", ".join(f"{serial:x}" for each in ended for serial in each.serials)
        print(f"{name} is revoked (serial numbers {serials})" if ended else f"{name} was revoked.")
        crl, broker = authority.folder / CRL, authority.index.broker
        runs = {each.files: each for each in authority.index.runs}
        folders = authority.index.folders
        passes = authority.passes(name)
        failures = {each: _copy_list(authority, each) for each in folders}
        write_rules(authority)  # where the list cannot be copied, they cannot be written either
    print(f"The list is in {crl}.")
    reached, read = True, list[BrokerPlace]()
    for folder, failure in failures.items():
        if folder in runs and not folder.is_dir():
            print(f"Not there any more: {folder}.")
        elif failure is not None:
            print(f"NOT REACHED: {folder} ({failure}): copy the list there, and reload the broker.")
            reached = False
        else:
            told, served = _reload(folder, is_run=folder in runs)
            reached &= told
            read += [runs[folder]] if served and folder in runs else []
    if not folders or (broker is not None and broker.files is None):
        print(f"Copy it to the broker's machine, to the path that crlfile names there. {_RELOAD}")
    for place in read:
        reached &= _end(place, passes, READ_S)
    if broker is not None:
        _end(broker, passes, 0.0)
    return 0 if reached else 1


def _end(place: BrokerPlace, passes: Passes, within_s: float) -> bool:
    """End a revoked name's connections at a broker, and say what came of it."""
    from coordinator.operate.identity.takeover import Takeover, end_connections

    where = f"{place.host}:{place.port}"
    outcome, reason = end_connections(place, passes, within_s=within_s)
    match outcome:
        case Takeover.ENDED:
            print(f"The broker at {where} has read it; {passes.name} has no connection there.")
        case Takeover.UNREAD:
            print(
                f"STILL LET IN: the broker at {where} has not read the list. Once it has, repeat "
                f"tessera-coordinator revoke {passes.name}: that ends connections which stand."
            )
        case Takeover.UNREACHED:
            print(
                f"The broker at {where} cannot be tested from here ({reason}). A connection that "
                "stands there lasts until it breaks, or the broker is restarted."
            )
    return outcome is Takeover.ENDED


def _copy_list(authority: Authority, folder: Path) -> str | None:
    """Write the list of revoked certificates to a broker's folder; returns why it cannot."""
    from coordinator.operate.identity.authority import CRL
    from coordinator.operate.identity.files import File, write_file

    try:
        write_file(folder / CRL, File(authority.crl))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _reload(folder: Path, *, is_run: bool) -> tuple[bool, bool]:
    """Let the broker with these files read them again, and say so.

    Returns whether it does or will, and whether it was told to.
    """
    from edge_sdk.program.control import ControlError, NotServedError, ask_run

    try:
        ask_run(folder.parent, "broker.reload")
    except NotServedError:
        how = "The run is not being served; its broker reads it when it starts."
        print(f"Reached: {folder}. {how if is_run else _RELOAD}")
    except ControlError as error:
        print(f"NOT REACHED: the list is in {folder}, but its broker has not read it: {error}")
        return False, False
    else:
        print(f"Reached: {folder}. The run's broker reads it.")
        return True, True
    return True, False


def _identities(arguments: argparse.Namespace) -> int:
    from coordinator.operate.identity.authority import Authority, utc_now

    with Authority(arguments.dir) as authority:
        now, rows = utc_now(), authority.index.enrolments
        if arguments.json:
            print(json.dumps([{**_facts(each), "standing": each.standing(now)} for each in rows]))
            return 0
        print(f"authority  {authority.fingerprint[:16]}… until {authority.until:%Y-%m-%d}")
        for label, place in _brokers(authority):
            print(f"{label:10} {place.host}, port {place.port}")
        width = max((len(each.name) for each in rows), default=0)
        for each in rows:
            standing = each.standing(now)
            when = each.revoked if each.revoked is not None else each.until
            word = {"valid": "until", "expired": "ended", "revoked": "revoked"}[standing]
            line = f"{each.name:{width}}  {word:7} {when:%Y-%m-%d}"
            shown = standing == "valid" and not each.is_coordinator
            print(f"{line}  {_say_tasks(each.tasks)}" if shown else line)
        for line in _advice(authority):
            print(line)
    return 0


def _advice(authority: Authority) -> Iterator[str]:
    """Say what lets devices into tasks that nobody named for them."""
    index = authority.index
    allowed = index.allowed(authority.now)
    open_to_all = [name for name, tasks in allowed.items() if tasks is None]
    if open_to_all:
        yield (
            f"{len(open_to_all)} device{'s' * (len(open_to_all) > 1)} may take part in every task; "
            f"to narrow that: tessera-coordinator grant {open_to_all[0]} --task NAME --only"
        )
    if index.broker is not None and not index.broker.by_task:
        yield (
            f"The broker at {index.broker.host} lets every device into every task; to change that: "
            f"tessera-coordinator broker-config {MOSQUITTO}, and reload it"
        )


def _brokers(authority: Authority) -> Iterator[tuple[str, BrokerPlace]]:
    if authority.index.broker is not None:
        yield "broker", authority.index.broker
    for each in authority.index.runs:
        yield "run", each


def _facts(enrolment: Enrolment) -> dict[str, Any]:
    return {
        "name": enrolment.name,
        "serials": [f"{serial:x}" for serial in enrolment.serials],
        "issued": enrolment.issued.isoformat(),
        "until": enrolment.until.isoformat(),
        "revoked": None if enrolment.revoked is None else enrolment.revoked.isoformat(),
        "tasks": None if enrolment.tasks is None else list(enrolment.tasks),
    }


def _broker_config(arguments: argparse.Namespace) -> int:
    from coordinator.operate.identity.authority import Authority
    from coordinator.operate.identity.bundles import make_place
    from coordinator.operate.identity.files import write_file
    from coordinator.operate.identity.mosquitto import CONFIG, mosquitto_files
    from edge_sdk.program.files import make_folder

    out: Path = arguments.out or arguments.dir / MOSQUITTO
    at = (arguments.at or out).absolute()
    if any(character.isspace() for character in str(at)):
        raise IdentityError(f"{str(at)!r}: Mosquitto cannot read paths with spaces; name another")
    with Authority(arguments.dir, create_days=AUTHORITY_DAYS) as authority:
        _say_new(authority)
        known = authority.index.broker
        hosts = arguments.host or ([known.host] if known else [])
        if not hosts:
            raise IdentityError(
                "--host is missing: give the name or address under which devices reach the broker"
            )
        place = make_place(hosts[0], arguments.port or (known.port if known else PORT))
        user = _account(arguments.user)
        if at == out.absolute():
            _check_reach(at, user)
        by_task = not arguments.every_task
        files = mosquitto_files(
            authority, hosts=hosts, port=place.port, at=at, user=user, by_task=by_task
        )
        make_folder(out, mode=0o700)
        for name, file in files.items():
            write_file(out / name, file)
        if user is not None:
            _hand_over([out, *(out / name for name in files)], user)
        here = out.absolute() if at == out.absolute() else None
        authority.remember_broker(replace(place, files=here, by_task=by_task))
    print(f"{out}: {', '.join(sorted(files))}")
    if at == out.absolute():
        print(f"mosquitto -c {at / CONFIG}")
    else:
        print(f"Copy them to {at} on the broker's machine (keep broker.key secret), then run there")
        print(f"mosquitto -c {at / CONFIG}")
    return 0


# -- details -------------------------------------------------------------------------------------


def _say_new(authority: Authority) -> None:
    if authority.is_new:
        print(
            f"{authority.folder} is the new authority, until {authority.until:%Y-%m-%d}. Keep it "
            "private and back it up: whoever has ca.key can connect as anybody."
        )


def _checked_tasks(tasks: Sequence[str] | None) -> AllowedTasks:
    """Return the tasks of --task, in their order; None: the flag was not given."""
    from edge_sdk.protocol.errors import MessageError
    from edge_sdk.protocol.messages.topics import check_name

    try:
        return None if not tasks else tuple(check_name(task, "task") for task in tasks)
    except MessageError as error:
        raise IdentityError(f"--task: {error}") from error


def _place(authority: Authority, text: str | None) -> BrokerPlace:
    """Return the broker's address: the given one, which is remembered, or the last one."""
    from coordinator.operate.identity.bundles import parse_place

    known = authority.index.place
    if text is None:
        if known is None:
            raise IdentityError(
                f"--broker is missing: give the broker's address as HOST or HOST:PORT "
                f"(default port {PORT}); it is remembered"
            )
        return known
    broker = authority.index.broker
    place = parse_place(text)
    if broker is not None:
        place = replace(place, files=broker.files, by_task=broker.by_task)
    authority.remember_broker(place)
    return place


def _account(given: str | None) -> str | None:
    """Return the account Mosquitto switches to when root starts it; None: root does not."""
    if os.geteuid() != 0:
        return given
    import pwd

    try:
        pwd.getpwnam(given or MOSQUITTO)
    except KeyError as error:
        if given is None:
            return "root"
        raise IdentityError(f"--user {given!r}: no such account") from error
    return given or MOSQUITTO


def _check_reach(folder: Path, user: str | None) -> None:
    """Raise IdentityError if that account cannot enter a parent folder; None: our own account."""
    if user in (None, "root"):
        return
    import pwd

    owner = pwd.getpwnam(str(user)).pw_uid
    for each in folder.parents:
        if each.exists() and (status := each.stat()).st_uid != owner and not status.st_mode & 0o001:
            raise IdentityError(
                f"{user!r}, the account Mosquitto runs under when root starts it, cannot enter "
                f"{each}: write to a folder it can enter, such as --out /etc/mosquitto/tessera, or "
                "use --user root for a trial"
            )


def _hand_over(paths: list[Path], user: str) -> None:
    """Give the files to the account under which Mosquitto reads its key."""
    if os.geteuid() == 0:
        for path in paths:
            shutil.chown(path, user)
