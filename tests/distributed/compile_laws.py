"""Run on every rank: a layer under ``torch.compile``, and the same layer as it is."""

import warnings

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.distributed.layer_laws import build_layer, randomise_, thd
from tests.parallel import make_config, parallel

LENGTHS = (8, 24, 16)


def compiled_equals_eager(cp: int, packed: bool, **options) -> None:
    """Output, the input's gradient and every parameter's gradient, bit for bit, and twice.

    Functions that stay as they are (:mod:`megatron_gdn.ops.autograd`) give Dynamo no warning.
    """
    with parallel(cp=cp):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        layer = build_layer(make_config(context_parallel_size=cp), groups, options)
        randomise_(layer)
        x = torch.randn(sum(LENGTHS) // cp, 1, 24)

        def results(run):
            layer.zero_grad()
            x_in = x.clone().requires_grad_()
            out, _ = run(x_in, None, packed_seq_params=thd(LENGTHS) if packed else None)
            out.square().sum().backward()
            return [out, x_in.grad, *(p.grad for p in layer.parameters())]

        expected = results(layer)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch._dynamo.utils.warn_once_cache.clear()
        # "eager" runs what Dynamo captured with torch's own kernels: no bit may differ.
        compiled = torch.compile(layer, backend="eager")
        try:
            with (
                torch.compiler.set_stance("default"),
                warnings.catch_warnings(record=True) as warned,
            ):
                warnings.simplefilter("always")
                for _ in range(2):
                    for one, other in zip(expected, results(compiled), strict=True):
                        assert torch.equal(one, other)
            assert not [one for one in warned if "uncompiled.py" in str(one.message)]
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing captured"
        finally:
            torch._dynamo.reset()
