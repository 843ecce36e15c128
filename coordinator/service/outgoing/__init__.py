"""Output of the coordinator: control messages, chunks, the published model."""
