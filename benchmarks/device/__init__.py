"""Costs of a level on a device: measured here, or modelled from a profile.

`kit.py` compiles the models, with torch; everything else works without it, so that small boards can
be measured with `tessera-fl[measure]`. `measure.py` runs one fresh process per case (`process.py`);
`results.py` holds the results, and everything else reads those.
"""
