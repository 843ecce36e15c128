"""Groups as mask policies see them: bundles of axes, cells of blocks, fragments."""
