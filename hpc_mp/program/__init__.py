"""The process of a rank until it becomes the user's program, and the inspection of ranks that hang. No torch is imported here."""
