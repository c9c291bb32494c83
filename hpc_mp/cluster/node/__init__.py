"""What one machine shows of itself: GPUs, network adapters, kernel, limits. Read, never judged."""
