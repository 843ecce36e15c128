"""A device as `tessera-device run`, which ends at once when it is connected.

python connecting.py run --config device.toml
"""

from __future__ import annotations

import os
import sys
from typing import Any

from edge_sdk.cli import main


def leave(*_: Any) -> None:
    """End this process with what it has done so far."""
    os._exit(0)


if __name__ == "__main__":
    # Patched when the program imports it, not before: that import is part of the start.
    import importlib.abc
    import importlib.machinery

    SERVICE = "edge_sdk.device.service.service"

    class _Patching(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != SERVICE:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            assert spec is not None  # noqa: S101  it is a part of the SDK
            assert spec.loader is not None  # noqa: S101
            execute = spec.loader.exec_module

            def patched(module: Any) -> None:
                execute(module)
                module.DeviceService._connected = leave

            spec.loader.exec_module = patched  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, _Patching())
    sys.exit(main())
