"""Tasks: turn a torch model into a plan and graphs, and export a saved model to a file."""
