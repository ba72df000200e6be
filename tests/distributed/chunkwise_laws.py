"""Run on every rank: chains of affine maps, and what is said of schemes and modes."""

import logging
import os
import sys
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils.checkpoint import checkpoint

from megatron_gdn import SequenceLayout
from megatron_gdn.compat import observe
from megatron_gdn.context_parallel import agreement, local_indices, price
from megatron_gdn.context_parallel.chunkwise.map_exchange import pack
from megatron_gdn.context_parallel.chunkwise.scheme import EXCHANGES
from megatron_gdn.context_parallel.chunkwise.states import chain_nodes
from megatron_gdn.gdn import layer as layer_module
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.mixers import micro_batch
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.choice import Choice
from tests.distributed.layer_laws import build_layer, by_way_of, randomise_, thd
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.ops.delta_rule.states import InHalf
from tests.parallel import group_of_one, make_config, parallel


def chains_equal_their_product(
    layout: str, backwards: bool, dtype: torch.dtype, cuts: tuple[int, ...] = ()
) -> None:
    """Every exchange gives every node the product of the maps before it.

    Before the last cut may stand NaN: no bit after it changes.
    """
    rank, size, M, K, V = dist.get_rank(), dist.get_world_size(), 3, 4, 5
    nodes = chain_nodes(size, SequenceLayout.parse(layout), frozenset(cuts))
    nodes = nodes.backwards() if backwards else nodes
    torch.manual_seed(0)  # the same maps on every rank, of which each uses its own
    n = len(nodes.hosts)
    local, through = torch.randn(n, M, K, V, dtype=dtype), torch.randn(n, M, K, K, dtype=dtype) / 2
    through[list(nodes.cuts)] = 0
    state, entering = torch.zeros(M, K, V, dtype=torch.float64), []
    for j in range(n):
        entering.append(state)
        state = through[j].double() @ state + local[j].double()
    mine = nodes.of(rank)
    maps = torch.empty(len(mine), M, K, V + K, dtype=dtype)
    for j, slot in mine:
        maps[slot] = pack(local[j], through[j])
    last = max(nodes.cuts, default=-1)
    ill = maps.clone()
    for j, slot in mine:
        if j < last:
            ill[slot] = float("nan")
    for exchange in EXCHANGES.values():
        got = exchange(maps, V, nodes, dist.group.WORLD)
        again = exchange(maps, V, nodes, dist.group.WORLD)
        assert got.dtype == dtype and torch.equal(got, again)
        beside_nan = exchange(ill, V, nodes, dist.group.WORLD)
        for j, slot in mine:
            assert j <= last or torch.equal(beside_nan[slot], got[slot]), (j, last)
            # Products of up to 16 maps, each a sum of 4: some 8 roundings deep.
            torch.testing.assert_close(
                got[slot].double(), entering[j], rtol=0, atol=64 * torch.finfo(dtype).eps
            )


def fp16_operands_equal_one_rank(cp: int, **options) -> None:
    """Every rank takes powers of two of its own; states and their gradients know none of them.

    To twice 8 tensors' rounding to fp16 by 2^-12: each side has its own.
    """
    choice = Choice(HalfOperands(InHalf()), "fp16 operands")
    with patch.object(layer_module, "choose_rule", lambda *_, **__: choice):
        parallel_equals_one_rank(replace(GDN, tolerance=2 * 8 * 2**-12), 1, cp, **options)


def either_exchange_equals_one_rank(exchange: str, *args, **options) -> None:
    with patch.object(micro_batch, "Chunkwise", by_way_of(exchange)):
        parallel_equals_one_rank(GDN, *args, mode="chunkwise", **options)


def the_mode_of_the_config_equals_one_rank(mode: str) -> None:
    def config(**changes):
        made = make_config(**changes)
        made.linear_cp_mode = mode
        return made

    parallel_equals_one_rank(replace(GDN, config=config), 1, 2)


def _layer(cp: int, **options):
    groups = ProcessGroupCollection(
        tp=group_of_one(), cp=parallel_state.get_context_parallel_group()
    )
    changes = options.pop("sizes", {})
    return build_layer(make_config(context_parallel_size=cp, **changes), groups, options)


