"""The shapes of all answers, as JSON Schema, which the API's description contains.

Every key of an object is always there; null means unknown.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

STATES = (
    *("starting", "waiting", "running", "paused", "stopping", "finished", "stopped", "failed"),
)
"""`failed`: one of several runs, which is down although it should be served."""
DEVICE_STATES = (
    "offline",
    "idle",
    "asked",
    "training",
    "kept",
    "skipped",
    "quarantined",
    "paused",
    "barred",
)


def _is(kind: str, says: str = "", **more: Any) -> Shape:
    return {"type": kind, **({"description": says} if says else {}), **more}


def _maybe(shape: Shape) -> Shape:
    """The shape, or null."""
    if isinstance(shape.get("type"), str) and "enum" not in shape:
        return {**shape, "type": [shape["type"], "null"]}
    said = {"description": shape["description"]} if "description" in shape else {}
    inner = {key: value for key, value in shape.items() if key != "description"}
    return {"anyOf": [inner, {"type": "null"}], **said}


def _object(says: str = "", /, **keys: Shape) -> Shape:
    """An object with exactly these keys."""
    said = {"description": says} if says else {}
    return {
        "type": "object",
        **said,
        "properties": keys,
        "required": list(keys),
        "additionalProperties": False,
    }


def _list(item: Shape, says: str = "") -> Shape:
    return _is("array", says, items=item)


def _map(item: Shape, says: str = "") -> Shape:
    return _is("object", says, additionalProperties=item)


def ref(name: str) -> Shape:
    """A reference to a shape of `SHAPES`."""
    return {"$ref": f"#/components/schemas/{name}"}


_text, _number, _truth = _is("string"), _is("number"), _is("boolean")
_count = _is("integer", minimum=0)
_time = _is("number", "Unix time in seconds.")
_level = _is("number", "Level: the share of every axis.", minimum=0, maximum=1)
_accuracy = _maybe(_is("number", "Accuracy, 0 to 1."))

_PAIR = _is("array", prefixItems=[_text, _count], items=False, minItems=2)

_STATUS = _object(
    "State of a run.",
    task=_text,
    run=_is("string", "Id of the run."),
    folder=_maybe(_text),
    state=_is("string", enum=list(STATES)),
    phase=_maybe(_is("string", "Phase of the round.")),
    asynchronous=_truth,
    round=_is("integer", "The present round.", minimum=0),
    rounds=_maybe(_is("integer", "Rounds that were asked for.")),
    committed=_is("integer", "Rounds that were committed.", minimum=0),
    waits_for=_maybe(_is("string", "The run waits for this, in words.")),
    deadline_s=_maybe(_is("number", "Seconds to the deadline of the phase.")),
    started=_maybe(_time),
    time=_maybe(_is("number", "Time of this state, as Unix time in seconds.")),
    version=_is("string", "Version of the coordinator."),
    broker_connected=_truth,
    devices=_object(
        "Numbers of devices.",
        known=_count,
        present=_count,
        training=_count,
        quarantined=_count,
        paused=_count,
    ),
    levels=_map(_count, "Devices by level, in the present round."),
    skips=_map(_count, "Devices that skip the present round, by the one-word code of the reason."),
    accuracy=_accuracy,
    deploy=_maybe(_is("number", "The level to deploy.")),
    best=_maybe(_object(round=_count, accuracy=_number, level=_maybe(_level))),
    level_reports=_list(
        _object(
            level=_level,
            parameters=_maybe(_count),
            accuracy=_accuracy,
            devices=_maybe(_count),
        )
    ),
    totals=_object(
        "Sums over the run.",
        seconds=_number,
        joules=_maybe(_number),
        bytes_up=_count,
        bytes_down=_count,
        trained=_count,
        skipped=_count,
        late=_count,
        rejected=_count,
    ),
    settings=_is("object", "Settings of the present round."),
    paused=_maybe(_object(by=_text, time=_time)),
    stopping=_maybe(_is("string", enum=["round", "now"])),
    delivery=_maybe(
        _object(
            "Trial of a model for inference by some devices; null without `[delivery]`.",
            round=_maybe(_is("integer", "Round of the model on trial; null: there is none.")),
            since=_maybe(_time),
            answers=_count,
            members=_is("integer", "Devices that are expected to answer.", minimum=0),
            promoted=_maybe(_is("integer", "Round of the model that all devices get.")),
            judges=_is("integer", "Devices here that have judged a model.", minimum=0),
            advice=_maybe(_is("string", "What to set, if nobody can judge the trial.")),
        )
    ),
    sequence=_is("integer", "Grows with every change.", minimum=0),
)

_DEVICE = {
    "device": _is("string", "The device's name. Devices choose it: show it as text."),
    "present": _truth,
    "state": _is("string", enum=list(DEVICE_STATES)),
    "level": _maybe(_level),
    "reason": _maybe(_is("string", "The device's reason, in its words: show it as text.")),
    "code": _maybe(_is("string", "The one-word code of a skip.")),
    "round": _maybe(_is("integer", "Its last round.")),
    "last_seen": _maybe(_time),
    "last_error": _maybe(_text),
    "last_error_time": _maybe(_is("number", "Unix time at which that error became known.")),
    "battery": _maybe(_is("number", "Charge, 0 to 1.")),
    "charging": _maybe(_truth),
    "temperature_c": _maybe(_number),
    "memory_free_mb": _maybe(_number),
    "memory_mb": _maybe(_number),
    "bytes_up": _maybe(_count),
    "bytes_down": _maybe(_count),
    "train_s": _maybe(_number),
    "joules": _maybe(_number),
    "energy_today_j": _maybe(_number),
    "energy_budget_j": _maybe(_number),
    "trained": _count,
    "skipped": _count,
    "late": _count,
    "rejected": _count,
    "contribution": _maybe(
        _is("number", "Share of all counted movements that are this device's, 0 to 1.")
    ),
    "staleness": _maybe(_is("integer", "Rounds since its newest counted movement.")),
    "samples": _maybe(_count),
    "quarantined": _maybe(_object(round=_maybe(_count), reason=_maybe(_text))),
    "labels": _map({"type": ["string", "number", "boolean"]}),
    "profile": _maybe(_is("string", "The kind of device.")),
    "version": _maybe(_is("string", "Version of its software.")),
    "sequence": _is("integer", "That of its last change.", minimum=0),
}
DEVICE_KEYS = tuple(_DEVICE)

_DEVICE_ROUND = _object(
    "A round of a device.",
    round=_count,
    level=_maybe(_level),
    reason=_maybe(_text),
    code=_maybe(_text),
    outcome=_maybe(_text),
    loss=_maybe(_number),
    bytes_up=_maybe(_count),
    bytes_down=_maybe(_count),
    train_s=_maybe(_number),
    joules=_maybe(_number),
)

SHAPES: dict[str, Shape] = {
    "Status": _STATUS,
    "Device": _object("A device, as the run knows it.", **_DEVICE),
    "DeviceWithRounds": _object(
        "A device with its last rounds.", **_DEVICE, rounds=_list(_DEVICE_ROUND)
    ),
    "Round": _object(
        "A round, or another event of the run's history.",
        round=_count,
        time=_maybe(_time),
        accuracy=_accuracy,
        levels=_list(_object(level=_level, accuracy=_accuracy)),
        seconds=_maybe(_number),
        joules=_maybe(_number),
        bytes_up=_maybe(_count),
        bytes_down=_maybe(_count),
        trained=_maybe(_count),
        skipped=_maybe(_count),
        late=_maybe(_count),
        rejected=_maybe(_count),
        coverage_min=_maybe(_is("number", "Times that the least covered block was trained.")),
        oldest_memory=_maybe(_is("number", "Rounds since the oldest remembered movement.")),
        digest=_maybe(_is("string", "Hash of the model.")),
        event=_maybe(_is("string", "Words for an event that is no round.")),
    ),
    "Blocks": _object(
        "The model as blocks.",
        round=_count,
        axes=_list(_object(name=_text, groups=_list(_count, "Units of every group."))),
        tensors=_list(
            _object(
                name=_text,
                shape=_list(_count),
                parameters=_count,
                blocks=_list(
                    _object(
                        id=_count,
                        parameters=_count,
                        signature=_list(_PAIR, "Pairs of an axis's name and a group's number."),
                        covered=_is("number", "Times that it was trained."),
                        last_covered=_maybe(_is("integer", "The last round that trained it.")),
                        age=_maybe(_is("integer", "Rounds since then.")),
                        memory_age=_maybe(
                            _is("number", "Rounds since its newest remembered movement.")
                        ),
                        movement=_maybe(_is("number", "RMS of its last step.")),
                    )
                ),
            )
        ),
    ),
    "Strip": _object(
        "One character per device and round.",
        rounds=_list(_count),
        devices=_map(_text),
        legend=_map(_text, "Words for every character."),
    ),
    "Audit": _object(
        "A change by somebody.",
        number=_is("integer", "Its place in the audit, from 1.", minimum=1),
        id=_text,
        time=_time,
        by=_text,
        what=_text,
        details=_is("object", "The command's arguments, and values from before."),
    ),
    "Session": _object(
        "Somebody who has signed in.",
        role=_is("string", enum=["read", "operate"]),
        name=_is("string", "The holder's name, which the audit shows."),
        until=_maybe(_is("number", "End of the session, as Unix time in seconds.")),
        runs=_list(_text, "Tasks whose runs are served."),
    ),
    "Done": _object("A change that was made.", result={"description": "The command's answer."}),
    "Health": _object("All is well.", ok={"const": True}),
    "Error": _object("A request that was refused.", error=_is("string", "The reason, in words.")),
}

EMPTY = _object()
TOKEN = _object(token=_is("string", "A token, or the ticket of a link.", maxLength=256))
STOP = _object(when=_is("string", "After this round, or at once.", enum=["round", "now"]))
ROUNDS = _object(add=_is("integer", "Rounds to add.", minimum=1, maximum=1_000_000))
SETTING = _object(
    name=_is("string", maxLength=100),
    value={"type": ["string", "number", "boolean", "null"], "maxLength": 1_000},
)
REASON = _object(reason=_is("string", "For the audit and the device.", maxLength=500))


def list_of(name: str) -> Shape:
    """A list of a shape of `SHAPES`."""
    return _list(ref(name))


def objection(value: Any, shape: Shape, where: str = "the body") -> str | None:
    """Say why a request's body has not this shape; None: it has.

    For the shapes of bodies above: objects of texts, numbers and choices.
    """
    if "properties" in shape:
        if not isinstance(value, dict):
            return f"{where} must be a JSON object"
        keys = shape["properties"]
        if unknown := sorted(str(key) for key in value.keys() - keys.keys()):
            return f"{where}: unknown key {unknown[0]!r:.80}"
        for key, inner in keys.items():
            if key not in value:
                return f"{where}: {key!r} is missing"
            if (why := objection(value[key], inner, repr(key))) is not None:
                return why
        return None
    if "enum" in shape and value not in shape["enum"]:
        return f"{where} must be one of {', '.join(map(repr, shape['enum']))}"
    kinds = [shape["type"]] if isinstance(shape["type"], str) else shape["type"]
    if not any(_fits(value, kind) for kind in kinds):
        return f"{where} must be of type {' or '.join(kinds)}"
    if isinstance(value, str) and len(value) > shape.get("maxLength", len(value)):
        return f"{where} must have at most {shape['maxLength']} characters"
    if isinstance(value, int | float) and not isinstance(value, bool):
        least, most = shape.get("minimum", value), shape.get("maximum", value)
        if not least <= value <= most:
            return f"{where} must be from {least} to {most}"
    return None


_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])
