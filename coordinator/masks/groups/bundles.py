"""Axes that share one choice of groups, and what a level allows on them.

Every policy chooses groups bundle by bundle. By default each axis is its own bundle. When tied, all
widths form one bundle and get the same groups, so every width needs the same number of groups. One
with too few atoms for that many groups (`K_axis = min(K, atoms)`) stays its own bundle, chosen by
the same policy, and so does an axis of depth: its groups are blocks, which have no counterpart. An
axis of alternatives is in no bundle: its group follows from the level.

A choice never exceeds the offer, on any axis of the bundle:

- groups as equal as the atoms allow: `axis.wanted(level)` groups, at least one;
- groups of different sizes: their atoms together stay within the level; the smallest group if no
  group does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis


@dataclass(frozen=True, slots=True)
class Bundle:
    """One choice of groups, for one axis or for several with the same number of groups."""

    numbers: tuple[int, ...]
    """Numbers of its axes in the plan."""
    axes: tuple[Axis, ...]
    even: Axis | None
    """One of its axes with equal groups, if any; all such axes allow equally many at a level."""
    uneven: tuple[Axis, ...]
    """Its axes with groups of different sizes."""
    smallest: int
    """The group for a device whose level is too small for any; no axis has a smaller one."""

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.axes[0].groups)

    def take(self, level: float, order: Iterable[int]) -> tuple[int, ...]:
        """Take each group, in this order, that still fits within the level; at least one.

        The result is ascending.
        """
        return self.fill(level, order) or (self.smallest,)

    def fill(self, level: float, order: Iterable[int], held: Sequence[int] = ()) -> tuple[int, ...]:
        """Add to `held`, in this order, each further group that fits; may be empty."""
        most = self.most(level)
        rooms = [
            (axis.groups, level * axis.atoms + 1e-9 - sum(axis.groups[g] for g in held))
            for axis in self.uneven
        ]
        taken = list(held)
        for group in order:
            if len(taken) == most:
                break
            if all(groups[group] <= room for groups, room in rooms):
                taken.append(group)
                rooms = [(groups, room - groups[group]) for groups, room in rooms]
        return tuple(sorted(taken))

    def prefix(self, level: float, order: Sequence[int]) -> tuple[int, ...]:
        """Take the longest beginning of the order that fits within the level; at least one group.

        A smaller level takes part of what a larger one takes, unlike in `take`, where a group that
        does not fit makes room for later ones. Within the level if the order begins with
        `smallest`, or if no axis is uneven. The result is ascending.
        """
        fitting = min(self.most(level), len(order))
        for axis in self.uneven:
            room, number = level * axis.atoms + 1e-9, 0
            while number < fitting and axis.groups[order[number]] <= room:
                room -= axis.groups[order[number]]
                number += 1
            fitting = number
        return tuple(sorted(order[: max(1, fitting)]))

    def most(self, level: float) -> int:
        """Upper bound on the groups that fit within the level."""
        return self.count if self.even is None else self.even.wanted(level)

    def surely(self, level: float) -> int:
        """Largest k such that any k groups fit within the level; 0 if some group alone does not."""
        fewest = self.most(level)
        for axis in self.uneven:
            room, fitting = level * axis.atoms + 1e-9, 0
            for atoms in sorted(axis.groups, reverse=True):
                room -= atoms
                if room < 0:
                    break
                fitting += 1
            fewest = min(fewest, fitting)
        return fewest


def bundles_of(plan: ModelPlan, tied: bool) -> tuple[Bundle, ...]:
    """Return the bundles of a plan, in axis order.

    Raises `ConfigError` if `tied` is asked for and the axes cannot be tied.
    """
    free = [number for number, axis in enumerate(plan.axes) if not axis.alternatives]
    alone = [_bundle(plan, (number,)) for number in free]
    widths = [bundle for bundle in alone if not bundle.axes[0].depth]
    if not tied or not widths:
        return tuple(alone)
    count = max(bundle.count for bundle in widths)
    together = tuple(bundle.numbers[0] for bundle in widths if bundle.count == count)
    for number in free:
        axis = plan.axes[number]
        if number not in together and axis.atoms > len(axis.groups) and not axis.depth:
            raise ConfigError(
                f"tied masks need the same number of groups on every axis: axis {axis.name!r} has "
                f"{len(axis.groups)}, axis {plan.axes[together[0]].name!r} has {count}; cut all "
                "axes into the same number of groups or leave masks untied"
            )
    rest = [bundle for bundle in alone if bundle.numbers[0] not in together]
    return tuple(sorted([_bundle(plan, together), *rest], key=lambda bundle: bundle.numbers))


def choose_each(
    plan: ModelPlan,
    bundles: Sequence[Bundle],
    levels: Mapping[str, float],
    choose: Callable[[str, float, int, Bundle], tuple[int, ...]],
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Ask `choose(device, level, bundle's number, bundle)` for every device and bundle in turn."""
    return {
        device: spread(
            plan,
            bundles,
            [choose(device, level, number, bundle) for number, bundle in enumerate(bundles)],
            level,
        )
        for device, level in levels.items()
    }


def spread(
    plan: ModelPlan, bundles: Sequence[Bundle], chosen: Sequence[tuple[int, ...]], level: float
) -> dict[str, tuple[int, ...]]:
    """Turn a choice for each bundle into groups for each axis, in axis order.

    Of alternatives, every submodel has the one of its level.
    """
    by_number = {
        number: groups
        for bundle, groups in zip(bundles, chosen, strict=True)
        for number in bundle.numbers
    }
    return {
        axis.name: (axis.alternative(level),) if axis.alternatives else by_number[number]
        for number, axis in enumerate(plan.axes)
    }


def holds_all(bundles: Sequence[Bundle], level: float) -> bool:
    """True if a device at this level gets every group of these bundles."""
    return all(bundle.surely(level) == bundle.count for bundle in bundles)


def _bundle(plan: ModelPlan, numbers: tuple[int, ...]) -> Bundle:
    axes = tuple(plan.axes[number] for number in numbers)
    even = next((axis for axis in axes if axis.equal), None)
    uneven = tuple(axis for axis in axes if not axis.equal)
    common = set(range(len(axes[0].groups)))
    for axis in uneven:
        common &= {g for g, atoms in enumerate(axis.groups) if atoms == min(axis.groups)}
    if not common:
        raise ConfigError(
            "tied masks need one group that is the smallest on every axis, for devices that can "
            f"train no more; axes {', '.join(repr(axis.name) for axis in uneven)} have none: cut "
            "them by the same ratios or leave masks untied"
        )
    smallest = min(common, key=lambda g: (sum(axis.groups[g] for axis in axes), g))
    return Bundle(numbers, axes, even, uneven, smallest)
