"""Many devices on one coordinator and one broker, on this machine.

- `held.py`: the cost of connected devices while rounds finish, on the coordinator and the broker;
- `recovery.py`: time until they are back, and a round finished, after the broker was away.

Coordinator and broker are separate programs. Devices are the real ones, with their own sockets,
folders and threads, but share a few processes (`fleet_process.py`): hundreds of interpreters do not
fit into a small machine. `site.py` puts them together. Everything is observed from outside:
presences on the broker (`presences.py`), the coordinator's history (`history.py`), /proc.
"""
