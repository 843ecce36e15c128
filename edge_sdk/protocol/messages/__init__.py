"""The messages between device and coordinator: values, topics, and their bytes."""
