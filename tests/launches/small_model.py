"""A hybrid model that two processes train in seconds, with either layer."""

from tests.launches.launching import SMALL

SPEC = {
    "ours": "megatron_gdn.specs hybrid_stack_spec",
    "upstream": "tests.launches.upstream_layers hybrid_stack",
}
FLAGS = f"""{SMALL}
    --hybrid-layer-pattern G-*- --position-embedding-type none
    --vocab-size 256 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --global-batch-size 2 --train-iters 6 --lr 3e-4 --lr-decay-style constant
    --mock-data --eval-iters 0 --eval-interval 100 --save-interval 100
"""
