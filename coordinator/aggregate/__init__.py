"""Aggregation: how movements become one movement of the global model."""
