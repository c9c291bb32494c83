"""A job file that is right and small, for tests that spoil it."""

JOB = """\
[job]
name = "small"
nodes = 1
ranks_per_node = 8
[model]
config = { model_type = "llama", num_hidden_layers = 4, hidden_size = 64, num_attention_heads = 8, num_key_value_heads = 4, \
intermediate_size = 128, vocab_size = 512, max_position_embeddings = 64 }
[data]
files = ["text.txt"]
sequence_length = 32
[parallel]
tensor = 2
pipeline = 2
[train]
steps = 10
global_batch = 16
[slurm]
setup = ["true"]
[environment]
set = { NCCL_DEBUG = "WARN" }
"""
