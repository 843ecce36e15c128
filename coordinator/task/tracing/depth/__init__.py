"""Regions by depth: chains of residual blocks, and the stacks that their weights become."""
