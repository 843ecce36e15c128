"""Fleets of mixed levels: does one model serve devices of all sizes, and which way trains it best?

settings.py  data, models and their split over devices
fleets.py    levels of the devices, and the ways to train a model with them
trial.py     one run: accuracy of every level, modelled energy
record.py    the file of finished runs, from which a study goes on
study.py     the runs of a study: screening, learning rates, seeds; comparisons at equal energy
page.py      tables and plots for docs/levels.md
command.py   `tessera-bench levels`
"""
