"""A forward that no backward follows keeps nothing but its output, and no tensor in two
forms."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.distributed.layer_laws import thd
from tests.distributed.mixers import whole
from tests.inference.row_mixers import KINDS
from tests.live_tensors import LiveBytes, bytes_per_token

pytestmark = pytest.mark.usefixtures("one_rank")


LAYERS = {
    "gdn": lambda: whole("gdn"),
    "gdn, light": lambda: whole("gdn", recompute="light"),
    "gdn, full": lambda: whole("gdn", recompute="full"),
    "mamba2": lambda: whole("mamba2"),
}
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def forward_only(layer, x, packed=None):
    return layer(x, None, packed_seq_params=packed)[0]


@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_saved_and_nothing_stays(name, mode, packed, training):
    layer = LAYERS[name]().train(training)
    saved = []
    x = torch.randn(150, 1, layer.config.hidden_size, requires_grad=True)
    documents = thd((70, 0, 80)) if packed else None
    with (
        torch.enable_grad(),
        saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        expected = forward_only(layer, x, documents)
        assert saved  # the hooks see what a backward would need
    with MODES[mode](), LiveBytes() as live:
        out = forward_only(layer, x, documents)
    assert torch.equal(out, expected)
    assert live.now == out.untyped_storage().nbytes()


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_backward_computes_again_costs_a_forward_alone_nothing(name):
    """A layer in training mode holds as little as in evaluation mode, at most and at
    its end."""
    layer = LAYERS[name]()
    x = torch.randn(640, 1, layer.config.hidden_size)
    found = []
    for training in (True, False):
        layer.train(training)
        with torch.no_grad():
            forward_only(layer, x)
            with LiveBytes() as live:
                hook = layer.out_proj.register_forward_pre_hook(
                    lambda *_: found.append(live.now)
                )
                forward_only(layer, x)
        hook.remove()
        found.append(live.most)
    assert found[:2] == found[2:]


@pytest.mark.each_value
@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_mixer_holds_the_inputs_of_its_rule_and_the_output_at_most(kind, packed):
    """Beside its rows: once each, in the aligned form, whose intermediates are of one
    chunk."""
    layout = kind.layout
    heads = kind.layout.state_heads
    widths = dict(zip(layout.names, layout.widths, strict=True))
    gates = {
        "kda": widths.get("g", 0) + heads,
        "gdn2": sum(widths.get(name, 0) for name in ("f", "b", "w")),
        "gdp": layout.width - layout.main_width,
    }.get(kind.name, 2 * heads)
    wide = 4 * (layout.conv_width + gates + layout.mixed_width)
    steps = kind.mixer().table.steps
    if steps > 1:  # the rule holds q, g and o for each step of a token
        wide += 4 * (steps * (widths["Q"] + heads) + (steps - 1) * layout.mixed_width)

    def lengths(tokens: int) -> tuple[int, ...] | None:
        return (tokens // 2 - 3, tokens // 2 + 3) if packed else None

    def bytes_of(mode, *tokens: int) -> float:
        with mode():
            return bytes_per_token(
                lambda n: kind.trained(
                    kind.rows(n).requires_grad_(), lengths(n), aligned=True
                ),
                tokens,
            )

    rows = 4 * layout.width  # made inside, by the test
    # The documents keep their chunk table for all layers: int64 slot of each token,
    # int64 token and bool `empty` of each slot. Whole chunks may be 64 slots more
    # between the two lengths.
    # A rule of n steps has a second table, of n rows per token.
    of_tables = {1, steps} if packed else set()
    table = sum(8 * n + (8 + 1) * (n + 64 / 320) for n in of_tables)
    assert wide + rows <= bytes_of(torch.no_grad, 320, 640) <= wide + rows + table
    if kind.name == "mamba2" and not packed:  # the measure sees what a backward keeps
        assert bytes_of(nullcontext, 1280, 2560) > wide + rows
