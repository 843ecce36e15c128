"""The device: its state machine, and the program that performs its effects."""
