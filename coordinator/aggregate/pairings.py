"""Rules that go with masks, an encoding and local rules; others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.robust import Robust
from coordinator.aggregate.rules import ASYNC_RULES, RULES, AsyncRule, Rule, Scaffold
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy, OrderedMasks, masks_name
from coordinator.masks.groups.fragments import fragments_within
from coordinator.masks.policies.disjoint import DisjointMasks
from coordinator.masks.policies.gre_raa import GreRaaMasks
from coordinator.masks.policies.random import RandomMasks
from edge_sdk.decide.budget import OFTEN, outlived_share
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.messages.local_rule import LocalRule, Widths
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.graphs import Manifest

GROWTH = 0.5
"""Share of the rounds in which a model grows: as good at equal rounds, with less energy."""


def check_pairing(
    rule: Rule | AsyncRule,
    masks: MaskPolicy,
    encoding: Encoding,
    widths: Widths = "own",
    plan: ModelPlan | None = None,
) -> None:
    """Raise `ConfigError`, with the reason, if these make no sense together.

    `plan` None leaves out what depends on the groups of the model.
    """
    problem = None if widths == "own" else _several(rule, masks, widths, plan)
    if problem is None and isinstance(rule, AsyncRule):
        problem = _asynchronous(rule, masks, plan)
    elif problem is None and isinstance(rule, Rule):
        problem = _synchronous(rule, masks, widths, plan)
    if problem is None and encoding.kind == "top-k":
        problem = _sparse(rule)
    if problem is not None:
        raise ConfigError(problem)


def check_variates(
    rule: Scaffold, local_rule: LocalRule, optimizer: ServerOptimizer, robust: Robust
) -> None:
    """Raise `ConfigError`, with the reason, if control variates do not go with these.

    A variate is a mean gradient that the coordinator reads from a movement.
    """
    for used, reason in (
        (
            rule.weighting != "uniform",
            f"weighting = {rule.weighting!r}: scaffold's variates are plain means over devices; "
            "leave it at uniform",
        ),
        (
            local_rule.momentum,
            f"momentum = {local_rule.momentum}: a movement would not be a sum of gradients, from "
            "which scaffold's variates follow; set momentum = 0",
        ),
        (
            local_rule.proximal,
            f"proximal = {local_rule.proximal}: scaffold's variates would hold the pull towards "
            "the start of the round; set proximal = 0, or use fedavg",
        ),
        (
            optimizer.name != "none",
            f"server optimiser {optimizer.name!r}: scaffold's own vectors are kept in place of its "
            "moments; set it to none",
        ),
        (
            robust.active,
            f"robust = {robust.name!r}: devices change their variates by what they sent, so the "
            "coordinator must not change it; set robust = none, or use another rule than scaffold",
        ),
    ):
        if used:
            raise ConfigError(reason)


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


def check_fragments(
    masks: MaskPolicy, manifest: Manifest, plan: ModelPlan, levels: Sequence[float], batch: int
) -> None:
    """Raise `ConfigError` for a fragment that devices are to train and that has no graph.

    Graphs are made for every size where operators allow it, and else for levels alone.
    """
    if not isinstance(masks, GreRaaMasks):
        return
    found = (
        groups
        for level in levels
        for groups in fragments_within(plan, masks.fragments, level, stream(0, "graphs")).values()
    )
    try:
        for groups in found:
            manifest.pick("gradient", plan.kept_atoms(plan.choose(groups)), batch)
    except GraphError as error:
        raise ConfigError(
            f"this run has no graph for {masks.fragments} fragments, because an operator of its "
            'model allows some sizes alone: set fragments = "tied" among the options of gre-raa, '
            f"or use another rule ({error})"
        ) from error


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


def fitting_widths(
    rule: Rule | AsyncRule, masks: str | None, *, alternatives: bool = False
) -> Widths:
    """Return the submodels that a step had best train (docs/levels.md).

    `masks` None: they are still to be chosen. `alternatives`: levels have norms of their own.
    """
    if isinstance(rule, AsyncRule | Scaffold) or rule.whole_models or alternatives:
        return "own"
    return "ordered-dropout" if masks in (None, "nested", "core") else "own"


def fitting_rescale(widths: Widths) -> float:
    """Return the rescale that goes with these widths: none where narrow ones are trained too."""
    return LocalRule(learning_rate=1).rescale if widths == "own" else 0.0


def fitting_masks(rule: Rule | AsyncRule, widths: Widths = "own") -> str:
    """Return the name of the mask policy that serves a rule best."""
    if isinstance(rule, AsyncRule):
        return "random" if rule.whole_models else "gre-raa"
    if widths != "own":
        return "nested"
    return "random" if rule.whole_models else "coverage"


def level_advice(
    rule: Rule | AsyncRule,
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
        often = "" if isinstance(rule, AsyncRule) else often
        none = (
            "devices compute the BatchNorm statistics of every level, from data of their own, "
            f"{often}at the end: there is no data for it here (task.evaluation)"
        )
    if isinstance(rule, AsyncRule) or rule.whole_models:
        silent = has_data or (rule.whole_models and survey_every is None)
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
    elif isinstance(rule, Scaffold):
        said.append("only the whole model is for use")
    else:
        said.append(
            'only the whole model is for use; widths = "ordered-dropout" makes every level a model'
        )
    if norm:
        if widths == "own" and not plan.has_alternatives and not isinstance(rule, Scaffold):
            said.append(
                "warning: a model with BatchNorm learns badly if devices of different levels train "
                'their own width only: set widths = "ordered-dropout" or "sandwich"'
            )
        if not has_data:
            said.append(none)
    return said


def horizon_advice(
    rule: Rule | AsyncRule, shares: Iterable[tuple[float, bool]], asked: float = 1.0
) -> str | None:
    """Warn if skipping devices often have no movement that is young enough; None: they have.

    `shares`: for each device, its share `p` of rounds, and True if they are evenly spread. `asked`:
    share of the devices that take part in a round.
    """
    if isinstance(rule, AsyncRule) or rule.counts_within is None:
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


def fragment_advice(masks: MaskPolicy, plan: ModelPlan) -> str | None:
    """Say in a sentence if fragments leave out a part of the model for ever; None: they do not."""
    if not isinstance(masks, GreRaaMasks) or not (share := masks.untrained_share(plan)):
        return None
    return (
        f"{share:.1%} of the parameters lie between {masks.fragments} fragments, and no "
        'device will ever train them; fragments = "alternate" leaves out none'
    )


def rule_name(rule: Rule | AsyncRule) -> str:
    """Return the name a rule is registered under."""
    kinds: dict[str, type] = {**RULES, **ASYNC_RULES}
    return next(name for name, kind in kinds.items() if type(rule) is kind)


def _several(
    rule: Rule | AsyncRule, masks: MaskPolicy, widths: Widths, plan: ModelPlan | None
) -> str | None:
    if isinstance(rule, Scaffold):
        return (
            f"{widths} trains other parts of the submodel in every step, and scaffold's variates "
            "are mean gradients over all steps: leave widths at own, or use another rule"
        )
    if isinstance(rule, AsyncRule):
        return (
            f"{widths} trains narrower submodels within the assigned one, and {rule_name(rule)} "
            "deals out fragments that have none: leave widths at own, or use a synchronous rule"
        )
    if not isinstance(masks, OrderedMasks):
        return (
            f"{widths} needs levels that lie within one another, and {masks_name(masks)} masks "
            "have no order: use nested or core masks, or leave widths at own"
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


def _synchronous(
    rule: Rule, masks: MaskPolicy, widths: Widths, plan: ModelPlan | None
) -> str | None:
    name = rule_name(rule)
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
    if rule.warmup_rounds and isinstance(masks, GreRaaMasks):
        return (
            f"{name} warms up with everybody training everything; gre-raa gives every device one "
            "fragment: set warmup_rounds = 0, or use another mask policy"
        )
    return _unfit_fragments(plan) if isinstance(masks, GreRaaMasks) else None


def _asynchronous(rule: AsyncRule, masks: MaskPolicy, plan: ModelPlan | None) -> str | None:
    name = rule_name(rule)
    if not rule.whole_models and not isinstance(masks, GreRaaMasks):
        return f"{name} trains one fragment at a time, which only gre-raa deals out"
    if isinstance(rule, FedBuff) and rule.whole_models and isinstance(masks, GreRaaMasks):
        return (
            f"{name} trains the whole model unless it is told otherwise, and gre-raa deals out "
            "fragments: set fragments = true among the rule's options, or leave masks at random"
        )
    if rule.whole_models and not isinstance(masks, RandomMasks):
        return (
            f"{name} trains the whole model, so there is nothing to choose: leave masks at random"
        )
    return None if rule.whole_models else _unfit_fragments(plan)


def _unfit_fragments(plan: ModelPlan | None) -> str | None:
    if plan is not None and plan.has_alternatives:
        return (
            "fragments have no level, and every level of this model has norms of its own "
            "(decouple_norms): do not decouple them, or use another mask policy"
        )
    return None


def _sparse(rule: Rule | AsyncRule) -> str | None:
    if isinstance(rule, Rule) and (rule.remembers != "nothing" or rule.replay_within):
        return (
            f"top-k is refused with {rule_name(rule)}: what memory would hold of it is not the "
            "movement; use fp16 or int8, or a rule without memory"
        )
    if isinstance(rule, Scaffold):
        return (
            "top-k is refused with scaffold: values that it holds back would be missing from the "
            "variates; use fp16 or int8"
        )
    return None
