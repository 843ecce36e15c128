"""A whole federation in one process, and the demo."""