def two_runs_are_bitwise_equal(cp: int, lengths: tuple[int, ...] | None) -> None:
    with parallel(cp=cp):
        torch.manual_seed(7)
        layer = _layer(cp, linear_cp_mode="chunkwise", sizes={"deterministic_mode": True})
        randomise_(layer)
        tokens, batch = (48, 2) if lengths is None else (sum(lengths), 1)
        x = torch.randn(tokens, batch, layer.hidden_size)
        x = x[local_indices(lengths or (tokens,), cp, dist.get_rank())]

        def run():
            leaf = x.clone().requires_grad_()
            packed = None if lengths is None else thd(lengths)
            out, _ = layer(leaf, None, packed_seq_params=packed)
            grads = torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])
            return [out, *grads]

        assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def forget_tables(layer) -> None:
    """Empty every cache of a function in the package, and the layer's of micro-batches.

    What they hold was made on some device.
    """
    modules = [m for name, m in sys.modules.items() if name.startswith("megatron_gdn.")]
    found = {id(x): x for m in modules for x in vars(m).values() if hasattr(x, "cache_clear")}
    assert len(found) > 5
    for cache in found.values():
        cache.cache_clear()
    layer.micro_batches._made.clear()


def trains_after_inference_mode(cp: int, mode: str) -> None:
    """Tables that an evaluation made under ``torch.inference_mode`` serve training too."""
    with parallel(cp=cp):
        layer = _layer(cp, linear_cp_mode=mode, sizes={})
        x = torch.randn(24, 1, layer.hidden_size)
        with torch.inference_mode():
            layer(x, None, packed_seq_params=thd((16, 32)))
        out, _ = layer(x, None, packed_seq_params=thd((16, 32)))
        grads = torch.autograd.grad(out.sum(), list(layer.parameters()))
        assert all(grad.isfinite().all() for grad in grads)


def tables_do_not_follow_the_default_device(cp: int, mode: str, layout: str) -> None:
    """Nothing that is worked out on the host comes up on ``torch.set_default_device``'s.

    On meta, which stands for a GPU here, it would have no values.
    """
    with parallel(cp=cp):
        layer = _layer(cp, linear_cp_mode=mode, cp_layout=layout)
        x = torch.randn(52, 1, layer.hidden_size)

        def results() -> list[torch.Tensor]:
            made = []
            for packed in (None, thd((20, 0, 84))):
                forget_tables(layer)
                layer.zero_grad()
                leaf = x.clone().requires_grad_()
                out = layer(leaf, None, packed_seq_params=packed)[0]
                out.backward(torch.ones_like(out))
                made += [out, leaf.grad, *(p.grad for p in layer.parameters())]
            return made

        usual = results()
        with torch.device("meta"):
            elsewhere = results()
        assert all(torch.equal(a, b) for a, b in zip(usual, elsewhere, strict=True))


def no_tokens_give_gradients_of_zero(cp: int, mode: str) -> None:
    with parallel(cp=cp):
        layer = _layer(cp, linear_cp_mode=mode)
        for tokens, batch, packed in ((0, 2, None), (8, 0, None), (0, 1, thd((0, 0)))):
            x = torch.randn(tokens, batch, layer.hidden_size, requires_grad=True)
            layer.zero_grad()
            out, _ = layer(x, None, packed_seq_params=packed)
            assert out.shape == x.shape
            out.sum().backward()
            assert x.grad.shape == x.shape
            assert all((p.grad == 0).all() for p in layer.parameters())


