"""The effect of each ATen operator on dimensions, one short function per operator.

Normalisation decides what can be narrowed (docs/plans.md):

- BatchNorm and InstanceNorm work channel by channel: channels may be cut.
- GroupNorm works group by group: whole norm groups may be cut; they are the axis's atoms.
- LayerNorm, RMSNorm and softmax mix the values they normalise over, so those stay whole. That is
  why a transformer's residual stream is not cut, unless the task asks that LayerNorm, RMSNorm and
  GroupNorm of one group take the statistics of what a submodel keeps (`layer_norm="submodel"`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from coordinator.errors import TraceError
from coordinator.task.tracing.factors import (
    Factors,
    concatenation,
    cut,
    fresh,
    leaves,
    reshape,
    split_front,
    widths,
)
from coordinator.task.tracing.walk import (
    DRAWS,
    Contraction,
    Dropout,
    Handler,
    NarrowedNorm,
    Value,
    Walk,
    arguments,
    create,
    describe,
    not_understood,
    operator_name,
    shape_of,
)

HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# -- layers with weights --------------------------------------------------------------------


@_handles("linear")
def _linear(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs, weight = walk.dims(a["input"]), walk.dims(a["weight"])
    walk.contract(node, ("input", a["input"], inputs[-1]), ("weight", a["weight"], weight[1]))
    if a["bias"] is not None:
        walk.tie(node, walk.dims(a["bias"])[0], weight[0])
    out = [*inputs[:-1], weight[0]]
    walk.count(node, [*out, weight[1]])
    return out


@_handles("conv1d", "conv2d", "conv3d")
def _conv(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs, weight, groups = walk.dims(a["input"]), walk.dims(a["weight"]), a["groups"]
    spatial = len(weight) - 2
    channels = inputs[-spatial - 1]
    for dim in (*weight[2:], *inputs[-spatial:]):
        walk.ban(node, dim, "is a spatial dimension of a convolution")
    if groups == 1:
        walk.contract(node, ("input", a["input"], channels), ("weight", a["weight"], weight[1]))
    else:
        # Channels are cut by whole convolution groups; the inside of a group stays.
        why = describe(node, "is inside a convolution group")
        front, inside = split_front(channels, groups, why)
        out_front, out_inside = split_front(weight[0], groups, why)
        walk.tie(node, front, out_front)
        walk.tie(node, inside, weight[1])
        for dim in (inside, out_inside):
            walk.ban(node, dim, "is inside a convolution group")
        walk.patch(node, "groups", out_front)
    if a["bias"] is not None:
        walk.tie(node, walk.dims(a["bias"])[0], weight[0])
    shape = shape_of(node)
    why = describe(node, "is a spatial dimension of a convolution")
    out_spatial = [fresh(size, frozen=why) for size in shape[-spatial:]]
    out = [*inputs[: -spatial - 1], weight[0], *out_spatial]
    walk.count(node, [*out, *weight[1:]])
    return out


@_handles("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle a weight of (in, out, kernel…): each input element meets each output's kernel."""
    if a["groups"] != 1:
        return not_understood(walk, node)
    inputs, weight = walk.dims(a["input"]), walk.dims(a["weight"])
    spatial = len(weight) - 2
    for dim in (*weight[2:], *inputs[-spatial:]):
        walk.ban(node, dim, "is a spatial dimension of a convolution")
    channels = inputs[-spatial - 1]
    walk.contract(node, ("input", a["input"], channels), ("weight", a["weight"], weight[0]))
    if a["bias"] is not None:
        walk.tie(node, walk.dims(a["bias"])[0], weight[1])
    walk.count(node, [*inputs, *weight[1:]])
    why = describe(node, "is a spatial dimension of a convolution")
    out_spatial = [fresh(size, frozen=why) for size in shape_of(node)[-spatial:]]
    return [*inputs[: -spatial - 1], weight[1], *out_spatial]


