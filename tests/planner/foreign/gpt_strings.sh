#!/bin/bash
MP=4; PP=2
GPT_ARGS="
    --tensor-model-parallel-size $MP \
    --pipeline-model-parallel-size 2 \
    --num-layers 24 \
    --hidden-size 2048 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 2 \
    --global-batch-size 64 \
    --recompute-granularity full \
    --recompute-method uniform \
    --recompute-num-layers 2 \
    --bf16
"
GPT_ARGS="$GPT_ARGS --log-interval=10"
OUTPUT_ARGS="--save checkpoints \
    --eval-iters 10"
python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py \
    $GPT_ARGS \
    $OUTPUT_ARGS > log.txt
