"""The process of a rank until it becomes the user's program, and the inspection of hung ranks. Does not import torch."""
