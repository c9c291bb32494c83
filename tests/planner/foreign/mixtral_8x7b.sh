#!/bin/bash
NNODES=${SLURM_NNODES:-"4"}
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 32768
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --vocab-size 32000
    --make-vocab-size-divisible-by 1
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
#    --moe-grouped-gemm
    --expert-tensor-parallel-size 1
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
)
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${PARALLEL_ARGS[@]} \
    --micro-batch-size 1 --global-batch-size 256 --bf16 --optimizer adam
