"""What holds under either scheme of context parallelism, and which one a layer
takes."""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_gdn import set_documents, static_packed_seq_params
from megatron_gdn.compat import observe
from megatron_gdn.context_parallel import price
from megatron_gdn.context_parallel.layouts import SequenceLayout
from megatron_gdn.context_parallel.scheme import WholeSequences
from megatron_gdn.gdn import layer as layer_module
from megatron_gdn.mixers.packing import static_documents_of
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.choice import Choice
from tests.distributed.layer_laws import (
    build_layer,
    forward_backward,
    over_ranks,
    randomise_,
    require_same_bits,
    thd,
)
from tests.other_defaults import by_both_defaults
from tests.parallel import groups_of_megatron, make_config
from tests.ranks import on_ranks

RECOMPUTE = {"recompute": "light"}
ONE_KEY_HEAD = {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
MODES = ("headwise", "chunkwise")
LAYOUTS = ("zigzag", "zigzag_buffer", "contiguous")
modes = pytest.mark.parametrize("linear_cp_mode", MODES)


def forget_tables(layer) -> None:
    """Empty every cache of a function in the package, and the layer's of
    micro-batches."""
    modules = [m for name, m in sys.modules.items() if name.startswith("megatron_gdn.")]
    found = {
        id(x): x for m in modules for x in vars(m).values() if hasattr(x, "cache_clear")
    }
    assert len(found) > 5
    for cache in found.values():
        cache.cache_clear()
    layer.micro_batches._batches.clear()


@modes
@on_ranks(cp=2)
def test_training_works_after_an_evaluation_in_inference_mode(linear_cp_mode):
    """Tables that an evaluation made under ``torch.inference_mode`` serve training
    too."""
    layer = over_ranks(linear_cp_mode=linear_cp_mode)
    x = torch.randn(24, 1, layer.hidden_size)
    packed = thd((16, 32))
    with torch.inference_mode():
        layer(x, None, packed_seq_params=packed)
    found = forward_backward(layer, x, packed)
    assert all(tensor.isfinite().all() for tensor in found.values())


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("cp", "linear_cp_mode", "layout"),
    [(1, "auto", "zigzag"), *((2, m, y) for m in MODES for y in LAYOUTS)],
)
@on_ranks(cp="cp")
def test_no_bit_follows_torchs_defaults(cp, linear_cp_mode, layout):
    layer = over_ranks(linear_cp_mode=linear_cp_mode, cp_layout=layout)
    lengths = (3, 0, 61, 7) if cp == 1 else (20, 0, 84)
    x = torch.randn(sum(lengths) // cp, 1, layer.hidden_size)

    def results() -> list[dict[str, torch.Tensor]]:
        made = []
        fixed = static_packed_seq_params(sum(lengths), 4, device="cpu")
        set_documents(fixed, [*accumulate(lengths, initial=0)])
        for packed in (None, thd(lengths), fixed):
            forget_tables(layer)
            made.append(forward_backward(layer, x, packed))
        # of which kernels read more than the plain code does
        tables = static_documents_of(fixed)._tables.values()
        tensors = (x for _, of_table in tables for x in of_table)
        made.append({str(number): x for number, x in enumerate(tensors)})
        return made

    for found, expected in zip(*by_both_defaults(results), strict=True):
        require_same_bits(found, expected)


def test_places_on_one_rank_do_not_follow_the_default_device():
    with torch.device("meta"):
        places = WholeSequences(HeadSizes(2, 4, 5, 6).layout).local_positions(None, 3)
    assert places.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("cp", "options"),
    [(1, {}), (1, RECOMPUTE), *((2, {"linear_cp_mode": mode}) for mode in MODES)],
    ids=str,
)
@on_ranks(cp="cp")
def test_no_tokens_give_gradients_of_zero(cp, options):
    layer = over_ranks(**options)
    for tokens, batch, packed in ((0, 2, None), (8, 0, None), (0, 1, thd((0, 0)))):
        x = torch.randn(tokens, batch, layer.hidden_size)
        found = forward_backward(layer, x, packed)
        assert found.pop("output").shape == found["input"].shape == x.shape
        assert all((gradient == 0).all() for gradient in found.values())


@modes
@on_ranks(cp=2)
def test_recomputing_the_norm_works_inside_checkpoints(linear_cp_mode):
    """In a block that a checkpoint of either kind computes again."""
    layer = over_ranks(linear_cp_mode=linear_cp_mode, recompute="light")
    randomise_(layer)
    x = torch.randn(24, 1, layer.hidden_size)
    packed = thd((16, 32))

    def block(x, *_, **__):
        return layer(x, None, packed_seq_params=packed)[0].tanh(), None

    plain = forward_backward(layer, x, run=block)
    for reentrant in (True, False):
        again = partial(checkpoint, block, use_reentrant=reentrant)
        found = forward_backward(
            layer, x, run=lambda x, *_, again=again, **__: again(x)
        )
        require_same_bits(found, plain)


