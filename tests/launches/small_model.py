"""A hybrid model that two processes train in seconds, with either layer."""

SPEC = {
    "ours": "megatron_gdn.specs hybrid_stack_spec",
    "upstream": "tests.launches.upstream_layers hybrid_stack",
}
FLAGS = """
    --hybrid-layer-pattern G-*- --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --kv-channels 16 --linear-num-key-heads 2 --linear-key-head-dim 16 --linear-num-value-heads 4
    --linear-value-head-dim 16 --linear-conv-kernel-dim 4 --position-embedding-type none
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 64 --max-position-embeddings 64 --vocab-size 256 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 3e-4 --lr-decay-style constant
    --mock-data --eval-iters 0 --eval-interval 100 --log-interval 1 --num-workers 0
    --no-persist-layer-norm --save-interval 100
"""
