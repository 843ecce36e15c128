"""The messages of both sides: values, topics, and their bytes."""
