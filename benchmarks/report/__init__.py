"""Reporting: figures, tables, plots, progress, and measured processes."""
