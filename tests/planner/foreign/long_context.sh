#!/bin/bash
ARGS=(
    --tensor-model-parallel-size 2
    --context-parallel-size 4
    --cp-comm-type a2a
    --sequence-parallel
    --use-tp-pp-dp-mapping
    --seq-length 32768
    --micro-batch-size 1
    --global-batch-size 16
    --bf16
    --recompute-activations
    --use-distributed-optimizer
    --optimizer-cpu-offload
    --exp-avg-dtype bf16
    --num-layers 32
)
for try in 1 2 3; do
    torchrun --nproc_per_node=8 pretrain_gpt.py "${ARGS[@]}" --load "$CKPT" && break
done
