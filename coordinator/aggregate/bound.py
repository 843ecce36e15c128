"""The longest movement that honest training can make: a limit that holds before anything is known.

A local rule that clips gradients bounds the movement `D_T = w_T − w_0` of `T` steps. With learning
rate γ, momentum μ, weight decay λ and gradients `‖g_t‖ ≤ clip_norm`, a step is (`LocalSteps`)

    v_{t+1} = μ v_t + γ (g_t + λ (w_0 + D_t)),    D_{t+1} = D_t − v_{t+1},    v_0 = D_0 = 0

The proximal term, SAM and control variates change which gradient is taken, before it is clipped;
ordered dropout and sandwich give a gradient of the whole submodel, which is clipped as a whole. So
`g_t` is any vector of that length, and nothing else of the rule matters. The recursion is linear:

    D_T = f_T w_0 + Σ_s i_{T−s} g_s

where `f` is the response of a single number to the start `w_0 = 1` without gradients, and `i` that
to one gradient of 1 in the first step from `w_0 = 0`. The triangle inequality gives

    ‖D_T‖ ≤ |f_T| ‖w_0‖ + clip_norm Σ_{t=1…T} |i_t|

and gradients along `w_0` with the signs of `f_T · i_{T−s}` reach it: the bound is exact. Without
decay it is `γ clip_norm Σ_t (1 − μᵗ)/(1 − μ)`, below `T γ clip_norm / (1 − μ)`.

On the wire a movement may be longer (`wire_factor`):

- fp16 rounds every value by a share of at most 2⁻¹¹.
- int8 rounds a block of n values by at most a step each, that is by √n/127 of the block's norm.
- top-k sends a part of `D + r`, `r` being the residual of earlier movements. Of a block of n values
  that keeps k, at most `q = √(1 − k/n)` of the norm stays behind. Each movement leaves at most q of
  itself, and each time the block is sent again, q of that. A block that is not sent for
  `RESIDUAL_ROUNDS` rounds is forgotten, so in that many rounds every part of r shrinks by q at
  least once: `‖r‖ ≤ F · M q/(1 − q)` with `F = min(RESIDUAL_ROUNDS, √blocks)`. (Per block the
  norm is at most `M q/(1 − q)`.) This is for one movement at a time that awaits its verdict.

Float32 rounds too: `SLACK` and `ROUNDING` allow for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.encoding.quantisation import STEPS
from edge_sdk.protocol.encoding.top_k import RESIDUAL_ROUNDS, kept_counts
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Indices

FOLLOWED = 10_000
"""Steps that are followed one by one. Each one more adds at most the largest response so far, or
`γ/(1 − μ)`, and decay at most takes the weights to 0: from there on the bound is less sharp."""
SLACK = 1e-3
"""Share by which a movement may exceed the bound: for gradients clipped in float32, and fp16."""
ROUNDING = 2.0**-23
"""Share of the weights that float32 rounds away in a step, at most."""
SERVED = 2.0
"""Factor by which the model that devices get may be longer than θ: int8 rounds it."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The bound of a local rule: `gradients + decay · ‖w_0‖`."""

    gradients: float
    """The part that clipped gradients make."""
    decay: float
    """The share of the starting weights' norm that weight decay makes."""
    steps: int

    def limit(self, start: float) -> float:
        """Return the longest movement from weights of this norm, with room for rounding."""
        start *= SERVED
        exact = self.gradients + self.decay * start
        return (1 + SLACK) * exact + self.steps * ROUNDING * (start + exact)


@lru_cache(maxsize=16)
def reach_of(rule: LocalRule, steps: int) -> Reach | None:
    """Return the bound of training by this rule; None: it does not clip, so there is none."""
    if rule.clip_norm is None:
        return None
    first = min(steps, FOLLOWED)
    impulse = [abs(each) for each in _response(rule, first, start=0.0, push=1.0)]
    free = [abs(each) for each in _response(rule, first, start=1.0, push=0.0)]
    gradients, decay = sum(impulse), max(free)
    if steps > first:
        gradients += (steps - first) * max(*impulse, rule.learning_rate / (1 - rule.momentum))
        decay = max(decay, 1.0) if rule.weight_decay else 0.0
    finite = math.isfinite(gradients) and math.isfinite(decay)
    return Reach(rule.clip_norm * gradients, decay, steps) if finite else Reach(math.inf, 0, steps)


def _response(rule: LocalRule, steps: int, *, start: float, push: float) -> list[float]:
    """Return `D_1 … D_T` of one number that starts at `start`, with a gradient in step 1 alone."""
    moved = velocity = 0.0
    found: list[float] = []
    for _ in range(steps):
        gradient = push + rule.weight_decay * (start + moved)
        velocity = rule.momentum * velocity + rule.learning_rate * gradient
        moved, push = moved - velocity, 0.0
        found.append(moved)
    return found


def wire_factor(encoding: Encoding, sizes: Indices) -> float:
    """Return how much longer than trained a movement of blocks of these sizes may arrive."""
    if encoding.kind == "int8":
        return 1 + math.sqrt(float(sizes.max(initial=1))) / STEPS
    if encoding.kind != "top-k":
        return 1.0
    left = 1 - kept_counts(sizes, encoding.keep) / sizes
    share = min(math.sqrt(float(np.max(left, initial=0.0))) * (1 + SLACK), 1 - 1e-6)
    rounds = min(float(RESIDUAL_ROUNDS), math.sqrt(len(sizes)))
    return 1 + rounds * share / (1 - share)
