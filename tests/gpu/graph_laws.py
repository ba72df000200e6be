"""A layer captured in a CUDA graph, forward and backward, against the same calls
without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from benchmarks.lib.measure import captured
from megatron_gdn import SequenceLayout, set_documents, static_packed_seq_params
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.specs import gated_delta_net_spec
from tests.distributed.layer_laws import (
    build_layer,
    randomise_,
    require_same_bits,
    thd,
    transformer_layer,
)
from tests.graphs_on_cpu import capturing_by_megatron
from tests.parallel import group_of_one, in_ddp, make_config, parallel

# One head configuration, which FlashQLA has compiled for other tests too.
SIZES = {
    "hidden_size": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "use_cpu_initialization": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
}
TOKENS = 4096
MOST = 12
# Of multiples of 16 tokens, so that four ranks can share them in zigzag. A document of
# 2112 tokens and more is cut into parts.
SETS = (
    (4096,),
    (2048, 2048),
    (16, 4080),
    (0, 3000 // 16 * 16, 0, 4096 - 3000 // 16 * 16),
    (1024,) * 4,
    (16, 32, 48, 64, 80, 3856),
    (1280, 0, 0, 0, 0, 1280, 0, 1536),
    (512,) * 8,
    (336,) * 11 + (400,),
    (4080, 16),
)


def offsets_of(lengths: Sequence[int], device="cuda") -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


_graphs: list[torch.cuda.CUDAGraph] = []


def replay_of(
    run: Callable[[], dict[str, torch.Tensor]],
) -> Callable[[], dict[str, torch.Tensor]]:
    """A replay of ``run`` as a CUDA graph; it returns copies of what the graph
    writes."""
    graph, made = captured(run)
    _graphs.append(graph)

    def call() -> dict[str, torch.Tensor]:
        graph.replay()
        return {name: value.clone() for name, value in made.items()}

    return call


class Step:
    """Forward and backward of one layer on a fixed input."""

    def __init__(self, tokens: int, rows: int, cp: int, group, **changes) -> None:
        torch.manual_seed(7)
        options = changes.pop("options", {})
        config = make_config(context_parallel_size=cp, **{**SIZES, **changes})
        groups = ProcessGroupCollection(tp=group_of_one(), cp=group)
        self.layer = build_layer(config, groups, options).cuda()
        randomise_(self.layer)
        shape = (2, tokens, rows, config.hidden_size)
        self.x, self.weight = torch.randn(shape, device="cuda").bfloat16().unbind()
        self.take(torch.arange(tokens // cp))

    def take(self, mine: torch.Tensor) -> None:
        """Let the rank hold these tokens, in the buffers that a graph reads."""
        if not hasattr(self, "leaf"):
            self.leaf = self.x[mine].clone().requires_grad_()
            self.d_out = self.weight[mine].clone()
        with torch.no_grad():
            self.leaf.copy_(self.x[mine])
            self.d_out.copy_(self.weight[mine])

    def run(self, packed=None) -> dict[str, torch.Tensor]:
        out, _ = self.layer(self.leaf, None, packed_seq_params=packed)
        named = {"dx": self.leaf, **dict(self.layer.named_parameters())}
        grads = torch.autograd.grad(out, list(named.values()), self.d_out)
        return {"output": out.detach(), **dict(zip(named, grads, strict=True))}


@contextmanager
def over_ranks(cp: int):
    """The context-parallel group. Its graphs end first: NCCL ends no group that a graph
    holds."""
    with parallel(cp=cp):
        try:
            yield (
                group_of_one()
                if cp == 1
                else parallel_state.get_context_parallel_group()
            )
        finally:
            while _graphs:
                _graphs.pop().reset()


def boundaries_can_be_filled_in_the_graph(**changes) -> None:
    """The offsets are a fixed buffer too, and the host does nothing but replay."""
    with over_ranks(1) as group:
        step = Step(TOKENS, 1, 1, group, **changes)
        packed = static_packed_seq_params(TOKENS, MOST)
        offsets = torch.full((MOST + 1,), TOKENS, dtype=torch.int32, device="cuda")
        offsets[0] = 0

        def fill_and_run() -> dict[str, torch.Tensor]:
            set_documents(packed, offsets)
            return step.run(packed)

        replay = replay_of(fill_and_run)
        for lengths in SETS:
            given = offsets_of(lengths)
            offsets.fill_(TOKENS)[: len(given)].copy_(given)
            replayed = replay()
            assert packed.cu_seqlens_q[: len(given)].tolist() == given.tolist()
            require_same_bits(
                step.run(packed), replayed, f"{lengths}, filled in the graph"
            )


def a_dense_graph_replays_eager_bits(cp: int = 1, rows: int = 2, **changes) -> None:
    with over_ranks(cp) as group:
        step = Step(2048, rows, cp, group, **changes)
        eager = {name: value.clone() for name, value in step.run().items()}
        replay = replay_of(step.run)
        for _ in range(3):
            require_same_bits(replay(), eager, "dense")
        with torch.no_grad():
            step.leaf.mul_(0.5)  # replays read their inputs anew
        again = replay()
        require_same_bits(again, step.run(), "dense, other input")
        assert not torch.equal(again["output"], eager["output"])


def a_packed_graph_replays_eager_bits(
    cp: int = 1, layout: str = "zigzag", *, as_ordinary: bool, sets=SETS, **changes
) -> None:
    """One graph, ten sets of documents; ``as_ordinary``: with the bits of ordinary
    documents."""
    options = {"cp_layout": layout, **changes.pop("options", {})}
    with over_ranks(cp) as group:
        step = Step(TOKENS, 1, cp, group, options=options, **changes)
        packed = static_packed_seq_params(TOKENS, MOST)
        replay = replay_of(lambda: step.run(packed))
        for lengths in sets:
            mine = local_indices(lengths, cp, group.rank(), SequenceLayout(layout))
            step.take(mine.cuda())
            set_documents(packed, offsets_of(lengths))
            replayed = replay()
            require_same_bits(
                step.run(packed), replayed, f"{lengths} eager and replayed"
            )
            ordinary = step.run(thd(lengths, "cuda"))
            if as_ordinary:
                require_same_bits(
                    replayed, ordinary, f"{lengths} in buffers and as they come"
                )
            for name, value in ordinary.items():
                error = (
                    (replayed[name].double() - value.double()).square().mean().sqrt()
                )
                scale = value.double().square().mean().sqrt()
                # Two cuts of a sequence are two draws of bf16's errors.
                assert error <= 2**-6 * scale, (lengths, name, float(error / scale))
        dist.barrier()


def layer_of_megatron(
    cp: int = 1, mode: str | None = None, **changes
) -> torch.nn.Module:
    """A transformer layer with our mixer and nothing else in it."""
    config = make_config(
        context_parallel_size=cp, hidden_dropout=0.0, **SIZES, **changes
    )
    return transformer_layer(
        config, gated_delta_net_spec("local", linear_cp_mode=mode)
    ).cuda()


def megatrons_local_graphs_give_eager_bits(
    modules: Sequence[str], cp: int = 1, packed: bool = False, mode: str | None = None
) -> None:
    """``cuda_graph_impl="local"``: recorded in the first step, replayed in the next."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import cuda_graphs

    rows = 1 if packed else 2
    tokens = TOKENS if packed else 1024

    def build(**changes):
        return in_ddp(
            layer_of_megatron(cp, mode=mode, **changes), grad_reduce_in_fp32=True
        )

    def step(model, x, d_out, documents) -> dict[str, torch.Tensor]:
        model.zero_grad_buffer()
        leaf = x.clone().requires_grad_()
        out = model(
            hidden_states=leaf, attention_mask=None, packed_seq_params=documents
        )[0]
        out.backward(d_out)
        grads = {name: p.main_grad.clone() for name, p in model.named_parameters()}
        return {"output": out.detach().clone(), "dx": leaf.grad, **grads}

    stream = torch.cuda.current_stream()
    with parallel(cp=cp):
        model_parallel_cuda_manual_seed(
            1, use_cudagraphable_rng=True, force_reset_rng=True
        )
        try:
            # The first to be built with graphs moves on to a stream of its own.
            graphed = build(cuda_graph_impl="local", cuda_graph_modules=list(modules))
            eager = build()
            randomise_(eager)
            with torch.no_grad():
                for to, value in zip(
                    graphed.parameters(), eager.parameters(), strict=True
                ):
                    to.copy_(value)
            both = [
                static_packed_seq_params(TOKENS, MOST) if packed else None
                for _ in range(2)
            ]
            for number, lengths in enumerate(SETS if packed else SETS[:4]):
                if packed:
                    for documents in both:
                        set_documents(documents, offsets_of(lengths))
                x, d_out = torch.randn(
                    2, tokens // cp, rows, 256, device="cuda"
                ).bfloat16()
                expected = step(eager, x, d_out, both[0])
                found = step(graphed, x, d_out, both[1])
                require_same_bits(found, expected, f"{modules}, step {number}")
                cuda_graphs.create_cudagraphs()
            assert cuda_graphs._CudagraphGlobalRecord.cudagraph_created
        finally:
            cuda_graphs.delete_cuda_graphs()
            torch.cuda.set_stream(stream)
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def transformer_engines_graph_gives_eager_bits(modules: Sequence[str]) -> None:
    """``cuda_graph_impl="transformer_engine"``: captured as Megatron does it, with its
    masks."""
    import transformer_engine.pytorch as te

    with parallel():
        eager = layer_of_megatron()
        graphed = layer_of_megatron(
            cuda_graph_impl="transformer_engine", cuda_graph_modules=list(modules)
        )
        randomise_(eager)
        with torch.no_grad():
            for to, value in zip(graphed.parameters(), eager.parameters(), strict=True):
                to.copy_(value)
        static = graphed.get_layer_static_inputs(1024, 2)
        hidden = static.pop("hidden_states")
        with capturing_by_megatron():
            # with an order it returns graphs, else the layers
            made = te.make_graphed_callables(
                (graphed,),
                ((hidden,),),
                sample_kwargs=(static,),
                allow_unused_input=True,
                _order=[1, -1],
                _num_layers_per_chunk=[1],
            )
        graphed.cuda_graphs = [made[0]]

        def step(layer, x, d_out) -> dict[str, torch.Tensor]:
            leaf = x.clone().requires_grad_()
            out = layer(hidden_states=leaf, attention_mask=None)[0]
            named = {"dx": leaf, **dict(layer.named_parameters())}
            grads = torch.autograd.grad(out, list(named.values()), d_out)
            return {
                "output": out.detach().clone(),
                **dict(zip(named, grads, strict=True)),
            }

        for number in range(3):
            x, d_out = torch.randn(2, 1024, 2, 256, device="cuda").bfloat16().unbind()
            require_same_bits(
                step(graphed, x, d_out), step(eager, x, d_out), f"{modules}, {number}"
            )
