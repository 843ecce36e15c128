"""Needs of every program: settings, durable files, processes, logs, the watchdog."""
