"""Conventions of distributed programs. A rank needs them at its start, without the job file's validation."""

import re

PYTHON = re.compile(r"(python|pypy)[\d.]*")  # names of the Python interpreter

# Variables that tell a rank its number and the others' addresses, by the names that torchrun uses. Lightning reads NODE_RANK.
IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

# Variables between the launcher and the process that becomes the program. The program does not need them.
BETWEEN = ("HPC_MP_TOKEN", "HPC_MP_SECRET", "HPC_MP_LISTEN_FD", "HPC_MP_ASKED", "HPC_MP_MPI", "HPC_MP_EMULATED")

# How programs number their ranks: the letters of each program's rule; the right-most varies fastest over ranks. Megatron-LM:
# core/parallel_state.py, order "tp-cp-ep-dp-pp" (with --use-tp-pp-dp-mapping it is DPCT); DeepSpeed: runtime/pipe/topology.py,
# PipeModelDataParallelTopology with the axes pipe, data, model; nanotron: parallel/context.py, arange reshaped to (expert,
# pipeline, data, context, tensor); torchtitan: distributed/parallel_dims.py, a mesh of pp, dp_replicate, dp_shard, cp, tp.
NUMBERINGS = {"megatron": "PDCT", "deepspeed": "PDT", "nanotron": "PDCT", "torchtitan": "PDCT"}
