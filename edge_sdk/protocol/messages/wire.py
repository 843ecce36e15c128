"""Control messages as bytes: one msgpack map each, `{"v": 1, "type": "bid", …}`.

`docs/protocol.md` lists every field. `fields.py` defines the forms of values. Messages of a
coordinator end with its stamp, `"epoch": [counter, instance]` (`epoch.py`).

Law: `decode_message(encode_message(m)) == m`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_sdk.protocol.errors import MessageError, ProtocolError
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.epoch import Claim, Echo, Epoch
from edge_sdk.protocol.messages.fields import (
    BINARY,
    BLOB,
    BLOBS,
    BYTES_BY_NAME,
    COUNT,
    ENCODING,
    FLAG,
    GROUPS,
    HASHES,
    LEVELS,
    NAME,
    NAMES,
    NUMBER,
    NUMBERS,
    RANGES,
    REASON,
    RULE,
    RUN,
    SHA256,
    TEXT,
    TEXTS,
    WIDTHS,
    Form,
    Forms,
    called,
    count,
    optional,
    pack_map,
    read_fields,
    unpack_map,
    write_fields,
)
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.messages.topics import Topic, TopicKind
from edge_sdk.protocol.messages.transfer import (
    Complaint,
    Credit,
    Evaluation,
    Offer,
    Presence,
    TaskNotice,
    Want,
)

MAX_CONTROL_BYTES = 2**18
STAMP = "epoch"
"""Name of the stamp in a message's map."""

ControlMessage = (
    TaskNotice
    | RoundOpen
    | RoundClosed
    | Presence
    | Bid
    | Assignment
    | Receipt
    | Offer
    | Credit
    | Want
    | Evaluation
    | Complaint
    | Condition
    | Survey
    | SurveyFinding
    | ModelNotice
    | Claim
    | Echo
)

TYPES: dict[str, type[ControlMessage]] = {
    "task_notice": TaskNotice,
    "round_open": RoundOpen,
    "round_closed": RoundClosed,
    "presence": Presence,
    "bid": Bid,
    "assignment": Assignment,
    "receipt": Receipt,
    "offer": Offer,
    "credit": Credit,
    "want": Want,
    "evaluation": Evaluation,
    "complaint": Complaint,
    "condition": Condition,
    "survey": Survey,
    "finding": SurveyFinding,
    "model_notice": ModelNotice,
    "claim": Claim,
    "echo": Echo,
}
"""Every message by its name on the wire."""

