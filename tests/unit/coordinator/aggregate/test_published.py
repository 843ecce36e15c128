"""Published systems by name: combinations that are sound, and that the guide lists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.aggregate.pairings import check_pairing, rule_name
from coordinator.aggregate.published import PUBLISHED
from coordinator.errors import ConfigError
from coordinator.masks import MASKS
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

GUIDE = Path(__file__).resolve().parents[4] / "docs/algorithms.md"


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_is_a_sound_combination(name: str) -> None:
    recipe = PUBLISHED[name]
    rule, masks, local = recipe.make(learning_rate=0.5, momentum=0.25, rescale=0.125)
    check_pairing(rule, masks, Encoding(), local.widths)
    assert (rule_name(rule), type(masks)) == (recipe.rule, MASKS[recipe.masks])
    assert (local.learning_rate, local.momentum) == (0.5, 0.25)
    assert local.rescale == recipe.local["rescale"]
    assert all(getattr(local, each) == value for each, value in recipe.tuned.items())


def test_numbers_to_tune_are_free() -> None:
    assert PUBLISHED["fedprox"].make(learning_rate=0.5, proximal=0.25)[2].proximal == 0.25
    assert PUBLISHED["fedsam"].make(learning_rate=0.5)[2].sam_radius == 0.1


def test_recipe_for_decoupled_norms_refuses_shared_ones() -> None:
    width = Axis("width", (1, 1))
    shared = ModelPlan(axes=(width,), tensors=(Tensor("scale", "float32", (Dim(2, 0),)),))
    copied = replace(shared, axes=(replace(width, alternatives=True),))
    PUBLISHED["nefl"].check_model(copied)
    PUBLISHED["fjord"].check_model(shared)
    with pytest.raises(ConfigError, match="decouple_norms"):
        PUBLISHED["nefl"].check_model(shared)


def test_guide_says_of_every_recipe_what_it_is_made_of() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", GUIDE.read_text(), re.MULTILINE))
    for name, recipe in PUBLISHED.items():
        if name == "fjord-distilled":
            assert rows[name] == "the same with `sandwich` and distillation 1"
            continue
        assert f"`{recipe.rule}`" in rows[name]
        assert f"`{recipe.masks}`" in rows[name]
        assert f"rescale {recipe.local['rescale']:g}" in rows[name]
        own = recipe.local.get("classes", "all") == "own"
        assert ("classes `own`" in rows[name]) == own
        for each, value in recipe.tuned.items():
            assert f"`{each}` {value:g} to start from" in rows[name]
        assert recipe.local.get("widths", "own") in (*re.findall(r"`([\w-]+)`", rows[name]), "own")
