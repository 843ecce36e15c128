"""What a level costs on a device: measured here, or modelled from a profile.

`kit.py` compiles what is trained, with torch; all else does without it, so that small boards can be
measured with what `tessera-fl[measure]` installs. `measure.py` runs one fresh process a case
(`process.py`); `results.py` is what comes of it, and everything else reads that.
"""
