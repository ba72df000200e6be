"""Our Gated DeltaProduct beside Megatron main's own class, from one file."""

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_gdn import GatedDeltaProduct, patch_megatron
from tests.distributed.layer_laws import thd
from tests.distributed.mixers import MAMBA_SIZES, build_gdp, config_of, draw_
from tests.distributed.model_laws import leaves
from tests.parallel import assert_close, groups_of_megatron
from tests.ranks import on_ranks
from tests.upstream_gdp import HAS_GDP, megatrons, megatrons_class, without_kernels

pytestmark = pytest.mark.skipif(
    not HAS_GDP, reason="needs a Megatron that has Gated DeltaProduct"
)
LENGTHS = (24, 8, 40)
# Both sides compute in fp32, in another order: some hundred additions of 6e-8 each.
TOLERANCE = 2e-5


def both(tp: int, steps: int, **changes):
    """Megatron's layer with random weights, and ours."""
    options = {"bias": True, "conv_bias": True}
    sizes = {
        **MAMBA_SIZES,
        "mamba_num_groups": 4,
        "tensor_model_parallel_size": tp,
        "gdp_num_householder": steps,
        **changes,
    }
    groups = groups_of_megatron()
    torch.manual_seed(5 + groups.tp.rank())
    theirs = megatrons(config_of(sizes), groups, **options)
    draw_(theirs)
    with torch.no_grad():  # the same on all ranks
        torch.manual_seed(9)
        theirs.out_proj.bias.normal_()
    ours = build_gdp(config_of(sizes), groups, num_householder=None, **options)
    assert ours.num_householder == steps
    return theirs, ours


def sharded(mixer) -> dict:
    return mixer.sharded_state_dict("mixer.")


def through_a_file(one, other, folder) -> None:
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(one), str(folder))
    loaded = dist_checkpointing.load(sharded(other), str(folder))
    other.load_state_dict({k.removeprefix("mixer."): v for k, v in loaded.items()})


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)]
)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@on_ranks(tp="tp")
def test_from_one_file_both_have_the_same_output_and_gradients(
    packed, steps, sequence_parallel, tp, tmp_path
):
    with without_kernels():
        theirs, ours = both(tp, steps, sequence_parallel=sequence_parallel)
        through_a_file(theirs, ours, tmp_path / "theirs")
        tokens = sum(LENGTHS)
        torch.manual_seed(3)
        x, weight = torch.randn(2, tokens, 1 if packed else 2, ours.d_model)
        if sequence_parallel:
            rank = ours.tp_group.rank()
            x, weight = (each.chunk(tp)[rank] for each in (x, weight))
        found = []
        for mixer in (theirs, ours):
            leaf = x.clone().requires_grad_()
            documents = thd(LENGTHS) if packed else None
            y, bias = mixer(leaf, packed_seq_params=documents)
            ((y + bias) * weight).sum().backward()
            grads = {name: p.grad for name, p in mixer.named_parameters()}
            found.append({"output": y.detach(), "input": leaf.grad, **grads})
        assert found[0].keys() == found[1].keys()
        for name, expected in found[0].items():
            assert expected.abs().max() > 0, name
            assert_close(name, found[1][name], expected, TOLERANCE)


@pytest.mark.parametrize("tp", [1, 2, 4])
@on_ranks(tp="tp")
def test_files_of_each_load_into_the_other(tp, tmp_path):
    def described(mixer):
        found = [leaf for leaf in leaves(sharded(mixer)) if hasattr(leaf, "dtype")]
        return {leaf.key: leaf.global_shape for leaf in found}

    with without_kernels():
        theirs, ours = both(tp, 2)
        assert described(ours) == described(theirs)
        through_a_file(theirs, ours, tmp_path / "theirs")
        again, _ = both(tp, 2)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        through_a_file(ours, again, tmp_path / "ours")
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter, again.get_parameter(name)), name


@on_ranks(tp=1)
def test_a_call_of_megatrons_class_builds_ours_until_it_is_given_back():
    theirs = megatrons_class()
    config = config_of(MAMBA_SIZES)
    found = []
    for options in ({"gdp": {"num_householder": 4}}, {}, {"gdn": False}):
        patch_megatron(**options)
        with without_kernels():
            found.append(megatrons(config, groups_of_megatron()))
    assert [type(x) for x in found] == [GatedDeltaProduct, GatedDeltaProduct, theirs]
    assert [x.num_householder for x in found] == [4, 3, 3]


@on_ranks(tp=1)
def test_parameters_and_plain_state_dict_are_megatrons():
    with without_kernels():
        theirs, ours = both(1, 2)
        names = [name for name, _ in theirs.named_parameters()]
        assert [name for name, _ in ours.named_parameters()] == names
        assert [*ours.state_dict()] == [*theirs.state_dict()]
        assert not any(ours.load_state_dict(theirs.state_dict()))
