"""The courses of a run: the state machines of rounds and fragments with their effects performed."""
