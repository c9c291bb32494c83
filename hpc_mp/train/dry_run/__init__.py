"""Dry runs: one process computes what any rank of a layout holds, sends, opens and writes, without the hardware."""
