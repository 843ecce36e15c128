"""The coordinator as a program: turns what arrives into events, and performs effects."""
