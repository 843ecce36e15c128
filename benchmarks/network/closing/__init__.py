"""The time between the last movement of a round and the opening of the next."""
