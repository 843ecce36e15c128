"""What closing a round costs the coordinator, and what a round costs on the wire.

- `throughput.py`: how fast the rules take movements in, beside `numpy.copyto` of the same bytes;
- `closes.py`: how much memory closing a round takes, from uploads on disk to the commit;
- `scale.py`: whether a round's time or memory grows with the number of registered devices;
- `traffic.py`: bytes for each device and round, by level and encoding.
"""
