"""Standing of devices that were refused or stayed silent. One in good standing has no entry.

Rules:
- A round in which a movement of a device is refused counts against it, a counted movement clears
  that. After `quarantine_after` such rounds in a row the device is quarantined: its bids are
  declined with the reason, it is not drawn, and its late movements are refused, until an operator
  releases it.
- Where agreement is measured (`aggregate/robust/agreement.py`), each device has a mean of it that
  fades. A device is quarantined when its mean is below the limit, and so far below those of the
  others of the round that chance does not explain it. One round alone never does that.
- A device that bids and is silent when the deadline passes is spare: it may still train, and its
  movement counts if it is in time, but no round waits for it until it delivers. If all that train
  are spare, the round waits for them.
- Standings change when a round closes, from facts that are on disk by then, so a crash changes
  nothing. (Late deliveries and releases are saved with the next checkpoint.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

from coordinator.rounds.persistent import PersistentMap

FADING = 0.9
"""Share of a device's agreements that stays from round to round: about ten rounds count."""
HEARD = 2.7
"""Weight of agreements from which on they are judged: that of three rounds."""
JUDGES = 5
"""Devices that must have such a weight before any is judged."""
OUTLYING = 3.0
DEVIATION = 1.4826
"""Standard deviation of normal numbers, in multiples of their median absolute deviation."""


@dataclass(frozen=True, slots=True)
class DeviceStanding:
    """Facts held against a device."""

    refusals: int = 0
    """Rounds in a row in which a movement of the device was refused."""
    reason: str = ""
    """Reason of the newest refusal."""
    silent: bool = False
    """True if it bid, did not deliver before the deadline, and has not delivered since."""
    quarantined: int | None = None
    """The round since which its bids are declined; None: they are not."""

    @property
    def decline(self) -> str:
        """The reason why a bid is declined, for the device; empty: it is not."""
        if self.quarantined is None:
            return ""
        if not self.refusals:
            return f"quarantined since round {self.quarantined}: {self.reason}"
        return (
            f"quarantined since round {self.quarantined}, after {self.refusals} refusals in a row; "
            f"the last: {self.reason}"
        )


GOOD = DeviceStanding()


@dataclass(frozen=True, slots=True)
class Agreed:
    """A device's agreement with others: a sum over rounds and its weight, both fading."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        """The faded mean; 0 if there is none."""
        return self.total / self.weight if self.weight else 0.0

    def after(self, agreement: float) -> Agreed:
        """Return it after another round."""
        return Agreed(FADING * self.total + agreement, FADING * self.weight + 1)


Agreements = PersistentMap[str, Agreed]

Standings = PersistentMap[str, DeviceStanding]
"""DeviceStanding of each device that is not in good standing."""


def closed(
    standings: Standings,
    round: int,
    *,
    counted: Iterable[str],
    refused: Mapping[str, str],
    silent: Iterable[str],
    quarantine_after: int,
) -> Standings:
    """Return the standings after a round. `refused` are reasons; `quarantine_after` 0: never."""
    for name in counted if len(standings) else ():
        if (was := standings.get(name)) is not None:
            kept = was if was.quarantined is not None else GOOD
            standings = _with(standings, name, replace(kept, silent=False))
    for name, reason in sorted(refused.items()):
        was = standings.get(name, GOOD)
        number, since = was.refusals + 1, was.quarantined
        if since is None and quarantine_after and number >= quarantine_after:
            since = round
        standings = _with(standings, name, DeviceStanding(number, reason, quarantined=since))
    for name in sorted(silent):
        standings = _with(standings, name, replace(standings.get(name, GOOD), silent=True))
    return standings


def agreed(known: Agreements, found: Mapping[str, float]) -> Agreements:
    """Return the record of agreements after a round."""
    return known.merging(
        {name: known.get(name, Agreed()).after(each) for name, each in sorted(found.items())}
    )


def disagreeing(known: Agreements, devices: Iterable[str], limit: float) -> dict[str, float]:
    """Return those of a round's devices that lead away from the others, and their mean agreement.

    Their mean is below `limit`, and by `OUTLYING` usual deviations below the median of the round.
    """
    means = {name: known[name].mean for name in devices if known[name].weight >= HEARD}
    if len(means) < JUDGES:
        return {}
    middle = median(means.values())
    spread = DEVIATION * median(abs(each - middle) for each in means.values())
    return {
        name: each for name, each in means.items() if each < min(limit, middle - OUTLYING * spread)
    }


def barred(standings: Standings, round: int, means: Mapping[str, float]) -> Standings:
    """Return the standings once devices are quarantined for leading away from the others."""
    for name, each in sorted(means.items()):
        reason = f"its movements point away from the others' (mean cosine {each:.2f})"
        standings = standings.putting(name, DeviceStanding(reason=reason, quarantined=round))
    return standings


def delivered(standings: Standings, device: str) -> Standings:
    """Return the standings once a silent device has delivered."""
    was = standings.get(device, GOOD)
    return _with(standings, device, replace(was, silent=False)) if was.silent else standings


def released(standings: Standings, device: str) -> Standings:
    """Return the standings in which nothing is held against a device."""
    return standings.dropping(device) if device in standings else standings


def declines(standings: Standings, device: str) -> str:
    """Return the reason why a device's bids are declined; empty: they are not."""
    was = standings.get(device)
    return "" if was is None else was.decline


def quarantined(standings: Standings) -> dict[str, DeviceStanding]:
    """Return the devices whose bids are declined, sorted by name."""
    return {name: each for name, each in sorted(standings.items()) if each.quarantined is not None}


def _with(standings: Standings, name: str, standing: DeviceStanding) -> Standings:
    return standings.dropping(name) if standing == GOOD else standings.putting(name, standing)
