"""Launching somebody's program instead of our own engine: what is decided for it, and what is refused."""
