"""How values of blocks become bytes: fp32, fp16, int8, top-k, zstd."""
