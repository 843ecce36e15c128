"""What leaves the coordinator: control messages, chunks, the published model."""
