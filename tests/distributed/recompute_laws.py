"""Run on every rank: the normed output is dropped after the forward and made again."""

import gc
import weakref
from unittest.mock import patch

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random

from tests.distributed.layer_laws import randomise_, thd
from tests.distributed.mark_laws import layer_with
from tests.parallel import make_config, parallel


def norm_is_recomputed_without_an_extension(
    cp: int, mode: str, called: bool, **options: str
) -> None:
    """No bit changes, the output is gone meanwhile, and the layer keeps nothing of it."""
    with parallel(cp=cp):
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        config = make_config(context_parallel_size=cp)
        saved = layer_with(config, groups, called, linear_cp_mode=mode)
        randomise_(saved)
        options = options or {"recompute_norm_out": True}
        again = layer_with(config, groups, called, linear_cp_mode=mode, **options)
        again.load_state_dict(saved.state_dict())
        x = torch.randn(48 // cp, 1, 24)
        mixed = []
        again.out_proj.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))

        def results(layer):
            leaf = x.clone().requires_grad_()
            out, _ = layer(leaf, None, packed_seq_params=thd((16, 32)))
            if layer is again:
                assert mixed[0].untyped_storage().nbytes() == 0, "not dropped"
            out.square().sum().backward()
            return [out, leaf.grad, *(p.grad for p in layer.parameters())]

        expected = results(saved)
        assert saved.norm_out_checkpoint is None
        build = AssertionError("Megatron builds an extension")
        with patch.object(megatron_random, "_get_share_storage", side_effect=build):
            for one, other in zip(results(again), expected, strict=True):
                assert torch.equal(one, other)
        assert again.norm_out_checkpoint is not None
        kept = weakref.ref(mixed.pop())
        gc.collect()
        assert kept() is None, "the layer keeps the output"
        again.eval()(x, None, packed_seq_params=thd((16, 32)))
        assert again.norm_out_checkpoint is None
