"""Topics, and who writes to them. This is the only module that builds or parses them.

    tessera/v1/<task>/pub/epoch                       who is in charge      coordinator, retained
    tessera/v1/<task>/pub/echo                        to itself             coordinator
    tessera/v1/<task>/pub/task                        the task              coordinator, retained
    tessera/v1/<task>/pub/round                       the current round     coordinator, retained
    tessera/v1/<task>/pub/coordinator                 its presence          coordinator, retained
    tessera/v1/<task>/pub/latest                      the newest model      coordinator, retained
    tessera/v1/<task>/pub/best                        the best model        coordinator, retained
    tessera/v1/<task>/pub/canary                      a model to try      coordinator, retained
    tessera/v1/<task>/pub/chunk/<hash>                a chunk, raw          coordinator, retained
    tessera/v1/<task>/down/<device>/control           messages to a device  coordinator
    tessera/v1/<task>/down/<device>-bulk/chunk/<hash> a chunk it asked for  coordinator
    tessera/v1/<task>/up/<device>/control             a device's messages   device
    tessera/v1/<task>/up/<device>-bulk/chunk          a piece of an upload  device
    tessera/v1/<task>/presence/<device>               its presence          device, retained
    tessera/v1/<task>/view/status                     the run, as JSON      coordinator, retained
    tessera/v1/<task>/view/fleet                      its devices, as JSON  coordinator, retained

A device has two connections, `<device>` and `<device>-bulk`. The name of the connection is in
every topic it may write, so that a broker can restrict each connection to its own topics. Names are
1 to 64 of `a-z 0-9 . _ -`, start with a letter or digit, and do not end in `-bulk`. Names of
devices have at most 59 characters, so that `-bulk` after them still fits into a certificate, and
neither are `coordinator` or `viewer` nor begin with `coordinator-` or `viewer-`. Only viewers read
what is under `view`: it tells about devices. A hash is 32 lower-case hex digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal

from edge_sdk.protocol.chunks import HASH_BYTES
from edge_sdk.protocol.errors import MessageError

ROOT = "tessera/v1"
MAX_TOPIC_CHARACTERS = 256
"""Limit on topics; the longest that can be built has 184."""

BULK = "-bulk"
"""Suffix of a participant's name for its connection that carries chunks."""

COORDINATOR = "coordinator"
"""The coordinator's name; if there are several, their names begin with it and a hyphen."""

VIEWER = "viewer"
"""Name of a dashboard that may read `view`; if there are several, as those of coordinators."""

MAX_DEVICE_CHARACTERS = 59
"""Limit on device names, because the common name of a certificate has at most 64."""

EVERY_TASK, EVERY_COORDINATOR = f"{ROOT}/+/pub/task", f"{ROOT}/+/pub/coordinator"
"""Filters for all tasks of a broker, and for the presence of their coordinators."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


class TopicKind(Enum):
    """Kinds of topic; the value is the form after the task."""

    EPOCH = "pub/epoch"
    ECHO = "pub/echo"
    TASK = "pub/task"
    ROUND = "pub/round"
    COORDINATOR = "pub/coordinator"
    LATEST = "pub/latest"
    BEST = "pub/best"
    CANARY = "pub/canary"
    CHUNK = "pub/chunk/<hash>"
    DOWN_CONTROL = "down/<device>/control"
    DOWN_CHUNK = "down/<device>-bulk/chunk/<hash>"
    UP_CONTROL = "up/<device>/control"
    UP_CHUNK = "up/<device>-bulk/chunk"
    PRESENCE = "presence/<device>"
    VIEW_STATUS = "view/status"
    VIEW_FLEET = "view/fleet"


@dataclass(frozen=True, slots=True)
class Topic:
    """A parsed topic."""

    task: str
    kind: TopicKind
    device: str | None = None
    """None: a topic from the coordinator to everybody."""
    hash: bytes | None = None
    """Hash of the chunk, if the topic names one."""


class Topics:
    """The topics of one task. Raises `MessageError` for names that do not fit into a topic."""

    def __init__(self, task: str) -> None:
        self._prefix = f"{ROOT}/{check_name(task, 'task')}/"

    @property
    def epoch(self) -> str:
        """Topic of the coordinator in charge: `Claim`."""
        return self._prefix + "pub/epoch"

    @property
    def echo(self) -> str:
        """Topic on which the coordinator hears itself: `Echo`."""
        return self._prefix + "pub/echo"

    @property
    def task(self) -> str:
        """Topic of the task: `TaskNotice`."""
        return self._prefix + "pub/task"

    @property
    def round(self) -> str:
        """Topic of the current round: `RoundOpen`, or `RoundClosed` after the last one."""
        return self._prefix + "pub/round"

    @property
    def coordinator(self) -> str:
        """Topic of the coordinator's `Presence`."""
        return self._prefix + "pub/coordinator"

    def model(self, choice: Literal["latest", "best", "canary"]) -> str:
        """Topic of a model for inference: `ModelNotice`."""
        return f"{self._prefix}pub/{choice}"

    def chunk(self, hash: bytes) -> str:
        """Topic of a retained chunk."""
        return f"{self._prefix}pub/chunk/{_hex(hash)}"

    def down_control(self, device: str) -> str:
        """Topic of messages to one device."""
        return f"{self._prefix}down/{check_device(device)}/control"

    def down_chunk(self, device: str, hash: bytes) -> str:
        """Topic of a chunk that one device asked for."""
        return f"{self._prefix}down/{bulk_name(device)}/chunk/{_hex(hash)}"

    def up_control(self, device: str) -> str:
        """Topic of one device's messages."""
        return f"{self._prefix}up/{check_device(device)}/control"

    def up_chunk(self, device: str) -> str:
        """Topic of the pieces of one device's uploads."""
        return f"{self._prefix}up/{bulk_name(device)}/chunk"

    def presence(self, device: str) -> str:
        """Topic of one device's `Presence`."""
        return f"{self._prefix}presence/{check_device(device)}"

    @property
    def view_status(self) -> str:
        """Topic of the run's state, for dashboards: JSON."""
        return self._prefix + "view/status"

    @property
    def view_fleet(self) -> str:
        """Topic of the devices, for dashboards: JSON."""
        return self._prefix + "view/fleet"

    # -- filters --------------------------------------------------------------------------------

    def down_chunks(self, device: str) -> str:
        """Filter for all chunks that one device asked for."""
        return f"{self._prefix}down/{bulk_name(device)}/chunk/+"

    @property
    def up_controls(self) -> str:
        """Filter for the messages of all devices."""
        return self._prefix + "up/+/control"

    @property
    def up_chunks(self) -> str:
        """Filter for the pieces of all devices' uploads."""
        return self._prefix + "up/+/chunk"

    @property
    def presences(self) -> str:
        """Filter for the presence of all devices."""
        return self._prefix + "presence/+"


