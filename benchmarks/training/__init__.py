"""Costs of training on this machine: the time of a step, memory and disk."""
