"""Memory on disk: segments, their index, and the space they take."""