FORMS: dict[type[ControlMessage], Forms] = {
    TaskNotice: {
        "task": NAME,
        "run": RUN,
        "plan": BLOB,
        "manifest": BLOB,
        "graphs": BLOBS,
        "chunk_bytes": COUNT,
    },
    RoundOpen: {
        "round": COUNT,
        "plan_hash": SHA256,
        "local_rule": called("rule", RULE),
        "steps": COUNT,
        "batch_size": COUNT,
        "bid_s": NUMBER,
        "train_deadline_s": called("train_s", NUMBER),
        "whole": FLAG,
        "replay_within": COUNT,
        "up": called("encoding", ENCODING),
        "run": RUN,
        "model": optional(BLOB),
        "rounds_left": optional(COUNT),
        "warmup": FLAG,
        "levels": LEVELS,
        "by_invitation": FLAG._replace(omits=False),
        "statistics": optional(BLOB)._replace(omits=None),
        "largest": NUMBER._replace(omits=1.0),
        "variates": FLAG._replace(omits=False),
        "control": optional(BLOB)._replace(omits=None),
    },
    RoundClosed: {"round": COUNT, "run": RUN},
    Presence: {
        "name": NAME,
        "session": COUNT,
        "online": FLAG,
        "reason": REASON._replace(omits=""),
        "exit_code": optional(COUNT)._replace(omits=None),
    },
    Bid: {
        "device": NAME,
        "round": COUNT,
        "level": optional(NUMBER),
        "reason": REASON,
        "samples": COUNT,
        "replays": FLAG,
        "compute": optional(NUMBER),
        "bytes_per_s": optional(NUMBER),
        "run": RUN,
        "code": optional(NAME),
    },
    Assignment: {
        "device": NAME,
        "round": COUNT,
        "groups": GROUPS,
        "run": RUN,
        "widths": WIDTHS,
    },
    Receipt: {
        "device": NAME,
        "round": COUNT,
        "outcome": Form(lambda outcome: outcome.value, Outcome),
        "reason": REASON,
        "run": RUN,
    },
    Offer: {
        "device": NAME,
        "run": RUN,
        "upload": BINARY,
        "round": COUNT,
        "answers": optional(COUNT),
        "size": COUNT,
        "chunk_bytes": COUNT,
        "sha256": BINARY,
    },
    Credit: {
        "device": NAME,
        "upload": BINARY,
        "missing": RANGES,
        "window": COUNT,
        "refused": FLAG,
        "reason": REASON,
    },
    Want: {"device": NAME, "chunks": HASHES},
    Evaluation: {
        "device": NAME,
        "run": RUN,
        "round": COUNT,
        "samples": COUNT,
        "loss": NUMBER,
        "accuracy": optional(NUMBER),
    },
    Complaint: {"device": NAME, "reason": REASON},
    Condition: {
        "device": NAME,
        "battery": optional(NUMBER)._replace(omits=None),
        "charging": optional(FLAG)._replace(omits=None),
        "temperature_c": optional(NUMBER)._replace(omits=None),
        "memory_free_mb": optional(NUMBER)._replace(omits=None),
        "memory_mb": optional(NUMBER)._replace(omits=None),
        "energy_today_j": optional(NUMBER)._replace(omits=None),
        "energy_budget_j": optional(NUMBER)._replace(omits=None),
        "labels": TEXTS._replace(omits={}),
        "profile": optional(NAME)._replace(omits=None),
        "version": optional(TEXT)._replace(omits=None),
        "last_error": optional(REASON)._replace(omits=None),
    },
    Survey: {
        "round": COUNT,
        "plan_hash": SHA256,
        "wants": TEXT,
        "levels": LEVELS,
        "groups": WIDTHS,
        "rescale": NUMBER,
        "samples": COUNT,
        "batch_size": COUNT,
        "wait_s": NUMBER,
        "devices": NAMES,
        "run": RUN,
        "model": optional(BLOB),
        "statistics": optional(BLOB),
    },
    SurveyFinding: {
        "device": NAME,
        "round": COUNT,
        "wants": TEXT,
        "level": NUMBER,
        "samples": COUNT,
        "run": RUN,
        "reason": REASON,
        "means": BYTES_BY_NAME,
        "m2s": BYTES_BY_NAME,
        "accuracy": optional(NUMBER),
    },
    ModelNotice: {
        "round": COUNT,
        "plan_hash": SHA256,
        "levels": LEVELS,
        "groups": WIDTHS,
        "accuracies": NUMBERS,
        "rescale": NUMBER,
        "run": RUN,
        "model": BLOB,
        "statistics": optional(BLOB),
    },
    Claim: {"run": RUN},
    Echo: {"number": COUNT},
}

ON_TOPIC: dict[TopicKind, tuple[type[ControlMessage], ...]] = {
    TopicKind.EPOCH: (Claim,),
    TopicKind.ECHO: (Echo,),
    TopicKind.TASK: (TaskNotice,),
    TopicKind.ROUND: (RoundOpen, RoundClosed, Survey),
    TopicKind.COORDINATOR: (Presence,),
    TopicKind.LATEST: (ModelNotice,),
    TopicKind.BEST: (ModelNotice,),
    TopicKind.DOWN_CONTROL: (
        RoundOpen,
        Assignment,
        Receipt,
        Credit,
        RoundClosed,
        Complaint,
    ),
    TopicKind.UP_CONTROL: (Bid, Offer, Want, Evaluation, SurveyFinding, Condition),
    TopicKind.PRESENCE: (Presence,),
}
"""Messages that each topic carries; the other topics carry chunks."""

