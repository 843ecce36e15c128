"""The coordinator as a program: turns arriving messages into events, and performs effects."""
