"""A fleet of emulated phones learns: accuracy for the joules and bytes spent.

    setting.py   the task and the phones: data, model, a share of the data for every phone
    run.py       one rule and one seed: accuracy and spending, round by round
    study.py     rules side by side over several seeds, and their figures
    plot.py      accuracy against joules and against bytes

Training is real, in this process; time, battery and joules are modelled from the phones' profiles
(`edge_sdk.decide.emulation.emulation`), and accounted for as in the demo.
"""
