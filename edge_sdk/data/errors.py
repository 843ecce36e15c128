"""The error of a device's data.

    TesseraError
    └── DataError        data that is missing, unreadable, or not the task's

Its text names the file, the row or sample and the column, what was found and what was wanted. It
may quote the data, so it is for the device's own log. The coordinator is told `UNFIT`.
"""

from __future__ import annotations

from edge_sdk.protocol.errors import TesseraError

UNFIT = "its data cannot be loaded or does not fit the task; its own log says what is wrong"
"""Words for the coordinator, in place of an error of the data."""


class DataError(TesseraError):
    """Data that is missing, unreadable, or does not fit the task."""
