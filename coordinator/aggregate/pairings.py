"""Rules that go with a mask policy and an encoding; other pairings are refused with the reason."""

from __future__ import annotations

from coordinator.aggregate.rules import ASYNC_RULES, RULES, FedRaa, Rule
from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy
from coordinator.masks.policies.disjoint import DisjointMasks
from coordinator.masks.policies.gre_raa import GreRaaMasks
from coordinator.masks.policies.random import RandomMasks
from edge_sdk.protocol.encoding.encoding import Encoding


def check_pairing(rule: Rule | FedRaa, masks: MaskPolicy, encoding: Encoding) -> None:
    """Raise `ConfigError`, with the reason, if these make no sense together."""
    problem = _asynchronous(rule, masks) if isinstance(rule, FedRaa) else _synchronous(rule, masks)
    if problem is None and encoding.kind == "top-k":
        problem = _sparse(rule)
    if problem is not None:
        raise ConfigError(problem)


def fitting_masks(rule: Rule | FedRaa) -> str:
    """Return the name of the mask policy that serves a rule best."""
    if isinstance(rule, FedRaa):
        return "gre-raa" if rule.fragments else "random"
    return "random" if rule.whole_models else "coverage"


def rule_name(rule: Rule | FedRaa) -> str:
    """Return the name a rule is registered under."""
    kinds: dict[str, type] = {**RULES, **ASYNC_RULES}
    return next(name for name, kind in kinds.items() if type(rule) is kind)


def _synchronous(rule: Rule, masks: MaskPolicy) -> str | None:
    name = rule_name(rule)
    if isinstance(masks, GreRaaMasks):
        return (
            f"gre-raa deals out fragments one arrival at a time; {name} closes rounds: "
            "use it with fed-raa, or another mask policy"
        )
    if rule.whole_models and not isinstance(masks, RandomMasks):
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


def _asynchronous(rule: FedRaa, masks: MaskPolicy) -> str | None:
    name = rule_name(rule)
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
