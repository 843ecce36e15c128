"""A fleet of emulated phones learns: how good the model gets for the joules and bytes it took.

    setting.py   what is learned, and by whom: data, model, a share of the data for every phone
    run.py       one rule and one seed: accuracy and what was spent, round by round
    study.py     rules side by side over several seeds, and their figures
    plot.py      accuracy against joules and against bytes

Training is real, in this process; time, battery and joules are those of the phones' profiles, so
they are modelled (`edge_sdk.decide.emulation.emulation`), and accounted for as in the demo.
"""
