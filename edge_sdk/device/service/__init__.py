"""The device as a program: the link's loop, the training thread, one run it takes part in."""
