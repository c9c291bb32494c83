#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
TP_SIZE=${TP_SIZE:-2}
PP=4
DTYPE=${DTYPE:-"fp8"}
PRETRAIN="Megatron-LM/pretrain_gpt.py"

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    "--vocab-size 128256"
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --manual-gc
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
    )
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --pipeline-model-parallel-size $PP
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel
)
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING_ARGS+=("${DDP_ARGS[@]}")

srun python "$PRETRAIN" "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" ${DTYPE_ARGS[@]} "${PARALLEL_ARGS[@]}" $EXTRA_ARGS 2>&1 | tee out.log
