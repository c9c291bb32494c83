#!/bin/bash
CMD="pretrain_gpt.py --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"
CMD="$CMD --micro-batch-size 2 --seq-length 4096 --bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 8"
torchrun --nproc_per_node 8 $CMD
