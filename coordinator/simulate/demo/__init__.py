"""`tessera-coordinator demo`: unequal devices train one model on real data.

digits.py      the data, the model, the devices
run.py         the run in one process, and its results as data
processes.py   the run as separate processes: a broker, a coordinator and devices
view.py        the display: live table, summary, plot
"""