@lru_cache(maxsize=128)
def parse_topic(text: str) -> Topic:
    """Parse a topic. Raises only `MessageError`, for any other text."""
    if len(text) > MAX_TOPIC_CHARACTERS or not text.startswith(ROOT + "/"):
        raise MessageError(f"{text[:80]!r} is not a topic under {ROOT}/")
    task, _, rest = text[len(ROOT) + 1 :].partition("/")
    check_name(task, "task")
    for kind, form in _FORMS.items():
        if found := form.fullmatch(rest):
            parts = found.groupdict()
            name, hash = parts.get("device"), parts.get("hash")
            return Topic(
                task,
                kind,
                None if name is None else check_device(name),
                None if hash is None else bytes.fromhex(hash),
            )
    raise MessageError(f"{text!r} is not a topic of version 1")


def check_name(text: str, what: str = "device") -> str:
    """Return the name if it fits into a topic. Raises `MessageError`."""
    if not _NAME.fullmatch(text):
        raise MessageError(
            f"{text[:80]!r} cannot name a {what}: use 1 to 64 of a-z, 0-9, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    if text.endswith(BULK):
        raise MessageError(
            f"{text!r} cannot name a {what}: the ending {BULK!r} is reserved for connections that "
            "carry chunks; choose another name"
        )
    return text


def check_device(text: str) -> str:
    """Return the name if a device may have it. Raises `MessageError`."""
    check_name(text)
    if len(text) > MAX_DEVICE_CHARACTERS:
        raise MessageError(
            f"{text!r} cannot name a device: it has {len(text)} characters, but at most "
            f"{MAX_DEVICE_CHARACTERS} fit into a certificate"
        )
    for reserved in (COORDINATOR, VIEWER):
        if is_named(text, reserved):
            raise MessageError(
                f"{text!r} cannot name a device: {reserved!r}, alone or followed by a hyphen, is "
                f"reserved for {reserved}s; choose another name"
            )
    return text


def is_named(text: str, reserved: str) -> bool:
    """True if a name is a reserved one, or begins with it and a hyphen."""
    return text == reserved or text.startswith(reserved + "-")


def bulk_name(device: str) -> str:
    """Return the name of a device's connection for chunks. Raises `MessageError`."""
    return check_device(device) + BULK


def _hex(hash: bytes) -> str:
    if len(hash) != HASH_BYTES:
        raise MessageError(f"the hash of a chunk has {HASH_BYTES} bytes, not {len(hash)}")
    return hash.hex()


_FORMS = {
    kind: re.compile(
        kind.value.replace("<device>", r"(?P<device>[^/]+)").replace(
            "<hash>", f"(?P<hash>{_HASH.pattern})"
        )
    )
    for kind in sorted(TopicKind, key=lambda kind: "<hash>" not in kind.value)
}
"""Those of chunks first: each has a name of its own, and most come once."""
