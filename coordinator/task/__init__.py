"""A task: a torch model becomes a plan and graphs, and a saved model leaves as a file."""