def recomputing_the_norm_inside_a_checkpoint_changes_nothing(cp: int, mode: str) -> None:
    """``recompute_norm_out`` in a block that a checkpoint of either kind computes again."""
    with parallel(cp=cp):
        layer = _layer(cp, linear_cp_mode=mode, recompute_norm_out=True)
        randomise_(layer)
        x = torch.randn(48 // cp, 1, layer.hidden_size)

        def grads(reentrant: bool | None) -> list[torch.Tensor]:
            leaf = x.clone().requires_grad_()
            layer.zero_grad()

            def block(x):
                return layer(x, None, packed_seq_params=thd((16, 32)))[0].tanh()

            if reentrant is None:
                out = block(leaf)
            else:
                out = checkpoint(block, leaf, use_reentrant=reentrant)
            out.square().sum().backward()
            return [leaf.grad, *(p.grad for p in layer.parameters())]

        plain = grads(None)
        for reentrant in (True, False):
            assert all(torch.equal(a, b) for a, b in zip(grads(reentrant), plain, strict=True))


def a_checkpoint_holds_while_auto_changes_the_scheme() -> None:
    """What a micro-batch saves must not depend on the one before it.

    A checkpoint that is not reentrant compares what its two forwards save. Sizes are made tiny by
    prices without fixed parts.
    """
    with parallel(cp=2), patch.multiple(price, FIXED=0, LATENCY=0, STEP=0):
        layer = _layer(2, linear_cp_mode="auto")
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


def no_exchange_where_no_document_is_cut() -> None:
    """Documents that end where ranks do: chunkwise sends nothing but what ranks compare."""
    with parallel(cp=2):
        layer = _layer(2, linear_cp_mode="chunkwise", cp_layout="contiguous")
        refuse = AssertionError("a collective")
        with (
            patch.dict(os.environ, {agreement.SWITCH: "0"}),
            patch.object(dist, "all_to_all_single", side_effect=refuse),
            patch.object(dist, "all_gather_into_tensor", side_effect=refuse),
        ):
            x = torch.randn(8, 1, layer.hidden_size, requires_grad=True)
            layer(x, None, packed_seq_params=thd((5, 3, 0, 8)))[0].sum().backward()


def auto_says_once_what_it_takes() -> list[str]:
    """Messages while three layers meet a short, a long and another short micro-batch."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    observe.log_once.cache_clear()
    observe.logger.addHandler(handler)
    level = observe.logger.level
    observe.logger.setLevel(logging.INFO)
    try:
        with parallel(cp=2):
            layers = [_layer(2) for _ in range(3)]
            for tokens in (8, 2**20, 12):
                for layer in layers:
                    layer.micro_batches.of(None, _projection(layer, tokens // 2))
    finally:
        observe.logger.removeHandler(handler)
        observe.logger.setLevel(level)
    return [m for m in messages if "linear_cp_mode" in m]


def _projection(layer, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As many rows of one rank as one asks for, without memory."""
    return torch.empty(tokens, 1, layer.dims.layout.width, dtype=dtype, device="meta")


def chosen_scheme(
    tokens: int,
    config_mode: str | None = None,
    dtype: torch.dtype = torch.float32,
    most_heads: int | None = None,
    **options,
) -> str:
    """Under a delta rule that runs at most so many heads on a rank."""
    if most_heads is not None:

        class FewHeads(PlainRule):
            def why_not_heads(self, heads: int) -> str | None:
                return None if heads <= most_heads else f"this rule runs at most {most_heads}"

        choice = Choice(FewHeads(), "a test")
        with patch.object(layer_module, "choose_rule", lambda *_, **__: choice):
            return chosen_scheme(tokens, config_mode, dtype, **options)

    with parallel(cp=2):
        groups = ProcessGroupCollection(
            tp=group_of_one(), cp=parallel_state.get_context_parallel_group()
        )
        config = make_config(context_parallel_size=2, **options.pop("sizes", {}))
        config.linear_cp_mode = config_mode
        layer = build_layer(config, groups, options)
        return layer.micro_batches.of(None, _projection(layer, tokens // 2, dtype)).scheme.name


def modes_that_cannot_run_are_refused() -> None:
    one_key_head = {"linear_num_key_heads": 1, "linear_num_value_heads": 3}
    with parallel(cp=2):
        for options, message in (
            ({"linear_cp_mode": "ring"}, "'headwise', 'chunkwise', 'auto'"),
            ({"linear_cp_mode": "headwise", "sizes": one_key_head}, "linear_cp_mode='chunkwise'"),
        ):
            try:
                _layer(2, **options)
            except ValueError as raised:
                assert message in str(raised), raised
            else:
                raise AssertionError(f"accepted: {options}")
    try:
        chosen_scheme(8, "headwise", most_heads=3)
    except ValueError as raised:
        assert "leaves 4 value heads on a rank, and this rule runs at most 3" in str(raised)
    else:
        raise AssertionError("accepted: heads that the rule cannot run")
