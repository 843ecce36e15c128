"""The coordinator that a device obeys: the one with the largest epoch it has heard of.

The epoch is kept on disk, so a device that starts again still ignores a coordinator that was
replaced. A broker that lost its messages, together with a new or restored run folder, makes a
coordinator with a smaller epoch the rightful one. So a device gives up an epoch if a smaller one
speaks and nobody with the larger one contradicts within `PATIENCE_S`: a coordinator that is in
charge contradicts at once. Messages without an epoch come from a version that knows none; they
count as smaller than any.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from edge_sdk.program.logs import fact
from edge_sdk.protocol.messages.epoch import Epoch

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds without a word from the larger epoch after which a device obeys the smaller one."""


class Allegiance:
    """Decides whose messages a device obeys. Times are those of the device's clock."""

    def __init__(self, epoch: Epoch | None, keep: Callable[[Epoch | None], None]) -> None:
        """`epoch` is the one kept on disk, by `keep`; None: none, or that of no version."""
        self.epoch = epoch
        self.due_s = math.inf
        """When to give up the present epoch."""
        self._keep = keep
        self._smaller: Epoch | None = None
        """The largest of the smaller epochs that spoke and were not contradicted."""

    def hear(self, epoch: Epoch | None, now: float, *, alive: bool, contested: bool) -> bool:
        """Note the epoch of a message; True if the message is to be obeyed.

        `alive`: it was sent just now. `contested`: a coordinator with a larger epoch would hear it,
        too, and contradict; other messages of a smaller epoch may be leftovers, and prove nothing.
        """
        if epoch == self.epoch:
            if alive:
                self.due_s, self._smaller = math.inf, None
            return True
        if _is_above(epoch, self.epoch):
            if self.epoch is not None:
                log.info("a later coordinator is in charge", extra=fact("new_epoch"))
            self._obey(epoch)
            return True
        if contested:
            if self.due_s == math.inf:
                self.due_s, self._smaller = now + PATIENCE_S, epoch
                log.warning(
                    "ignoring an earlier coordinator (epoch %s); this device obeys %s",
                    epoch or "unknown",
                    self.epoch,
                    extra=fact("ignored_epoch"),
                )
            elif _is_above(epoch, self._smaller):
                self._smaller = epoch
        return False

    def give_up(self, now: float) -> bool:
        """Obey the smaller epoch, if it is time; True if so: what it said has to be heard again."""
        if now < self.due_s:
            return False
        log.warning(
            "nothing was heard of the coordinator with epoch %s; obeying %s",
            self.epoch,
            self._smaller or "one without an epoch",
            extra=fact("new_epoch"),
        )
        self._obey(self._smaller)
        return True

    def _obey(self, epoch: Epoch | None) -> None:
        self.epoch, self.due_s, self._smaller = epoch, math.inf, None
        self._keep(epoch)


def _is_above(epoch: Epoch | None, other: Epoch | None) -> bool:
    return epoch is not None and (other is None or epoch > other)
