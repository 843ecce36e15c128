"""Training a slice: backends and the local rules they share."""
