"""Final check of a trace: run it at another batch size and narrowed, and compare with the module.

It catches a wrong rule for an operator and an overlooked fixed batch size. The check draws its own
weights, because a model's initial ones hide mistakes: a head of zeros gives zero at every width,
and a norm's ones and zeros look alike wherever they are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy

import numpy as np
import torch

from coordinator.errors import TraceError
from coordinator.task.tracing.capture.calls import Call, calling
from coordinator.task.tracing.capture.capture import TRACE_BATCH, first_line, named_arrays
from coordinator.task.tracing.program import TracedProgram
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan

BATCH = TRACE_BATCH - 4

TOLERANCE = 1e-4
"""Largest accepted difference from the zero-masked model, relative to the largest output."""

Arrays = dict[str, torch.Tensor]
Inputs = tuple[torch.Tensor, ...]


def check_runs(model: torch.nn.Module, call: Call) -> None:
    """Raise `TraceError` if the model itself fails on the user's example."""
    try:
        _run(model, _copies(dict(model.named_buffers())), call, train=False)
    except TraceError:
        raise
    except Exception as error:  # whatever forward() raises is reported
        raise TraceError(
            f"the model fails on the example input: {type(error).__name__}: {first_line(error)}"
        ) from error


def check_programs(
    plan: ModelPlan,
    train: TracedProgram,
    evaluate: TracedProgram,
    model: torch.nn.Module,
    call: Call,
) -> None:
    """Compare both programs with the module, whole and narrowed; raise `TraceError`."""
    found = _Trial(plan, train, evaluate, model, call)
    mismatch = found.mismatch()
    if mismatch is not None:
        # Rounding in float32 may be worse than the tolerance; in float64 only mistakes are left.
        mismatch = found.in_double().mismatch(mismatch)
    if mismatch is not None:
        raise TraceError(mismatch)


class _Trial:
    """A model with weights and inputs to compare it and its programs on."""

    def __init__(
        self,
        plan: ModelPlan,
        train: TracedProgram,
        evaluate: TracedProgram,
        model: torch.nn.Module,
        call: Call,
    ) -> None:
        self._plan = plan
        self._programs = {"evaluation": evaluate, "training": train}
        self._model = model
        self._double = False
        self._state, inputs = _trial(plan, model, call)
        self._call = call.given(inputs)

    def in_double(self) -> _Trial:
        """Return the trial with all numbers in float64."""
        double = copy(self)
        double._double = True
        double._call = self._call.given([_in_double(each) for each in self._call.tensors])
        return double

    def mismatch(self, otherwise: str = "") -> str | None:
        """Say how a program differs from the module, or `otherwise` if that cannot be seen."""
        plan, state = self._plan, self._state
        rng = np.random.default_rng(0)
        choices = [_scattered(plan, rng) for _ in range(2)]
        for mode, program in self._programs.items():
            full = self._forward(mode, state)
            drops = bool(program.at(_kept(plan, plan.all_groups()), BATCH).masks)
            if not drops:  # otherwise the module would draw its own masks
                try:
                    own = _unstacked(plan, self._copies(state))
                    wanted = _run(self._model, own, self._call, train=mode == "training")
                except Exception as error:
                    if self._double:  # it makes float32 tensors of its own
                        return otherwise
                    return f"the model fails in {mode} mode: {first_line(error)}"
                if found := _mismatch(f"the traced model in {mode} mode", full, wanted, wanted):
                    return found
            for choice in choices[: 2 if mode == "evaluation" else 1]:
                narrow, masked = _narrow_and_masked(plan, state, choice)
                _point(plan, masked, program.directions)
                got = self._forward(mode, narrow, choice)
                wanted = self._forward(mode, masked, present=choice)
                if found := _mismatch(f"a submodel in {mode} mode", got, wanted, full):
                    return found
        return None

    def _forward(
        self,
        mode: str,
        state: Arrays,
        choice: Groups | None = None,
        present: Groups | None = None,
    ) -> torch.Tensor:
        """Return a program's output with nothing dropped.

        Outside `present`, weights are zero, and blocks of chains are left out.
        """
        plan, inputs = self._plan, self._call.tensors
        kept = _kept(plan, choice or plan.all_groups())
        marks = None
        if present is not None:
            marks, state = _marks(plan, present), _with_blocks(plan, state, present)
        forward = self._programs[mode].at(kept, BATCH, present=marks)
        ones = [torch.ones(shape, device=inputs[0].device) for _, shape in forward.masks]
        copies = self._copies(state)
        if self._double:
            forward, ones = forward.in_double(), [each.double() for each in ones]
        try:
            with torch.no_grad():
                return forward(
                    [copies[tensor.name] for tensor in plan.tensors],
                    [copies[buffer.name] for buffer in plan.buffers],
                    [tensor.clone() for tensor in inputs],
                    [1.0] * len(plan.axes),
                    ones,
                )
        except Exception as error:  # whatever torch raises at sizes that tracing got wrong
            what = "the traced model" if choice is None else "a submodel"
            raise TraceError(
                f"{what} in {mode} mode fails at batch size {BATCH}: {first_line(error)}; tracing "
                "missed how forward() depends on its sizes"
            ) from error

    def _copies(self, state: Arrays) -> Arrays:
        copies = _copies(state)
        return {n: _in_double(each) for n, each in copies.items()} if self._double else copies


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype is torch.float32 else tensor


