"""Rules that go with masks, an encoding and local rules; others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.aggregate.rules import ASYNC_RULES, RULES, FedRaa, Rule
from coordinator.errors import ConfigError
from coordinator.masks import MASKS, MaskPolicy, OrderedMasks
from coordinator.masks.policies.disjoint import DisjointMasks
from coordinator.masks.policies.gre_raa import GreRaaMasks
from coordinator.masks.policies.random import RandomMasks
from edge_sdk.decide.budget import OFTEN, outlived_share
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule, Widths
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.graphs import Manifest

GROWTH = 0.5
"""Share of the rounds in which a model grows: as good at equal rounds, with less energy."""


def check_pairing(
    rule: Rule | FedRaa,
    masks: MaskPolicy,
    encoding: Encoding,
    widths: Widths = "own",
    plan: ModelPlan | None = None,
) -> None:
    """Raise `ConfigError`, with the reason, if these make no sense together.

    `plan` None leaves out what depends on the groups of the model.
    """
    problem = None if widths == "own" else _several(rule, masks, widths, plan)
    if problem is None and isinstance(rule, FedRaa):
        problem = _asynchronous(rule, masks, plan)
    elif problem is None and isinstance(rule, Rule):
        problem = _synchronous(rule, masks, widths)
    if problem is None and encoding.kind == "top-k":
        problem = _sparse(rule)
    if problem is not None:
        raise ConfigError(problem)


def check_growth(rule: Rule, masks: MaskPolicy, plan: ModelPlan) -> None:
    """Raise `ConfigError`, with the reason, if the model cannot grow from level to level."""
    if problem := _ungrown(rule, masks, plan):
        raise ConfigError(f"grow {problem}: set grow = 0")


def fitting_growth(rule: Rule, masks: MaskPolicy, widths: Widths, plan: ModelPlan) -> float:
    """Return the share of the rounds in which the model had best grow (docs/levels.md)."""
    return 0.0 if widths == "own" or _ungrown(rule, masks, plan) else GROWTH


def _ungrown(rule: Rule, masks: MaskPolicy, plan: ModelPlan) -> str | None:
    if rule.whole_models:
        return f"begins with narrow submodels, and {rule_name(rule)} takes whole models only"
    if rule.warmup_rounds:
        return "begins with narrow submodels, and a warm-up with the whole model"
    if not isinstance(masks, OrderedMasks) or not masks.nests(plan):
        return "needs levels that lie within one another, as with nested masks"
    return None


def check_local_rule(local_rule: LocalRule, manifest: Manifest) -> None:
    """Raise `ConfigError` if devices are to take outputs for scores of classes that are none, or
    have no graphs for it.
    """
    graphs = manifest.graphs
    if local_rule.distillation:
        made = any(entry.kind == "distillation" for entry in graphs)
        _check_scores("distillation", "0", manifest, made=made)
    if local_rule.classes != "all":
        made = any("classes" in entry.input_names for entry in graphs)
        _check_scores("classes", '"all"', manifest, made=made)


def _check_scores(setting: str, plain: str, manifest: Manifest, *, made: bool) -> None:
    if manifest.loss != "cross-entropy":
        raise ConfigError(
            f"{setting} takes a model's outputs as scores of classes, but the task's loss is "
            f"{manifest.loss}: set {setting} = {plain}, or train with cross-entropy"
        )
    if not made:
        raise ConfigError(
            f"this run was made without graphs for {setting}: set {setting} = {plain}, or start a "
            "new run in another folder"
        )


def fitting_widths(rule: Rule | FedRaa, masks: str | None, *, alternatives: bool = False) -> Widths:
    """Return the submodels that a step had best train (docs/levels.md).

    `masks` None: they are still to be chosen. `alternatives`: levels have norms of their own.
    """
    if isinstance(rule, FedRaa) or rule.whole_models or alternatives:
        return "own"
    return "ordered-dropout" if masks in (None, "nested", "core") else "own"


def fitting_rescale(widths: Widths) -> float:
    """Return the rescale that goes with these widths: none where narrow ones are trained too."""
    return LocalRule(learning_rate=1).rescale if widths == "own" else 0.0


def fitting_masks(rule: Rule | FedRaa, widths: Widths = "own") -> str:
    """Return the name of the mask policy that serves a rule best."""
    if isinstance(rule, FedRaa):
        return "gre-raa" if rule.fragments else "random"
    if widths != "own":
        return "nested"
    return "random" if rule.whole_models else "coverage"


def level_advice(
    rule: Rule | FedRaa,
    masks: MaskPolicy,
    widths: Widths,
    plan: ModelPlan,
    *,
    has_data: bool,
    survey_every: int | None = None,
) -> list[str]:
    """Say, in sentences, what becomes of the levels of a run, and where that is known to fail.

    `has_data`: the coordinator has data to compute BatchNorm statistics from (docs/levels.md).
    `survey_every`: rounds between surveys, in which devices do it; None: they cannot.
    """
    norm = any(buffer.statistic for buffer in plan.buffers)
    none = (
        "warning: BatchNorm statistics are computed here from data, and there is none "
        "(task.evaluation): levels below 100 % have no statistics, and the whole model only those "
        "of devices that train all of it"
    )
    if survey_every is not None:
        often = f"every {survey_every} rounds and " if survey_every else ""
        often = "" if isinstance(rule, FedRaa) else often
        none = (
            "devices compute the BatchNorm statistics of every level, from data of their own, "
            f"{often}at the end: there is no data for it here (task.evaluation)"
        )
    if isinstance(rule, FedRaa) or rule.whole_models:
        silent = has_data or (_whole(rule) and survey_every is None)
        return [none] if norm and not silent else []
    said = []
    if widths != "own":
        said.append(
            f"every level becomes a model: {widths} trains the narrower ones on each device"
        )
    elif plan.has_alternatives:
        said.append("every level has norms of its own, which devices of that level train")
    elif isinstance(masks, OrderedMasks):
        said.append("devices train their own width only, which spoils the widths of others")
    else:
        said.append(
            'only the whole model is for use; widths = "ordered-dropout" makes every level a model'
        )
    if norm:
        if widths == "own" and not plan.has_alternatives:
            said.append(
                "warning: a model with BatchNorm learns badly if devices of different levels train "
                'their own width only: set widths = "ordered-dropout" or "sandwich"'
            )
        if not has_data:
            said.append(none)
    return said


def horizon_advice(
    rule: Rule | FedRaa, shares: Iterable[tuple[float, bool]], asked: float = 1.0
) -> str | None:
    """Warn if skipping devices often have no movement that is young enough; None: they have.

    `shares`: for each device, its share `p` of rounds, and True if they are evenly spread. `asked`:
    share of the devices that take part in a round.
    """
    if isinstance(rule, FedRaa) or rule.counts_within is None:
        return None
    within = rule.counts_within
    lost = [
        (outlived_share(p * asked, within, even=even and asked >= 1), p)
        for p, even in shares
        if p < 1
    ]
    most, rarest = max(lost, default=(0.0, 1.0))
    if most < OFTEN:
        return None
    return (
        f"warning: horizon = {within} drops about {most:.0%} of the old movements of a device that "
        f"trains in {rarest * asked:.1%} of rounds: set a horizon of several times "
        f'{1 / (rarest * asked):.0f}, or "none"'
    )


def _whole(rule: Rule | FedRaa) -> bool:
    """True if every device trains the whole model."""
    return not rule.fragments if isinstance(rule, FedRaa) else rule.whole_models


def rule_name(rule: Rule | FedRaa) -> str:
    """Return the name a rule is registered under."""
    kinds: dict[str, type] = {**RULES, **ASYNC_RULES}
    return next(name for name, kind in kinds.items() if type(rule) is kind)


def _several(
    rule: Rule | FedRaa, masks: MaskPolicy, widths: Widths, plan: ModelPlan | None
) -> str | None:
    if isinstance(rule, FedRaa):
        return (
            f"{widths} trains narrower submodels within the assigned one, and {rule_name(rule)} "
            "deals out fragments that have none: leave widths at own, or use a synchronous rule"
        )
    if not isinstance(masks, OrderedMasks):
        name = next(name for name, kind in MASKS.items() if type(masks) is kind)
        return (
            f"{widths} needs levels that lie within one another, and {name} masks have no order: "
            "use nested or core masks, or leave widths at own"
        )
    if plan is not None and plan.has_alternatives:
        return (
            f"{widths} needs levels that lie within one another, and every level of this model has "
            "norms of its own (decouple_norms): leave widths at own, or do not decouple them"
        )
    if plan is not None and not masks.nests(plan):
        return (
            f"{widths} needs levels that lie within one another; with groups that do not ascend in "
            "size, static ones do not: use nested or core masks, or leave widths at own"
        )
    return None


def _synchronous(rule: Rule, masks: MaskPolicy, widths: Widths) -> str | None:
    name = rule_name(rule)
    if isinstance(masks, GreRaaMasks):
        return (
            f"gre-raa deals out fragments one arrival at a time; {name} closes rounds: "
            "use it with fed-raa, or another mask policy"
        )
    if rule.whole_models and widths == "own" and not isinstance(masks, RandomMasks):
        return (
            f"{name} takes whole models only, so there is nothing for a mask policy to choose: "
            "leave it at random, or use ra-fed or ram-fed"
        )
    if rule.warmup_rounds and isinstance(masks, DisjointMasks):
        return (
            f"{name} warms up with everybody training everything; disjoint never gives two devices "
            "the same groups: set warmup_rounds = 0, or use another mask policy"
        )
    return None


def _asynchronous(rule: FedRaa, masks: MaskPolicy, plan: ModelPlan | None) -> str | None:
    name = rule_name(rule)
    if rule.fragments and plan is not None and plan.has_alternatives:
        return (
            f"{name} deals out fragments, which have no level, and every level of this model has "
            "norms of its own (decouple_norms): do not decouple them, or use a synchronous rule"
        )
    if rule.fragments and not isinstance(masks, GreRaaMasks):
        return f"{name} trains one fragment at a time, which only gre-raa deals out"
    if not rule.fragments and not isinstance(masks, RandomMasks):
        return (
            f"{name} trains the whole model, so there is nothing to choose: leave masks at random"
        )
    return None


def _sparse(rule: Rule | FedRaa) -> str | None:
    if isinstance(rule, Rule) and (rule.remembers != "nothing" or rule.replay_within):
        return (
            f"top-k is refused with {rule_name(rule)}: what memory would hold of it is not the "
            "movement; use fp16 or int8, or a rule without memory"
        )
    return None
