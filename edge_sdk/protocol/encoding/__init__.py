"""Values of blocks as bytes: fp32, fp16, int8, top-k, zstd."""
