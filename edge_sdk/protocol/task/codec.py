"""The bytes of a manifest, and the versions and slots in a graph's own bytes. Versions 1 to 5.

    envelope = msgpack [ "tessera-graphs", version, sha256(body) as 32 bytes, body as bytes ]
    body     = msgpack [ plan hash, opset, ir version, min onnxruntime, loss, tolerance, data,
                         graphs ]
    data     = [ [array of x0, array of x1 …], array of targets ]
             | [ [array …], array of targets, [class names], [input of x0, input of x1 …] ]
                                                from version 3 on
    array    = [ dtype, [sizes without the samples], highest | nil ]
    input    = [ [feature names], [] | [lowest, highest], [means], [deviations],
                 window | nil, sample rate | nil, mels | nil, frame | nil, hop | nil ]
    graph    = [ kind, sha256, size, kept | nil, batch | nil, inputs, outputs, masks,
                 activations, products ]        from version 2 on also: slots
                                                from version 5 on also: places
    kept     = [ atoms of every axis ]          in version 4, 0 means any
    slot     = [ byte offset, dim ]
    place    = [ name, [ way … ] ]              way = [ name, start, end, [ multiple … ] ]
    multiple = [ dim, number ]
    port     = [ name, dtype, dims ]            mask = [ port, probability ]
    dim      = [ coefficient, [axis numbers], batch ]
             | [ coefficient, [axis numbers], batch, [ dim … ] ]    a sum, from version 2 on
    activations, products = [ cost … ]          bytes; multiply-accumulates
    cost     = [ coefficient, [axis numbers], power of the batch ]

A manifest is of version 5 if a graph has places; else of version 4 if a graph fixes some axes and
takes any size of others; else of version 3 if the task names its classes or describes its inputs;
else of version 2 if a graph has slots, which a side that does not know them would not fill, or
sizes that are sums. Every other manifest is still of version 1.

Hashes are 32 bytes; ranges, means, deviations, probabilities and the tolerance float64; the rest
as in `plan/codec.py`. `decode_manifest` rejects bytes that another encoder would have written
differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, cast

from edge_sdk.protocol.canonical import count, counts, flag, packed, text, unpacked
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription
from edge_sdk.protocol.task.graphs import (
    SLOT_BYTES,
    CostTerm,
    GraphEntry,
    GraphPlace,
    GraphWay,
    Kind,
    Manifest,
    MaskSpec,
    Port,
    SizeSlot,
    SizeTerm,
    Ways,
)

MAGIC = "tessera-graphs"
VERSIONS = (1, 2, 3, 4, 5)
MAX_MANIFEST_BYTES = 16 * 2**20
"""A graph of two hundred tensors takes about 20 KB; a larger message is not a manifest."""
NO_WAYS: Ways = MappingProxyType({})
"""Every place takes its default."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's canonical bytes, with their hash in front."""
    body = _encode_body(manifest)
    return packed([MAGIC, _version(manifest), hashlib.sha256(body).digest(), body])


def manifest_hash(manifest: Manifest) -> str:
    """Return the SHA-256 of the canonical body, in hex digits."""
    return hashlib.sha256(_encode_body(manifest)).hexdigest()


