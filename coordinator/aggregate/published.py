"""Published systems by name, as combinations of a rule, a mask policy and a local rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.aggregate.rules import AsyncRule, Rule, make_rule
from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy, make_masks
from edge_sdk.program.settings import Given, nearest
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published system: the settings that make it, and where they come from."""

    rule: str = "ra-fed"
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    masks: str
    mask_options: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any]
    """Fields of `LocalRule` that belong to the system; the others are free."""
    tuned: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `LocalRule` that the system is known for and that are chosen for each task, with
    the values to start from."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of a run's table `[run]` that belong to the system."""
    source: str
    """Citation."""
    differs: str = ""
    """Parts of the system that are not here; empty if there are none."""
    decoupled: bool = False
    """The model's norms are decoupled (`decouple_norms`)."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that make the system, by their keys in a run's file.

        Those of `tuned` may be given otherwise.
        """
        plain = {"widths": "own", "distillation": 0.0, "classes": "all", "grow": 0.0}
        local = {**plain, **self.tuned, **self.local}
        return {
            "rule.name": self.rule,
            **{f"rule.options.{name}": value for name, value in self.rule_options.items()},
            "mask.name": self.masks,
            **{f"mask.options.{name}": value for name, value in self.mask_options.items()},
            **{f"run.{name}": value for name, value in {**local, **self.run}.items()},
        }

    def check_model(self, plan: ModelPlan) -> None:
        """Raise `ConfigError` if the system is made for another kind of model."""
        if self.decoupled and not plan.has_alternatives:
            raise ConfigError(
                "this recipe keeps norms of every level apart, and the model's norms are shared: "
                "make the task from decouple_norms(model, copies), copies being its groups"
            )

    def make(self, **local: Any) -> tuple[Rule | AsyncRule, MaskPolicy, LocalRule]:
        """Make the rule, the mask policy and the local rule; `local` gives its other fields.

        The settings in `run` are for the caller to pass on to the run.
        """
        return (
            make_rule(self.rule, **self.rule_options),
            make_masks(self.masks, **self.mask_options),
            LocalRule(**{**self.tuned, **local, **self.local}),
        )


_HETERO = (
    "rows of the output layer of classes that a device has no sample of do not move, but count in "
    "the mean, where the authors' code leaves them out; inputs are rescaled after normalisation, "
    "where that code does so before it, and BatchNorm takes it out again"
)
_FJORD = "Horváth et al., FjORD, NeurIPS 2021 (arXiv:2102.13451)"

_RAM_FED = (
    "Wang et al., Theoretical Convergence Guaranteed Resource-Adaptive Federated Learning with "
    "Mixed Heterogeneity, KDD 2023"
)
_REGIONS = "regions are groups of units, not of single parameters"

