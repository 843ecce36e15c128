"""Programs that do the job, each run by itself with the Python of its simulator.

They import the simulator, torch, numpy and `turns.py` beside them, and nothing else of this
project: what a simulator pins never meets what we pin.
"""
