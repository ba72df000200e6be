"""Run on every rank of a nccl world: the layer in bf16, whole and in parallel."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import build_layer, randomise_, thd
from tests.distributed.mixers import build_mamba2
from tests.host_reads import waiting_refused
from tests.parallel import (
    alone,
    groups_of_megatron,
    in_ddp,
    make_config,
    parallel,
    reduce_gradients,
    share_of,
)

# Every rank's share is a head configuration that FlashQLA compiles once for several
# cases: 8 key and 16 value heads, half or a quarter of them.
GPU = {
    "hidden_size": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "use_cpu_initialization": False,
}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, **GPU}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # to try the laws themselves


class Kind(NamedTuple):
    """A mixer that is held to the laws."""

    sizes: dict
    build: Callable  # of config, groups and a dict of options
    share_of: Callable
    fp32: tuple[str, ...]
    fastest: str  # the backend that a Hopper GPU takes


KINDS = {
    "gdn": Kind(GPU, build_layer, share_of, ("A_log", "dt_bias"), "flash_qla"),
    "mamba2": Kind(
        {
            "hidden_size": 256,
            "mamba_num_heads": 16,
            "mamba_num_groups": 2,
            "mamba_head_dim": 64,
            "mamba_state_dim": 128,
            "use_cpu_initialization": False,
        },
        lambda config, groups, options: build_mamba2(config, groups, **options).to(
            DEVICE
        ),
        share_of,
        ("A_log", "dt_bias", "D"),
        "fla",
    ),
}


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def _packed(lengths):
    return thd(lengths, DEVICE) if lengths else None


def _forward_backward(layer, x, weight, lengths) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    out, _ = layer(x, packed_seq_params=_packed(lengths))
    (out.float() * weight).sum().backward()
    return {"output": out.detach(), "dx": x.grad}


def errors_of_one_rank_and_of_all(
    tp: int,
    cp: int,
    sp: bool,
    lengths,
    mode: str = "auto",
    layout: str = "zigzag",
    mixer: str = "gdn",
    **options,
) -> dict:
    """The rule that ran and a Hopper GPU's; by name the relative rms errors against
    fp32 of the parallel layer and of one rank, and over how many numbers."""
    tokens, batch = (sum(lengths), 1) if lengths else (512, 2)
    kind = KINDS[mixer]
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, **kind.sizes}
    with parallel(tp=tp, cp=cp):
        torch.manual_seed(7)
        exact = kind.build(make_config(**kind.sizes), alone(), {"backend": "reference"})
        randomise_(exact)
        with torch.no_grad():
            for name, parameter in exact.named_parameters():
                if name not in kind.fp32:
                    parameter.copy_(parameter.bfloat16())
        x = torch.randn(tokens, batch, 256, device=DEVICE).bfloat16()
        weight = torch.randn(tokens, batch, 256, device=DEVICE)

        def everything(layer, x):
            found = _forward_backward(layer, x, weight, lengths)
            return found | {name: p.grad for name, p in layer.named_parameters()}

        truth = everything(exact, x.float())
        one = kind.build(make_config(**bf16), alone(), options)
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(exact.get_parameter(name))
        single = everything(one, x)

        config = make_config(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            sequence_parallel=sp,
            **bf16,
        )
        groups = groups_of_megatron()
        layer = kind.build(
            config, groups, {"linear_cp_mode": mode, "cp_layout": layout, **options}
        )
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(kind.share_of(name, exact.get_parameter(name), layer))
        ddp = in_ddp(layer, grad_reduce_in_fp32=True)
        mine = local_indices(
            lengths or (tokens,), cp, groups.cp.rank(), SequenceLayout.parse(layout)
        ).to(DEVICE)
        if sp:
            mine = mine.chunk(tp)[groups.tp.rank()]
        found = _forward_backward(ddp, x[mine], weight[mine], lengths)
        reduce_gradients(ddp)

        report = {}

        def compare(name, in_parallel, alone, true):
            scale = rms(true)
            report[name] = (
                rms(in_parallel.float() - true) / scale,
                rms(alone.float() - true) / scale,
                true.numel(),
            )

        for name in ("output", "dx"):
            compare(name, found[name], single[name][mine], truth[name][mine])
        for name, parameter in layer.named_parameters():
            compare(
                name,
                parameter.main_grad,
                kind.share_of(name, single[name], layer),
                kind.share_of(name, truth[name], layer),
            )
        return {"backend": (layer.backend, kind.fastest), "errors": report}


def _chunkwise_pass(lengths, layout="zigzag", **changes):
    """A chunkwise layer in bf16 over all ranks, as a function that runs it back and
    forth."""
    groups = groups_of_megatron()
    torch.manual_seed(7)
    config = make_config(context_parallel_size=groups.cp.size(), **BF16, **changes)
    layer = build_layer(
        config, groups, {"linear_cp_mode": "chunkwise", "cp_layout": layout}
    )
    tokens, batch = (sum(lengths), 1) if lengths else (512, 2)
    x = torch.randn(tokens // groups.cp.size(), batch, 256, device=DEVICE).bfloat16()
    packed = _packed(lengths)

    def run():
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf, None, packed_seq_params=packed)
        grads = torch.autograd.grad(
            out.float().square().sum(), [leaf, *layer.parameters()]
        )
        return [out, *grads]

    return run


def chunkwise_waits_for_nothing(lengths, layout) -> None:
    """Once a micro-batch is known, no call of either pass waits for the GPU."""
    with parallel(cp=torch.distributed.get_world_size()):
        run = _chunkwise_pass(lengths, layout)
        run()
        with waiting_refused():
            run()


def chunkwise_repeats_bitwise(lengths) -> bool:
    """Two forward and backward passes over all ranks, of which one runs beside other
    work."""
    with parallel(cp=torch.distributed.get_world_size()):
        run = _chunkwise_pass(lengths, deterministic_mode=True)
        first = run()
        with torch.cuda.stream(torch.cuda.Stream()):
            noise = torch.randn(2048, 2048, device="cuda")
            for _ in range(50):
                noise = (noise @ noise).clamp(-1, 1)
        return all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
