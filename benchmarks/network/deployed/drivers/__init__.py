"""Programs that are started by their path, with the code of any checkout."""
