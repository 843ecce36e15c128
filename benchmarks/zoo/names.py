"""The models of the zoo: where each comes from, and the size of its input.

The lists were written down before anything was measured. Inputs are small because a graph's size
depends on a model's depth, not on its pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.report.options import UsageError

Source = Literal["own", "torchvision", "timm", "transformers"]

CLASSES = 7
"""Classes of every model, a number that no hidden width of the stock models has."""

TOKENS = 16
"""Length of every sequence."""

NEEDS: dict[Source, str] = {
    "own": "",
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
}
"""The package each source needs."""

CURE = "pip install 'tessera-fl[zoo]'"


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model: its builder's name, the side of its square pictures, and further arguments."""

    name: str
    source: Source
    side: int = 64
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name that no other model has: `timm/resnet10t`."""
        return f"{self.source}/{self.name}"


_TORCHVISION = [
    ZooModel("alexnet", "torchvision"),
    ZooModel("convnext_tiny", "torchvision"),
    ZooModel("densenet121", "torchvision"),
    ZooModel("efficientnet_b0", "torchvision"),
    ZooModel("googlenet", "torchvision", arguments={"init_weights": False}),
    ZooModel("inception_v3", "torchvision", 80, {"init_weights": False, "aux_logits": False}),
    ZooModel("maxvit_t", "torchvision", 224),
    ZooModel("mnasnet0_5", "torchvision"),
    ZooModel("mobilenet_v2", "torchvision"),
    ZooModel("mobilenet_v3_small", "torchvision"),
    ZooModel("regnet_y_400mf", "torchvision"),
    ZooModel("resnet18", "torchvision"),
    ZooModel("shufflenet_v2_x0_5", "torchvision"),
    ZooModel("squeezenet1_1", "torchvision"),
    ZooModel("swin_t", "torchvision"),
    ZooModel("vgg11", "torchvision"),
    ZooModel("vit_b_32", "torchvision", arguments={"image_size": 64}),
]
"""The smallest builder of each of torchvision's 17 families of classifiers. Inception trains
without its auxiliary head, which needs pictures of 299."""

_TIMM = [
    *(
        ZooModel(name, "timm")
        for name in (
            *("resnet10t", "resnetv2_18", "legacy_seresnet18", "skresnet18", "resnest14d"),
            *("resnext26ts", "res2net50_14w_8s", "regnetx_002", "regnety_002", "densenet121"),
            *("vgg11_bn", "dla46_c", "dpn48b", "hrnet_w18_small", "selecsls42"),
            *("ese_vovnet19b_slim", "hgnetv2_b0", "cs3darknet_s", "nf_regnet_b0", "repvgg_a0"),
            *("hardcorenas_a", "mobilenetv2_035", "mobilenetv3_small_050", "lcnet_035"),
            *("mobilenetv4_conv_small_035", "tinynet_e", "mnasnet_small", "fbnetc_100"),
            *("efficientnet_b0", "efficientnet_lite0", "tf_efficientnetv2_b0", "ghostnet_050"),
            *("repghostnet_050", "rexnetr_100", "mobileone_s0", "repvit_m0_9", "starnet_s050"),
            *("fasternet_t0", "shvit_s1", "convnext_atto", "convnextv2_atto"),
            *("inception_next_atto", "mambaout_femto", "edgenext_xx_small", "mobilevit_xxs"),
            *("mobilevitv2_050", "efficientvit_b0", "poolformer_s12", "pvt_v2_b0", "fastvit_t8"),
        )
    ),
    *(
        ZooModel(name, "timm", arguments={"img_size": 64})
        for name in (
            *("vit_tiny_patch16_224", "deit_tiny_patch16_224", "cait_xxs24_224", "pit_ti_224"),
            *("mixer_s32_224", "gmlp_ti16_224", "resmlp_12_224", "twins_svt_small"),
        )
    ),
    ZooModel("levit_128s", "timm", 224),
    ZooModel("swin_tiny_patch4_window7_224", "timm", arguments={"img_size": 64, "window_size": 2}),
]
"""Sixty of timm's families, the small ones of each."""

_TRANSFORMERS = [
    ZooModel(name, "transformers") for name in ("bert", "distilbert", "gpt2", "vit", "llama")
]
"""From configurations, with random weights: two layers of 64, but in the stock classes."""

_OWN = [
    ZooModel(name, "own", 16)
    for name in ("mobile", "shuffled", "dense", "patches", "masked-text", "generator")
]
"""Six small models in the manner of stock ones, which need no further package (`own.py`)."""

ZOO: dict[str, ZooModel] = {
    model.key: model for model in (*_OWN, *_TORCHVISION, *_TIMM, *_TRANSFORMERS)
}
STOCK = tuple(key for key, model in ZOO.items() if model.source != "own")
QUICK = tuple(key for key, model in ZOO.items() if model.source == "own")


def find_models(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of models named by key, by name or by source. Raises `UsageError`."""
    found: dict[str, None] = {}
    for text in wanted:
        keys = [key for key, model in ZOO.items() if text in (key, model.name, model.source)]
        if not keys:
            raise UsageError(
                f"no model of the zoo is called {text!r}; give own, torchvision, timm, "
                f"transformers, or names such as {STOCK[0]}"
            )
        found |= dict.fromkeys(keys)
    return tuple(found)