@on_ranks(cp=2)
def test_a_checkpoint_holds_while_auto_changes_the_scheme():
    """It compares what its two forwards save; prices without fixed parts make tiny
    sizes differ."""
    with patch.multiple(price, FIXED_TIME=0, COLLECTIVE_TIME=0, PRODUCT_TIME=0):
        layer = over_ranks(linear_cp_mode="auto")
        randomise_(layer)
        schemes = []
        for lengths in ((4096,), (16,) * 8, (8,), (4096,)):
            packed = thd(lengths)
            x = torch.randn(sum(lengths) // 2, 1, layer.hidden_size, requires_grad=True)

            def block(x, packed=packed):
                out, _ = layer(x, None, packed_seq_params=packed)
                schemes.append(layer.micro_batches.of(packed, out).scheme.name)
                return out

            checkpoint(block, x, use_reentrant=False).sum().backward()
        assert set(schemes) == {"headwise", "chunkwise"}, schemes


def _projection(layer, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As many rows of one rank as one asks for, without memory."""
    return torch.empty(tokens, 1, layer.dims.layout.width, dtype=dtype, device="meta")


def chosen(
    tokens: int,
    config_mode: str | None = None,
    dtype: torch.dtype = torch.float32,
    most_heads: int | None = None,
    sizes: dict | None = None,
    **options,
) -> str:
    """The scheme, under a delta rule that runs at most so many heads on a rank."""

    class FewHeads(PlainRule):
        def why_not_heads(self, heads: int) -> str | None:
            return (
                None if heads <= most_heads else f"this rule runs at most {most_heads}"
            )

    rule = lambda *_, **__: Choice(FewHeads(), "a test")  # noqa: E731
    config = make_config(context_parallel_size=2, **(sizes or {}))
    config.linear_cp_mode = config_mode
    patched = patch.object(layer_module, "resolve_rule", rule)
    with nullcontext() if most_heads is None else patched:
        layer = build_layer(config, groups_of_megatron(), options)
        return layer.micro_batches.of(
            None, _projection(layer, tokens // 2, dtype)
        ).scheme.name


@on_ranks(cp=2)
def test_the_mode_comes_from_the_spec_or_the_config():
    long = 2**20
    short = 64
    assert chosen(short) == "headwise" and chosen(long) == "chunkwise"
    assert (
        chosen(short, "chunkwise") == "chunkwise"
        and chosen(long, "headwise") == "headwise"
    )
    assert chosen(short, "headwise", linear_cp_mode="chunkwise") == "chunkwise"
    assert chosen(short, sizes=ONE_KEY_HEAD) == "chunkwise"
    assert chosen(long, sizes={"batch_invariant_mode": True}) == "headwise"
    assert chosen(short, most_heads=4) == "headwise"
    assert chosen(short, most_heads=3) == "chunkwise"


@on_ranks(cp=2)
def test_activations_are_priced_in_their_own_dtype():
    """Twice the bytes per row cost headwise twice, and chunkwise nothing more."""
    for dtype, scheme in ((torch.bfloat16, "headwise"), (torch.float32, "chunkwise")):
        assert chosen(2**19, dtype=dtype) == scheme


@on_ranks(cp=2)
def test_auto_logs_each_choice_once():
    """Three layers meet a short, a long and another short micro-batch."""
    messages: list[str] = []
    observe.log_once.cache_clear()
    with patch.object(
        observe, "log_single_rank", lambda *args: messages.append(args[2])
    ):
        layers = [over_ranks() for _ in range(3)]
        for tokens in (8, 2**20, 12):
            for layer in layers:
                layer.micro_batches.of(None, _projection(layer, tokens // 2))
    headwise, chunkwise = [m for m in messages if "linear_cp_mode" in m]
    assert "takes 'headwise'" in headwise and "8 tokens" in headwise
    assert "2 ranks, 2 per machine" in headwise and "ms chunkwise" in headwise
    assert "takes 'chunkwise'" in chunkwise


@pytest.mark.parametrize("case", ["rows", "documents", "bf16"])
@on_ranks(cp=2)
def test_auto_takes_the_price_of_the_micro_batch_that_it_gets(case):
    """Each batch row has states of its own, and in zigzag each document."""
    messages: list[str] = []
    observe.log_once.cache_clear()
    layer = over_ranks()
    tokens = 2**16 if case == "documents" else 2**18
    lengths = (16,) * (tokens // 16) if case == "documents" else None
    rows = 3 if case == "rows" else 1
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    proj = torch.empty(1, 1, layer.dims.layout.width, dtype=dtype)
    proj = proj.expand(tokens // 2, rows, -1)
    packed = None if lengths is None else thd(lengths)
    with patch.object(
        observe, "log_single_rank", lambda *args: messages.append(args[2])
    ):
        scheme = layer.micro_batches.of(packed, proj).scheme
    cost = price.price(
        layer.dims.heads.state_shape,
        layer.dims.layout.share(2),
        cp_size=2,
        layout=SequenceLayout.ZIGZAG,
        tokens=tokens,
        rows=rows,
        lengths=lengths,
        element_size=dtype.itemsize,
        ranks_per_machine=2,
    )
    assert scheme.name == cost.cheaper_mode
    (message,) = [m for m in messages if "linear_cp_mode" in m]
    sequences = rows if lengths is None else len(lengths)
    assert f"{tokens} tokens in {sequences} sequences over 2 ranks" in message
    assert f"{cost.headwise:.2f} ms headwise, {cost.chunkwise:.2f} ms c" in message


@on_ranks(cp=2)
def test_modes_that_cannot_run_are_refused():
    for options, message in (
        ({"linear_cp_mode": "ring"}, "'headwise', 'chunkwise', 'auto'"),
        (
            {"linear_cp_mode": "headwise", "changes": ONE_KEY_HEAD},
            "linear_cp_mode='chunkwise'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            over_ranks(**options)
    with pytest.raises(
        ValueError, match="leaves 4 value heads on a rank.*runs at most 3"
    ):
        chosen(8, "headwise", most_heads=3)
