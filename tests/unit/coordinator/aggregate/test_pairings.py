"""Which rule goes with which mask policy and encoding: a complete table."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.pairings import (
    check_fragments,
    check_local_rule,
    check_pairing,
    fitting_masks,
    fragment_advice,
    level_advice,
    rule_name,
)
from coordinator.aggregate.robust import Robust
from coordinator.aggregate.rules import ASYNC_RULES, RULES, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import MASKS, make_masks
from coordinator.rounds.synchronous import RoundsConfig
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule, Widths
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, Tensor
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.graphs import GraphEntry, Manifest, Port, SizeTerm

WHOLE = {"fedavg", "fedvarp"}
REMEMBERING = {"ram-fed", "fedvarp", "ccfl-1", "ccfl-2", "ccfl-3", "strategy-2"}


def sound(rule: str, mask: str) -> bool:
    if rule == "fed-raa":
        return mask == "gre-raa"
    return mask == "random" or rule not in {*WHOLE, "fedasync", "fedbuff"}


@pytest.mark.parametrize(("rule", "mask"), list(product([*RULES, *ASYNC_RULES], MASKS)))
def test_pairing_is_taken_if_and_only_if_it_is_sound(rule: str, mask: str) -> None:
    pair = make_rule(rule), make_masks(mask)
    if sound(rule, mask):
        check_pairing(*pair, Encoding())
    else:
        with pytest.raises(ConfigError, match=rule):
            check_pairing(*pair, Encoding())


@pytest.mark.parametrize("widths", ["ordered-dropout", "sandwich"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rule", [*RULES, *ASYNC_RULES])
def test_several_widths_need_masks_with_an_order_and_a_synchronous_rule(
    rule: str, mask: str, widths: Widths
) -> None:
    pair = make_rule(rule), make_masks(mask)
    if rule in RULES and rule != "scaffold" and mask in {"nested", "core", "static"}:
        check_pairing(*pair, Encoding(), widths)
    else:
        with pytest.raises(ConfigError, match=widths):
            check_pairing(*pair, Encoding(), widths)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "scaffold"])
def test_masks_chosen_for_several_widths_go_with_the_rule(rule: str) -> None:
    made = make_rule(rule)
    check_pairing(made, make_masks(fitting_masks(made, "sandwich")), Encoding(), "sandwich")
    check_pairing(made, make_masks(fitting_masks(made)), Encoding())


MANIFEST = Manifest(
    plan_hash="0" * 64,
    opset=18,
    ir_version=9,
    min_onnxruntime="1.23.0",
    loss="cross-entropy",
    tolerance=0.0,
    data=DataSpec((ArraySpec("float32", (4,)),), ArraySpec("int64", highest=2)),
    graphs=(),
)


def test_distillation_needs_scores_of_classes() -> None:
    distilling = LocalRule(learning_rate=0.1, widths="sandwich", distillation=0.5)
    without = MANIFEST
    graph = GraphEntry(
        kind="distillation",
        sha256="1" * 64,
        size_bytes=1,
        kept=None,
        batch=None,
        inputs=(),
        outputs=(Port("outputs", "float32"),),
    )
    check_local_rule(distilling, replace(without, graphs=(graph,)))
    check_local_rule(LocalRule(learning_rate=0.1, widths="sandwich"), replace(without, loss="mse"))
    with pytest.raises(ConfigError, match="the task's loss is mse"):
        check_local_rule(distilling, replace(without, loss="mse"))
    with pytest.raises(ConfigError, match="without graphs for distillation"):
        check_local_rule(distilling, without)


def test_own_classes_need_scores_and_graphs_that_take_them() -> None:
    own = LocalRule(learning_rate=0.1, classes="own")
    graph = GraphEntry(
        kind="gradient",
        sha256="1" * 64,
        size_bytes=1,
        kept=None,
        batch=None,
        inputs=(Port("classes", "float32", (SizeTerm(3),)),),
        outputs=(Port("loss", "float32"),),
    )
    with_masks = replace(MANIFEST, graphs=(graph,))
    check_local_rule(own, with_masks)
    check_local_rule(replace(own, classes="all"), replace(MANIFEST, loss="mse"))
    with pytest.raises(ConfigError, match=r"classes takes a model's outputs as scores .* is mse"):
        check_local_rule(own, replace(with_masks, loss="mse"))
    with pytest.raises(ConfigError, match="without graphs for classes"):
        check_local_rule(own, replace(MANIFEST, graphs=(replace(graph, inputs=()),)))


@pytest.mark.parametrize("rule", [*RULES, *ASYNC_RULES])
def test_top_k_is_refused_with_rules_that_remember(rule: str) -> None:
    masks = make_masks("gre-raa" if rule == "fed-raa" else "random")
    if rule in {*REMEMBERING, "scaffold"}:
        with pytest.raises(ConfigError, match="top-k"):
            check_pairing(make_rule(rule), masks, Encoding.parse("top-k"))
    else:
        check_pairing(make_rule(rule), masks, Encoding.parse("top-k"))


@pytest.mark.parametrize(
    ("local", "more", "reason"),
    [
        ({"momentum": 0.5}, {}, "momentum = 0.5: a movement would not be a sum of gradients"),
        ({"proximal": 0.1}, {}, "proximal = 0.1: scaffold's variates would hold the pull"),
        ({}, {"server_optimizer": ServerOptimizer(name="adam")}, "server optimiser 'adam'"),
        ({}, {"robust": Robust(name="median")}, "robust = 'median'"),
        ({}, {"rule": {"weighting": "samples"}}, "weighting = 'samples': scaffold's variates"),
    ],
)
def test_scaffold_is_refused_with_what_variates_cannot_be_read_from(
    local: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    options = {**more}
    with pytest.raises(ConfigError, match=re.escape(reason)):
        RoundsConfig(
            plan=ModelPlan((Axis("a", (1, 1)),), (Tensor("w", "float32", (Dim(2, 0),)),)),
            rule=make_rule("scaffold", **options.pop("rule", {})),  # type: ignore[arg-type]
            masks=make_masks("random"),
            local_rule=LocalRule(learning_rate=0.1, **local),
            rounds=1,
            steps=1,
            batch_size=1,
            min_devices=1,
            seed=0,
            **options,
        )


@pytest.mark.parametrize("masks", ["disjoint", "gre-raa"])
def test_masks_that_never_give_everything_are_refused_with_a_warm_up(masks: str) -> None:
    with pytest.raises(ConfigError, match="warmup_rounds"):
        check_pairing(make_rule("ram-fed", warmup_rounds=1), make_masks(masks), Encoding())


def test_fedbuff_takes_fragments_if_it_is_told_to() -> None:
    check_pairing(make_rule("fedbuff", fragments=True), make_masks("gre-raa"), Encoding())
    with pytest.raises(ConfigError, match="set fragments = true"):
        check_pairing(make_rule("fedbuff"), make_masks("gre-raa"), Encoding())
    with pytest.raises(ConfigError, match="which only gre-raa deals out"):
        check_pairing(make_rule("fedbuff", fragments=True), make_masks("random"), Encoding())
    assert fitting_masks(make_rule("fedbuff")) == "random"
    assert fitting_masks(make_rule("fedbuff", fragments=True)) == "gre-raa"


@pytest.mark.parametrize("rule", ["fed-raa", "ra-fed"])
def test_fragments_are_refused_where_every_level_has_norms_of_its_own(rule: str) -> None:
    with pytest.raises(ConfigError, match="decouple_norms"):
        check_pairing(make_rule(rule), make_masks("gre-raa"), Encoding(), plan=COPIES)


def test_start_says_how_much_of_the_model_nobody_trains() -> None:
    pair = ModelPlan(
        (Axis("a", (1, 1)), Axis("b", (2, 2))), (Tensor("w", "float32", (Dim(2, 0), Dim(4, 1))),)
    )
    said = fragment_advice(make_masks("gre-raa", fragments="tied"), pair)
    assert said is not None
    assert "50.0% of the parameters lie between tied fragments" in said
    for masks in (make_masks("gre-raa"), make_masks("gre-raa", fragments="rotating")):
        assert fragment_advice(masks, pair) is None
    assert fragment_advice(make_masks("random"), pair) is None


def test_fragments_without_a_graph_are_refused() -> None:
    pair = ModelPlan(
        (Axis("a", (1, 1)), Axis("b", (2, 2))), (Tensor("w", "float32", (Dim(2, 0), Dim(4, 1))),)
    )
    graph = GraphEntry(
        kind="gradient",
        sha256="1" * 64,
        size_bytes=1,
        kept=(1, 2),
        batch=None,
        inputs=(),
        outputs=(Port("loss", "float32"),),
    )
    level = replace(MANIFEST, graphs=(graph,))
    check_fragments(make_masks("gre-raa", fragments="tied"), level, pair, [1.0, 0.5], 4)
    check_fragments(make_masks("random"), MANIFEST, pair, [1.0, 0.5], 4)
    check_fragments(make_masks("gre-raa"), level, pair, [0.5], 4)
    with pytest.raises(ConfigError, match='set fragments = "tied"'):
        check_fragments(make_masks("gre-raa"), level, pair, [1.0, 0.5], 4)


@pytest.mark.parametrize("name", [*RULES, *ASYNC_RULES])
def test_rule_knows_its_name_and_says_what_it_does(name: str) -> None:
    rule = make_rule(name)
    assert rule_name(rule) == name
    first = (type(rule).__doc__ or "").partition("\n")[0]
    assert first.endswith(".")
    assert not first.startswith(type(rule).__name__ + "(")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ram-fed", {"damping": 0}, "damping"),
        ("ram-fed", {"damping": 1.1}, "damping"),
        ("ram-fed", {"damping": True}, "damping = True: must be adaptive, or a number"),
        ("ram-fed", {"correction": "population"}, "give damping as a number"),
        ("ram-fed", {"correction": "none"}, "correction"),
        ("ram-fed", {"population": "some"}, "population"),
        ("ram-fed", {"warmup_rounds": -1}, "warmup_rounds"),
        ("ra-fed", {"server_rate": 0}, "server_rate"),
        ("ra-fed", {"weighting": "loss"}, "weighting"),
        ("ccfl-2", {"horizon": 0}, "horizon"),
        ("fed-raa", {"alpha": 0}, "alpha"),
        ("fed-raa", {"staleness": "linear"}, "staleness"),
        ("fed-raa", {"a": -1}, "a must"),
        ("fedbuff", {"size": 0}, "size is a number of movements, at least 1"),
        ("fedbuff", {"server_rate": 0}, "server_rate"),
        ("fedbuff", {"alpha": 0.5}, "alpha is not a known key"),
        ("ra-fed", {"horizon": 3}, "horizon is not a known key"),
        ("ram-fed", {"damping": "abc"}, "damping = 'abc': must be adaptive, or a"),
        ("ram-fed", {"warmup_rounds": 1.5}, "warmup_rounds = 1.5: must be a whole number"),
        ("ccfl-2", {"horizon": True}, "horizon = True: must be a whole number"),
        ("ra-fed", {"weighting": 3}, "weighting = 3: must be one of"),
    ],
)
def test_option_that_makes_no_sense_is_refused(
    name: str, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_rule(name, **options)


def test_mask_option_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="tied = 'maybe': must be true or false"):
        make_masks("random", tied="maybe")


PLAN = ModelPlan(axes=(Axis("hidden", (2, 2)),), tensors=(Tensor("w", "float32", (Dim(4, 0),)),))
BATCH_NORM = replace(
    PLAN, buffers=(Buffer("norm.running_mean", "float32", (Dim(4, 0),), statistic=True),)
)


COPIES = replace(
    BATCH_NORM,
    axes=(*PLAN.axes, Axis("copies", (1, 1), alternatives=True)),
    tensors=(*PLAN.tensors, Tensor("scale", "float32", (Dim(2, 1), Dim(4, 0)))),
)


@pytest.mark.parametrize(
    ("masks", "widths", "plan", "has_data", "words"),
    [
        ("coverage", "own", "plain", True, ["only the whole model"]),
        ("nested", "own", "plain", True, ["own width only"]),
        ("nested", "sandwich", "plain", False, ["every level becomes a model"]),
        ("nested", "sandwich", "norm", True, ["every level becomes a model"]),
        ("nested", "sandwich", "norm", False, ["every level", "(task.evaluation)"]),
        ("coverage", "own", "norm", True, ["only the whole model", "learns badly"]),
        ("nested", "own", "copies", True, ["norms of its own"]),
    ],
)
def test_start_says_what_becomes_of_levels_and_what_is_known_to_fail(
    masks: str, widths: Widths, plan: str, has_data: bool, words: list[str]
) -> None:
    said = level_advice(
        make_rule("ram-fed"),
        make_masks(masks),
        widths,
        {"plain": PLAN, "norm": BATCH_NORM, "copies": COPIES}[plan],
        has_data=has_data,
    )
    assert len(said) == len(words)
    for sentence, part in zip(said, words, strict=True):
        assert part in sentence


@pytest.mark.parametrize(
    ("rule", "every", "words"),
    [
        ("ram-fed", 10, "every 10 rounds and at the end"),
        ("ram-fed", 0, "of their own, at the end"),
        ("fedavg", 10, "every 10 rounds and at the end"),
        ("fed-raa", 10, "of their own, at the end"),
    ],
)
def test_start_says_that_devices_compute_statistics(rule: str, every: int, words: str) -> None:
    made = make_rule(rule)
    masks = make_masks(fitting_masks(made))
    said = level_advice(made, masks, "own", BATCH_NORM, has_data=False, survey_every=every)
    assert words in said[-1]
    assert "warning" not in said[-1]
    told = level_advice(made, masks, "own", BATCH_NORM, has_data=True, survey_every=every)
    assert not any(words in each for each in told)


def test_whole_models_have_no_levels_to_advise_on() -> None:
    for rule in ("fedavg", "fed-raa"):
        said = level_advice(make_rule(rule), make_masks("random"), "own", PLAN, has_data=False)
        assert said == []
