"""`tessera-coordinator demo`: devices of different means train one model on real data.

digits.py      the data, the model, the devices
run.py         the run and its results as data
view.py        what a person sees: live table, summary, plot
"""
