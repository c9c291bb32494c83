"""The variables of torchrun, alone here: a rank needs their names in its first moments, without the job file's validation."""

# What tells a rank who it is and where the others are, by the names that torchrun gives them; Lightning reads NODE_RANK.
IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
