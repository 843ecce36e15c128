"""The answers: the API and its description, event streams, metrics, signs of life."""
