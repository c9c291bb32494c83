"""What a rank's process does before it becomes somebody's program, and the look at ranks that hang. No torch is imported here."""
