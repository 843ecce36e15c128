"""Decides what the device can afford: the level it trains, or a skip with its reason."""
