"""`tessera-coordinator serve`: a run, its broker, and the service in one process."""
