"""The contract between device and coordinator: plans, blocks, messages.

Imports nothing else of ours.
"""
