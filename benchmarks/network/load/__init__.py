"""Many devices on one coordinator and one broker, on this machine.

- `held.py`: what devices that stay cost while rounds finish, the coordinator and the broker;
- `recovery.py`: how soon they are back, and a round finished, after the broker was away.

Coordinator and broker are programs of their own. Devices are the real ones, with sockets, folders
and threads of their own, but share a few processes (`fleet_process.py`): hundreds of interpreters
do not fit into a small machine. `site.py` puts them together; what happens is read from outside:
presences on the broker (`presences.py`), the coordinator's history (`history.py`), /proc.
"""
