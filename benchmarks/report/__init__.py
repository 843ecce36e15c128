"""Reporting: figures, tables, plots, progress, and processes that are measured."""
