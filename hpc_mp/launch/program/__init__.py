"""The launch of a user's program in place of our own engine: its choices and checks."""