def decode_manifest(data: bytes, *, expected_hash: str | None = None) -> Manifest:
    """Decode a manifest. Raises only `GraphError`, for any other bytes.

    `expected_hash` is the hash another party named; a manifest with a different one is rejected.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise GraphError(
            f"{len(data)} bytes are too many for a manifest (at most {MAX_MANIFEST_BYTES})"
        )
    envelope = unpacked(data, GraphError, "a manifest of graphs")
    if not isinstance(envelope, list) or len(envelope) != 4 or envelope[0] != MAGIC:
        raise GraphError("these bytes are not a manifest of graphs")
    _, version, digest, body = envelope
    if version not in VERSIONS:
        raise GraphError(
            f"manifest version {version!r} is unknown; this side reads versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}"
        )
    if not isinstance(body, bytes) or hashlib.sha256(body).digest() != digest:
        raise GraphError("the manifest's hash does not match its bytes: it was damaged or altered")
    if expected_hash is not None and digest.hex() != expected_hash:
        raise GraphError(f"this is manifest {digest.hex()[:12]}…, not {expected_hash[:12]}…")
    try:
        manifest = _decode_body(unpacked(body, GraphError, "a manifest of graphs"))
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise GraphError(f"the manifest's bytes have the wrong structure: {error}") from error
    if manifest.encoded != data:
        raise GraphError("the manifest is not in canonical form")
    return manifest


def graph_opsets(data: bytes) -> tuple[int, dict[str, int]]:
    """Return the IR version and operator set versions by domain of an ONNX file.

    "" is the standard domain. Reads only the outermost fields. Raises `GraphError` for bytes that
    are not protobuf.
    """
    ir_version, opsets = 0, {}
    for field, value in _fields(memoryview(data)):
        if field == 1 and isinstance(value, int):
            ir_version = value
        elif field == 8 and isinstance(value, memoryview):
            imported = dict(_fields(value))
            name, version = imported.get(1, memoryview(b"")), imported.get(2, 0)
            if not isinstance(name, memoryview) or not isinstance(version, int):
                raise GraphError("these bytes are not an ONNX graph")
            domain = bytes(name).decode(errors="replace")
            opsets["" if domain == "ai.onnx" else domain] = version
    return ir_version, opsets


def graph_nodes(data: bytes) -> int | None:
    """Return the number of nodes of an ONNX file; None if some of them hold a graph, whose nodes
    may run any number of times.

    Raises `GraphError` for bytes that are not protobuf.
    """
    count = 0
    # A field that occurs in several pieces is all of them together: of the file, its graph; of a
    # graph, its nodes (1); of a node, its attributes (5); of an attribute, its graphs (6 and 11).
    for graph in _parts(memoryview(data), 7):
        for node in _parts(graph, 1):
            count += 1
            for attribute in _parts(node, 5):
                if _parts(attribute, 6, 11):
                    return None
    return count


def fitted(
    entry: GraphEntry, data: bytes, kept: Sequence[int], batch: int = 1, ways: Ways = NO_WAYS
) -> bytes:
    """Return the graph's file for this submodel: sizes in its slots, one way for each place.

    A protobuf number may have leading zeros, so its length never changes, and every way is a whole
    field of the file: the result depends on nothing but the file, the sizes and the ways. Raises
    `GraphError` if the file has no such number there.
    """
    if not entry.slots and not entry.places:
        return data
    written = bytearray(data)
    left, slots = entry.without(entry.options(ways, kept, batch))
    for slot in slots:
        place = slice(slot.offset, slot.offset + SLOT_BYTES)
        if [byte >> 7 for byte in written[place]] != [1] * (SLOT_BYTES - 1) + [0]:
            raise GraphError(f"{entry} has no number of {SLOT_BYTES} bytes at {slot.offset}")
        size = slot.size.value(kept, batch)
        if size >> 7 * SLOT_BYTES:
            raise GraphError(f"{entry}: a size of {size} does not fit into {SLOT_BYTES} bytes")
        written[place] = slot_bytes(size)
    return without_ways(written, left)


def without_ways(data: bytes | bytearray, left: Sequence[GraphWay]) -> bytes:
    """Return a graph's file without the bytes of these ways, which are in ascending order."""
    edges = [0, *(edge for option in left for edge in (option.start, option.end)), len(data)]
    return b"".join(data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def slot_bytes(size: int) -> bytes:
    """Return a number as protobuf writes it, with leading zeros up to `SLOT_BYTES`."""
    digits = [(size >> 7 * place) & 0x7F for place in range(SLOT_BYTES)]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


def _version(manifest: Manifest) -> int:
    if any(entry.places for entry in manifest.graphs):
        return 5
    if any(0 in (entry.kept or ()) for entry in manifest.graphs):
        return 4
    if manifest.data.classes or manifest.data.descriptions:
        return 3
    sums = any(
        dim.more
        for entry in manifest.graphs
        for port in (*entry.inputs, *entry.outputs)
        for dim in port.dims
    )
    return 2 if sums or any(entry.slots for entry in manifest.graphs) else 1


def _fields(data: memoryview) -> list[tuple[int, int | memoryview]]:
    """Return the (number, value) pairs of one protobuf message."""
    fields: list[tuple[int, int | memoryview]] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            fields.append((key >> 3, value))
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise GraphError("these bytes are not an ONNX graph")
        if at + size > len(data):
            raise GraphError("these bytes are not an ONNX graph: they end too early")
        fields.append((key >> 3, data[at : at + size]))
        at += size
    return fields


def _parts(data: memoryview, *numbers: int) -> list[memoryview]:
    """Return the messages in these fields of one."""
    found = _fields(data)
    return [value for number, value in found if number in numbers and isinstance(value, memoryview)]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise GraphError("these bytes are not an ONNX graph")


def _encode_body(manifest: Manifest) -> bytes:
    version = _version(manifest)
    return packed(
        [
            bytes.fromhex(manifest.plan_hash),
            manifest.opset,
            manifest.ir_version,
            manifest.min_onnxruntime,
            manifest.loss,
            float(manifest.tolerance),
            _encode_data(manifest.data, version),
            [_encode_entry(entry, version) for entry in manifest.graphs],
        ]
    )


def _encode_entry(entry: GraphEntry, version: int) -> list[Any]:
    slots = [[slot.offset, _encode_size(slot.size)] for slot in entry.slots]
    return [
        entry.kind,
        bytes.fromhex(entry.sha256),
        entry.size_bytes,
        None if entry.kept is None else list(entry.kept),
        entry.batch,
        [_encode_port(port) for port in entry.inputs],
        [_encode_port(port) for port in entry.outputs],
        [[mask.port, float(mask.probability)] for mask in entry.masks],
        [_encode_cost(term) for term in entry.activations],
        [_encode_cost(term) for term in entry.products],
        *([slots] if version > 1 else []),
        *([[_encode_place(place) for place in entry.places]] if version > 4 else []),
    ]


def _encode_place(place: GraphPlace) -> list[Any]:
    ways = [
        [way.name, way.start, way.end, [[_encode_size(size), n] for size, n in way.multiples]]
        for way in place.options
    ]
    return [place.name, ways]


def _encode_data(data: DataSpec, version: int) -> list[Any]:
    arrays = [[_encode_array(spec) for spec in data.inputs], _encode_array(data.targets)]
    if version < 3:
        return arrays
    return [*arrays, list(data.classes), [_encode_input(each) for each in data.descriptions]]


def _encode_input(described: InputDescription) -> list[Any]:
    return [
        list(described.features),
        [float(bound) for bound in described.range or ()],
        [float(number) for number in described.mean],
        [float(number) for number in described.deviation],
        described.window,
        described.sample_rate,
        described.mels,
        described.frame,
        described.hop,
    ]


def _encode_array(spec: ArraySpec) -> list[Any]:
    return [spec.dtype, list(spec.shape), spec.highest]


def _encode_cost(term: CostTerm) -> list[Any]:
    return [term.coefficient, list(term.axes), term.batch]


def _encode_port(port: Port) -> list[Any]:
    return [port.name, port.dtype, [_encode_size(dim) for dim in port.dims]]


def _encode_size(size: SizeTerm) -> list[Any]:
    first = [size.coefficient, list(size.axes), size.batch]
    return [*first, [_encode_size(term) for term in size.more]] if size.more else first


def _decode_body(body: Any) -> Manifest:
    plan, opset, ir_version, runtime, loss, tolerance, data, graphs = body
    return Manifest(
        plan_hash=_digest(plan),
        opset=count(opset),
        ir_version=count(ir_version),
        min_onnxruntime=text(runtime),
        loss=text(loss),
        tolerance=_number(tolerance),
        data=_decode_data(data),
        graphs=tuple(_decode_entry(entry) for entry in graphs),
    )


def _decode_entry(entry: Any) -> GraphEntry:
    kind, digest, size, kept, batch, inputs, outputs, masks, activations, products, *more = entry
    slots, *rest = more or [[]]
    (places,) = rest or [[]]
    return GraphEntry(
        kind=cast(Kind, text(kind)),
        sha256=_digest(digest),
        size_bytes=count(size),
        kept=None if kept is None else counts(kept),
        batch=None if batch is None else count(batch),
        inputs=tuple(_decode_port(port) for port in inputs),
        outputs=tuple(_decode_port(port) for port in outputs),
        masks=tuple(MaskSpec(text(port), _number(p)) for port, p in masks),
        activations=tuple(_decode_cost(term) for term in activations),
        products=tuple(_decode_cost(term) for term in products),
        slots=tuple(SizeSlot(count(offset), _decode_size(size)) for offset, size in slots),
        places=tuple(_decode_place(place) for place in places),
    )


def _decode_place(place: Any) -> GraphPlace:
    name, ways = place
    return GraphPlace(
        text(name),
        tuple(
            GraphWay(
                text(way),
                count(start),
                count(end),
                tuple((_decode_size(size), count(number)) for size, number in multiples),
            )
            for way, start, end, multiples in ways
        ),
    )


def _decode_data(data: Any) -> DataSpec:
    inputs, targets, *more = data
    classes, described = more or [[], []]
    return DataSpec(
        tuple(_decode_array(array) for array in inputs),
        _decode_array(targets),
        tuple(text(name) for name in classes),
        tuple(_decode_input(each) for each in described),
    )


def _decode_input(described: Any) -> InputDescription:
    features, bounds, mean, deviation, *counted = described
    window, sample_rate, mels, frame, hop = (
        None if value is None else count(value) for value in counted
    )
    low_high = tuple(_number(bound) for bound in bounds)
    return InputDescription(
        features=tuple(text(name) for name in features),
        range=cast(tuple[float, float], low_high) if low_high else None,
        mean=tuple(_number(number) for number in mean),
        deviation=tuple(_number(number) for number in deviation),
        window=window,
        sample_rate=sample_rate,
        mels=mels,
        frame=frame,
        hop=hop,
    )


def _decode_array(array: Any) -> ArraySpec:
    dtype, sizes, highest = array
    return ArraySpec(text(dtype), counts(sizes), None if highest is None else count(highest))


def _decode_cost(term: Any) -> CostTerm:
    coefficient, axes, power = term
    return CostTerm(count(coefficient), counts(axes), count(power))


def _decode_port(port: Any) -> Port:
    name, dtype, dims = port
    return Port(text(name), text(dtype), tuple(_decode_size(dim) for dim in dims))


def _decode_size(size: Any) -> SizeTerm:
    coefficient, axes, batch, *rest = size
    (more,) = rest or [[]]
    if any(len(term) > 3 for term in more):
        raise GraphError("a summand of a size has summands of its own")
    terms = tuple(_decode_size(term) for term in more)
    return SizeTerm(count(coefficient), counts(axes), flag(batch), terms)


def _digest(value: Any) -> str:
    if not isinstance(value, bytes) or len(value) != 32:
        raise TypeError(f"{value!r} is not a hash of 32 bytes")
    return value.hex()


def _number(value: Any) -> float:
    if not isinstance(value, float):
        raise TypeError(f"{value!r} is not a float")
    return value
