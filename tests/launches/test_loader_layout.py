"""A clone's own loader cuts documents of 32 tokens, which every layout can."""

import subprocess

import numpy
import pytest
import torch

from tests.launches.launching import SMALL, in_a_clone, launched, losses
from tests.launches.record import recorded

pytestmark = in_a_clone

LENGTH = 32
FLAGS = f"""{SMALL}
    --spec megatron_gdn.specs hybrid_stack_spec --hybrid-layer-pattern G-*-
    --vocab-size 256 --tokenizer-type NullTokenizer
    --global-batch-size 2 --train-iters 4 --lr 3e-3 --lr-warmup-iters 1
    --split 100,0,0 --eval-iters 0 --eval-interval 100
    --no-masked-softmax-fusion --dataloader-inter-document-masking
"""


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> str:
    """400 documents that count in threes, in the files that Megatron reads."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(tmp_path_factory.mktemp("data") / "documents")
    made = torch.Generator().manual_seed(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", numpy.int32)
    for start in torch.randint(200, (400,), generator=made):
        builder.add_document((start + torch.arange(LENGTH) * 3) % 250, [LENGTH])
    builder.finalize(f"{prefix}.idx")
    return prefix


def trained(documents: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Ranks have as many tokens of a micro-batch: Megatron draws numbers for them."""
    return launched(
        "pretrain_hybrid.py",
        ranks,
        *FLAGS.split(),
        f"--context-parallel-size={ranks}",
        f"--micro-batch-size={ranks}",
        f"--data-path={documents}",
        f"--data-cache-path={documents}-cache",
    )


def test_two_ranks_take_the_steps_of_one_where_the_whole_buffer_is_cut(documents):
    """fp32; the log has seven digits, and four steps multiply rounding by less than
    ten."""
    one = losses(trained(documents, 1))
    assert len(one) == 4 and one[-1] < one[0]
    told_by = (
        "--hybrid-layer-pattern G-*- --dataloader-inter-document-masking "
        "--context-parallel-size 2"
    )
    with recorded("pretrain_hybrid.py", 2, told_by, "one process") as two:
        two.equals(losses(trained(documents, 2)), one, rel=1e-5)
