"""What distributed programs agree on, alone here: a rank needs it in its first moments, without the job file's validation."""

import re

PYTHON = re.compile(r"(python|pypy)[\d.]*")  # names of its interpreters

# What tells a rank who it is and where the others are, by the names that torchrun gives them; Lightning reads NODE_RANK.
IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

# What is between the launcher and the process that becomes a program, and no business of the program's.
BETWEEN = ("HPC_MP_TOKEN", "HPC_MP_SECRET", "HPC_MP_LISTEN_FD", "HPC_MP_ASKED", "HPC_MP_MPI", "HPC_MP_EMULATED")

# How programs number their ranks: the letters of each one's own rule, the right-most the fastest over ranks. Megatron-LM:
# core/parallel_state.py, order "tp-cp-ep-dp-pp" (with --use-tp-pp-dp-mapping it is DPCT); DeepSpeed: runtime/pipe/topology.py,
# PipeModelDataParallelTopology with the axes pipe, data, model; nanotron: parallel/context.py, arange reshaped to (expert,
# pipeline, data, context, tensor); torchtitan: distributed/parallel_dims.py, a mesh of pp, dp_replicate, dp_shard, cp, tp.
NUMBERINGS = {"megatron": "PDCT", "deepspeed": "PDT", "nanotron": "PDCT", "torchtitan": "PDCT"}
