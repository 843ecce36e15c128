"""Nodes of a Ray cluster: is this project there, in this version, and do they compute alike?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import edge_sdk
from coordinator.errors import CoordinatorError

INSTALL = "install tessera-fl[ray,onnx] {} on every node, for the Python that runs Ray there"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts on which the bits of a training depend."""

    host: str
    version: str
    """Version of this project; empty if it is not installed."""
    runtime: str
    """Version of onnxruntime; empty if it is not installed."""
    processor: str


def survey(ray: Any, timeout_s: float) -> list[NodeFacts]:
    """Ask every node for its facts. Raises `CoordinatorError` if no processor comes free."""
    asked = ray.remote(max_retries=0)(_facts())
    first = asked.options(num_cpus=1, max_retries=-1).remote()
    if not ray.wait([first], timeout=timeout_s)[0]:
        ray.cancel(first)
        total = ray.cluster_resources().get("CPU", 0)
        raise CoordinatorError(
            f"no processor of the Ray cluster came free in {timeout_s:g} s (it has {total:g}): end "
            "other work there, or add nodes"
        )
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = [
        asked.options(num_cpus=0, scheduling_strategy=at(node["NodeID"], soft=False)).remote()
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]
    answers = ray.wait([first, *nodes], num_returns=1 + len(nodes), timeout=timeout_s)[0]
    return [facts for answer in answers if (facts := _answered(ray, answer)) is not None]


def _answered(ray: Any, answer: Any) -> NodeFacts | None:
    try:
        return NodeFacts(*ray.get(answer))
    except ray.exceptions.RayError as error:
        # A node that is lost just now. One that comes later is checked by its first task.
        _log.debug("a node was not asked: %s", error)
        return None


def check_nodes(nodes: Sequence[NodeFacts]) -> None:
    """Raise `CoordinatorError` if a node has another version; warn of one that computes otherwise.

    Versions of this process are what counts.
    """
    own = edge_sdk.__version__
    for node in nodes:
        if node.version != own:
            has = f"has tessera-fl {node.version}" if node.version else "has no tessera-fl"
            raise CoordinatorError(f"the node {node.host} {has}: {INSTALL.format(own)}")
        if not node.runtime:
            raise CoordinatorError(
                f"the node {node.host} has no onnxruntime: {INSTALL.format(own)}"
            )
    for what, kinds in (
        ("processors", {node.processor for node in nodes}),
        ("versions of onnxruntime", {node.runtime for node in nodes}),
    ):
        if len(kinds) > 1:
            _log.warning(
                "The cluster's nodes have different %s (%s): the bits of the model may depend on "
                "where a device is trained.",
                what,
                ", ".join(sorted(kinds)),
            )


def _facts() -> Any:
    # A function of a function is sent whole, so that a node without this project can run it.
    def facts() -> tuple[str, str, str, str]:
        import importlib
        import platform
        from pathlib import Path

        def version(module: str) -> str:
            try:
                return str(importlib.import_module(module).__version__)
            except ImportError:
                return ""

        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else platform.processor() or platform.machine()
        return platform.node(), version("edge_sdk"), version("onnxruntime"), processor

    return facts
