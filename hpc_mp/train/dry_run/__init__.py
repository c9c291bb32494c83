"""Dry runs: what any rank of any layout holds, sends, opens and writes, found out in one process without its hardware."""