_NAMES = {cls: name for name, cls in TYPES.items()}
_TYPE_KEY = b"\xa4type"
_TYPES_ON = {
    kind: tuple(bytes([0xA0 | len(_NAMES[cls])]) + _NAMES[cls].encode() for cls in classes)
    for kind, classes in ON_TOPIC.items()
}
"""Names of the messages that each topic carries, in msgpack."""


def encode_message(message: ControlMessage, epoch: Epoch | None = None) -> bytes:
    """Encode the message, stamped with the epoch of the coordinator that sends it, if one does.

    Raises `MessageError` if it could not be read back.
    """
    cls = type(message)
    content = write_fields(message, FORMS[cls])
    if epoch is not None:
        content[STAMP] = [epoch.counter, epoch.instance]
    data = pack_map(_NAMES[cls], content)
    if len(data) > MAX_CONTROL_BYTES:
        raise MessageError(
            f"a {_NAMES[cls]} of {len(data)} bytes is too large to send "
            f"(at most {MAX_CONTROL_BYTES})"
        )
    return data


def decode_message(data: bytes | memoryview) -> ControlMessage:
    """Decode a message. Raises only `MessageError`, for any other bytes."""
    return _read_message(unpack_map(data, "a message", MAX_CONTROL_BYTES))


def _read_message(content: Mapping[str, Any]) -> ControlMessage:
    kind = content.get("type")
    cls = TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MessageError(f"a message of unknown type {str(kind)[:40]!r}")
    try:
        arguments: dict[str, Any] = read_fields(cls, content, FORMS[cls])
        return cls(**arguments)
    except MessageError as error:
        raise MessageError(f"{kind}: {error}") from error


def may_be_message(kind: TopicKind, data: bytes) -> bool:
    """False if bytes cannot be a message for such a topic; true of few bytes that are none.

    Costs next to nothing, so that a flood of other bytes costs no more than that.
    """
    names, at = _TYPES_ON.get(kind, ()), data.find(_TYPE_KEY, 0, MAX_CONTROL_BYTES)
    while at >= 0:
        at += len(_TYPE_KEY)
        if data.startswith(names, at):
            return True
        at = data.find(_TYPE_KEY, at, MAX_CONTROL_BYTES)
    return False


def decode_received(topic: Topic, data: bytes | memoryview) -> ControlMessage:
    """Decode the message that arrived on a topic.

    Also raises `MessageError` if the topic is not for such a message, or if the message names a
    different device or task than its topic: the broker protects only the topic.
    """
    return decode_stamped(topic, data)[0]


def decode_stamped(topic: Topic, data: bytes | memoryview) -> tuple[ControlMessage, Epoch | None]:
    """Decode as `decode_received`, and return the sender's stamp, too; None: it has none."""
    content = unpack_map(data, "a message", MAX_CONTROL_BYTES)
    message, stamp = _read_message(content), content.get(STAMP)
    kind = _NAMES[type(message)]
    if not isinstance(message, ON_TOPIC.get(topic.kind, ())):
        raise MessageError(f"a {kind} does not belong on {topic.kind.value}")
    if isinstance(message, TaskNotice) and message.task != topic.task:
        raise MessageError(f"{kind} of task {message.task!r} on the topic of {topic.task!r}")
    named = message.name if isinstance(message, Presence) else getattr(message, "device", None)
    if topic.device is not None and named is not None and named != topic.device:
        raise MessageError(f"{kind} of device {named!r} on the topic of {topic.device!r}")
    return message, None if stamp is None else _read_stamp(stamp)


def _read_stamp(stamp: Any) -> Epoch:
    try:
        counter, instance = stamp
        return Epoch(count(counter), TEXT.read(instance))
    except (TypeError, ValueError, ProtocolError) as error:
        raise MessageError(f"the stamp of a message is wrong: {str(error)[:200]}") from error
