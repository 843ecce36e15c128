"""Costs of closing a round on the coordinator, and of a round on the wire.

- `throughput.py`: rate at which rules take in movements, beside `numpy.copyto` of the same bytes;
- `closes.py`: memory that closing a round takes, from uploads on disk to the commit;
- `scale.py`: growth of a round's time and memory with the number of registered devices;
- `traffic.py`: bytes for each device and round, by level and encoding.
"""
