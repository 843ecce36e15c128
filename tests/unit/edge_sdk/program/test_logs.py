"""Logs for machines: one JSON object per line, with facts."""

from __future__ import annotations

import json
import logging

from edge_sdk.program.logs import JsonLines, fact


def test_fact_never_takes_the_place_of_what_every_line_has() -> None:
    record = logging.LogRecord("device", logging.INFO, "", 0, "half", None, None)
    vars(record).update(fact("bid", round=3, level=0.5, time=7))
    line = json.loads(JsonLines().format(record))
    assert (line["event"], line["round"]) == ("bid", 3)
    assert (line["level"], line["fact_level"], line["fact_time"]) == ("info", 0.5, 7)
    assert line["time"].endswith("+00:00")
