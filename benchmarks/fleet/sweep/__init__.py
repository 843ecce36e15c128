"""Sweeps: many simulated experiments from one file, and plots of what came out."""
