"""The coordinator's errors.

TesseraError
└── CoordinatorError
    ├── TraceError       a model could not be turned into a plan; names the module and why
    ├── GraphCompileError  a task could not be compiled (`task.graphs.errors`)
    ├── MemoryStoreError   a memory cannot be used (`aggregate.memory.errors`): busy, damaged
    ├── RunError           a run folder cannot be used (`run.folder`)
    ├── FencedError        another coordinator is in charge of the task (`service.outgoing.fence`)
    ├── BrokerStartError   the embedded broker does not start (`operate.broker.embedded`)
    ├── PortError          a port that cannot be had (`operate.broker.ports`)
    ├── IdentityError      a certificate that cannot be had (`operate.identity.errors`)
    ├── CodeError          a join code that cannot be made or used (`operate.joining.codes`)
    ├── BusyError          a loop did not get to a request (`service.admission.requests`)
    ├── RefusalError       an HTTP request that is refused (`operate.http.refusal`)
    ├── RequestError       a request to join that cannot be read (`operate.joining.desk`)
    └── ControlError       a command that the served run refuses (`operate.control`)
        └── NotServedError   nobody serves the run
"""

from __future__ import annotations

from edge_sdk.protocol.errors import ConfigError, TesseraError

__all__ = ["ConfigError", "CoordinatorError", "StopRequestedError", "TraceError"]


class CoordinatorError(TesseraError):
    """Base of the coordinator's errors."""


class StopRequestedError(Exception):
    """A run was told to stop before it, or its evaluation, was ready."""


class TraceError(CoordinatorError):
    """A model could not be turned into a plan; the text names the module and says why."""
