"""What operators ask of a run while it lasts: settings, pauses, quarantine; and who asked it."""
