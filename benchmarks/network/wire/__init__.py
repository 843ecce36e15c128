"""What a round costs beside its training: bytes on sockets, seconds, memory, all of it measured.

- `bytes_by_level.py`: bytes of a device in a round, by level and encoding; pulled over needed;
- `fan_out.py`: bytes of the coordinator in a round, by the number of devices;
- `overhead.py`: seconds and CPU of a round of ten programs, less the training;
- `device.py`: memory of a device through a round; what an idle one sends and computes;
- `serving.py`: memory of the coordinator while a large model goes to devices;
- `bids.py`: how long a bid is on its way while bulk moves.

Coordinator and devices are the real ones, configured by files as a user would (`files.py`), on a
broker of their own: as programs (`programs.py`), or in threads of this process where only bytes
count (`in_threads.py`). Bytes are counted on the way to the broker (`forwarder.py`, `packets.py`):
all that is in the TCP stream, without headers of TCP and IP, and without TLS.
"""
