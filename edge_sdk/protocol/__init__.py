"""The contract between device and coordinator: plans, blocks, messages.

Imports no other package of this project.
"""
