"""Derive a plan from a torch module: `trace_model`, and `trace_plan` for the plan alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, get_args

import numpy as np
import torch

from coordinator.errors import TraceError
from coordinator.task.tracing.capture.calls import ExampleInput, make_call
from coordinator.task.tracing.capture.capture import (
    TRACE_BATCH,
    Captured,
    capture,
    check_arrays,
    named_arrays,
)
from coordinator.task.tracing.check import check_programs, check_runs
from coordinator.task.tracing.depth.stacks import DepthChain, find_depth, stacked_dims, tie_blocks
from coordinator.task.tracing.factors import (
    Factor,
    Factors,
    freeze,
    fresh,
    leaves,
    segments_of,
    size_of,
    tie,
    widths,
)
from coordinator.task.tracing.moments import batch_moments
from coordinator.task.tracing.norms import copied_names
from coordinator.task.tracing.operators import HANDLERS
from coordinator.task.tracing.program import TracedProgram
from coordinator.task.tracing.walk import Walk, walk_graph
from edge_sdk.protocol.plan import specs
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan, Regions
from edge_sdk.train.local import axis_scales
from edge_sdk.train.statistics import Moments, batches, moments_of

LayerNorms = Literal["whole", "submodel"]
"""What LayerNorm normalises over stays whole, or is what the submodel keeps of it."""


@dataclass(frozen=True)
class TracedModel:
    """A model's plan, and its forward pass at every width, in training and evaluation mode."""

    plan: ModelPlan
    train: TracedProgram
    evaluate: TracedProgram
    reasons: tuple[str, ...]
    """Reasons why hidden dimensions of weights stay whole, one line per dimension."""

    def weights_of(self, model: torch.nn.Module) -> dict[str, Array]:
        """Return the model's weights as numpy arrays (copies), named as in the plan."""
        return _named(model, self.plan.tensors)

    def buffers_of(self, model: torch.nn.Module) -> dict[str, Array]:
        """Return the model's buffers as numpy arrays (copies), named as in the plan."""
        return _named(model, self.plan.buffers)

    def predict(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
    ) -> Array:
        """Compute a submodel's outputs (None: the whole model's) in evaluation mode.

        `rescale` is that of its training (`LocalRule`); the whole model does not need it.
        """
        groups = groups or self.plan.full_groups()
        self.plan.check(weights, groups)
        kept = self.plan.kept_atoms(self.plan.choose(groups))
        forward = self.evaluate.at(kept, len(inputs[0]), rescale != 0)
        with torch.no_grad():
            output = forward(*self._tensors(weights, buffers, inputs, groups, rescale))
        return _numpy(output)

    def moments(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
        batch_size: int = 64,
    ) -> Moments | None:
        """Compute a submodel's BatchNorm moments over these samples, a batch at a time.

        Dropout is off, and a last batch of one sample is left out; a single sample is repeated.
        None: the model has no BatchNorm.
        """
        groups = groups or self.plan.full_groups()
        self.plan.check(weights, groups)
        kept = self.plan.kept_atoms(self.plan.choose(groups))
        names = [buffer.name for buffer in self.plan.buffers]
        merged: Moments | None = None
        for part in batches(inputs, batch_size, least=2):
            size = len(part[0])
            forward = self.train.at(kept, size, rescale != 0)
            masks = [torch.ones(shape) for _, shape in forward.masks]
            given = self._tensors(weights, buffers, part, groups, rescale)
            found = batch_moments(forward, *given, masks)
            if not found:
                return None
            new = moments_of(size, {names[number]: _numpy(value) for number, value in found})
            merged = new if merged is None else merged.merged(new)
        return merged

    def _tensors(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        groups: Groups,
        rescale: float,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        plan, scales = self.plan, axis_scales(self.plan, groups, rescale)
        return (
            [torch.from_numpy(weights[tensor.name]) for tensor in plan.tensors],
            # copies: a model may change both in place
            [torch.tensor(buffers[buffer.name]) for buffer in plan.buffers],
            [torch.tensor(np.ascontiguousarray(array)) for array in inputs],
            [torch.tensor(scales[axis.name]) for axis in plan.axes],
        )


def trace_plan(
    model: torch.nn.Module,
    example_input: ExampleInput,
    *,
    groups: int | None = None,
    ratios: Sequence[float] | None = None,
    output: str | int | None = None,
    layer_norm: LayerNorms = "whole",
    regions: Regions = "width",
) -> ModelPlan:
    """Find every axis of an ordinary torch module and cut it into groups.

    `example_input` is a batch (dimension 0), a tuple of batches for several inputs, or a dictionary
    of batches by the names of forward()'s arguments. Give either `groups`, the number of equal
    groups per axis, or `ratios`, their relative sizes. An axis with fewer atoms than groups gets
    one group per atom. `output` names the tensor to train on, or its position, where forward()
    returns several; None: the only one, `logits` or `out`, or the first of a tuple. With
    `layer_norm="submodel"`, LayerNorm, RMSNorm and GroupNorm of one group take the statistics of
    what a submodel keeps, so that the widths they normalise over can be narrowed.

    `regions`: cut widths, or depth (whole blocks of a chain of residual blocks of one shape, each a
    group of its own, so `groups` and `ratios` are not needed), or both.

    Raises `TraceError`, which names the module, when the model cannot be traced or when no part of
    it can be cut.
    """
    traced = trace_model(
        model,
        example_input,
        groups=groups,
        ratios=ratios,
        output=output,
        layer_norm=layer_norm,
        regions=regions,
    )
    return traced.plan


def trace_model(
    model: torch.nn.Module,
    example_input: ExampleInput,
    *,
    groups: int | None = None,
    ratios: Sequence[float] | None = None,
    output: str | int | None = None,
    layer_norm: LayerNorms = "whole",
    regions: Regions = "width",
) -> TracedModel:
    """Derive a plan as `trace_plan` does, with the programs that run the model at any size."""
    if regions not in get_args(Regions):
        raise TraceError(f"regions are {', '.join(get_args(Regions))}, not {regions!r}")
    if groups is not None and ratios is not None:
        raise TraceError("give either groups=K or ratios=[…]")
    if groups is None and ratios is None:
        if regions != "depth":
            raise TraceError("give either groups=K or ratios=[…]")
        groups = 1
    parts: int | Sequence[float] = ratios if groups is None else groups  # type: ignore[assignment]
    if isinstance(ratios, (int, float)):
        raise TraceError(f"ratios must be a list such as [5, 10, 20], one per group, not {ratios}")
    specs.split_atoms(1, parts)  # rejects bad values before the slow part
    if layer_norm not in (known := get_args(LayerNorms)):
        raise TraceError(f"layer_norm must be one of {', '.join(known)}, not {layer_norm!r}")
    call = make_call(model, example_input, output)
    check_arrays(model, call)
    batch = call.tiled(TRACE_BATCH)
    check_runs(model, call)
    dims = _named_dims(model)
    batch_factor = Factor(TRACE_BATCH, batch=True)
    captured = [capture(model, batch, train=mode) for mode in (True, False)]
    narrow_norms = layer_norm == "submodel"
    walks = [_walk(graph, dims, batch_factor, narrow_norms) for graph in captured]
    names = list(captured[0].weights)
    copies = _tied_copies(model, dims)
    chains = [] if regions == "width" else find_depth(*captured)
    if regions == "both":
        tie_blocks(chains, dims)
    axes = {} if regions == "depth" else _axes(names, dims, needed=not chains)
    statistics = {name for name, node in captured[0].buffers.items() if node in walks[0].written}
    plan = _plan(model, captured[0], dims, axes, chains, statistics, walks[1], parts, copies)
    train, evaluate = (
        TracedProgram(graph, walk, axes, {len(axes) + at: each for at, each in enumerate(found)})
        for graph, walk, found in zip(
            captured,
            walks,
            ([each.train for each in chains], [each.evaluate for each in chains]),
            strict=True,
        )
    )
    check_programs(plan, train, evaluate, model, call)
    return TracedModel(plan, train, evaluate, _hidden_reasons(names, dims, axes))


def _named_dims(model: torch.nn.Module) -> dict[str, list[Factors]]:
    """Make a fresh factor for every dimension of every weight and buffer."""
    named = named_arrays(model)
    return {name: [fresh(size) for size in value.shape] for name, value in named.items()}


def _walk(
    captured: Captured, dims: Mapping[str, list[Factors]], batch: Factor, narrow_norms: bool
) -> Walk:
    values: dict[torch.fx.Node, list[Factors]] = {}
    for name, node in (*captured.weights.items(), *captured.buffers.items()):
        values[node] = dims[name]
        if not node.users:
            for dim in dims[name]:
                freeze(dim, "is not used by forward()")
    for node, constant in captured.constants.items():
        why = "belongs to a constant made in forward(); register it as a buffer"
        values[node] = [fresh(size, frozen=why) for size in constant.shape]
    for node in captured.inputs:
        shape = node.meta["val"].shape
        values[node] = [[batch], *(fresh(s, frozen="is an input of the model") for s in shape[1:])]
    layers = [*captured.weights.values(), *captured.buffers.values()]
    return walk_graph(captured.graph, values, layers, HANDLERS, narrow_norms=narrow_norms)


def _tied_copies(model: torch.nn.Module, dims: Mapping[str, list[Factors]]) -> Factors:
    """Make the copies of all decoupled norms one dimension, and return it; empty: there are none.

    Raises `TraceError` if their numbers differ.
    """
    found = [dims[name][0] for name in copied_names(model) if name in dims]
    counts = {size_of(dim) for dim in found}
    if len(counts) > 1:
        raise TraceError(f"norms were decoupled into different numbers of copies: {sorted(counts)}")
    for other in found[1:]:
        tie(found[0], other, "is a copy of a norm's parameters")
    return found[0] if found else []


def _axes(
    names: Sequence[str], dims: Mapping[str, list[Factors]], *, needed: bool
) -> dict[Factor, int]:
    """Number the free factors of the weights; a dimension keeps at most one of them free.

    Raises `TraceError` if there are none and they are `needed`.
    """
    used = Counter(leaf for shape in dims.values() for dim in shape for leaf in leaves(dim))
    for name in dims:
        for dim in dims[name]:
            if any(leaf.batch for leaf in leaves(dim)):
                raise TraceError(f"the shape of {name!r} depends on the batch size")
            free = [leaf for leaf in leaves(dim) if leaf.frozen is None]
            freeze({leaf for leaf in free if free.count(leaf) > 1}, f"is squared in {name!r}")
            free = [leaf for leaf in free if leaf.frozen is None]
            # Prefer the width most layers share, such as attention heads, then the largest.
            keep = max(free, key=lambda leaf: (used[leaf], leaf.size), default=None)
            others = [leaf for leaf in free if leaf is not keep]
            freeze(others, f"shares a dimension of {name!r} with a width that more layers use")
            _settle_sums(name, dim)
    known = _readable(names, dims)
    axes: dict[Factor, int] = {}
    for name in names:
        for dim in dims[name]:
            for leaf in widths(dim):
                if leaf.frozen is None and leaf in known:
                    axes.setdefault(leaf, len(axes))
    if not axes and needed:
        lines = [f"  {line}" for name in names for _, line in _reasons(name, dims[name])]
        if not names:
            lines = ["  none of its weights is trained: requires_grad is False for all of them"]
        if not dims:
            lines = ["  it has no weights"]
        if any("normalised over as a whole" in line for line in lines):
            lines.append('layer_norm="submodel" lets LayerNorm use the statistics of what is kept')
        raise TraceError("\n".join(["nothing in this model can be narrowed:", *lines]))
    return axes


def _readable(names: Sequence[str], dims: Mapping[str, list[Factors]]) -> set[Factor]:
    """Return the free widths, each of which can be read off the shapes of weights.

    A graph learns its sizes there: from a dimension that has this width alone, or from a sum of
    which it knows all the others. A width that is hidden from both is frozen.
    """
    every = [(name, leaf) for name in names for dim in dims[name] for leaf in leaves(dim)]
    known = {leaf for _, leaf in every if not leaf.segments and leaf.frozen is None}
    sums = [(name, leaf) for name, leaf in every if leaf.segments]
    while True:
        hidden = [
            (name, missing)
            for name, leaf in sums
            if (missing := {each for each in widths([leaf]) if each.frozen is None} - known)
        ]
        if not hidden:
            return known
        name, missing = min(hidden, key=lambda pair: len(pair[1]))
        if len(missing) > 1:
            smallest = min(missing, key=lambda leaf: leaf.size)
            freeze([smallest], f"occurs only as a part of {name!r}")
        else:
            known |= missing


def _settle_sums(name: str, dim: Factors) -> None:
    """Freeze what a plan cannot express: repeated segments, and any but their slowest factor."""
    for position, leaf in enumerate(leaves(dim)):
        if position and leaf.segments:
            freeze([leaf], f"is concatenated and repeated in {name!r}")
        for segment in segments_of(leaf):
            freeze(segment[1:], f"shares a segment of {name!r} with another width")


def _reasons(name: str, shape: Sequence[Factors]) -> list[tuple[str, str]]:
    """Return each frozen factor's reason, and a line that says where it is."""
    return [
        (reason, f"{name}, dimension {position}: it {reason}")
        for position, dim in enumerate(shape)
        for reason in dict.fromkeys(leaf.frozen for leaf in widths(dim))
        if reason
    ]


NEVER_CUT = (
    "is an input of the model",
    "is an output of the model",
    "is a spatial dimension of a convolution",
    "is a vocabulary",
)


def _hidden_reasons(
    names: Sequence[str], dims: Mapping[str, list[Factors]], axes: Mapping[Factor, int]
) -> tuple[str, ...]:
    """Reasons for dimensions without an axis, except those nobody expects to have one."""
    return tuple(
        line
        for name in names
        for reason, line in _reasons(
            name, [[] if any(leaf in axes for leaf in widths(dim)) else dim for dim in dims[name]]
        )
        if not reason.startswith(NEVER_CUT)
    )


def _plan(
    model: torch.nn.Module,
    captured: Captured,
    dims: Mapping[str, list[Factors]],
    widths: Mapping[Factor, int],
    chains: Sequence[DepthChain],
    statistics: set[str],
    evaluation: Walk,
    parts: int | Sequence[float],
    copies: Factors,
) -> ModelPlan:
    arrays = named_arrays(model)
    depth = [chain.factor for chain in chains]
    axes = {**widths, **{factor: len(widths) + at for at, factor in enumerate(depth)}}
    weights = stacked_dims(captured.weights, chains, dims)
    buffers = stacked_dims(captured.buffers, chains, dims)

    def dims_of(shape: Sequence[Factors]) -> tuple[specs.Dim, ...]:
        return tuple(_plan_dim(dim, size_of(dim), axes) for dim in shape)

    def kind(name: str, members: Sequence[str]) -> torch.Tensor:
        return arrays[members[0] if members else name]

    def axis(name: str, factor: Factor) -> specs.Axis:
        if factor in depth:
            return specs.Axis(name, (1,) * factor.size, depth=True)
        if factor in leaves(copies):
            return specs.Axis(name, (1,) * factor.size, alternatives=True)
        return specs.Axis(name, specs.split_atoms(factor.size, parts))

    shapes = {name: shape for name, (shape, _) in stacked_dims(dims, chains, dims).items()}
    names = _axis_names(shapes, axes, leaves(copies), depth)
    return ModelPlan(
        axes=tuple(axis(name, factor) for name, factor in zip(names, axes, strict=True)),
        tensors=tuple(
            specs.Tensor(name, _dtype(kind(name, members)), dims_of(shape), members)
            for name, (shape, members) in weights.items()
        ),
        buffers=tuple(
            specs.Buffer(
                name,
                _dtype(kind(name, members)),
                dims_of(shape),
                members,
                statistic=_is_statistic(
                    kind(name, members), members[0] if members else name, statistics
                ),
            )
            for name, (shape, members) in buffers.items()
        ),
        macs=_mac_terms(evaluation, axes, chains),
    )


def _dtype(array: torch.Tensor) -> str:
    return str(array.dtype).removeprefix("torch.")


def _is_statistic(array: torch.Tensor, name: str, written: set[str]) -> bool:
    """Tell statistics from counters (`num_batches_tracked`), which are written but not averaged."""
    return name in written and array.is_floating_point()


def _plan_dim(dim: Factors, size: int, axes: Mapping[Factor, int]) -> specs.Dim:
    parts = leaves(dim)
    for position, leaf in enumerate(parts):
        if leaf in axes:
            outer = prod(part.size for part in parts[:position])
            inner = prod(part.size for part in parts[position + 1 :])
            return specs.Dim(size, axes[leaf], outer, inner)
        if leaf.segments:
            inner = prod(part.size for part in parts[position + 1 :])
            return _segmented(leaf, inner, size, axes)
    return specs.Dim(size)


def _segmented(leaf: Factor, inner: int, size: int, axes: Mapping[Factor, int]) -> specs.Dim:
    found: list[specs.Segment] = []
    for segment in segments_of(leaf):
        own = prod(part.size for part in segment) * inner
        if segment and segment[0] in axes:
            each = prod(part.size for part in segment[1:]) * inner
            found.append(specs.Segment(own, axes[segment[0]], each))
        elif found and found[-1].axis is None:
            found[-1] = specs.Segment(found[-1].size + own)
        else:
            found.append(specs.Segment(own))
    return specs.Dim(size, segments=tuple(found)) if len(found) > 1 else specs.Dim(size)


def _axis_names(
    dims: Mapping[str, list[Factors]],
    axes: Mapping[Factor, int],
    copies: Factors,
    depth: Sequence[Factor],
) -> list[str]:
    """Name each axis after the first module whose weights have it, numbered if necessary.

    That of copies, which all norms have, is called so; one of depth after the module around its
    blocks.
    """
    names: dict[Factor, str] = {}
    for name in dims:
        for dim in dims[name]:
            for leaf in widths(dim):
                if leaf in axes and leaf not in names:
                    stem = "copies" if leaf in copies else name.rpartition(".")[0] or name
                    if leaf in depth:
                        stem = name.partition("*")[0].rpartition(".")[0] or "blocks"
                    taken = set(names.values())
                    tries = [stem, *(f"{stem}#{n}" for n in range(2, len(axes) + 2))]
                    names[leaf] = next(candidate for candidate in tries if candidate not in taken)
    return [names[factor] for factor in axes]


def _mac_terms(
    walk: Walk, axes: Mapping[Factor, int], chains: Sequence[DepthChain]
) -> tuple[specs.MacTerm, ...]:
    terms: dict[tuple[int, ...], int] = {}
    firsts = {node: c.factor for c in chains for node in c.evaluate.blocks[0].nodes}
    others = {node for c in chains for block in c.evaluate.blocks[1:] for node in block.nodes}
    for node, constant, factors in walk.products:
        if node in others:
            continue  # as many as the first block's
        factors = [firsts[node], *factors] if node in firsts else factors
        choices = [segments_of(leaf) if leaf.segments else [[leaf]] for leaf in leaves(factors)]
        for choice in product(*choices):  # a product of sums is a sum of products
            parts = [leaf for segment in choice for leaf in segment]
            key = tuple(sorted(axes[leaf] for leaf in parts if leaf in axes))
            fixed = prod(leaf.size for leaf in parts if leaf not in axes and not leaf.batch)
            terms[key] = terms.get(key, 0) + constant * fixed
    return tuple(specs.MacTerm(terms[key], key) for key in sorted(terms))


def _named(model: torch.nn.Module, tensors: Sequence[specs.Tensor]) -> dict[str, Array]:
    state = named_arrays(model)
    return {
        each.name: np.stack([_numpy(state[name]) for name in each.members])
        if each.members
        else _numpy(state[each.name])
        for each in tensors
    }


def _numpy(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy().copy()
    return array
