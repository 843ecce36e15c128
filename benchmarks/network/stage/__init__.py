"""The stage of network benchmarks: tasks, files, programs, and counting between them."""
