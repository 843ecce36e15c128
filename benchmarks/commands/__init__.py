"""The commands of `tessera-bench`: a module each, with its parser, its run and its tables."""
