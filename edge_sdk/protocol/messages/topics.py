"""Topics: who writes what where. Built and parsed here and nowhere else.

    tessera/v1/<task>/pub/task                        the task              coordinator, retained
    tessera/v1/<task>/pub/round                       the present round     coordinator, retained
    tessera/v1/<task>/pub/coordinator                 its presence          coordinator, retained
    tessera/v1/<task>/pub/chunk/<hash>                a chunk, raw          coordinator, retained
    tessera/v1/<task>/down/<device>/control           messages to a device  coordinator
    tessera/v1/<task>/down/<device>-bulk/chunk/<hash> a chunk it asked for  coordinator
    tessera/v1/<task>/up/<device>/control             messages of a device  device
    tessera/v1/<task>/up/<device>-bulk/chunk          a piece of an upload  device
    tessera/v1/<task>/presence/<device>               its presence          device, retained

A device has two connections, `<device>` and `<device>-bulk`. The name of the connection is in
every topic it may write, so that a broker can hold each to its own. Names are 1 to 64 of
`a-z 0-9 . _ -`, the first a letter or digit, and do not end in `-bulk`. Those of devices have at
most 59, so that `-bulk` fits behind them into a certificate, and are neither `coordinator` nor
begin with `coordinator-`. A hash is 32 lower-case hex digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from edge_sdk.protocol.chunks import HASH_BYTES
from edge_sdk.protocol.errors import MessageError

ROOT = "tessera/v1"
MAX_TOPIC_CHARACTERS = 256
"""The longest that can be built has 184."""

BULK = "-bulk"
"""Behind the name of a participant: its connection for chunks."""

COORDINATOR = "coordinator"
"""The coordinator's name; those of several begin with it and a hyphen."""

MAX_DEVICE_CHARACTERS = 59
"""The common name of a certificate has at most 64."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


class TopicKind(Enum):
    """What a topic is for; the value is its form behind the task."""

    TASK = "pub/task"
    ROUND = "pub/round"
    COORDINATOR = "pub/coordinator"
    CHUNK = "pub/chunk/<hash>"
    DOWN_CONTROL = "down/<device>/control"
    DOWN_CHUNK = "down/<device>-bulk/chunk/<hash>"
    UP_CONTROL = "up/<device>/control"
    UP_CHUNK = "up/<device>-bulk/chunk"
    PRESENCE = "presence/<device>"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic taken apart."""

    task: str
    kind: TopicKind
    device: str | None = None
    """None: a topic of the coordinator for everybody."""
    hash: bytes | None = None
    """Of the chunk, where the topic names one."""


class Topics:
    """The topics of one task. Raises `MessageError` for names that do not fit into a topic."""

    def __init__(self, task: str) -> None:
        self._prefix = f"{ROOT}/{check_name(task, 'task')}/"

    @property
    def task(self) -> str:
        """What is trained: `TaskNotice`."""
        return self._prefix + "pub/task"

    @property
    def round(self) -> str:
        """The present round: `RoundOpen`, or `RoundClosed` behind the last one."""
        return self._prefix + "pub/round"

    @property
    def coordinator(self) -> str:
        """`Presence` of the coordinator."""
        return self._prefix + "pub/coordinator"

    def chunk(self, hash: bytes) -> str:
        """A retained chunk."""
        return f"{self._prefix}pub/chunk/{_hex(hash)}"

    def down_control(self, device: str) -> str:
        """Messages to one device."""
        return f"{self._prefix}down/{check_device(device)}/control"

    def down_chunk(self, device: str, hash: bytes) -> str:
        """A chunk that one device asked for."""
        return f"{self._prefix}down/{bulk_name(device)}/chunk/{_hex(hash)}"

    def up_control(self, device: str) -> str:
        """Messages of one device."""
        return f"{self._prefix}up/{check_device(device)}/control"

    def up_chunk(self, device: str) -> str:
        """Pieces of one device's uploads."""
        return f"{self._prefix}up/{bulk_name(device)}/chunk"

    def presence(self, device: str) -> str:
        """`Presence` of one device."""
        return f"{self._prefix}presence/{check_device(device)}"

    # -- filters --------------------------------------------------------------------------------

    def down_chunks(self, device: str) -> str:
        """All chunks that one device asked for."""
        return f"{self._prefix}down/{bulk_name(device)}/chunk/+"

    @property
    def up_controls(self) -> str:
        """The messages of all devices."""
        return self._prefix + "up/+/control"

    @property
    def up_chunks(self) -> str:
        """The pieces of all devices' uploads."""
        return self._prefix + "up/+/chunk"

    @property
    def presences(self) -> str:
        """The presence of all devices."""
        return self._prefix + "presence/+"


def parse_topic(text: str) -> Topic:
    """A topic taken apart. Raises `MessageError`, and nothing else, for any other text."""
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
    """The same name, if it fits into a topic. Raises `MessageError`."""
    if not _NAME.fullmatch(text):
        raise MessageError(
            f"{text[:80]!r} cannot name a {what}: use 1 to 64 of a-z, 0-9, '.', '_' and '-', "
            "the first a letter or digit"
        )
    if text.endswith(BULK):
        raise MessageError(
            f"{text!r} cannot name a {what}: {BULK!r} at the end is kept for the connections that "
            "carry chunks; choose another name"
        )
    return text


def check_device(text: str) -> str:
    """The same name, if a device may have it. Raises `MessageError`."""
    check_name(text)
    if len(text) > MAX_DEVICE_CHARACTERS:
        raise MessageError(
            f"{text!r} cannot name a device: it has {len(text)} characters, more than the "
            f"{MAX_DEVICE_CHARACTERS} that fit into a certificate"
        )
    if text == COORDINATOR or text.startswith(COORDINATOR + "-"):
        raise MessageError(
            f"{text!r} cannot name a device: {COORDINATOR!r}, alone or with a hyphen behind it, is "
            "kept for coordinators; choose another name"
        )
    return text


def bulk_name(device: str) -> str:
    """The name of a device's connection for chunks. Raises `MessageError`, as `check_device`."""
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
    for kind in TopicKind
}
