"""Manifests of graphs: which one fits, what they refuse, and their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.errors import GraphError, GroupError, ProtocolError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Segment, Tensor
from edge_sdk.protocol.task.codec import (
    decode_manifest,
    encode_manifest,
    fitted,
    graph_opsets,
    slot_bytes,
)
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.graphs import (
    CostTerm,
    GraphEntry,
    GraphPlace,
    GraphWay,
    Kind,
    Manifest,
    MaskSpec,
    Port,
    RunCost,
    SizeSlot,
    SizeTerm,
    size_of,
    sum_of,
)
from tests.property.plan.test_plan_codec_fuzz import grafts, structures_of

PLAN = ModelPlan(
    axes=(Axis("hidden", (2, 1, 1)), Axis("heads", (1, 1))),
    tensors=(
        Tensor("fc", "float32", (Dim(4, 0), Dim(3))),
        Tensor("qkv", "float32", (Dim(12, 1, 3, 2), Dim(4, 0))),
        Tensor("temperature", "float32", ()),
    ),
    buffers=(
        Buffer("mean", "float32", (Dim(4, 0),), statistic=True),
        Buffer("table", "int64", (Dim(5),)),
    ),
)
BATCH = SizeTerm(1, (), True)
HIDDEN = SizeTerm(1, (0,))
DATA = DataSpec((ArraySpec("float32", (3,)),), ArraySpec("int64", (), 6))
GOLDEN = Path(__file__).parents[1] / "golden" / "manifest_v1.bin"
GOLDEN_2 = GOLDEN.with_name("manifest_v2.bin")
GOLDEN_4 = GOLDEN.with_name("manifest_v4.bin")
GOLDEN_5 = GOLDEN.with_name("manifest_v5.bin")


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def entry_of(
    kind: Kind = "gradient",
    kept: tuple[int, ...] | None = None,
    batch: int | None = None,
    *,
    statistic: bool = True,
    weighted: bool = True,
) -> GraphEntry:
    """A graph of PLAN; `statistic` and `weighted` decide whether it pads."""

    def ports(*named: tuple[str, str, tuple[SizeTerm, ...]]) -> tuple[Port, ...]:
        """Sizes become constants where the graph has them fixed."""
        out = []
        for name, dtype, dims in named:
            fixed = []
            for dim in dims:
                if dim.axes and kept is not None and all(kept[axis] for axis in dim.axes):
                    dim = SizeTerm(dim.value(kept, 1))
                if dim.batch and batch is not None:
                    dim = SizeTerm(dim.value((), batch))
                fixed.append(dim)
            out.append(Port(name, dtype, tuple(fixed)))
        return tuple(out)

    tensors = {
        "fc": (HIDDEN, SizeTerm(3)),
        "qkv": (SizeTerm(6, (1,)), HIDDEN),
        "temperature": (),
    }
    inputs = ports(
        ("x0", "float32", (BATCH, SizeTerm(3))),
        ("s:heads", "float32", ()),
        ("b:table", "int64", (SizeTerm(5),)),
        *((f"w:{name}", "float32", dims) for name, dims in tensors.items()),
        *([("targets", "int64", (BATCH,))] if kind == "gradient" else []),
        *([("sample_weights", "float32", (BATCH,))] if weighted else []),
        *([("m0", "float32", (BATCH, HIDDEN))] if kind == "gradient" else []),
    )
    outputs = (
        ports(
            ("loss", "float32", ()),
            *((f"g:{name}", "float32", dims) for name, dims in tensors.items()),
            *([("n:mean", "float32", (HIDDEN,))] if statistic else []),
        )
        if kind == "gradient"
        else ports(("outputs", "float32", (BATCH, SizeTerm(7))))
    )
    masks = (MaskSpec("m0", 0.25),) if kind == "gradient" else ()
    costs = [CostTerm(20)]
    if batch is None:
        costs += [CostTerm(12, (), 1), CostTerm(4, (), 2)]
    if kept is None:
        costs += [CostTerm(8, (0, 1), 0 if batch else 1)]
    products = [CostTerm(5 if kind == "gradient" else 2)]
    if kept is None and batch is None:
        products += [CostTerm(7, (0, 0), 1)]
    digested = digest(kind, kept, batch, statistic)
    return GraphEntry(
        kind, digested, 100, kept, batch, inputs, outputs, masks, tuple(costs), tuple(products)
    )


def manifest_of(*graphs: GraphEntry, plan: ModelPlan = PLAN) -> Manifest:
    return Manifest(plan.hash, 18, 9, "1.23.0", "cross-entropy", 1e-6, DATA, graphs)


MANIFEST = manifest_of(
    entry_of(), entry_of(kept=(2, 1), batch=8), entry_of("evaluate"), entry_of("evaluate", batch=4)
)

# -- sizes --------------------------------------------------------------------------------------


@given(
    coefficient=st.integers(0, 100),
    axes=st.lists(st.integers(0, 2), max_size=3),
    batch=st.booleans(),
    kept=st.tuples(*[st.integers(1, 50)] * 3),
    size=st.integers(1, 64),
)
def test_size_is_the_product(
    coefficient: int, axes: list[int], batch: bool, kept: tuple[int, ...], size: int
) -> None:
    wanted = coefficient
    for axis in axes:
        wanted *= kept[axis]
    if batch:
        wanted *= size
    assert SizeTerm(coefficient, tuple(sorted(axes)), batch).value(kept, size) == wanted


def test_port_shape_follows_widths_and_batch() -> None:
    port = Port("a", "float32", (BATCH, SizeTerm(6, (1,)), SizeTerm(5), SizeTerm(2, (0, 1), True)))
    assert port.shape((3, 2), 7) == (7, 12, 5, 2 * 3 * 2 * 7)


@given(kept=st.tuples(*[st.integers(1, 50)] * 2), size=st.integers(1, 64))
def test_activation_bytes_add_up(kept: tuple[int, int], size: int) -> None:
    any_size = entry_of().activation_bytes(kept, size)
    assert any_size == 20 + 12 * size + 4 * size * size + 8 * kept[0] * kept[1] * size
    assert entry_of(batch=8).activation_bytes(kept, size) == 20 + 8 * kept[0] * kept[1]
    assert entry_of(kept=(2, 1), batch=8).activation_bytes(kept, size) == 20


@given(kept=st.tuples(*[st.integers(1, 50)] * 2), size=st.integers(1, 64))
def test_macs_add_up(kept: tuple[int, int], size: int) -> None:
    assert entry_of().macs(kept, size) == 5 + 7 * kept[0] ** 2 * size
    assert entry_of(kept=(2, 1), batch=8).macs(kept, size) == 5


def test_weight_bytes_are_those_of_the_submodel() -> None:
    groups = {"hidden": (1, 2), "heads": (0,)}
    kept = PLAN.kept_atoms(PLAN.choose(groups))
    assert entry_of().weight_bytes(kept) == 4 * PLAN.submodel_parameters(groups)


def test_cost_at_is_that_of_the_graphs_that_fit() -> None:
    """Level 1/3 on axes of 2+1+1 and 1+1 atoms is at most (2, 1): there batch 8 has its graph."""
    cost = MANIFEST.cost_at(PLAN, 1 / 3, 8)
    assert cost == RunCost(2 + 7 * 2 * 2 * 8, 5, 20, 4 * PLAN.cost_at(1 / 3).parameters)
    whole = MANIFEST.cost_at(PLAN, 1.0, 3)
    assert whole.forward_macs == 2 + 7 * 16 * 3
    assert whole.step_macs == 5 + 7 * 16 * 3
    assert whole.activation_bytes == 20 + 12 * 3 + 4 * 9 + 8 * 4 * 2 * 3
    assert whole.weight_bytes == 4 * PLAN.parameters


def test_cost_at_without_a_graph() -> None:
    assert manifest_of(entry_of()).cost_at(PLAN, 1.0, 3).forward_macs is None
    with pytest.raises(GraphError, match="no gradient graph"):
        manifest_of(entry_of("evaluate")).cost_at(PLAN, 1.0, 3)
    with pytest.raises(GroupError, match=r"not 1\.5"):
        MANIFEST.cost_at(PLAN, 1.5, 3)


# -- picking ------------------------------------------------------------------------------------


def picked(
    wanted: tuple[tuple[int, ...], int], *graphs: GraphEntry, kind: Kind = "gradient"
) -> tuple[tuple[int, ...] | None, int | None]:
    entry = manifest_of(*graphs).pick(kind, *wanted)
    assert entry in graphs
    assert entry.kind == kind
    return entry.kept, entry.batch


def static(*pairs: tuple[tuple[int, ...] | None, int | None]) -> list[GraphEntry]:
    return [entry_of(kept=kept, batch=batch, statistic=False) for kept, batch in pairs]


SMALL, LARGE = (2, 1), (4, 2)


@pytest.mark.parametrize(
    ("graphs", "wanted", "found"),
    [
        ([(None, None)], (SMALL, 5), (None, None)),
        ([(None, None), (SMALL, 5)], (SMALL, 5), (SMALL, 5)),
        ([(None, None), (SMALL, 8)], (SMALL, 5), (None, None)),
        ([(None, 5), (SMALL, 5)], (SMALL, 5), (SMALL, 5)),
        ([(LARGE, 5), (None, 5)], (SMALL, 5), (None, 5)),
        ([(SMALL, 32), (SMALL, 8), (SMALL, 16), (SMALL, 4)], (SMALL, 5), (SMALL, 8)),
        ([(SMALL, 32), (SMALL, 8), (SMALL, 5)], (SMALL, 5), (SMALL, 5)),
        ([(LARGE, 8), (SMALL, 16)], (SMALL, 5), (SMALL, 16)),
        ([(SMALL, None)], (SMALL, 5), (SMALL, None)),
    ],
)
def test_pick_finds_the_closest(graphs: Any, wanted: Any, found: Any) -> None:
    for order in (graphs, graphs[::-1]):
        assert picked(wanted, *static(*order)) == found


@pytest.mark.parametrize(
    ("graphs", "wanted", "words"),
    [
        ([], (SMALL, 5), "has: none"),
        ([(LARGE, None)], (SMALL, 5), r"widths \[2, 1\] with batch 5.*widths \[4, 2\], any batch"),
        ([(SMALL, 4)], (SMALL, 5), "batch 5.*batch 4"),
        ([(None, None)], (SMALL, 0), "at least one sample"),
    ],
)
def test_pick_names_both_sides_when_nothing_fits(graphs: Any, wanted: Any, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        picked(wanted, *static(*graphs))


@pytest.mark.parametrize(
    ("statistic", "weighted", "pads"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_pick_pads_only_where_it_changes_nothing(
    statistic: bool, weighted: bool, pads: bool
) -> None:
    entry = entry_of(batch=8, statistic=statistic, weighted=weighted)
    assert entry.pads == pads
    assert picked((SMALL, 8), entry) == (None, 8)
    if pads:
        assert picked((SMALL, 7), entry) == (None, 8)
    else:
        with pytest.raises(GraphError):
            picked((SMALL, 7), entry)


def test_pick_keeps_kinds_apart() -> None:
    assert picked((SMALL, 3), *MANIFEST.graphs, kind="evaluate") == (None, None)
    with pytest.raises(GraphError, match="no evaluate graph"):
        picked((SMALL, 3), entry_of(), kind="evaluate")


sizes = st.tuples(
    st.sampled_from([None, (1, 1), (2, 1), (2, 2)]), st.one_of(st.none(), st.integers(1, 6))
)


@given(pairs=st.lists(sizes, unique=True, max_size=8), kept=st.sampled_from([(1, 1), (2, 1)]))
def test_pick_agrees_with_trying_everything(
    pairs: list[tuple[tuple[int, ...] | None, int | None]], kept: tuple[int, ...]
) -> None:
    """Exact, else symbolic, else the least padding; `largest_batch` is the last that works."""
    manifest = manifest_of(*static(*pairs))
    for size in range(1, 8):
        tries: Sequence[int | None] = [size, None, *range(size + 1, 8)]
        order = [pair for pair in product(tries, (kept, None)) if pair[::-1] in pairs]
        if order:
            entry = manifest.pick("gradient", kept, size)
            assert (entry.batch, entry.kept) == order[0]
        else:
            with pytest.raises(GraphError):
                manifest.pick("gradient", kept, size)
        limit = manifest.largest_batch("gradient", kept)
        assert bool(order) == (limit is None or size <= limit)


# -- refusing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: SizeTerm(-1),
        lambda: SizeTerm(2**60),
        lambda: SizeTerm(1, (1, 0)),
        lambda: SizeTerm(1, (-1,)),
        lambda: CostTerm(0),
        lambda: CostTerm(2**60),
        lambda: CostTerm(1, (1, 0)),
        lambda: CostTerm(1, (-1,)),
        lambda: CostTerm(1, (), -1),
        lambda: CostTerm(1, (), 2**40),
        lambda: replace(entry_of(), activations=(CostTerm(1), CostTerm(2))),
        lambda: replace(entry_of(), activations=(CostTerm(1, (0,)), CostTerm(1))),
        lambda: replace(entry_of(), products=(CostTerm(1), CostTerm(2))),
        lambda: replace(entry_of(kept=(2, 1)), products=(CostTerm(1, (0,)),)),
        lambda: replace(entry_of(batch=8), activations=(CostTerm(1, (), 1),)),
        lambda: replace(entry_of(kept=(2, 1)), activations=(CostTerm(1, (0,)),)),
        lambda: Port("", "float32"),
        lambda: Port("a", "complex64"),
        lambda: Port("a", "float32", (BATCH,) * 33),
        lambda: MaskSpec("m0", 1.0),
        lambda: MaskSpec("m0", float("nan")),
        lambda: replace(entry_of(), kind="train"),  # type: ignore[arg-type]
        lambda: replace(entry_of(), sha256="AB" * 32),
        lambda: replace(entry_of(), size_bytes=0),
        lambda: replace(entry_of(), batch=0),
        lambda: replace(entry_of(), kept=(0, 1)),
        lambda: replace(entry_of(), kept=(2, 1)),
        lambda: replace(entry_of(), batch=8),
        lambda: replace(entry_of(), inputs=(Port("x0", "float32"),) * 2, masks=()),
        lambda: replace(entry_of(), outputs=(Port("loss", "float32"), Port("x0", "float32"))),
        lambda: replace(entry_of(), masks=(MaskSpec("m1", 0.5),)),
        lambda: replace(entry_of(), masks=(MaskSpec("m0", 0.5),) * 2),
        lambda: replace(entry_of(), outputs=()),
        lambda: replace(entry_of("evaluate"), outputs=(Port("loss", "float32"),)),
        lambda: replace(entry_of("evaluate"), kind="statistics"),
        lambda: replace(entry_of("evaluate"), kind="statistics", outputs=()),
        lambda: ArraySpec("complex64"),
        lambda: ArraySpec("float32", (1,) * 32),
        lambda: ArraySpec("float32", (-1,)),
        lambda: ArraySpec("float32", (2**60,)),
        lambda: ArraySpec("int64", (), -1),
        lambda: ArraySpec("int64", (), 2**60),
        lambda: DataSpec((), ArraySpec("int64")),
        lambda: replace(MANIFEST, plan_hash="abc"),
        lambda: replace(MANIFEST, opset=0),
        lambda: replace(MANIFEST, ir_version=0),
        lambda: replace(MANIFEST, min_onnxruntime="new"),
        lambda: replace(MANIFEST, tolerance=float("inf")),
        lambda: replace(MANIFEST, tolerance=-1.0),
        lambda: replace(MANIFEST, graphs=(entry_of(), replace(entry_of(), sha256="0" * 64))),
        lambda: manifest_of(entry_of(), replace(entry_of(batch=8), sha256=entry_of().sha256)),
    ],
)
def test_nonsense_is_refused(make: Any) -> None:
    with pytest.raises(GraphError):
        make()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataSpec((ArraySpec("float64", (3,)),), DATA.targets), "'x0' is not float64 3,"),
        (DataSpec((ArraySpec("float32", (4,)),), DATA.targets), "'x0' is not float32 4,"),
        (DataSpec(DATA.inputs, ArraySpec("int64", (1,))), "'targets' is not int64 1,"),
    ],
)
def test_graph_of_other_data_is_refused(data: DataSpec, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        replace(MANIFEST, data=data)


@pytest.mark.parametrize("dims", [(SizeTerm(8), SizeTerm(3)), (HIDDEN, SizeTerm(3)), (BATCH,)])
def test_graph_whose_samples_are_not_the_batch_is_refused(dims: tuple[SizeTerm, ...]) -> None:
    with pytest.raises(GraphError, match="'x0' is not float32 3,"):
        manifest_of(exchanged(entry_of(), Port("x0", "float32", dims)))


def test_graph_of_more_inputs_than_the_data_is_refused() -> None:
    with pytest.raises(GraphError, match="takes 'x1'; the task's data has 1 inputs"):
        manifest_of(exchanged(entry_of(), Port("x1", "float32", (BATCH,))))


def test_manifest_of_the_plan_fits_it() -> None:
    MANIFEST.check(PLAN)


def without(entry: GraphEntry, name: str) -> GraphEntry:
    return replace(entry, outputs=tuple(port for port in entry.outputs if port.name != name))


def exchanged(entry: GraphEntry, port: Port) -> GraphEntry:
    """The graph with its port of this name replaced, or with one more input."""
    if any(each.name == port.name for each in entry.outputs):
        ports = tuple(port if each.name == port.name else each for each in entry.outputs)
        return replace(entry, outputs=ports)
    rest = tuple(each for each in entry.inputs if each.name != port.name)
    return replace(entry, inputs=(*rest, port))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (entry_of(kept=(5, 1)), r"widths \[4, 2\]"),
        (
            GraphEntry("evaluate", "0" * 64, 1, (1,), None, (), (Port("outputs", "float32"),)),
            r"widths \[4, 2\]",
        ),
        (exchanged(entry_of(), Port("m0", "float32", (SizeTerm(1, (2,)),))), "names an axis"),
        (replace(entry_of(), activations=(CostTerm(1, (2,)),)), "names an axis"),
        (replace(entry_of(), products=(CostTerm(1, (2,)),)), "names an axis"),
        (exchanged(entry_of(), Port("w:other", "float32")), "'w:other' is neither"),
        (exchanged(entry_of(), Port("momentum", "float32")), "'momentum' is neither"),
        (
            exchanged(entry_of(), Port("w:fc", "float32", (HIDDEN, SizeTerm(2)))),
            r"\(4, 2\).*the plan says float32 of shape \(4, 3\)",
        ),
        (exchanged(entry_of(), Port("b:table", "int32", (SizeTerm(5),))), "int32.*int64"),
        (exchanged(entry_of(), Port("s:heads", "float32", (SizeTerm(1),))), "'s:heads'"),
        (exchanged(entry_of(), Port("g:fc", "float32", (SizeTerm(3), HIDDEN))), "'g:fc'"),
        (without(entry_of(), "g:qkv"), "no output 'g:qkv'"),
        (entry_of(statistic=False), "no output 'n:mean'"),
    ],
)
def test_manifest_that_does_not_fit_the_plan_is_refused(entry: GraphEntry, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        manifest_of(entry).check(PLAN)


def test_manifest_of_another_plan_is_refused() -> None:
    other = ModelPlan(axes=(), tensors=PLAN.tensors[2:])
    with pytest.raises(GraphError, match=f"{PLAN.hash[:12]}….*{other.hash[:12]}…"):
        MANIFEST.check(other)


# -- bytes --------------------------------------------------------------------------------------


def sealed(body: bytes, version: int = 1) -> bytes:
    """An envelope whose hash is right, so that only the body can be at fault."""
    packed: bytes = msgpack.packb(["tessera-graphs", version, hashlib.sha256(body).digest(), body])
    return packed


BODY: bytes = msgpack.unpackb(MANIFEST.encoded)[3]


def test_golden_file_is_the_manifest() -> None:
    assert decode_manifest(GOLDEN.read_bytes()) == MANIFEST
    assert encode_manifest(MANIFEST) == GOLDEN.read_bytes()


def test_golden_file_is_as_the_format_is_described() -> None:
    body = msgpack.unpackb(BODY)
    assert len(body) == 8
    assert body[:6] == [bytes.fromhex(PLAN.hash), 18, 9, "1.23.0", "cross-entropy", 1e-6]
    assert body[6] == [[["float32", [3], None]], ["int64", [], 6]]
    kind, sha, size, kept, batch, inputs, outputs, masks, activations, products = body[7][0]
    assert (kind, len(sha), size, kept, batch) == ("gradient", 32, 100, None, None)
    assert inputs[0] == ["x0", "float32", [[1, [], True], [3, [], False]]]
    assert outputs[0] == ["loss", "float32", []]
    assert masks == [["m0", 0.25]]
    assert activations == [[20, [], 0], [12, [], 1], [4, [], 2], [8, [0, 1], 1]]
    assert products == [[5, [], 0], [7, [0, 0], 1]]


def test_decode_of_encode_is_the_manifest() -> None:
    decoded = decode_manifest(encode_manifest(MANIFEST), expected_hash=MANIFEST.hash)
    assert decoded == MANIFEST
    assert decoded.encoded == MANIFEST.encoded
    assert MANIFEST.hash == hashlib.sha256(BODY).hexdigest()
    assert issubclass(GraphError, ProtocolError)


def test_decode_refuses_another_hash_and_version() -> None:
    with pytest.raises(GraphError, match=f"{MANIFEST.hash[:12]}…, not 000000000000…"):
        decode_manifest(MANIFEST.encoded, expected_hash="0" * 64)
    envelope = msgpack.unpackb(MANIFEST.encoded)
    with pytest.raises(GraphError, match=r"version 6 .* reads versions 1 to 5"):
        decode_manifest(msgpack.packb([envelope[0], 6, *envelope[2:]]))
    for version in (2, 3, 4, 5):  # nothing in it needs them
        with pytest.raises(GraphError, match="canonical"):
            decode_manifest(msgpack.packb([envelope[0], version, *envelope[2:]]))


def test_decode_refuses_other_forms_of_the_same_manifest() -> None:
    """A float written as float32 or integer, an integer written long: equal, but not the bytes."""
    tree = msgpack.unpackb(BODY)
    assert sealed(msgpack.packb(tree)) == MANIFEST.encoded
    single = msgpack.packb(tree, use_single_float=True)
    long_opset = BODY.replace(bytes([0x12, 0x09, 0xA6]), bytes([0xCC, 0x12, 0x09, 0xA6]), 1)
    assert msgpack.unpackb(long_opset) == tree
    for body in (single, long_opset, msgpack.packb([*tree[:5], 0, *tree[6:]])):
        assert body != BODY
        with pytest.raises(GraphError):
            decode_manifest(sealed(body))


def test_decode_refuses_every_flipped_byte() -> None:
    data = MANIFEST.encoded
    for at in range(len(data)):
        with pytest.raises(GraphError):
            decode_manifest(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])


# -- sizes in the file ----------------------------------------------------------------------------


FILE = b"before" + slot_bytes(2**21) + b"between" + slot_bytes(2**21 + 1)
SLOTTED = replace(
    entry_of(),
    sha256=hashlib.sha256(FILE).hexdigest(),
    size_bytes=len(FILE),
    slots=(SizeSlot(6, HIDDEN), SizeSlot(17, SizeTerm(3, (0, 1)))),
)
SUM = SizeTerm(2, more=(SizeTerm(1, (0,)), SizeTerm(3, (0, 1))))


@given(hidden=st.integers(1, 2**10), heads=st.integers(1, 2**10))
def test_sizes_are_written_into_their_slots_and_nowhere_else(hidden: int, heads: int) -> None:
    written = fitted(SLOTTED, FILE, (hidden, heads))
    assert (len(written), written[:6], written[10:17]) == (len(FILE), b"before", b"between")
    numbers = [
        sum((byte & 0x7F) << 7 * place for place, byte in enumerate(written[at : at + 4]))
        for at in (6, 17)
    ]
    assert numbers == [hidden, 3 * hidden * heads]
    assert [byte >> 7 for byte in written[6:10]] == [1, 1, 1, 0]
    assert fitted(entry_of(), FILE, (hidden, heads)) == FILE


def test_size_that_does_not_fit_its_slot_is_refused() -> None:
    with pytest.raises(GraphError, match="does not fit into 4 bytes"):
        fitted(SLOTTED, FILE, (2**14, 2**13))
    with pytest.raises(GraphError, match="no number of 4 bytes at 6"):
        fitted(SLOTTED, b"x" * len(FILE), (1, 1))


@pytest.mark.parametrize(
    "slots",
    [
        (SizeSlot(17, HIDDEN), SizeSlot(6, HIDDEN)),
        (SizeSlot(6, HIDDEN), SizeSlot(9, HIDDEN)),
        (SizeSlot(18, HIDDEN),),
    ],
)
def test_slots_that_overlap_or_leave_the_file_are_refused(slots: tuple[SizeSlot, ...]) -> None:
    with pytest.raises(GraphError, match="not in order, or one is outside the file"):
        replace(SLOTTED, slots=slots)
    with pytest.raises(GraphError, match="offset is at least 0"):
        SizeSlot(-1, HIDDEN)
    with pytest.raises(GraphError, match="always there follows the batch"):
        replace(SLOTTED, slots=(SizeSlot(6, BATCH),))
    with pytest.raises(GraphError, match="a size the graph has fixed"):
        replace(entry_of(kept=(2, 1)), slots=(SizeSlot(0, HIDDEN),))
    with pytest.raises(GraphError, match="names an axis"):
        manifest_of(replace(SLOTTED, slots=(SizeSlot(6, SizeTerm(1, (2,))),))).check(PLAN)


# -- ways to compute a value ----------------------------------------------------------------------

PARTS = (b"head", b"plain", b"by " + slot_bytes(2**21), b"middle", b"one", b"two", b"three", b"end")
WHOLE = b"".join(PARTS)
EDGES = [sum(map(len, PARTS[:n])) for n in range(len(PARTS) + 1)]


def way(name: str, part: int, *multiples: tuple[SizeTerm, int]) -> GraphWay:
    return GraphWay(name, EDGES[part], EDGES[part + 1], multiples)


FIRST = GraphPlace(
    "conv forward", (way("plain", 1), way("blocked", 2, (SizeTerm(1, (0,), True), 16)))
)
SECOND = GraphPlace("conv input gradient", (way("a", 4), way("b", 5), way("c", 6)))
CHOOSES = replace(
    entry_of(),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    size_bytes=len(WHOLE),
    slots=(SizeSlot(EDGES[2] + 3, SizeTerm(1, (0,), True)),),
    places=(FIRST, SECOND),
)


@pytest.mark.parametrize(
    ("ways", "kept", "batch", "expected"),
    [
        ({}, (4, 2), 4, b"headplainmiddleoneend"),
        ({"conv forward": "blocked"}, (4, 2), 4, b"headby " + slot_bytes(16) + b"middleoneend"),
        ({"conv forward": "blocked"}, (4, 2), 3, b"headplainmiddleoneend"),  # 12 is no multiple
        ({"conv input gradient": "c"}, (4, 2), 4, b"headplainmiddlethreeend"),
        ({"conv input gradient": "blocked", "other": "b"}, (4, 2), 4, b"headplainmiddleoneend"),
    ],
)
def test_file_keeps_one_way_for_each_place(
    ways: dict[str, str], kept: tuple[int, ...], batch: int, expected: bytes
) -> None:
    assert fitted(CHOOSES, WHOLE, kept, batch, ways) == expected


def test_sizes_of_ways_that_are_not_taken_make_no_other_graph() -> None:
    always = SizeSlot(EDGES[3], HIDDEN)
    assert CHOOSES.default_slots == ()
    assert replace(CHOOSES, slots=(*CHOOSES.slots, always)).default_slots == (always,)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ((SECOND, FIRST), "not in order"),
        ((FIRST, FIRST), "occurs twice"),
        (
            (FIRST, GraphPlace("x", (way("a", 4), GraphWay("b", EDGES[5], len(WHOLE) + 1)))),
            "outside",
        ),
        (
            (FIRST, GraphPlace("x", (way("a", 4), GraphWay("b", EDGES[5] - 1, EDGES[6])))),
            "not in order",
        ),
        ((GraphPlace("x", (way("a", 2), way("b", 4))),), "always there follows the batch"),
        ((SECOND,), "always there follows the batch"),
        ((GraphPlace("x", (way("a", 1), GraphWay("b", EDGES[2], EDGES[2] + 5))),), "at the edge"),
    ],
)
def test_impossible_places_are_refused(places: tuple[GraphPlace, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        replace(CHOOSES, places=places)


def test_impossible_ways_are_refused() -> None:
    for broken in (("", 0, 1), ("a", -1, 1), ("a", 2, 2)):
        with pytest.raises(GraphError):
            GraphWay(*broken)
    with pytest.raises(GraphError):
        GraphWay("a", 0, 1, ((HIDDEN, 0),))
    with pytest.raises(GraphError, match="up to 32 sizes"):
        GraphWay("a", 0, 1, ((HIDDEN, 2),) * 33)
    with pytest.raises(GraphError, match="up to 32 axes"):
        SizeTerm(1, (0,) * 33)
    for options in ((way("a", 1),), (), (way("a", 1), way("a", 2))):
        with pytest.raises(GraphError):
            GraphPlace("x", options)
    with pytest.raises(GraphError, match="no default"):
        GraphPlace("x", (way("a", 1, (HIDDEN, 2)), way("b", 2)))
    with pytest.raises(GraphError, match="a size the graph has fixed"):
        replace(entry_of(batch=4), size_bytes=len(WHOLE), places=CHOOSES.places)
    unknown = GraphPlace("x", (way("a", 4), way("b", 5, (SizeTerm(1, (7,)), 2))))
    with pytest.raises(GraphError, match="names an axis"):
        manifest_of(replace(CHOOSES, places=(FIRST, unknown))).check(PLAN)


def test_manifest_with_places_is_of_version_five_and_comes_back() -> None:
    manifest = manifest_of(CHOOSES, entry_of("evaluate"))
    assert encode_manifest(manifest) == GOLDEN_5.read_bytes()
    assert msgpack.unpackb(manifest.encoded)[1] == 5
    assert decode_manifest(manifest.encoded) == manifest


def test_manifest_with_slots_is_of_version_two_and_comes_back() -> None:
    manifest = manifest_of(SLOTTED, entry_of("evaluate"))
    assert encode_manifest(manifest) == GOLDEN_2.read_bytes()
    assert msgpack.unpackb(manifest.encoded)[1] == 2
    assert decode_manifest(manifest.encoded) == manifest
    assert msgpack.unpackb(MANIFEST.encoded)[1] == 1


BY_DEPTH = manifest_of(*(entry_of(kept=(0, heads)) for heads in (1, 2)), entry_of("evaluate"))


def test_graph_may_fix_some_axes_and_take_any_size_of_others() -> None:
    """As a chain does: a graph for each number of blocks, at all widths."""
    BY_DEPTH.check(PLAN)
    for hidden, heads in ((1, 1), (4, 1), (3, 2)):
        entry = BY_DEPTH.pick("gradient", (hidden, heads), 8)
        assert entry.kept == (0, heads)
        assert {port.name: port.shape((hidden, heads), 8) for port in entry.inputs}["w:qkv"] == (
            6 * heads,
            hidden,
        )
        assert BY_DEPTH.pick("evaluate", (hidden, heads), 8).kept is None
    assert str(BY_DEPTH.graphs[0]).endswith("(widths [any, 1], any batch)")
    with pytest.raises(GraphError, match=r"fits widths \[4, 3\].*\[any, 1\].*\[any, 2\]"):
        BY_DEPTH.pick("gradient", (4, 3), 8)
    exact = entry_of(kept=(4, 2))
    closest = manifest_of(entry_of(), entry_of(kept=(0, 2)), exact)
    assert closest.pick("gradient", (4, 2), 8) is exact
    assert closest.pick("gradient", (3, 2), 8).kept == (0, 2)
    assert closest.pick("gradient", (3, 1), 8).kept is None


@pytest.mark.parametrize(
    ("level", "bid"),
    [(1.0, 1.0), (0.99, 0.75), (0.9, 0.75), (0.75, 0.75), (0.7, 0.5), (0.4, 0.25), (0.2, 0.2)],
)
def test_level_within_has_a_graph(level: float, bid: float) -> None:
    """Eight blocks, and graphs for eight, six, four, two and one; a width of two groups."""
    axes = (Axis("blocks", (1,) * 8, depth=True), Axis("hidden", (1, 1)))
    stack = Tensor("w", "float32", (Dim(8, 0), Dim(2, 1)), tuple(f"{n}.w" for n in range(8)))
    plan = ModelPlan(axes=axes, tensors=(stack,))
    made = tuple(
        replace(entry_of(kept=(blocks, 1)), kept=(blocks, 0)) for blocks in (8, 6, 4, 2, 1)
    )
    assert manifest_of(*made, plan=plan).level_within(plan, level) == bid
    assert manifest_of(entry_of()).level_within(PLAN, level) == level


@pytest.mark.parametrize("kept", [(0, 0), (0, -1), (0, 3), (0,)])
def test_graph_that_fixes_nothing_or_too_much_is_refused(kept: tuple[int, ...]) -> None:
    with pytest.raises(GraphError):
        manifest_of(replace(entry_of(kept=(0, 1)), kept=kept)).check(PLAN)


def test_manifest_that_fixes_some_axes_is_of_version_four_and_comes_back() -> None:
    assert encode_manifest(BY_DEPTH) == GOLDEN_4.read_bytes()
    assert decode_manifest(GOLDEN_4.read_bytes()) == BY_DEPTH
    envelope = msgpack.unpackb(GOLDEN_4.read_bytes())
    assert envelope[1] == 4
    assert [graph[3] for graph in msgpack.unpackb(envelope[3])[7]] == [[0, 1], [0, 2], None]


def test_size_that_is_a_sum() -> None:
    assert SUM.value((5, 7), 3) == 2 + 5 + 3 * 5 * 7
    assert sum_of([SizeTerm(3, (0, 1)), SizeTerm(1), SizeTerm(1, (0,)), SizeTerm(1)]) == SUM
    assert (SUM.all_axes, SUM.any_batch) == (frozenset({0, 1}), False)
    segments = (Segment(4, 0), Segment(6, 1, 3), Segment(2))
    assert size_of(Dim(12, segments=segments)).value((4, 2), 1) == 12
    for more in ((SizeTerm(1, (0,)), SizeTerm(1, (0,))), (SizeTerm(0, (1,)),), (SizeTerm(1),)):
        with pytest.raises(GraphError, match="summands"):
            SizeTerm(2, more=more)
    entry = entry_of("evaluate")
    wide = replace(entry, outputs=(Port("outputs", "float32", (BATCH, SUM)),))
    manifest = manifest_of(entry_of(), wide)
    assert msgpack.unpackb(manifest.encoded)[1] == 2
    assert decode_manifest(manifest.encoded) == manifest


@given(data=st.binary(max_size=200))
def test_decode_refuses_random_bytes(data: bytes) -> None:
    for attempt in (data, sealed(data)):
        with pytest.raises(GraphError):
            decode_manifest(attempt)


TREE = msgpack.unpackb(BODY)
WORDS = st.sampled_from(["gradient", "evaluate", "float32", "outputs", "1.23.0"])
structures = structures_of(WORDS | st.binary(min_size=32, max_size=32))


@settings(max_examples=400)
@given(tree=structures.flatmap(lambda branch: st.sampled_from(grafts(TREE, branch))))
def test_decode_of_grafted_bodies_is_exact_or_refused(tree: Any) -> None:
    """The envelope is right and one node is anything: nothing but `GraphError` comes out."""
    data = sealed(msgpack.packb(tree))
    with suppress(GraphError):
        assert decode_manifest(data).encoded == data


TREE_5 = msgpack.unpackb(msgpack.unpackb(manifest_of(CHOOSES, entry_of("evaluate")).encoded)[3])


@settings(max_examples=400)
@given(tree=structures.flatmap(lambda branch: st.sampled_from(grafts(TREE_5, branch))))
def test_decode_of_grafted_bodies_with_places_is_exact_or_refused(tree: Any) -> None:
    body = msgpack.packb(tree)
    envelope = ["tessera-graphs", 5, hashlib.sha256(body).digest(), body]
    with suppress(GraphError):
        manifest = decode_manifest(data := msgpack.packb(envelope))
        assert manifest.encoded == data
        for entry in manifest.graphs:  # what was accepted can be fitted, or is refused
            if entry.size_bytes < 10_000:
                file = b"\x80" * entry.size_bytes
                fitted(entry, file, (4, 2), 8, {"conv forward": "blocked"})


@pytest.mark.parametrize("depth", [1, 2, 100, 500, 1000])
@pytest.mark.parametrize("opening", [b"\x94\x01\x90\xc2\x91", b"\x91"])
def test_decode_refuses_sizes_and_lists_in_each_other(depth: int, opening: bytes) -> None:
    """A summand of a size has none of its own. Anywhere, and however deep: only `GraphError`."""
    leaf = b"\x93\x01\x90\xc2"
    for tree in grafts(TREE_5, "here"):
        body = msgpack.packb(tree).replace(msgpack.packb("here"), opening * depth + leaf)
        data = sealed(body, 5)
        with suppress(GraphError):
            assert decode_manifest(data).encoded == data


@settings(max_examples=300)
@given(tree=structures)
def test_decode_of_any_structure_is_exact_or_refused(tree: Any) -> None:
    for data in (msgpack.packb(tree), sealed(msgpack.packb(tree))):
        with pytest.raises(GraphError):
            decode_manifest(data)


# -- what a file says of itself -----------------------------------------------------------------


def test_opsets_are_read_from_the_file() -> None:
    """IR 9, a producer, two imports (standard 18, "ml" 3) and an unknown fixed-width field."""
    data = bytes([0x08, 9, 0x12, 1, 0x61, 0x42, 2, 0x10, 18, 0x42, 6, 0x0A, 2, 0x6D, 0x6C, 0x10, 3])
    assert graph_opsets(data + bytes([0x7D, 0, 0, 0, 0])) == (9, {"": 18, "ml": 3})


@pytest.mark.parametrize(
    "data",
    [
        bytes([0x42, 8, 0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F, 0x10, 18]),  # the domain is a number
        bytes([0x42, 3, 0x12, 1, 0x61]),  # the version is a string
        bytes([0x42, 9, 0x10, 18]),  # ends too early
        bytes([0x08, *[0xFF] * 11]),  # a number without end
        bytes([0x0B]),  # a group, which protobuf gave up
    ],
)
def test_opsets_in_the_wrong_form_are_refused(data: bytes) -> None:
    with pytest.raises(GraphError):
        graph_opsets(data)


@given(data=st.binary(max_size=60))
def test_opsets_of_random_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(GraphError):
        ir_version, opsets = graph_opsets(data)
        assert ir_version >= 0
        assert all(isinstance(domain, str) for domain in opsets)
