"""Studies: fleets that learn."""
