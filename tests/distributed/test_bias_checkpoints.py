"""bias=True: megatron-core stores the projection's bias whole, we store it by sections."""

import pytest

from tests.distributed import bias_laws as laws


@pytest.mark.parametrize("written_at", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_of_upstream_loads_at_any_tensor_parallel_size(pools, tmp_path, written_at):
    pools(written_at).run(laws.save, str(tmp_path), written_at, theirs=True)
    for tp in (1, 2):
        found = pools(tp).run(laws.outcome_of_loading, str(tmp_path), tp, theirs=False)
        assert found == ["equal"] * tp
    # Why we do not write it so: upstream itself reads it at its own size only, and says nothing.
    other = 3 - written_at
    found = pools(other).run(laws.outcome_of_loading, str(tmp_path), other, theirs=True)
    assert "scrambled" in found


def test_upstream_reads_what_is_written_for_it(pools, tmp_path):
    (refusal,) = set(pools(2).run(laws.save, str(tmp_path), 2, theirs=False, gdn_whole_bias=True))
    assert "tensor_model_parallel_size=1" in refusal
    pools(1).run(laws.save, str(tmp_path), 1, theirs=False, gdn_whole_bias=True)
    assert pools(1).run(laws.outcome_of_loading, str(tmp_path), 1, theirs=True) == ["equal"]
    for tp in (1, 2):
        found = pools(tp).run(laws.outcome_of_loading, str(tmp_path), tp, theirs=False)
        assert found == ["equal"] * tp


def test_sections_are_refused_by_upstream_and_not_misread(pools, tmp_path):
    pools(1).run(laws.save, str(tmp_path), 1, theirs=False)
    (found,) = pools(1).run(laws.outcome_of_loading, str(tmp_path), 1, theirs=True)
    assert "layer.in_proj.bias" in found, found
