"""Measured costs of a round besides its training: bytes on sockets, seconds, memory.

- `bytes_by_level.py`: bytes of a device in a round, by level and encoding; pulled over needed;
- `fan_out.py`: bytes of the coordinator in a round, by the number of devices;
- `overhead.py`: seconds and CPU of a round of ten programs, less the training;
- `device.py`: memory of a device through a round; traffic and CPU of an idle one;
- `serving.py`: memory of the coordinator while a large model goes to devices;
- `bids.py`: latency of a bid while bulk moves.

Coordinator and devices are the real ones, configured by files as a user would (`files.py`), on
their own broker: as programs (`programs.py`), or in threads of this process where only bytes count
(`in_threads.py`). Bytes are counted on the way to the broker (`forwarder.py`, `packets.py`):
everything in the TCP stream, without headers of TCP and IP, and without TLS.
"""