PUBLISHED: Mapping[str, Recipe] = {
    "fedprox": Recipe(
        rule="fedavg",
        rule_options={"weighting": "samples"},
        masks="random",
        local={"rescale": 0.0},
        tuned={"proximal": 0.01},
        source="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020 "
        "(arXiv:1812.06127); uniform sampling and means by samples, as in its experiments",
        differs="every device takes all steps: one that cannot skips, where the paper lets slow "
        "ones take fewer; proximal is its μ, for which it searches 0.001, 0.01, 0.1 and 1",
    ),
    "fedsam": Recipe(
        rule="fedavg",
        rule_options={"weighting": "samples"},
        masks="random",
        local={"rescale": 0.0},
        tuned={"sam_radius": 0.1},
        source="Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML "
        "2022 (arXiv:2206.02618), and Caldarola et al., Improving Generalization in Federated "
        "Learning by Seeking Flat Minima, ECCV 2022 (arXiv:2203.11834), whose code has a radius of "
        "0.1 for CIFAR-10",
        differs="no stochastic weight averaging (Caldarola et al.) and no momentum of the run's "
        "direction on devices (MoFedSAM)",
    ),
    "ra-fed-paper": Recipe(
        masks="random", local={"rescale": 0.0}, source=_RAM_FED, differs=_REGIONS
    ),
    "ram-fed-paper": Recipe(
        rule="ram-fed",
        rule_options={
            "damping": 1.0,
            "population": "all",
            "correction": "coverage",
            "warmup_rounds": 1,
        },
        masks="random",
        local={"rescale": 0.0},
        run={"max_staleness": 1000},
        source=f"{_RAM_FED}; every device trains everything in the first round, as in its code",
        differs=f"{_REGIONS}; no round leaves regions out on purpose (periodic masks do)",
    ),
    "ccfl-paper": Recipe(
        rule="ccfl-2",
        rule_options={"horizon": "none", "absent": "zero"},
        masks="random",
        local={"rescale": 0.0},
        source="Zhang et al., CCFL: Computationally Customized Federated Learning, as printed",
    ),
    "oap": Recipe(
        masks="coverage",
        local={"rescale": 0.0},
        source="Zhou et al., Every Parameter Matters, NeurIPS 2023",
    ),
    "prunefl": Recipe(
        masks="prunefl",
        local={"rescale": 0.0},
        source="Jiang et al., Model Pruning Enables Efficient Federated Learning on Edge Devices, "
        "IEEE Transactions on Neural Networks and Learning Systems 2022 (arXiv:1909.12326)",
        differs="whole groups are pruned, not single parameters, and keep their weights, which "
        "return with them; the squared gradient is that of a round's movement; costs are counted, "
        "not measured; no device prunes by magnitude before the first round",
    ),
    "ist": Recipe(
        masks="disjoint",
        mask_options={"tied": True},
        local={"rescale": 0.0},
        source="Yuan et al., Distributed Learning of Deep Neural Networks using Independent Subnet "
        "Training, VLDB 2022 (arXiv:1910.02120)",
    ),
    "heterofl": Recipe(
        masks="static",
        mask_options={"tied": True},
        local={"rescale": 1.0, "classes": "own"},
        source="Diao et al., HeteroFL, ICLR 2021 (arXiv:2010.01264)",
        differs=_HETERO,
    ),
    "fedrolex": Recipe(
        masks="rolling",
        mask_options={"tied": True, "shared": True},
        local={"rescale": 1.0, "classes": "own"},
        source="Alam et al., FedRolex, NeurIPS 2022 (arXiv:2212.01548); rescale and classes as in "
        "its code",
        differs=f"{_HETERO}; windows advance by a group, not by a unit",
    ),
    "fjord": Recipe(
        rule_options={"weighting": "samples"},
        masks="nested",
        mask_options={"tied": True},
        local={"rescale": 0.0, "widths": "ordered-dropout"},
        source=_FJORD,
    ),
    "fjord-distilled": Recipe(
        rule_options={"weighting": "samples"},
        masks="nested",
        mask_options={"tied": True},
        local={"rescale": 0.0, "widths": "sandwich", "distillation": 1.0},
        source=f"{_FJORD}, with self-distillation: the widest submodel learns from the labels and "
        "the drawn one from its outputs, on the same batch",
        differs="the drawn submodel is always a narrower one",
    ),
    "slimmable": Recipe(
        masks="nested",
        mask_options={"tied": True},
        local={"rescale": 0.0, "widths": "sandwich", "distillation": 1.0},
        source="Yu and Huang, Universally Slimmable Networks, ICCV 2019 (arXiv:1903.05134)",
        differs="a step trains one narrower submodel, not the narrowest and two drawn ones",
    ),
    "nefl": Recipe(
        masks="nested",
        mask_options={"tied": True},
        local={"rescale": 0.0},
        decoupled=True,
        source="Kang et al., NeFL, IEEE Transactions on Mobile Computing 2025 (arXiv:2308.07761)",
        differs="submodels differ in width alone, not in depth, and so there are no step sizes of "
        "residual blocks to learn",
    ),
    "fiarse": Recipe(
        masks="nested",
        mask_options={"order": "importance"},
        local={"rescale": 0.0},
        source="Wu et al., FIARSE, NeurIPS 2024 (arXiv:2407.19389)",
        differs="whole groups are ranked, once, by the model the run starts with",
    ),
}
"""Recipes by name."""


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name. Raises `ConfigError`."""
    if name not in PUBLISHED:
        raise ConfigError(f"there is no recipe {name!r}{nearest(name, PUBLISHED)}")
    return PUBLISHED[name]


def recipe_preset(
    given: Mapping[str, Given], key: str = "run.recipe", named: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the settings of the recipe that is given as `key`; none without one.

    `named` returns a program's name for a key of a run's file. Raises `ConfigError` if another
    value is given for one of the settings.
    """
    name = given[key].value if key in given else None
    if not isinstance(name, str):
        return {}  # there is none; or it is no name, which the reader complains about
    recipe = find_recipe(name)
    settings = {named(each): value for each, value in recipe.settings.items()}
    free = {named(f"run.{each}") for each in recipe.tuned}
    for own, value in settings.items():
        if own in free:
            continue
        for other, (said, where) in given.items():
            if (other == own and not _same(said, value)) or own.startswith(f"{other}."):
                raise ConfigError(
                    f"recipe {name} sets {own} = {value!r}, but {where} gives {said!r}: leave out "
                    "one of the two"
                )
    return settings


def _same(said: Any, value: Any) -> bool:
    """Tell if a value, perhaps spelt out in a variable or a flag, is this one."""
    if isinstance(said, str) and isinstance(value, int | float):
        return said.lower() in (str(value).lower(), f"{value:g}")
    return bool(said == value)
