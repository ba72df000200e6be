"""Run on both ranks of a nccl world: the layer in bf16, whole and in parallel."""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import build_layer, randomise_, thd
from tests.parallel import group_of_one, make_config, parallel, share_of

GPU = {
    "hidden_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "use_cpu_initialization": False,
}


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def bf16_error_of_two_ranks_is_that_of_one(
    tp: int,
    cp: int,
    sp: bool,
    lengths,
    mode: str = "headwise",
    layout: str = "zigzag",
    key_heads: int = 4,
) -> dict:
    """Relative rms error against fp32, of one rank and of two, for everything a layer gives."""
    sizes = {**GPU, "linear_num_key_heads": key_heads}
    tokens, batch = (sum(lengths), 1) if lengths else (512, 2)
    with parallel(tp=tp, cp=cp):
        alone = ProcessGroupCollection(tp=group_of_one(), cp=group_of_one())
        torch.manual_seed(7)
        torch.cuda.manual_seed(7)
        exact = build_layer(make_config(**sizes), alone, {})
        randomise_(exact)
        with torch.no_grad():
            for name, parameter in exact.named_parameters():
                if name not in ("A_log", "dt_bias"):
                    parameter.copy_(parameter.bfloat16())
        x = torch.randn(tokens, batch, 256, device="cuda").bfloat16()
        weight = torch.randn(tokens, batch, 256, device="cuda")

        def packed():
            return thd(lengths, "cuda") if lengths else None

        def run(layer, x):
            x = x.clone().requires_grad_()
            out, _ = layer(x, None, packed_seq_params=packed())
            (out.float() * weight).sum().backward()
            grads = {name: p.grad for name, p in layer.named_parameters()}
            return {"output": out.detach(), "dx": x.grad, **grads}

        truth = run(exact, x.float())
        bf16 = {"bf16": True, "params_dtype": torch.bfloat16, **sizes}
        one = build_layer(make_config(**bf16), alone, {})
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(exact.get_parameter(name))
        single = run(one, x)

        config = make_config(
            tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=sp, **bf16
        )
        groups = ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
        )
        layer = build_layer(config, groups, {"linear_cp_mode": mode, "cp_layout": layout})
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(share_of(name, exact.get_parameter(name), layer))
        ddp = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
        )
        mine = local_indices(
            lengths or (tokens,), cp, groups.cp.rank(), SequenceLayout.parse(layout)
        ).cuda()
        if sp:
            mine = mine.chunk(tp)[groups.tp.rank()]
        x_mine = x[mine].requires_grad_()
        out, _ = ddp(x_mine, None, packed_seq_params=packed())
        (out.float() * weight[mine]).sum().backward()
        ddp.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([ddp], config)

        report = {}

        def compare(name, parallel_value, single_value, true_value):
            scale = rms(true_value)
            report[name] = (
                rms(parallel_value.float() - true_value) / scale,
                rms(single_value.float() - true_value) / scale,
            )

        compare("output", out, single["output"][mine], truth["output"][mine])
        compare("dx", x_mine.grad, single["dx"][mine], truth["dx"][mine])
        for name, parameter in layer.named_parameters():
            compare(
                name,
                parameter.main_grad,
                share_of(name, single[name], layer),
                share_of(name, truth[name], layer),
            )
        return {"backend": layer.backend, "errors": report}


def _chunkwise_pass(lengths, layout="zigzag", **changes):
    """A chunkwise layer in bf16 over both ranks, as a function that runs it back and forth."""
    groups = ProcessGroupCollection(
        tp=group_of_one(), cp=parallel_state.get_context_parallel_group()
    )
    torch.manual_seed(7)
    torch.cuda.manual_seed(7)
    config = make_config(
        bf16=True, params_dtype=torch.bfloat16, context_parallel_size=2, **GPU, **changes
    )
    layer = build_layer(config, groups, {"linear_cp_mode": "chunkwise", "cp_layout": layout})
    tokens, batch = (sum(lengths), 1) if lengths else (512, 2)
    x = torch.randn(tokens // 2, batch, 256, device="cuda").bfloat16()
    packed = thd(lengths, "cuda") if lengths else None

    def run():
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf, None, packed_seq_params=packed)
        grads = torch.autograd.grad(out.float().square().sum(), [leaf, *layer.parameters()])
        return [out, *grads]

    return run


def chunkwise_waits_for_nothing(lengths, layout) -> None:
    """Once a micro-batch is known, no call of either pass waits for the GPU."""
    with parallel(cp=2):
        run = _chunkwise_pass(lengths, layout)
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def chunkwise_repeats_bitwise(lengths) -> bool:
    """Two forward and backward passes over two GPUs, of which one runs beside other work."""
    with parallel(cp=2):
        run = _chunkwise_pass(lengths, deterministic_mode=True)
        first = run()
        with torch.cuda.stream(torch.cuda.Stream()):
            noise = torch.randn(2048, 2048, device="cuda")
            for _ in range(50):
                noise = (noise @ noise).clamp(-1, 1)
        return all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
