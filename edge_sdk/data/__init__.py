"""A device's own data: where samples come from, and how they become batches."""
