"""A run on disk: its folder, journal, checkpoints and chunks."""
