"""Mask policies for studies: they give a theorem's terms the values that a figure asks for."""
