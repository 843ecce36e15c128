"""The runs of the study, and what they say.

A run is compared with two of the same place (setting, rule, devices a round) that have no
attackers and no defence, so the price of a defence counts as loss too: one in which all devices
are honest, and one in which the attackers stay away. The first has data that no defence can have;
the second is the best that refusing the attackers can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.report.figures import Figure
from benchmarks.studies.attack.attackers import ABSENT, ATTACKS, NO_ATTACK
from benchmarks.studies.attack.defences import NO_DEFENCE, RECOMMENDED
from benchmarks.studies.attack.settings import DEVICES
from benchmarks.studies.attack.trial import AttackOutcome, AttackTrial

RULES = ("ra-fed", "ram-fed")
AIMED = ("sign-flip", "scaling", "noise")
"""Attacks that the recommended defence should make harmless."""
WITHIN = 3.0
"""Points of accuracy that such an attack may cost."""
MOST_REFUSED = 1.0
"""Percent of honest movements that may be refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedAttacks:
    """The runs that are asked for."""

    settings: tuple[str, ...]
    rules: tuple[str, ...]
    drawn: tuple[int, ...]
    attacks: tuple[str, ...]
    defences: tuple[str, ...]
    seeds: int = 1

    def next_case(self, done: Mapping[AttackTrial, AttackOutcome]) -> AttackTrial | None:
        """Return a run that is not done yet; None: all are."""
        return next((case for case in self.cases() if case not in done), None)

    def cases(self) -> Iterator[AttackTrial]:
        """Yield the runs, in order: those without attackers first, further seeds last."""
        attacks = dict.fromkeys([NO_ATTACK, *self.attacks])
        weightings = dict.fromkeys(ATTACKS[name].weighting for name in attacks)
        pairs = [(NO_ATTACK, weighting) for weighting in weightings]
        pairs += [(name, ATTACKS[name].weighting) for name in attacks if name != NO_ATTACK]
        for seed in range(self.seeds):
            for setting in self.settings:
                for rule in self.rules:
                    for drawn in self.drawn:
                        for attack, weighting in pairs:
                            for defence in self._defences(attack):
                                yield AttackTrial(
                                    setting, rule, drawn, attack, defence, weighting, seed
                                )

    def _defences(self, attack: str) -> list[str]:
        """Return the defences against an attack: none, if nobody attacks because nobody came."""
        given = [] if attack == ABSENT else self.defences
        return list(dict.fromkeys([NO_DEFENCE, *given]))

    def count(self) -> int:
        """Number of runs in all."""
        return sum(1 for _ in self.cases())


Place = tuple[str, str, int]
"""A setting, a rule, and the devices drawn for every round."""


@dataclass(frozen=True, slots=True)
class AttackStudy:
    """Finished runs, and what is to be read from them: means over seeds, in percent."""

    outcomes: Mapping[AttackTrial, AttackOutcome]

    @property
    def places(self) -> list[Place]:
        """Every setting, rule and number of devices a round that has a run, in order."""
        return sorted(
            {(case.setting, case.rule, case.drawn) for case in self.outcomes},
            key=lambda place: (place[0], -place[2], place[1]),
        )

    def present(self, of: Callable[[AttackTrial], str], known: Iterable[str]) -> list[str]:
        """Return the names, of those known, that some run has."""
        run = {of(case) for case in self.outcomes}
        return [name for name in known if name in run]

    def of(self, place: Place, attack: str, defence: str) -> list[AttackOutcome]:
        """Return the runs of every seed."""
        weighting = ATTACKS[attack].weighting
        return [
            outcome
            for case, outcome in self.outcomes.items()
            if replace(case, seed=0) == AttackTrial(*place, attack, defence, weighting)
        ]

    def accuracy(self, place: Place, attack: str, defence: str) -> float | None:
        """Return the whole model's accuracy; None: not run."""
        return _mean(100 * each.accuracy.get("1", 0.0) for each in self.of(place, attack, defence))

    def lost(self, place: Place, attack: str, defence: str, base: str = NO_ATTACK) -> float | None:
        """Return the points below a run of another attack, undefended; None: not run.

        Of every seed that both have.
        """
        found = []
        for outcome in self.of(place, attack, defence):
            other = replace(outcome.case, attack=base, defence=NO_DEFENCE)
            if other in self.outcomes:
                clean = self.outcomes[other].accuracy.get("1", 0.0)
                found.append(100 * (clean - outcome.accuracy.get("1", 0.0)))
        return _mean(found)

    def refused(
        self, defence: str, attacks: Iterable[str], place: Place | None = None
    ) -> RefusedCounts:
        """Count the refused movements in the runs of some attacks."""
        wanted = set(attacks)
        found = [
            outcome
            for case, outcome in self.outcomes.items()
            if case.defence == defence
            and case.attack in wanted
            and place in (None, (case.setting, case.rule, case.drawn))
        ]
        return RefusedCounts(
            sum(each.honest_refused for each in found),
            sum(each.honest for each in found),
            sum(each.hostile_refused for each in found),
            sum(each.hostile for each in found),
            sum(each.honest_quarantined for each in found),
            sum(each.hostile_quarantined for each in found),
        )

    def read(
        self, place: Place, attack: str, defence: str, what: Callable[[AttackOutcome], float | None]
    ) -> float | None:
        """Return the mean of something over the seeds that have it."""
        found = (what(each) for each in self.of(place, attack, defence))
        return _mean(value for value in found if value is not None)

    def figures(self, defence: str = RECOMMENDED) -> list[Figure]:
        """Return the aims, for each rule and number of devices a round: the worst setting's."""
        found: list[Figure] = []
        for rule, drawn in sorted({(rule, drawn) for _, rule, drawn in self.places}):
            places = [place for place in self.places if place[1:] == (rule, drawn)]
            name = f"attack.{rule}.{'all' if drawn == DEVICES else drawn}"
            for attack in AIMED:
                for what, base in (("lost", NO_ATTACK), ("behind_absent", ABSENT)):
                    lost = [self.lost(place, attack, defence, base) for place in places]
                    found += _worst(f"{name}.{attack}.{what}", "points", lost, WITHIN)
            opened = [self.read(place, "backdoor", defence, _backdoor) for place in places]
            found += _worst(f"{name}.backdoor.success", "%", opened, None)
            cost = [self.lost(place, NO_ATTACK, defence) for place in places]
            found += _worst(f"{name}.cost", "points", cost, None)
        refused = self.refused(defence, ATTACKS)
        if refused.honest:
            share = 100 * refused.honest_refused / refused.honest
            found.append(Figure("attack.honest_refused", share, "%", target=MOST_REFUSED))
        return found


@dataclass(frozen=True, slots=True)
class RefusedCounts:
    """Movements that were refused, and that were sent, by honest devices and by hostile ones."""

    honest_refused: int
    honest: int
    hostile_refused: int
    hostile: int
    honest_quarantined: int
    """Devices that were quarantined in the end, over all runs."""
    hostile_quarantined: int


def _backdoor(outcome: AttackOutcome) -> float | None:
    return None if outcome.backdoor is None else 100 * outcome.backdoor


def _worst(
    name: str, unit: str, values: Sequence[float | None], target: float | None
) -> list[Figure]:
    known = [value for value in values if value is not None]
    return [Figure(name, max(known), unit, target=target)] if known else []


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return mean(known) if known else None
