"""The model as packs of blocks that devices pull."""
