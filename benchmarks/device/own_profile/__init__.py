"""A profile of this machine, measured."""
