"""What a rank's process of somebody's program does before it becomes that program. No torch is imported here."""
