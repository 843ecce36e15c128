"""One job on several simulators: ours, Flower's, Apple's `pfl`, and a bare torch loop."""
