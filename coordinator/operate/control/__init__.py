"""Commands about a run that is being served."""
