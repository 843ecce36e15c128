"""Topics: who writes what where. Built and parsed here and nowhere else.

    tessera/v1/<task>/pub/task                   the task                  coordinator, retained
    tessera/v1/<task>/pub/round                  the present round         coordinator, retained
    tessera/v1/<task>/pub/coordinator            its presence              coordinator, retained
    tessera/v1/<task>/pub/chunk/<hash>           a chunk, raw              coordinator, retained
    tessera/v1/<task>/down/<device>/control      messages to a device      coordinator
    tessera/v1/<task>/down/<device>/chunk/<hash> a chunk it asked for      coordinator
    tessera/v1/<task>/up/<device>/control        messages of a device      device
    tessera/v1/<task>/up/<device>/chunk          a piece of an upload      device
    tessera/v1/<task>/presence/<device>          its presence              device, retained

The name of a device is in every topic it may write, so that a broker can hold it to them. Names
are 1 to 64 of `a-z 0-9 . _ -`, the first a letter or digit; a hash is 32 lower-case hex digits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from edge_sdk.protocol.chunks import HASH_BYTES
from edge_sdk.protocol.errors import MessageError

ROOT = "tessera/v1"
MAX_TOPIC_CHARACTERS = 256
"""The longest that can be built has 195."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


class TopicKind(Enum):
    """What a topic is for; the value is its form behind the task."""

    TASK = "pub/task"
    ROUND = "pub/round"
    COORDINATOR = "pub/coordinator"
    CHUNK = "pub/chunk/<hash>"
    DOWN_CONTROL = "down/<device>/control"
    DOWN_CHUNK = "down/<device>/chunk/<hash>"
    UP_CONTROL = "up/<device>/control"
    UP_CHUNK = "up/<device>/chunk"
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
        return f"{self._prefix}down/{check_name(device)}/control"

    def down_chunk(self, device: str, hash: bytes) -> str:
        """A chunk that one device asked for."""
        return f"{self._prefix}down/{check_name(device)}/chunk/{_hex(hash)}"

    def up_control(self, device: str) -> str:
        """Messages of one device."""
        return f"{self._prefix}up/{check_name(device)}/control"

    def up_chunk(self, device: str) -> str:
        """Pieces of one device's uploads."""
        return f"{self._prefix}up/{check_name(device)}/chunk"

    def presence(self, device: str) -> str:
        """`Presence` of one device."""
        return f"{self._prefix}presence/{check_name(device)}"

    # -- filters --------------------------------------------------------------------------------

    def down_chunks(self, device: str) -> str:
        """All chunks that one device asked for."""
        return f"{self._prefix}down/{check_name(device)}/chunk/+"

    @property
    def up_all(self) -> str:
        """Everything that devices send up."""
        return self._prefix + "up/+/#"

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
                None if name is None else check_name(name),
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
    return text


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