def _trial(plan: ModelPlan, model: torch.nn.Module, call: Call) -> tuple[Arrays, Inputs]:
    """Choose weights, buffers and inputs to try: as random as the model tolerates."""
    generator = torch.Generator().manual_seed(0)
    plain, rows = _state_of(plan, model), call.tiled(BATCH).tensors
    wild = {**plain, **_randomised(plan, plain, model, generator)}
    varied = tuple(_varied(tensor, generator) for tensor in rows)
    for state, inputs in ((wild, varied), (wild, rows), (plain, varied)):
        try:
            own = _unstacked(plan, _copies(state))
            output = _run(model, own, call.given(inputs), train=False)
        except Exception:  # noqa: S112  # such as ids out of range; the plain example must run
            continue
        if output.isfinite().all():
            return state, inputs
    try:
        _run(model, _unstacked(plan, _copies(plain)), call.given(rows), train=False)
    except Exception as error:
        raise TraceError(
            f"the batch size is fixed inside the model: forward() runs on the example of "
            f"{len(call.tensors[0])} rows but fails at {BATCH}: {first_line(error)}"
        ) from error
    return plain, rows


def _randomised(
    plan: ModelPlan, plain: Arrays, model: torch.nn.Module, generator: torch.Generator
) -> Arrays:
    """Draw values that are neither zero nor equal, at magnitudes normal for a network."""
    trained = {tensor.name for tensor in plan.tensors}
    constant = {
        buffer.name
        for buffer in plan.buffers
        if not buffer.statistic and all(dim.whole for dim in buffer.dims[bool(buffer.members) :])
    } - _parameters(plan, model)
    stacks = {tensor.name for tensor in plan.tensors if tensor.members}
    found: Arrays = {}
    for name, old in plain.items():
        if name in constant or not old.is_floating_point():
            continue
        noise = torch.empty(old.shape, dtype=old.dtype)
        if name not in trained:  # it may be a variance, so signs stay
            noise.uniform_(generator=generator)
            found[name] = old * (0.75 + noise.to(old.device) / 2) + noise.to(old.device) / 10
            continue
        noise = noise.normal_(generator=generator).to(old.device)
        one = old[0] if name in stacks else old
        fan_in = max(1, one[0].numel()) if one.ndim > 1 else 1
        found[name] = noise / fan_in**0.5 if one.ndim > 1 else old + noise / 10
    return found


def _parameters(plan: ModelPlan, model: torch.nn.Module) -> set[str]:
    """Names, in the plan, of the module's parameters; frozen ones are buffers of the plan."""
    own = dict(model.named_parameters())
    return {
        each.name
        for each in (*plan.tensors, *plan.buffers)
        if (each.members[0] if each.members else each.name) in own
    }