@_handles("embedding")
def _embedding(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    table = walk.dims(a["weight"])
    walk.ban(node, table[0], "is a vocabulary")
    return [*walk.dims(a["indices"]), table[1]]


@_handles("embedding_bag")
def _embedding_bag(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle bags of one length (a 2-D input): torch flattens the ids, offsets by `arange`."""
    table, ids, offsets = walk.dims(a["weight"]), walk.dims(a["indices"]), a["offsets"]
    walk.ban(node, table[0], "is a vocabulary")
    bags = shape_of(offsets)[0]
    made_here = getattr(offsets.target, "__name__", "") == "arange.start_step"
    if not made_here or offsets.args[2] * bags != prod(shape_of(a["indices"])):
        raise TraceError(describe(node, "bags of different lengths; give a 2-D batch of ids"))
    batch, _ = split_front(ids[0], bags, describe(node, "is a bag"))
    if a["per_sample_weights"] is not None:
        walk.tie(node, walk.dims(a["per_sample_weights"])[0], ids[0])
    walk.patch(offsets, "end", ids[0])
    walk.values[offsets] = [batch]
    rest = [
        [fresh(int(size), frozen="is internal to embedding_bag") for size in value.shape]
        for value in node.meta["val"][1:]
    ]
    return ([batch, table[1]], *rest)


@_handles("matmul", "mm", "bmm")
def _matmul(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    (left_name, left), (right_name, right) = list(a.items())[:2]
    one, two = walk.dims(left), walk.dims(right)
    if len(one) < 2 or len(two) < 2:
        for dim in (*one, *two):
            others = [f for f in leaves(dim) if not f.batch]
            walk.ban(node, others, "is multiplied as a vector")
        return [*one[:-1], *two[1:]] if len(two) < 2 else [*two[:-2], two[-1]]
    walk.contract(node, (left_name, left, one[-1]), (right_name, right, two[-2]))
    out = [*_broadcast(walk, node, one[:-2], two[:-2]), one[-2], two[-1]]
    walk.count(node, [*out, one[-1]])
    return out


@_handles("addmm", "baddbmm")
def _added_product(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    product = _matmul(walk, node, dict(list(a.items())[1:3]))
    return _broadcast(walk, node, product, walk.dims(a["self"]))


@_handles("einsum")
def _einsum(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle two operands with each label at most once in each; anything else stays whole."""
    operands = a["tensors"]
    terms, _, result = a["equation"].replace(" ", "").partition("->")
    labels = terms.split(",")
    plain = all(len(set(term)) == len(term) and "." not in term for term in labels)
    if len(operands) != 2 or not result or not plain:
        return not_understood(walk, node)
    one, two = (
        dict(zip(term, walk.dims(operand), strict=True))
        for term, operand in zip(labels, operands, strict=True)
    )
    for label in [label for label in one | two if label not in result]:
        if not (one.get(label) and two.get(label)):
            walk.ban(node, one.get(label) or two.get(label) or [], "is reduced")
            continue
        left = ("tensors.0", operands[0], one[label])
        walk.contract(node, left, ("tensors.1", operands[1], two[label]))
    for label in result:
        if one.get(label) and two.get(label):
            walk.tie(node, one[label], two[label])
    dims = {label: one.get(label) or two.get(label) or [] for label in one | two}
    walk.count(node, list(dims.values()))
    return [dims[label] for label in result]


@_handles("scaled_dot_product_attention")
def _attention(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    query, key, value = (walk.dims(a[name]) for name in ("query", "key", "value"))
    walk.tie(node, query[-1], key[-1])
    walk.tie(node, key[-2], value[-2])
    shared = _broadcast(walk, node, key[:-2], value[:-2])
    if a["enable_gqa"]:  # several heads share a key and a value: they are cut together
        heads = shape_of(a["key"])[-3]
        front, inside = split_front(query[-3], heads, describe(node, "shares keys and values"))
        walk.tie(node, front, shared[-1])
        walk.ban(node, inside, "counts the heads that share keys and values")
        shared[-1] = query[-3]
    lead = _broadcast(walk, node, query[:-2], shared)
    scores = [*lead, query[-2], key[-2]]
    if a["dropout_p"]:
        walk.dropouts.append(Dropout(node.name, a["dropout_p"], scores))
    if a["attn_mask"] is not None:
        _broadcast(walk, node, scores, walk.dims(a["attn_mask"]))
    walk.ban(node, query[-1], "is the width of an attention head")
    walk.ban(node, value[-1], "is the width of an attention head")
    walk.ban(node, key[-2], "is attended over")
    walk.count(node, [*scores, query[-1]])
    walk.count(node, [*scores, value[-1]])
    return [*lead, query[-2], value[-1]]


@_handles("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle one layer in one direction: its gates are copies of its width in its weights."""
    if "batch_first" not in a or len(shape_of(a["input"])) != 3:
        raise TraceError(
            describe(node, "packed or unbatched sequences; give a batch of sequences of one length")
        )
    inputs = walk.dims(a["input"])
    at = 0 if a["batch_first"] else 1
    if any(leaf.batch for leaf in leaves(inputs[1 - at])):
        raise TraceError(
            describe(node, "steps through the batch instead of the sequence; set batch_first=True")
        )
    states = a["hx"] if isinstance(a["hx"], (list, tuple)) else [a["hx"]]
    for state in states:
        walk.tie(node, walk.dims(state)[1], inputs[at])
    if len(a["params"]) not in (2, 4):  # an LSTM that projects its output
        return not_understood(walk, node)
    weight, own, *rest = a["params"]
    gates = shape_of(own)[0] // shape_of(own)[1]
    why = describe(node, "counts the gates of a recurrent layer")
    front, width = split_front(walk.dims(weight)[0], gates, why)
    walk.ban(node, front, "counts the gates of a recurrent layer")
    walk.ban(node, inputs[1 - at], "is stepped through by a recurrent layer")
    columns = ("params.0", weight, walk.dims(weight)[1])
    walk.contract(node, ("input", a["input"], inputs[2]), columns)
    for each in (own, *rest):
        walk.tie(node, walk.dims(each)[0], walk.dims(weight)[0])
    walk.tie(node, walk.dims(own)[1], width)
    # The hidden state is summed over inside the operator; scaling its weight does the same.
    walk.contractions.append(Contraction(node.name, "params.1", width, 0))
    for state in states:
        walk.tie(node, walk.dims(state)[2], width)
    for each in (weight, own):
        walk.count(node, [*inputs[:2], *walk.dims(each)])
    final: list[Factors] = [[], inputs[at], width]
    return ([*inputs[:2], width], *(final for _ in states))


# -- normalisation --------------------------------------------------------------------------


@_handles("batch_norm", "instance_norm")
def _batch_norm(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs = walk.dims(a["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if a[name] is not None:
            walk.tie(node, walk.dims(a[name])[0], inputs[1])
    if a.get("training") or a.get("use_input_stats"):
        walk.written.update(n for n in (a["running_mean"], a["running_var"]) if n is not None)
    _mixed(walk, node, [inputs[0], *inputs[2:]])
    return inputs


@_handles("group_norm")
def _group_norm(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs = walk.dims(a["input"])
    for name in ("weight", "bias"):
        if a[name] is not None:
            walk.tie(node, walk.dims(a[name])[0], inputs[1])
    if walk.narrow_norms and a["num_groups"] == 1:  # LayerNorm over channels and pixels
        walk.norms.append(NarrowedNorm(node.name, (inputs[1],)))
        _mixed(walk, node, inputs[2:])
        return inputs
    why = "is inside a GroupNorm group"
    front, inside = split_front(inputs[1], a["num_groups"], describe(node, why))
    walk.ban(node, inside, why)
    walk.patch(node, "num_groups", front)
    _mixed(walk, node, inputs[2:])
    return inputs


def _mixed(walk: Walk, node: fx.Node, dims: Sequence[Factors]) -> None:
    """Freeze dimensions whose mean and variance are taken, but not the batch, which may be."""
    for dim in dims:
        others = [factor for factor in leaves(dim) if not factor.batch]
        walk.ban(node, others, "is normalised over")


@_handles("layer_norm", "rms_norm")
def _layer_norm(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs = walk.dims(a["input"])
    normalised = inputs[-len(a["normalized_shape"]) :]
    for name in ("weight", "bias"):
        if a.get(name) is not None:
            for dim, own in zip(normalised, walk.dims(a[name]), strict=True):
                walk.tie(node, dim, own)
    if walk.narrow_norms and not any(leaf.batch for dim in normalised for leaf in leaves(dim)):
        walk.patch(node, "normalized_shape", tuple(normalised))
        walk.norms.append(NarrowedNorm(node.name, tuple(normalised)))
        return inputs
    for dim in normalised:
        walk.ban(node, dim, "is normalised over as a whole")
    return inputs


@_handles("_weight_norm")
def _weight_norm(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Divide by the norm of what is kept: zeros outside a submodel would not change it."""
    weight = walk.dims(a["v"])
    for one, other in zip(weight, walk.dims(a["g"]), strict=False):
        if other:
            walk.tie(node, one, other)
    if a["v"].op == "placeholder" and a["dim"] >= 0:
        walk.directions[a["v"]] = a["dim"]
    _stay_weight(walk, node, a["v"])
    return weight


@_handles("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
def _along(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    (inputs,) = (walk.dims(value) for name, value in a.items() if name in ("self", "input"))
    walk.ban(node, inputs[a["dim"]], "is normalised or summed along")
    return inputs


@_handles("mean", "sum", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm")
@_handles("any", "all", "prod", "argmax", "argmin", "norm")
def _reduce(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs = walk.dims(a["self"])
    which = a.get("dim")
    which = range(len(inputs)) if which in (None, []) else which
    which = {d % len(inputs) for d in ([which] if isinstance(which, int) else which)}
    # A sum over parts of a weight is a sum over those that are kept: zeros would add nothing.
    linear = operator_name(node) == "sum" and a["self"] in walk.weights
    for position in () if linear else which:
        others = [factor for factor in leaves(inputs[position]) if not factor.batch]
        walk.ban(node, others, "is reduced")
    if a.get("keepdim"):
        return [[] if i in which else dim for i, dim in enumerate(inputs)]
    return [dim for i, dim in enumerate(inputs) if i not in which]


@_handles("cosine_similarity")
def _similarity(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims = _broadcast(walk, node, walk.dims(a["x1"]), walk.dims(a["x2"]))
    along = a["dim"] % len(dims)
    walk.ban(node, dims[along], "is reduced")
    return [*dims[:along], *dims[along + 1 :]]


@_handles("max", "min", "median")
def _extreme(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle two tensors, all elements, or (values, indices) along a dimension."""
    if "other" in a:
        return _pointwise(walk, node, a)
    out = _reduce(walk, node, a)
    return (out, out) if "dim" in a else out


# -- element by element ---------------------------------------------------------------------


@_handles(
    "pointwise", "where", "masked_fill", "copy", "fill", "zero", "rsub", "hardswish", "log_sigmoid",
    "mish", "threshold", "gelu", "relu6", "abs",  # not marked as pointwise when in place
    "special_erfc", "nan_to_num", "square",
)  # fmt: skip
def _pointwise(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    out: list[Factors] = []
    for operand in node.all_input_nodes:
        if isinstance(walk.values.get(operand), list):
            out = _broadcast(walk, node, out, walk.dims(operand))
    return out


@_handles("rrelu")
def _rrelu(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    if a["training"]:
        raise TraceError(describe(node, "draws random numbers; use nn.LeakyReLU"))
    return _pointwise(walk, node, a)


@_handles("glu")
def _glu(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims = walk.dims(a["self"])
    along = a["dim"] % len(dims)
    front, piece = split_front(dims[along], 2, describe(node, "is split"))
    walk.ban(node, front, "counts the pieces of a split")
    return [*dims[:along], piece, *dims[along + 1 :]]


@_handles("dropout", "feature_dropout")
def _dropout(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs = walk.dims(node.all_input_nodes[0])
    if a["train"] and a["p"] > 0:
        by_channel = operator_name(node) == "feature_dropout"
        mask = [*inputs[:2], *([] for _ in inputs[2:])] if by_channel else inputs
        walk.dropouts.append(Dropout(node.name, a["p"], mask))
    return inputs


@_handles("alpha_dropout", "feature_alpha_dropout")
def _alpha_dropout(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    if a["train"] and a["p"] > 0:
        raise TraceError(describe(node, DRAWS))
    return walk.dims(node.all_input_nodes[0])


@_handles("bernoulli")
def _bernoulli(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle ones with a fixed probability: stochastic depth, which drops branches of samples."""
    keep, inputs = a.get("p"), walk.dims(a["self"])
    if not isinstance(keep, float) or not 0 < keep <= 1:
        raise TraceError(describe(node, DRAWS))
    walk.dropouts.append(Dropout(node.name, 1 - keep, inputs))
    return inputs


@_handles("rand")
def _rand(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle `floor(keep + rand)`, the older form of stochastic depth; all else is refused."""
    if kept_share(node) is None:
        raise TraceError(describe(node, DRAWS))
    dims: list[Factors] = create(walk, node)
    walk.dropouts.append(Dropout(node.name, 1 - (kept_share(node) or 0.0), dims))
    return dims


def kept_share(node: fx.Node) -> float | None:
    """Return `keep` if uniform numbers are used only as `floor(keep + numbers)`."""
    sums = list(node.users)
    if len(sums) != 1 or operator_name(sums[0]) != "add":
        return None
    (other,) = [each for each in sums[0].args if each is not node] or [None]
    floors = [user for user in sums[0].users if operator_name(user) == "floor"]
    keep = float(other) if isinstance(other, (int, float)) else None
    in_place = [each for each in floors if each.target is torch.ops.aten.floor_.default]
    alone = bool(in_place) or len(floors) == len(sums[0].users)
    return keep if keep is not None and 0 < keep < 1 and floors and alone else None


@_handles(
    "contiguous", "clone", "detach", "alias", "to", "type_as", "zeros_like", "ones_like",
    "full_like", "lift_fresh_copy", "_to_copy", "_assert_tensor_metadata",
)  # fmt: skip
def _same(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    source = node.all_input_nodes[0]
    _stay_weight(walk, node, source)
    return walk.dims(source) if node.meta.get("val") is not None else None


@_handles("prelu")
def _prelu(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    inputs, weight = walk.dims(a["self"]), walk.dims(a["weight"])
    if weight[0]:
        walk.tie(node, inputs[1], weight[0])
    return inputs


# -- shapes ---------------------------------------------------------------------------------


@_handles("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def _reshape(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    why = describe(node, "is regrouped in a way that cannot be followed")
    out = reshape(walk.dims(node.all_input_nodes[0]), shape_of(node), why)
    for name in ("size", "shape"):
        if name in a:
            walk.patch(node, name, tuple(out))
    if "sizes" in a:  # unflatten states only the new dimensions
        start = a["dim"] % len(shape_of(node.all_input_nodes[0]))
        walk.patch(node, "sizes", tuple(out[start : start + len(a["sizes"])]))
    _stay_weight(walk, node, node.all_input_nodes[0])
    return out


@_handles("reshape_as", "view_as")
def _reshape_as(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    why = describe(node, "is regrouped in a way that cannot be followed")
    out = reshape(walk.dims(a["self"]), shape_of(node), why)
    for one, other in zip(out, walk.dims(a["other"]), strict=True):
        walk.tie(node, one, other)
    _stay_weight(walk, node, a["self"])
    return out


@_handles("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T", "adjoint")
def _permute(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    source = node.all_input_nodes[0]
    dims = walk.dims(source)
    # Ask torch where each dimension goes, with a small tensor of distinct sizes.
    probe = torch.empty([i + 2 for i in range(len(dims))], device="meta")
    rest = [argument for argument in node.args if not isinstance(argument, fx.Node)]
    moved = node.target(probe, *rest)  # type: ignore[operator]
    _stay_weight(walk, node, source)
    return [dims[size - 2] for size in moved.shape]


@_handles("expand", "expand_as")
def _expand(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    source, shape = walk.dims(node.all_input_nodes[0]), shape_of(node)
    old = [1] * (len(shape) - len(source)) + list(shape_of(node.all_input_nodes[0]))
    padded: list[Factors] = [[] for _ in range(len(shape) - len(source))] + source
    out = [
        dim if size == wanted else fresh(wanted)
        for dim, size, wanted in zip(padded, old, shape, strict=True)
    ]
    if "size" in a:
        walk.patch(node, "size", tuple(out))
    return out


@_handles("repeat", "tile")
def _repeat(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Repeat: a dimension of size one becomes a new one, such as a class token's batch."""
    source, shape = walk.dims(a["self"]), shape_of(node)
    name = "repeats" if "repeats" in a else "dims"
    times = [1] * (len(shape) - len(a[name])) + list(a[name])
    padded: list[Factors] = [[] for _ in range(len(shape) - len(source))] + source
    out: list[Factors] = []
    patched: list[Factors] = []
    for dim, count, size in zip(padded, times, shape, strict=True):
        if dim and count != 1:
            walk.ban(node, dim, "is repeated")
            out.append(fresh(size, frozen=describe(node, "is repeated")))
            patched.append(fresh(count, frozen=describe(node, "is repeated")))
        else:
            patched.append(fresh(count))
            out.append(dim or patched[-1])
    walk.patch(node, name, tuple(patched))
    return out


@_handles("repeat_interleave")
def _repeat_interleave(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    if not isinstance(a["repeats"], int) or a["dim"] is None:
        return not_understood(walk, node)
    dims = list(walk.dims(a["self"]))
    along = a["dim"] % len(dims)
    walk.ban(node, dims[along], "is repeated")
    dims[along] = fresh(shape_of(node)[along], frozen=describe(node, "is repeated"))
    return dims


@_handles("cat")
def _cat(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    along = a["dim"] % len(shape_of(node))
    out: list[Factors] = []
    pieces: list[Factors] = []
    for piece in a["tensors"]:
        dims = list(walk.dims(piece))
        pieces.append(dims[along])
        dims[along] = []
        out = _broadcast(walk, node, out, dims)
    size, parts = shape_of(node)[along], [leaf for dim in pieces for leaf in widths(dim)]
    if any(leaf.batch for leaf in parts) or all(leaf.frozen is not None for leaf in parts):
        walk.ban(node, parts, "is concatenated")
        out[along] = fresh(size, frozen=describe(node, "is concatenated"))
    else:
        out[along] = concatenation(pieces, size) if len(pieces) > 1 else pieces[0]
    return out


@_handles("stack")
def _stack(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    out: list[Factors] = []
    for piece in a["tensors"]:
        out = _broadcast(walk, node, out, walk.dims(piece))
    along = a["dim"] % (len(out) + 1)
    why = describe(node, "is stacked")
    return [*out[:along], fresh(len(a["tensors"]), frozen=why), *out[along:]]


@_handles("select")
def _select(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims = walk.dims(a["self"])
    along = a["dim"] % len(dims)
    walk.ban(node, dims[along], "is indexed")
    return [*dims[:along], *dims[along + 1 :]]


@_handles("slice")
def _slice(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims, shape = list(walk.dims(a["self"])), shape_of(node)
    along = a["dim"] % len(dims)
    whole = shape_of(a["self"])[along]
    if shape[along] == whole:
        if a["end"] is not None and dims[along]:  # x[:n] that keeps everything
            walk.patch(node, "end", dims[along])
        return dims
    start, end = _interval(node, whole)
    if a["step"] != 1 or not _taken_apart(a["self"], along, whole):
        walk.ban(node, dims[along], "is sliced")
        dims[along] = fresh(shape[along], frozen=describe(node, "is sliced"))
        return dims
    sizes = [size for size in (start, end - start, whole - end) if size]
    pieces = cut(dims[along], sizes, describe(node, "is sliced"))
    before = pieces[: 1 if start else 0]
    dims[along] = pieces[len(before)]
    if before:
        walk.patch(node, "start", before[0])
        before = [concatenation([before[0], dims[along]], end)]
    walk.patch(node, "end", before[0] if before else dims[along])
    return dims


def _interval(node: fx.Node, whole: int) -> tuple[int, int]:
    """Return where a slice starts and ends in a dimension of this size."""
    given = arguments(node)
    start, end = given["start"] or 0, whole if given["end"] is None else given["end"]
    return (
        min(max(start + whole if start < 0 else start, 0), whole),
        min(max(end + whole if end < 0 else end, 0), whole),
    )


def _taken_apart(source: fx.Node, along: int, whole: int) -> bool:
    """Tell whether slices of the source take each of its elements once: a split, in other words."""
    found = []
    for user in source.users:
        given = arguments(user) if operator_name(user) == "slice" else {}
        if given and given["dim"] % len(shape_of(source)) == along:
            found.append(_interval(user, whole))
    ends = [0, *(end for _, end in sorted(set(found)))]
    return ends == [*(start for start, _ in sorted(set(found))), whole]


@_handles("roll", "flip", "sort", "topk", "unfold", "diff")
def _rearranged(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Keep whole the dimensions whose elements change places or are chosen; the others pass."""
    rank = len(shape_of(a["self"]))
    named = next(a[key] for key in ("dims", "dim", "dimension") if key in a)
    named = [named] if isinstance(named, int) else named or range(rank)
    touched = {dim % rank for dim in named}
    if operator_name(node) != "unfold":
        return _resize(walk, node, touched)
    whole = _resize(walk, node, touched)
    return [*whole, fresh(a["size"], frozen=describe(node, "is cut into windows"))]


@_handles("index_select")
def _index_select(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims = list(walk.dims(a["self"]))
    along = a["dim"] % len(dims)
    walk.ban(node, dims[along], "is indexed")
    dims[along] = walk.dims(a["index"])[0]
    return dims


@_handles("gather")
def _gather(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Index one dimension; the others must be as long as the index's to pass."""
    dims, index = walk.dims(a["self"]), walk.dims(a["index"])
    along = a["dim"] % len(dims) if dims else 0
    sizes = zip(shape_of(a["self"]), shape_of(a["index"]), strict=True)
    for position, (own, other) in enumerate(sizes):
        if position == along or own != other:
            walk.ban(node, dims[position], "is indexed")
        else:
            walk.tie(node, dims[position], index[position])
    return index


@_handles("index")
def _index(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Index by tensors: their dimensions replace those they index, or come first if apart."""
    dims = walk.dims(a["self"])
    indices = {place: each for place, each in enumerate(a["indices"]) if each is not None}
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices.values()):
        raise TraceError(describe(node, "has a size that depends on the data"))
    common: list[Factors] = []
    for place, index in indices.items():
        batch = [leaf.batch for leaf in leaves(dims[place])] == [True]
        if batch and _counts(index, shape_of(a["self"])[place]):  # every sample by its number
            walk.patch(index, "end", dims[place])
            walk.values[index] = [dims[place]]
        else:
            walk.ban(node, dims[place], "is indexed")
        common = _broadcast(walk, node, common, walk.dims(index))
    first, last = min(indices), max(indices)
    front = first if last - first == len(indices) - 1 else 0
    rest = [dim for place, dim in enumerate(dims) if place not in indices]
    return [*rest[:front], *common, *rest[front:]]


def _counts(node: fx.Node, size: int) -> bool:
    """Tell whether this is `arange(size)`."""
    if operator_name(node) != "arange":
        return False
    given = arguments(node)
    return (given.get("start", 0), given["end"], given.get("step", 1)) == (0, size, 1)


@_handles("unbind")
def _unbind(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims = walk.dims(a["self"])
    along = a["dim"] % len(dims)
    walk.ban(node, dims[along], "is indexed")
    return tuple([*dims[:along], *dims[along + 1 :]] for _ in node.meta["val"])


@_handles("split_with_sizes")
def _split(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    dims = walk.dims(a["self"])
    along = a["dim"] % len(dims)
    sizes = a["split_sizes"]
    if len(set(sizes)) == 1 and not any(leaf.segments for leaf in leaves(dims[along])[:1]):
        # Equal pieces, such as fused q, k, v or a gate and its input: all alike.
        front, piece = split_front(dims[along], len(sizes), describe(node, "is split"))
        walk.ban(node, front, "counts the pieces of a split")
        outs = [piece] * len(sizes)
    else:
        outs = cut(dims[along], sizes, describe(node, "is split unevenly"))
    walk.patch(node, "split_sizes", tuple(outs))
    return tuple([*dims[:along], out, *dims[along + 1 :]] for out in outs)


@_handles(
    *(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg")),
    *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)),
    *(f"adaptive_{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("avg", "max")),
    *(f"_adaptive_avg_pool{n}d" for n in (2, 3)),
    *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
def _pool(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Take the last n dimensions, n from the operator's name, as spatial; the rest pass."""
    spatial = next(n for n in (1, 2, 3) if f"{n}d" in operator_name(node))
    rank = len(shape_of(node.all_input_nodes[0]))
    return _resize(walk, node, range(rank - spatial, rank))


@_handles("pixel_shuffle", "pixel_unshuffle", "im2col", "col2im")
def _pixels(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Move pixels to channels, or back: each channel has a run of channels on the other side."""
    dims, shape = walk.dims(a["self"]), shape_of(node)
    along = 1 if "col" in operator_name(node) else len(dims) - 3
    for dim in dims[along + 1 :]:
        walk.ban(node, dim, "is pooled, padded or resized")
    why = describe(node, "holds the pixels of a channel")
    channels = dims[along]
    before, after = shape_of(a["self"])[along], shape[along]
    if after < before:
        channels, inside = split_front(channels, after, why)
        walk.ban(node, inside, "holds the pixels of a channel")
    else:
        channels = [*channels, *fresh(after // before, frozen=why)]
    return [*dims[:along], channels, *(fresh(size, frozen=why) for size in shape[along + 1 :])]


@_handles("new_zeros", "new_ones", "new_full", "new_empty")
def _new(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Handle a tensor whose source gives only its type."""
    dims = [fresh(size) for size in shape_of(node)]
    walk.patch(node, "size", tuple(dims))
    return dims


@_handles("pad")
def _pad(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """Read (before, after) pairs from the last dimension backwards; size would not show a shift."""
    rank, pad = len(shape_of(node)), a["pad"]
    touched = [rank - 1 - i for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]]
    return _resize(walk, node, touched)


def _resize(walk: Walk, node: fx.Node, touched: Collection[int]) -> Value:
    dims = walk.dims(node.all_input_nodes[0])
    for position in touched:
        walk.ban(node, dims[position], "is pooled, padded or resized")
    why = describe(node, "is spatial")

    def outcome(value: torch.Tensor) -> list[Factors]:
        return [
            fresh(int(value.shape[position]), frozen=why) if position in touched else dim
            for position, dim in enumerate(dims)
        ]

    value = node.meta["val"]  # with indices, a tuple
    return tuple(map(outcome, value)) if isinstance(value, (tuple, list)) else outcome(value)


def _broadcast(walk: Walk, node: fx.Node, one: list[Factors], two: list[Factors]) -> list[Factors]:
    """Align dimensions from the right; ones stretch."""
    longer, shorter = (one, two) if len(one) >= len(two) else (two, one)
    out = list(longer)
    for back in range(1, len(shorter) + 1):
        if not out[-back]:
            out[-back] = shorter[-back]
        elif shorter[-back]:
            walk.tie(node, out[-back], shorter[-back])
    return out


def _stay_weight(walk: Walk, node: fx.Node, source: fx.Node) -> None:
    if source in walk.weights:
        walk.weights.add(node)
