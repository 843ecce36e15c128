"""Hostile devices: the harm they do, and which defence keeps them from it.

attackers.py  what a hostile device changes: its movement, its data, its number of samples
settings.py   data, models and triggers of backdoors; the levels of devices, and who attacks
defences.py   defences by name, as settings of a run
watching.py   agreement of the model's steps with honest devices, by coverage
trial.py      one run of the real coordinator with real training
record.py     the file of finished runs, from which a study goes on
study.py      the runs of a study, and what they say
page.py       tables for docs/attacks.md
command.py    `tessera-bench attack`
"""
