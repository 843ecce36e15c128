"""Rounds of deployed devices, beside a bare torch loop that does the same training."""
