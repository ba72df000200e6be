"""Run on every rank: the toy mixer whole and in parallel."""

import torch
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn.mixers.init import take_share
from tests.distributed import mixer_laws
from tests.distributed.layer_laws import randomise_
from tests.parallel import group_of_one, make_config
from tests.toy_mixer import HIDDEN, LAYOUT, H, ToyMixer, V


def share_of(name: str, whole: torch.Tensor, mixer: ToyMixer) -> torch.Tensor:
    """This tensor-parallel rank's share of a whole parameter (or of its gradient)."""
    split = {
        "in_proj.weight": (0, LAYOUT.widths),
        "conv1d.weight": (0, LAYOUT.conv_widths),
        "decay_bias": (0, (H,)),
        "out_proj.weight": (1, (H * V,)),
    }.get(name)
    tp = mixer.tp_group
    return whole if split is None else take_share(whole, *split, tp.rank(), tp.size())


def whole_layer(config) -> ToyMixer:
    torch.manual_seed(7)
    layer = ToyMixer(config, ProcessGroupCollection(tp=group_of_one(), cp=group_of_one()))
    randomise_(layer)
    return layer


def build(config, groups, **options) -> ToyMixer:
    layer = ToyMixer(config, groups, **options)
    # The norm is used by every tensor-parallel rank on its own heads.
    layer.out_norm.weight.sequence_parallel = True
    return layer


def _sum_gradients_of_norms(ddp, tp: int) -> None:
    config = make_config(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    _allreduce_non_tensor_model_parallel_grads([ddp], config)


TOY = mixer_laws.Mixers(
    make_config, whole_layer, build, share_of, HIDDEN, torch.float32, 1e-5, ("decay_bias",),
    _sum_gradients_of_norms,
)  # fmt: skip


def toy_equals_one_rank(*args, **kwargs) -> None:
    mixer_laws.parallel_equals_one_rank(TOY, *args, **kwargs)


def checkpoint_law() -> None:
    mixer_laws.checkpoint_law(TOY)
