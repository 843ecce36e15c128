"""The bytes of a plan. Versions 1 to 3; the hash is part of the wire contract.

    envelope = msgpack [ "tessera-plan", version, sha256(body), body, sha256(costs), costs ]
    body     = msgpack [ regions, axes, tensors, buffers, depth ]
    costs    = msgpack [ [ macs, [axis numbers] ] … ]
    axis     = [ name, [atoms of each group] ]  or, if its groups are alternatives,
               [ name, [atoms of each group], true ]
    tensor   = [ name, dtype, dims ]            buffer = [ name, dtype, dims, statistic ]
    dim      = [ size ]                         whole
             | [ size, axis, outer, inner ]     of axis number `axis`
             | [ size, [ segment … ] ]          in version 2: one segment after the other
    segment  = [ size ] | [ size, axis, inner ]
    depth    = [ [ axis, [ stack … ] ] … ]      in version 3; empty before
    stack    = [ name, [ names of its rows in the torch module ] ]

Hashes are 32 bytes, body and costs are byte strings. The plan's hash is the body's: it identifies
how a model is cut. Costs are separate, so that counting them better does not change the model.

A plan with axes of depth is of version 3: `depth` lists them, each with its stacks in the order of
tensors and then buffers. Another plan is of version 2 if a dimension has segments; every other plan
is still of version 1, with the hash it always had.

Only arrays, strings, unsigned integers, booleans and bytes occur, in msgpack's shortest forms, so a
plan has one encoding. `decode_plan` rejects bytes that another encoder would have written
differently: it encodes what it read and compares.
"""

from __future__ import annotations

import hashlib
from typing import Any

from edge_sdk.protocol.canonical import count, counts, flag, packed, text, unpacked
from edge_sdk.protocol.errors import PlanError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, MacTerm, Segment, Tensor

MAGIC = "tessera-plan"
VERSIONS = (1, 2, 3)
MAX_PLAN_BYTES = 16 * 2**20
"""A plan of a thousand tensors takes about 60 KB; a larger message is not a plan."""


def encode_plan(plan: ModelPlan) -> bytes:
    """Return the plan's canonical bytes, with their hash in front."""
    body, costs = _encode_body(plan), _encode_costs(plan)
    hashes = [hashlib.sha256(part).digest() for part in (body, costs)]
    return packed([MAGIC, _version(plan), hashes[0], body, hashes[1], costs])


def plan_hash(plan: ModelPlan) -> str:
    """Return the SHA-256 of the canonical body, in hex digits."""
    return hashlib.sha256(_encode_body(plan)).hexdigest()


def decode_plan(data: bytes, *, expected_hash: str | None = None) -> ModelPlan:
    """Decode a plan. Raises only `PlanError`, for any other bytes.

    `expected_hash` is the hash another party named; a plan with a different one is rejected.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise PlanError(f"{len(data)} bytes are too many for a plan (at most {MAX_PLAN_BYTES})")
    envelope = unpacked(data, PlanError, "a plan")
    if not isinstance(envelope, list) or len(envelope) < 2 or envelope[0] != MAGIC:
        raise PlanError("these bytes are not a plan")
    if envelope[1] not in VERSIONS:
        raise PlanError(
            f"plan version {envelope[1]!r} is unknown; this side reads versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}"
        )
    if len(envelope) != 6:
        raise PlanError(f"a plan's envelope has 6 entries, not {len(envelope)}")
    digest, body, costs_digest, costs = envelope[2:]
    for part, named in ((body, digest), (costs, costs_digest)):
        if not isinstance(part, bytes) or hashlib.sha256(part).digest() != named:
            raise PlanError("the plan's hash does not match its bytes: it was damaged or altered")
    if expected_hash is not None and digest.hex() != expected_hash:
        raise PlanError(f"this is plan {digest.hex()[:12]}…, not {expected_hash[:12]}…")
    try:
        plan = _decode(unpacked(body, PlanError, "a plan"), unpacked(costs, PlanError, "a plan"))
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise PlanError(f"the plan's bytes have the wrong structure: {error}") from error
    if plan.encoded != data:
        raise PlanError("the plan is not in canonical form")
    return plan


def _encode_body(plan: ModelPlan) -> bytes:
    return packed(
        [
            plan.regions,
            [
                [axis.name, list(axis.groups), *([True] if axis.alternatives else [])]
                for axis in plan.axes
            ],
            [[t.name, t.dtype, _encode_dims(t)] for t in plan.tensors],
            [[b.name, b.dtype, _encode_dims(b), b.statistic] for b in plan.buffers],
            _encode_depth(plan),
        ]
    )


def _encode_depth(plan: ModelPlan) -> list[Any]:
    stacks = [each for each in (*plan.tensors, *plan.buffers) if each.members]
    return [
        [number, [[s.name, list(s.members)] for s in stacks if s.dims[0].axis == number]]
        for number, axis in enumerate(plan.axes)
        if axis.depth
    ]


def _encode_costs(plan: ModelPlan) -> bytes:
    return packed([[term.macs, list(term.axes)] for term in plan.macs])


def _version(plan: ModelPlan) -> int:
    if plan.regions != "width":
        return 3
    tensors = (*plan.tensors, *plan.buffers)
    return 2 if any(dim.segments for tensor in tensors for dim in tensor.dims) else 1


def _encode_dims(tensor: Tensor) -> list[list[Any]]:
    return [_encode_dim(dim) for dim in tensor.dims]


def _encode_dim(dim: Dim) -> list[Any]:
    if dim.segments:
        return [
            dim.size,
            [
                [each.size] if each.axis is None else [each.size, each.axis, each.inner]
                for each in dim.segments
            ],
        ]
    return [dim.size] if dim.axis is None else [dim.size, dim.axis, dim.outer, dim.inner]


def _decode(body: Any, macs: Any) -> ModelPlan:
    regions, axes, tensors, buffers, depth = body
    deep = {count(number) for number, _ in depth}
    members = {
        text(name): tuple(text(each) for each in names)
        for _, stacks in depth
        for name, names in stacks
    }
    plan = ModelPlan(
        axes=tuple(_decode_axis(*axis, depth=number in deep) for number, axis in enumerate(axes)),
        tensors=tuple(
            Tensor(text(name), text(dtype), _decode_dims(dims), members.get(name, ()))
            for name, dtype, dims in tensors
        ),
        buffers=tuple(
            Buffer(
                text(name),
                text(dtype),
                _decode_dims(dims),
                members.get(name, ()),
                statistic=flag(statistic),
            )
            for name, dtype, dims, statistic in buffers
        ),
        macs=tuple(MacTerm(count(each), counts(numbers)) for each, numbers in macs),
    )
    if plan.regions != text(regions):
        raise PlanError(f"the plan says regions {regions!r}, but its axes are of {plan.regions!r}")
    return plan


def _decode_axis(name: Any, groups: Any, alternatives: Any = False, *, depth: bool) -> Axis:
    return Axis(text(name), counts(groups), flag(alternatives), depth)


def _decode_dims(dims: Any) -> tuple[Dim, ...]:
    return tuple(_decode_dim(dim) for dim in dims)


def _decode_dim(dim: Any) -> Dim:
    if len(dim) == 2 and isinstance(dim[1], list):
        segments = tuple(Segment(*counts(each)) for each in dim[1])
        return Dim(count(dim[0]), segments=segments)
    numbers: Any = counts(dim)
    if len(numbers) > 4:
        raise ValueError(f"{dim!r} is not a dimension")
    return Dim(*numbers)
