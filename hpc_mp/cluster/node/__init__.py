"""Facts about one machine: GPUs, network adapters, kernel, limits. They are read here and judged elsewhere."""
