"""The tables of docs/attacks.md, from the record of finished runs."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.attack.attackers import ABSENT, ATTACKS, NO_ATTACK
from benchmarks.studies.attack.defences import DEFENCES, NO_DEFENCE, RECOMMENDED
from benchmarks.studies.attack.settings import DEVICES
from benchmarks.studies.attack.study import AIMED, AttackStudy, Place
from benchmarks.studies.attack.trial import AttackOutcome
from benchmarks.studies.attack.watching import FEW

BEGIN = "<!-- tessera-bench attack -->"

Number = float | None


def render_tables(study: AttackStudy) -> str:
    """Return Markdown: aims, accuracies, refusals, backdoors, sparse blocks, costs, gaps."""
    parts = [
        ("Aims", _aims(study)),
        *((f"Accuracy: {_where(place)}", _accuracies(study, place)) for place in study.places),
        ("Refused movements", _refusals(study)),
        ("Backdoors", _backdoors(study)),
        (f"Blocks that at most {FEW} devices hold", _sparse(study)),
        ("The price without attackers", _price(study)),
        ("Run, and not run", _gaps(study)),
    ]
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in parts if text)


def _aims(study: AttackStudy) -> str:
    """Show the aims of the recommended defence."""
    rows = []
    for place in study.places:
        lost = [
            study.lost(place, attack, RECOMMENDED, base)
            for attack in AIMED
            for base in (NO_ATTACK, ABSENT)
        ]
        refused = study.refused(RECOMMENDED, ATTACKS, place)
        share = 100 * refused.honest_refused / refused.honest if refused.honest else None
        if any(each is not None for each in lost):
            rows.append([_where(place), *map(_points, lost), _percent(share)])
    heads = [
        f"`{name}`, points below {base} (aim ≤ 3)"
        for name in AIMED
        for base in ("all honest", "attackers away")
    ]
    return _table([f"`{RECOMMENDED}`", *heads, "honest movements refused (aim < 1 %)"], rows)


def _accuracies(study: AttackStudy, place: Place) -> str:
    """Show the whole model's accuracy of each defence under each attack, in percent."""
    attacks = [
        name for name in ATTACKS if any(study.of(place, name, defence) for defence in DEFENCES)
    ]
    rows = []
    for defence in DEFENCES:
        cells = [study.accuracy(place, attack, defence) for attack in attacks]
        if any(cell is not None for cell in cells):
            rows.append([_marked(defence), *map(_one, cells)])
    return _table(["defence", *attacks], rows)


def _refusals(study: AttackStudy) -> str:
    """Show the share of movements that were refused, of honest devices and of hostile ones."""
    rows = []
    for defence in study.present(lambda case: case.defence, DEFENCES):
        clean = study.refused(defence, [NO_ATTACK])
        others = study.refused(defence, [name for name in ATTACKS if name != NO_ATTACK])
        pairs = (
            (clean.honest_refused, clean.honest),
            (others.honest_refused, others.honest),
            (others.hostile_refused, others.hostile),
        )
        shares = [100 * part / whole if whole else None for part, whole in pairs]
        both = clean.honest_quarantined + others.honest_quarantined
        total = f"{clean.honest + others.honest:,}"
        counts = [total, str(both), str(others.hostile_quarantined)]
        rows.append([_marked(defence), *map(_percent, shares), *counts])
    heads = ["honest, no attackers", "honest, beside attackers", "of attackers"]
    more = ["honest movements in all", "honest devices quarantined", "attackers quarantined"]
    return _table(["defence", *heads, *more], rows)


def _backdoors(study: AttackStudy) -> str:
    """Show how often the trigger works."""
    attacks = [name for name in ATTACKS if name.startswith("backdoor")]
    places = [
        place
        for place in study.places
        if any(study.of(place, name, each) for name in attacks for each in DEFENCES)
    ]

    def success(outcome: AttackOutcome) -> Number:
        return None if outcome.backdoor is None else 100 * outcome.backdoor

    rows = []
    for attack in attacks:
        for defence in DEFENCES:
            cells = [study.read(place, attack, defence, success) for place in places]
            if any(cell is not None for cell in cells):
                rows.append([attack, _marked(defence), *map(_one, cells)])
    if not rows:
        return ""
    clean = [study.read(place, NO_ATTACK, NO_DEFENCE, success) for place in places]
    rows.insert(0, ["no attack", NO_DEFENCE, *map(_one, clean)])
    return _table(["trigger works, %", "defence", *map(_where, places)], rows)


def _sparse(study: AttackStudy) -> str:
    """Show the agreement of steps with honest devices, where few hold a block and elsewhere."""
    rows = []
    for place in study.places:
        if place[2] == DEVICES:
            continue
        for attack in AIMED:
            for defence in DEFENCES:
                few, many, share = (
                    study.read(place, attack, defence, what)
                    for what in (_few, _many, lambda each: 100 * each.few_share)
                )
                if share is not None:
                    cells = [_percent(share), _cosine(few), _cosine(many)]
                    rows.append([_where(place), attack, _marked(defence), *cells])
    heads = ["run", "attack", "defence", f"parameters with Γ ≤ {FEW}"]
    return _table([*heads, f"agreement, Γ ≤ {FEW}", "agreement, others"], rows, texts=3)


def _few(outcome: AttackOutcome) -> Number:
    return outcome.few


def _many(outcome: AttackOutcome) -> Number:
    return outcome.many


def _price(study: AttackStudy) -> str:
    """Show what a defence costs a fleet that is honest: points, and processor time."""
    rows = []
    for defence in study.present(lambda case: case.defence, DEFENCES):
        lost = [study.lost(place, NO_ATTACK, defence) for place in study.places]
        times = [study.read(place, NO_ATTACK, defence, _round_ms) for place in study.places]
        if any(each is not None for each in lost):
            cells = [f"{_points(a)}, {_one(b)}" for a, b in zip(lost, times, strict=True)]
            rows.append([_marked(defence), *cells])
    return _table(["points lost, ms a round", *map(_where, study.places)], rows)


def _round_ms(outcome: AttackOutcome) -> Number:
    return 1e3 * outcome.round_s


def _gaps(study: AttackStudy) -> str:
    """Show how many runs there are, so that it shows what was not run."""
    rows = []
    for place in study.places:
        cases = [case for case in study.outcomes if (case.setting, case.rule, case.drawn) == place]
        seeds = {case.seed for case in cases}
        rows.append([_where(place), str(len(cases)), str(len(seeds))])
    lines = [_table(["run", "runs", "most seeds"], rows)]
    for what, known, of in (
        ("attacks", ATTACKS, lambda case: case.attack),
        ("defences", DEFENCES, lambda case: case.defence),
    ):
        run = study.present(of, known)
        if never := [name for name in known if name not in run]:
            lines.append(f"Never run, {what}: {', '.join(never)}.")
    return "\n\n".join(lines)


def _where(place: Place) -> str:
    setting, rule, drawn = place
    return f"{setting}, {rule}, {'all' if drawn == DEVICES else drawn} a round"


def _marked(defence: str) -> str:
    return f"**{defence}**" if defence == RECOMMENDED else defence


def _points(value: Number) -> str:
    return "–" if value is None else f"{value:.1f}".replace("-", "−")


def _one(value: Number) -> str:
    return "–" if value is None else f"{value:.1f}"


def _percent(value: Number) -> str:
    return "–" if value is None else f"{value:.2f} %"


def _cosine(value: Number) -> str:
    return "–" if value is None else f"{value:.2f}".replace("-", "−")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    if not rows:
        return ""
    rule = ["---" if number < texts else "--:" for number in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))
