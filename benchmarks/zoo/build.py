"""Build a model of the zoo with random weights, and a batch for it. Nothing is ever fetched."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.report.options import UsageError
from benchmarks.zoo.names import CLASSES, CURE, NEEDS, TOKENS, ZooModel
from benchmarks.zoo.own import OWN, VOCABULARY
from coordinator.task.tracing.capture.calls import ExampleInput

WIDTH, LAYERS, HEADS = 64, 2, 4
"""Sizes of the models that are built from transformers' configurations."""


def missing_package(model: ZooModel) -> str | None:
    """Return the package that a model needs and that is not installed."""
    package = NEEDS[model.source]
    return package if package and find_spec(package) is None else None


def build(model: ZooModel, rows: int = 2) -> tuple[nn.Module, ExampleInput]:
    """Return the model, with weights from a fixed seed, and an example of so many rows.

    Raises `UsageError` when its package is not installed.
    """
    if package := missing_package(model):
        raise UsageError(f"{model.key} needs {package}: {CURE}")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the packages: no weights, no questions
    if model.source != "own":
        _load_torchvision()
    torch.manual_seed(0)
    makers: dict[str, Callable[[ZooModel], nn.Module]] = {
        "own": lambda wanted: OWN[wanted.name](),
        "torchvision": _torchvision,
        "timm": _timm,
        "transformers": _transformers,
    }
    made = makers[model.source](model)
    return made, _example(model, rows)


def _example(model: ZooModel, rows: int) -> ExampleInput:
    words = model.source == "transformers" or model.source == "own"
    if words and model.name in ("bert", "distilbert", "gpt2", "llama", "masked-text"):
        ids = torch.randint(3, VOCABULARY, (rows, TOKENS))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.name == "generator":
        return torch.randint(3, VOCABULARY, (rows, TOKENS))
    return torch.randn(rows, 3, model.side, model.side)


def _torchvision(model: ZooModel) -> nn.Module:
    models = import_module("torchvision.models")
    made: nn.Module = models.get_model(
        model.name, weights=None, num_classes=CLASSES, **model.arguments
    )
    return made


_libraries: list[Any] = []


def _load_torchvision() -> None:
    """Load torchvision, which timm and transformers load too, if it is there.

    PyPI's build is for CUDA. Beside a CPU torch its operators are missing, and so it does not load
    until two of them are declared.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        library: Any = torch.library
        declared = library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(declared)  # a library takes its operators along when it ends
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        import_module("torchvision")


def _timm(model: ZooModel) -> nn.Module:
    made: nn.Module = import_module("timm").create_model(
        model.name, pretrained=False, num_classes=CLASSES, **model.arguments
    )
    return made


def _transformers(model: ZooModel) -> Any:
    t: Any = import_module("transformers")
    sizes: dict[str, Any] = {
        "num_labels": CLASSES,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 2 * WIDTH,
    }
    text = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    if model.name == "bert":
        return t.BertForSequenceClassification(t.BertConfig(**sizes, **text))
    if model.name == "distilbert":
        own = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 2 * WIDTH}
        config = t.DistilBertConfig(num_labels=CLASSES, **own, **text)
        return t.DistilBertForSequenceClassification(config)
    if model.name == "gpt2":
        own = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * TOKENS}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        return t.GPT2LMHeadModel(t.GPT2Config(num_labels=CLASSES, **own, **text, **ends))
    if model.name == "vit":
        return t.ViTForImageClassification(t.ViTConfig(image_size=model.side, **sizes))
    own = {"num_key_value_heads": HEADS // 2, "max_position_embeddings": 2 * TOKENS}
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **own, **text))
