"""Every error of the contract, as one tree.

    TesseraError                 anything this project raises on purpose
    ├── ProtocolError            the contract was broken
    │   ├── PlanError            a plan is malformed, not canonical, or not the one its hash names
    │   ├── TensorError          arrays do not fit the plan: unknown or missing name, shape, dtype
    │   ├── GroupError           a choice of groups does not fit the plan: axis, empty set, id
    │   ├── BlockError           a set of blocks does not fit the plan: id, order, number of values
    │   ├── EncodingError        an encoding is unknown, out of range, or not available here
    │   ├── GraphError           graphs are malformed, altered, or do not fit plan or runtime
    │   └── MessageError         a message contradicts itself
    ├── StateError               an event that cannot happen in this state; the state is unchanged
    ├── TrainingError            local training could not produce a movement (`edge_sdk.train`)
    │   ├── NonFiniteError       a loss or a movement is not finite
    │   └── TrainingStopped      `should_stop()` said so
    ├── ConfigError              a setting is unknown, missing or cannot be; names it and its place
    │   └── LinkError            a broker cannot be reached as configured (`edge_sdk.transport`)
    ├── DataError, FetchError,   a device's data, fetching or broker (`edge_sdk.data.errors`,
    │   BrokerError              `device.transfer.fetching`, `device.service.service`)
    └── CoordinatorError         the coordinator's own (`coordinator.errors`)

Code that checks input catches one of the `ProtocolError` children; whatever raises one has changed
nothing.
"""

from __future__ import annotations


class TesseraError(Exception):
    """Base of every error this project raises on purpose."""


class ProtocolError(TesseraError):
    """The contract between device and coordinator was broken."""


class PlanError(ProtocolError):
    """A plan is malformed, not canonical, or not the one its hash names."""


class TensorError(ProtocolError):
    """Arrays do not fit the plan: an unknown or missing name, a wrong shape or dtype."""


class GroupError(ProtocolError):
    """A choice of groups does not fit the plan: an axis, an empty set, an id out of range."""


class BlockError(ProtocolError):
    """A set of blocks does not fit the plan: an id, the order, the number of values."""


class EncodingError(ProtocolError):
    """An encoding of blocks is unknown, out of range, or not available here."""


class GraphError(ProtocolError):
    """Graphs are malformed, altered, missing, or do not fit the plan or the runtime here."""


class MessageError(ProtocolError):
    """A message contradicts itself."""


class ConfigError(TesseraError):
    """A setting is unknown, missing or cannot be; the text names it and says what is allowed."""


class StateError(TesseraError):
    """An event that cannot happen in the current state. The state is unchanged."""


class TrainingError(TesseraError):
    """Local training could not produce a movement."""


class NonFiniteError(TrainingError):
    """A loss or a movement is not finite; no result of the training is returned."""


class TrainingStopped(TrainingError):
    """`should_stop()` ended the training; no result of it is returned."""

    def __init__(self, steps_done: int) -> None:
        super().__init__(f"training was stopped after {steps_done} steps")
        self.steps_done = steps_done
