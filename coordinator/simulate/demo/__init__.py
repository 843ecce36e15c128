"""`tessera-coordinator demo`: devices of different means train one model on real data.

digits.py      the data, the model, the devices
run.py         the run in one process, and its results as data
processes.py   the run as a broker, a coordinator and devices of their own
view.py        what a person sees: live table, summary, plot
"""
