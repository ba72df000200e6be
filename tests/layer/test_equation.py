"""Every mixer on one rank is its equation, token by token: the output and every
gradient."""

from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.layer_laws import randomise_
from tests.distributed.mixer_laws import equals_written_out
from tests.distributed.mixers import in_fp64, whole
from tests.written_out import written_out

pytestmark = pytest.mark.usefixtures("one_rank")

BIASES = {"bias": True, "conv_bias": True}
ZERO_CENTRED = {"layernorm_zero_centered_gamma": True}
FULL_GATES = {"forget_rank": 0, "output_rank": 0}
ONE_GROUP = {"mamba_num_groups": 1, "mamba_num_heads": None, "mamba_head_dim": 4}
ONE_KEY_HEAD = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 2,
}
# A mixer, its options, and changes of its config.
CASES = {
    "gdn": ("gdn", {}, {}),
    "gdn, biases": ("gdn", BIASES, {}),
    "gdn, no l2norm": ("gdn", {"use_qk_l2norm": False, **BIASES}, {}),
    "gdn, sigmoid": ("gdn", {"output_gate_activation": "sigmoid"}, {}),
    "gdn, write strengths up to 2": ("gdn", {"allow_neg_eigval": True}, {}),
    "gdn, zero-centred norm": ("gdn", {}, ZERO_CENTRED),
    "gdn, one key head": ("gdn", {}, ONE_KEY_HEAD),
    "gdn, light": ("gdn", {"recompute": "light"}, {}),
    "gdn, full": ("gdn", {"recompute": "full", "allow_neg_eigval": True}, {}),
    "gdn2": ("gdn2", {}, {}),
    "gdn2, options": ("gdn2", {"use_qk_l2norm": False, **BIASES}, ZERO_CENTRED),
    "gdn2, light": ("gdn2", {"recompute": "light"}, {}),
    "gdn2, full": ("gdn2", {"recompute": "full"}, {}),
    "gdp": ("gdp", {}, {}),
    "gdp, one update": ("gdp", {"num_householder": 1}, {}),
    "gdp, biases": ("gdp", {"num_householder": 3, **BIASES}, {"mamba_num_groups": 8}),
    "gdp, light": ("gdp", {"recompute": "light"}, {}),
    "gdp, full": ("gdp", {"recompute": "full", "num_householder": 4}, {}),
    "kda": ("kda", {}, {}),
    "kda, biases": ("kda", {**FULL_GATES, **BIASES}, ZERO_CENTRED),
    "kda, no l2norm": ("kda", {"use_qk_l2norm": False, **BIASES}, {}),
    "kda, full output gate": (
        "kda",
        {"conv_bias": True, "forget_rank": 4, "output_rank": 0},
        {},
    ),
    "kda, bounded": (
        "kda",
        {"gate_lower_bound": -5.0, "output_rank": 3, "forget_rank": 0},
        {},
    ),
    "kda, light": ("kda", {**FULL_GATES, "recompute": "light"}, {}),
    "kda, full": ("kda", {"recompute": "full"}, {}),
    "mamba2": ("mamba2", {}, {}),
    "mamba2, D of channels": ("mamba2", {"D_has_hdim": True, "conv_bias": False}, {}),
    "mamba2, limits, no norm": (
        "mamba2",
        {"dt_limit": (0.002, 0.05), "rmsnorm": False},
        {},
    ),
    "mamba2, own groups": ("mamba2", {}, {"mamba_num_groups": 8}),
    "mamba2, one group": ("mamba2", {"expand": 2, "norm_eps": 1e-2}, ONE_GROUP),
}


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [None, (70, 0, 1, 66)], ids=["batch", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_the_mixer_is_its_equation(case, lengths):
    kind, options, changes = CASES[case]
    equals_written_out(in_fp64(kind, changes, **options), lengths, tokens=40)


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "light", "full"])
@pytest.mark.parametrize("kind", ["gdn", "gdn2", "gdp", "kda", "mamba2"])
def test_so_is_the_mixer_whose_bits_do_not_depend_on_the_cut(kind, recompute):
    """In batch-invariant mode, with chunks that end inside, at and after 64 tokens."""
    options = {} if kind == "mamba2" else {"recompute": recompute}
    mixer = in_fp64(kind, {"batch_invariant_mode": True}, **options)
    equals_written_out(mixer, (64, 0, 3, 66))


@pytest.mark.parametrize("tokens", [2, 3])
def test_so_are_the_shortest_sequences(tokens):
    equals_written_out(in_fp64("gdn", **BIASES), tokens=tokens)


def test_a_called_norm_gives_the_same():
    layer = in_fp64("gdn", output_gate_activation="sigmoid")
    layer.out_norm.register_forward_hook(lambda *_: None)
    equals_written_out(layer)


@pytest.mark.parametrize("length", [1, 65])
def test_in_bf16_the_layer_is_no_less_exact_than_its_equation_step_by_step(length):
    layer = whole("gdn")
    randomise_(layer)
    layer = layer.bfloat16()
    x = torch.randn(length, 2, 24).bfloat16()
    exact, _ = written_out(layer, x.double(), (length,))
    plain, _ = written_out(layer, x, (length,))
    found, _ = layer(x, None)
    error, plain_error = (
        (y.double() - exact).square().mean().sqrt() for y in (found, plain)
    )
    assert error <= 1.2 * plain_error


class Dtypes(TorchDispatchMode):
    """The dtypes of what each operation gives, by the operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.given = defaultdict(set)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        if isinstance(given, torch.Tensor):
            self.given[operation.overloadpacket.__name__].add(given.dtype)
        return given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gdn", "gdn2", "gdp", "kda", "mamba2"])
def test_the_equation_of_16_bit_rows_has_gates_unit_lengths_and_states_in_fp32(
    kind, dtype
):
    mixer = whole(kind)
    x = torch.randn(3, 1, mixer.config.hidden_size, dtype=dtype)
    with torch.no_grad(), Dtypes() as seen:
        y, _ = written_out(mixer, x, (3,))
    assert y.dtype == dtype
    wide = {torch.float32}
    assert seen.given["softplus"] == seen.given["bmm"] == wide
    assert kind == "mamba2" or seen.given["rsqrt"] == wide
    # The output gate of Kimi Delta Attention has the rows' dtype.
    gates = {"kda": wide | {dtype}, "mamba2": set()}
    assert seen.given["sigmoid"] == gates.get(kind, wide)
