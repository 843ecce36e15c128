"""A device's own data: sources of samples, and batches of them."""
