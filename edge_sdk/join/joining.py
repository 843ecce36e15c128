"""Join a task: make a key, ask the coordinator, and write the files of a device.

    <folder>/  <name>.key, <name>.pem, <name>-bulk.pem, ca.pem   where certificates are used
               device.toml                                       last: then the device has joined

A join that broke off is repeated with the same code: the key is still there, and the coordinator
gives the same name and key the same place again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from edge_sdk.join.client import Welcome, fetch_welcome, send_request
from edge_sdk.join.code import MAX_TASKS, JoinCode, JoinError
from edge_sdk.join.files import (
    CA_FILE,
    DEVICE_FILE,
    certificate_files,
    render_broker,
    render_device,
)
from edge_sdk.join.keys import make_key, make_request
from edge_sdk.program.files import make_folder, write_whole
from edge_sdk.protocol.errors import ConfigError, MessageError
from edge_sdk.protocol.messages.topics import BULK, check_device, check_name
from edge_sdk.transport.settings import BrokerSettings

_BROKER_KEYS = ("host", "port", "tls", "username", "password", "allow_plaintext")


def join_task(
    code: JoinCode,
    *,
    name: str,
    folder: Path,
    data: str | None = None,
    label: str | None = None,
) -> Path:
    """Join and return the path of the new `device.toml`, which names all tasks of the code.

    `data` None: left to the owner; `label`: see `render_device`. Raises `JoinError`, and `OSError`
    for files.
    """
    try:
        check_device(name)
    except MessageError as error:
        raise JoinError(f"--name: {error}") from error
    config = folder / DEVICE_FILE
    if config.exists():
        raise JoinError(
            f"{config} already exists: start it with tessera-device run --config {config}, or "
            "join as another device with --name or --dir"
        )
    welcome = fetch_welcome(code)
    make_folder(folder, mode=0o700)
    request = None
    if welcome.certificates:
        key = folder / f"{name}.key"
        if not key.exists():
            make_key(key)
        request = make_request(key, name).decode()
    answer = send_request(code, welcome, name, request)
    table = _store(answer, welcome, name, folder)
    tasks = _tasks(answer, code)
    text = render_device(name, tasks, data, table, label=label, has_keys=welcome.certificates)
    write_whole(config, text.encode(), mode=0o600)
    return config


def _tasks(answer: Mapping[str, Any], code: JoinCode) -> list[str]:
    """Return the tasks that an answer names, the most important first."""
    tasks = answer.get("tasks", [code.task])  # coordinators of one task may name none
    try:
        if not isinstance(tasks, list) or not 0 < len(tasks) <= MAX_TASKS:
            raise TypeError
        return list(dict.fromkeys(check_name(task, "task") for task in tasks))
    except (MessageError, TypeError) as error:
        raise JoinError(f"the coordinator named tasks that cannot be used: {error}") from error


def _store(answer: Mapping[str, Any], welcome: Welcome, name: str, folder: Path) -> str:
    """Write the certificates of an answer, and return its `[broker]` table."""
    broker = answer.get("broker")
    if not isinstance(broker, dict):
        raise JoinError("the coordinator's answer has no broker: is its version the same as ours?")
    values: dict[str, str | int | bool | None] = {
        key: broker[key] for key in _BROKER_KEYS if broker.get(key) not in (None, False)
    }
    try:
        if not {type(value) for value in values.values()} <= {str, int, bool}:
            raise TypeError
        known = {each.name for each in fields(BrokerSettings)}
        BrokerSettings(**{key: value for key, value in values.items() if key in known})  # type: ignore[arg-type]
    except (ConfigError, TypeError) as error:
        raise JoinError(f"the coordinator named a broker that cannot be used: {error}") from error
    if welcome.certificates:
        write_whole(folder / CA_FILE, welcome.ca.encode())
        for key, file in (("certificate", name), ("bulk_certificate", name + BULK)):
            pem = answer.get(key)
            if not isinstance(pem, str) or "BEGIN CERTIFICATE" not in pem:
                raise JoinError(f"the coordinator's answer has no {key}: ask its operator")
            write_whole(folder / f"{file}.pem", pem.encode())
        values |= certificate_files(name, name + BULK, name)
    return render_broker(values)
