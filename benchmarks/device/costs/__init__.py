"""Predicted costs of rounds against measured ones, at every level of every family.

- `compare.py`: prepares a task's files, starts the processes, and compares;
- `process.py`: runs in them: a calibration with timed trainings, or one round and its peak.
"""
