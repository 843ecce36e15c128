"""Execution providers of onnxruntime, as backends of their own.

    onnx             the processor
    onnx-cuda …      a provider of this onnxruntime; what it cannot run runs on the processor

A provider that is installed may still refuse to work, for want of a driver or a library. Then
onnxruntime falls back to the processor without an error: such a case is left out, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable

PROVIDERS = {
    "onnx-cuda": "CUDAExecutionProvider",
    "onnx-tensorrt": "TensorrtExecutionProvider",
    "onnx-xnnpack": "XnnpackExecutionProvider",
    "onnx-nnapi": "NnapiExecutionProvider",
    "onnx-coreml": "CoreMLExecutionProvider",
}
"""Backends by name, and the provider each trains with."""


def provider_of(backend: str) -> str | None:
    """Return the execution provider of a backend; None: it needs none."""
    return PROVIDERS.get(backend)


def backends_with(available: Iterable[str]) -> tuple[str, ...]:
    """Return the backends for which these providers are enough."""
    there = set(available)
    return tuple(name for name, provider in PROVIDERS.items() if provider in there)


def accelerated() -> tuple[str, ...]:
    """Return the backends with a provider that this machine's onnxruntime has."""
    try:
        import onnxruntime
    except ImportError:
        return ()
    return backends_with(onnxruntime.get_available_providers())
