"""Settings of every program: one reader, and the documentation made from the same classes."""

from edge_sdk.program.settings.reader import (
    Given,
    load_settings,
    nearest,
    read_keys,
    read_table,
    read_toml,
)
from edge_sdk.program.settings.types import (
    NOT_A_KEY,
    PREFIX,
    Count,
    Example,
    Flat,
    Natural,
    Percent,
    Seconds,
    Share,
    Short,
    Spelling,
    Within,
    check_fields,
    same_as,
)
from edge_sdk.protocol.errors import ConfigError

__all__ = [
    "NOT_A_KEY",
    "PREFIX",
    "ConfigError",
    "Count",
    "Example",
    "Flat",
    "Given",
    "Natural",
    "Percent",
    "Seconds",
    "Share",
    "Short",
    "Spelling",
    "Within",
    "check_fields",
    "load_settings",
    "nearest",
    "read_keys",
    "read_table",
    "read_toml",
    "same_as",
]
