"""Native CPU kernels: their sources, how they are compiled and loaded, and their calls."""
