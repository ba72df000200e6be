"""Our Kimi Delta Attention beside newer Megatrons' own class, from one file."""

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.distributed.layer_laws import thd
from tests.distributed.mixers import build_kda, config_of, draw_
from tests.distributed.model_laws import leaves
from tests.parallel import assert_close, groups_of_megatron
from tests.ranks import on_ranks
from tests.upstream_kda import HAS_KDA, megatrons, without_kernels

pytestmark = pytest.mark.skipif(
    not HAS_KDA, reason="needs a Megatron that has KimiDeltaAttention"
)
# Megatron's class has as many key heads as value heads, of equal dims.
SIZES = {
    "hidden_size": 20,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "linear_cp_mode": "headwise",
}
BOUNDED = {"kda_safe_gate": True, "kda_lower_bound": -5.0}
FULL = {"forget_rank": None, "output_rank": None}  # as the config says
LENGTHS = (24, 8, 40)
# Both sides compute in fp32, in another order: some hundred additions of 6e-8 each.
TOLERANCE = 2e-5


def both(tp: int, **changes):
    """Megatron's layer with random weights, and ours."""
    sizes = {"tensor_model_parallel_size": tp, **SIZES, **changes}
    groups = groups_of_megatron()
    torch.manual_seed(5 + groups.tp.rank())
    theirs = megatrons(config_of(sizes), groups)
    draw_(theirs)
    with torch.no_grad():  # the same on all ranks
        torch.manual_seed(9)
        theirs.out_norm.weight.copy_(1 + torch.randn(theirs.value_head_dim) / 10)
    return theirs, build_kda(config_of(sizes), groups, **FULL)


def sharded(mixer) -> dict:
    return mixer.sharded_state_dict("mixer.")


def through_a_file(one, other, folder) -> None:
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(one), str(folder))
    loaded = dist_checkpointing.load(sharded(other), str(folder))
    other.load_state_dict({k.removeprefix("mixer."): v for k, v in loaded.items()})


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)]
)
@pytest.mark.parametrize("changes", [{}, BOUNDED], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@on_ranks(tp="tp")
def test_from_one_file_both_have_the_same_output_and_gradients(
    packed, changes, sequence_parallel, tp, tmp_path
):
    with without_kernels():
        theirs, ours = both(tp, sequence_parallel=sequence_parallel, **changes)
        through_a_file(theirs, ours, tmp_path / "theirs")
        tokens = sum(LENGTHS)
        torch.manual_seed(3)
        x, weight = torch.randn(2, tokens, 1 if packed else 2, SIZES["hidden_size"])
        if sequence_parallel:
            rank = ours.tp_group.rank()
            x, weight = (each.chunk(tp)[rank] for each in (x, weight))
        found = []
        for mixer in (theirs, ours):
            leaf = x.clone().requires_grad_()
            documents = thd(LENGTHS) if packed else None
            y, bias = mixer(leaf, None, packed_seq_params=documents)
            assert bias is None
            (y * weight).sum().backward()
            found.append({"output": y.detach(), "input": leaf.grad, **grads(mixer)})
        assert found[0].keys() == found[1].keys()
        for name, expected in found[0].items():
            assert expected.abs().max() > 0, name
            assert_close(name, found[1][name], expected, TOLERANCE)


def grads(mixer) -> dict[str, torch.Tensor]:
    """Whole gradients of weights that every rank has whole, in either class."""
    made = {}
    group = mixer.tp_group
    for name, parameter in mixer.named_parameters():
        gradient = parameter.grad
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=group)
        if name == "beta_proj.weight" and len(gradient) < mixer.num_key_heads:
            parts = [torch.empty_like(gradient) for _ in range(group.size())]
            torch.distributed.all_gather(parts, gradient, group=group)
            gradient = torch.cat(parts)
        is_megatrons = type(mixer).__module__.startswith("megatron.core")
        split = mixer.config.sequence_parallel
        if name == "out_norm.weight" and is_megatrons and not split:
            # Megatron's class leaves each rank with the gradient of its heads.
            torch.distributed.all_reduce(gradient, group=group)
        made[name] = gradient
    return made


@pytest.mark.parametrize("tp", [1, 2, 4])
@on_ranks(tp="tp")
def test_files_of_each_load_into_the_other(tp, tmp_path):
    def described(mixer):
        found = [leaf for leaf in leaves(sharded(mixer)) if hasattr(leaf, "dtype")]
        return {leaf.key: leaf.global_shape for leaf in found}

    with without_kernels():
        theirs, ours = both(tp)
        assert described(ours) == described(theirs)
        through_a_file(theirs, ours, tmp_path / "theirs")
        again, _ = both(tp)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        through_a_file(ours, again, tmp_path / "ours")
        for name, parameter in theirs.named_parameters():
            assert torch.equal(parameter, again.get_parameter(name)), name


@on_ranks(tp=1)
def test_constructor_and_plain_state_dict_are_megatrons():
    with without_kernels():
        theirs, ours = both(1)
        assert [*ours.state_dict()] == [*theirs.state_dict()]
        assert not any(ours.load_state_dict(theirs.state_dict()))
