"""Trains a submodel: backends and the local rules they share."""
