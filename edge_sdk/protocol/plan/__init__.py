"""The plan of a model: axes, groups, tensors, and the blocks they make."""
