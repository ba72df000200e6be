"""Adapters around in_proj (LoRA, DoRA) load at every tensor-parallel size."""

import pytest

from tests.distributed import adapter_laws as laws
from tests.distributed import bridge, peft_rows_laws
from tests.distributed import bridge_peft_laws as peft_laws
from tests.distributed.bridge import needs_bridge


@pytest.mark.parametrize("as_bridge_alone", [False, True], ids=["by sections", "whole"])
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_an_adapter_of_two_ranks_is_the_same_adapter_on_one_and_two(
    pools, tmp_path, mixer, as_bridge_alone
):
    """Files by sections, and files with whole rows that were written without this package."""
    pools(2).run(laws.save, mixer, str(tmp_path), 2, as_bridge_alone)
    for tp in (1, 2):
        for differences in pools(2).run(laws.load, mixer, str(tmp_path), tp):
            assert len(differences) == 3
            assert not any(differences.values()), differences


def test_an_adapter_with_pefts_names_is_the_same_on_one_rank_and_two(pools, tmp_path):
    pools(2).run(peft_rows_laws.save, str(tmp_path), 2)
    for tp in (1, 2):
        for equal in pools(2).run(peft_rows_laws.load, str(tmp_path), tp):
            assert equal == dict.fromkeys(equal, True)


@needs_bridge
@pytest.mark.parametrize("as_bridge_alone", [False, True], ids=["by sections", "whole"])
@pytest.mark.parametrize(("mixer", "kind"), [("gdn", "LoRA"), ("gdn", "DoRA"), ("mamba2", "LoRA")])
def test_bridges_own_adapters_do_the_same(pools, tmp_path, mixer, kind, as_bridge_alone):
    """DoRA around Mamba's in_proj has no files in Bridge: its own adapter raises TypeError."""
    own = (bridge.FOLDER, kind)
    pools(2).run(laws.save, mixer, str(tmp_path), 2, as_bridge_alone, own)
    for tp in (1, 2):
        for differences in pools(2).run(laws.load, mixer, str(tmp_path), tp, own):
            assert len(differences) == {"LoRA": 2, "DoRA": 3}[kind]
            assert not any(differences.values()), differences


@needs_bridge
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"]
)
def test_a_layer_with_bridges_lora_equals_the_layer_of_merged_weights(
    pools, mixer, tp, sequence_parallel
):
    """Output, input gradient and the gradients of every A and B; nothing else has one."""
    pools(tp).run(peft_laws.equals_the_merged_layer, bridge.FOLDER, mixer, tp, sequence_parallel)