def _varied(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Make rows differ, even if the example has only one: equal rows have no variance."""
    if tensor.is_floating_point():
        noise = torch.empty(tensor.shape, dtype=tensor.dtype).normal_(generator=generator)
        spread = tensor.std() if tensor.numel() > 1 else torch.ones(())
        return tensor + noise.to(tensor.device) * (spread if spread > 0 else 1.0) / 2
    rows = tensor.reshape(len(tensor), -1)
    order = torch.rand(rows.shape, generator=generator).argsort(1).to(tensor.device)
    return rows.gather(1, order).reshape(tensor.shape)


def _scattered(plan: ModelPlan, rng: np.random.Generator) -> Groups:
    """Choose about half of each axis's groups at random."""
    return {
        axis.name: sorted(
            rng.choice(len(axis.groups), size=max(1, len(axis.groups) // 2), replace=False).tolist()
        )
        for axis in plan.axes
    }


def _narrow_and_masked(plan: ModelPlan, state: Arrays, choice: Groups) -> tuple[Arrays, Arrays]:
    weights = {tensor.name: state[tensor.name].cpu().numpy() for tensor in plan.tensors}
    buffers = {buffer.name: state[buffer.name].cpu().numpy() for buffer in plan.buffers}
    narrow = plan.cut(weights, choice)
    masked: dict[str, Array] = {name: np.zeros_like(array) for name, array in weights.items()}
    plan.paste(masked, narrow, choice)
    cut = {**narrow, **plan.cut_buffers(buffers, choice)}
    return _like(state, cut), {**state, **_like(state, masked)}


def _with_blocks(plan: ModelPlan, state: Arrays, present: Groups) -> Arrays:
    """Return the arrays with only the rows of blocks that are present."""
    found = dict(state)
    for tensor in (*plan.tensors, *plan.buffers):
        if tensor.members and (number := tensor.dims[0].axis) is not None:
            found[tensor.name] = state[tensor.name][list(present[plan.axes[number].name])]
    return found


def _point(plan: ModelPlan, masked: Arrays, directions: Mapping[str, int]) -> None:
    """Give units without weights some direction; their norm, another weight, is zero."""
    stacks = {each.members[0]: each.name for each in plan.tensors if each.members}
    rows = {name for each in plan.tensors for name in each.members}
    for name, dim in directions.items():
        if name in rows and name not in stacks:
            continue
        units = masked[stacks.get(name, name)].movedim(dim + (name in stacks), 0)
        units[(units == 0).flatten(1).all(1)] = 1


def _like(state: Arrays, arrays: Mapping[str, Array]) -> Arrays:
    return {name: torch.tensor(each).to(state[name].device) for name, each in arrays.items()}


def _kept(plan: ModelPlan, choice: Groups) -> tuple[int, ...]:
    return plan.kept_atoms(plan.choose(choice))


def _marks(plan: ModelPlan, choice: Groups) -> tuple[tuple[bool, ...], ...]:
    """Return for each atom of each axis whether the choice has its group."""
    return tuple(
        tuple(
            group in choice[axis.name]
            for group, size in enumerate(axis.groups)
            for _ in range(size)
        )
        for axis in plan.axes
    )


def _mismatch(what: str, got: torch.Tensor, wanted: torch.Tensor, full: torch.Tensor) -> str | None:
    """Say that `got` is too far from `wanted`; `full` is the whole model's output.

    Where narrowing hardly moves the output (a deep residual model), an error is small too, so the
    tolerance shrinks with it, down to what rounding allows.
    """
    if got.shape != wanted.shape:
        error = float("nan")
    else:
        largest = max(1e-6, _largest(wanted))
        stake = _largest(full - wanted) / largest if full is not wanted else 1.0
        error = _largest(got - wanted) / largest
        if error <= min(TOLERANCE, max(TOLERANCE / 10, stake * TOLERANCE * 10)):
            return None
    return (
        f"{what} does not compute the same as the model at batch size {BATCH} "
        f"(relative error {error:.1e}): tracing missed something forward() does"
    )


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _run(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], call: Call, *, train: bool
) -> torch.Tensor:
    """Run the model itself with these weights and buffers, and leave it unchanged."""
    with torch.no_grad(), _mode(model, train=train), calling(model, call):
        own = call.given([tensor.clone() for tensor in call.tensors])
        # We tie the names: given two names of one module, torch would not restore the first.
        output: torch.Tensor = torch.func.functional_call(
            model, _by_owner(model, state), own.arguments, own.keywords, tie_weights=False
        )
        return output


def _by_owner(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Arrays:
    """Return the same tensors under one name for each module that owns them."""
    arrays = named_arrays(model)
    new = {id(arrays[name]): tensor for name, tensor in state.items()}
    return {
        f"{path}.{name}" if path else name: new[id(old)]
        for path, module in model.named_modules()
        for name, old in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
        if id(old) in new
    }


@contextmanager
def _mode(model: torch.nn.Module, *, train: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.train(train)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _state_of(plan: ModelPlan, model: torch.nn.Module) -> Arrays:
    arrays = {name: array.detach() for name, array in named_arrays(model).items()}
    return {
        each.name: torch.stack([arrays[name] for name in each.members])
        if each.members
        else arrays[each.name]
        for each in (*plan.tensors, *plan.buffers)
    }


def _unstacked(plan: ModelPlan, state: Arrays) -> Arrays:
    """Return the arrays by the names of the module."""
    found = dict(state)
    for each in (*plan.tensors, *plan.buffers):
        if each.members:
            found |= dict(zip(each.members, found.pop(each.name), strict=True))
    return found


def _copies(state: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.detach().clone() for name, tensor in state.items()}
