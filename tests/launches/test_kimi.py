"""A launch of a clone trains an imported Kimi Linear; what it saves is exported."""

import pytest
import torch

from megatron_gdn.hf import (
    compare_folders,
    export_folder,
    import_folder,
    megatron_flags,
    read_hf_config,
)
from tests.hf.model_laws import hf_model
from tests.hf.tiny_models import KIMI, as_kimi_published, build
from tests.launches.launching import in_a_clone, launched, losses

pytestmark = in_a_clone
SCRIPT = "pretrain_hybrid.py"
FLAGS = """
    --vocab-size 256 --tokenizer-type NullTokenizer --mock-data --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --train-iters 4
    --lr-decay-style constant --eval-iters 0 --eval-interval 100 --log-interval 1
    --num-workers 0 --no-persist-layer-norm --save-interval 100 --no-save-optim
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model with the words of the launches' tokenizer."""
    made = tmp_path_factory.mktemp("kimi") / "hf"
    made.mkdir()
    model = build(KIMI, q_lora_rank=None, vocab_size=256)
    as_kimi_published(model, made)
    return made


def trained(folder, imported, saved, processes, *flags) -> list[float]:
    every = [*megatron_flags(read_hf_config(folder)), *FLAGS.split()]
    every += [f"--load={imported}", f"--save={saved}", *flags]
    return losses(launched(SCRIPT, processes, *every, launcher=True))


def test_a_launch_goes_on_from_an_import_and_its_checkpoint_exports(folder, tmp_path):
    imported = tmp_path / "imported"
    import_folder(folder, imported)
    unchanged = ["--lr=0", "--min-lr=0", "--moe-router-bias-update-rate=0"]
    trained(folder, imported, tmp_path / "unchanged", 1, *unchanged)
    export_folder(tmp_path / "unchanged", tmp_path / "same", like=folder)
    assert list(compare_folders(folder, tmp_path / "same")) == []

    one = trained(folder, imported, tmp_path / "one", 1, "--lr=3e-3")
    tp = ["--tensor-model-parallel-size=2", "--sequence-parallel"]
    two = trained(folder, imported, tmp_path / "two", 2, "--lr=3e-3", *tp)
    assert one == pytest.approx(two, rel=1e-5)
    assert one[-1] < one[0]
    export_folder(tmp_path / "two", tmp_path / "back", like=folder)
    changed = [str(one) for one in compare_folders(folder, tmp_path / "back")]
    assert any("e_score_correction_bias" in one for one in changed)
    assert any("kv_b_proj" in one for one in changed)
    model = hf_model(tmp_path / "back")
    logits = model(torch.arange(64)[None], use_cache=False).logits
    assert logits.isfinite().all()
