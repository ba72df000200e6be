"""Importing this module calls :func:`megatron_gdn.patch_megatron`, and Megatron knows 'K' layers.

For launches that can only import something, in each process that builds a model::

    VERL_USE_EXTERNAL_MODULES=megatron_gdn.enable       # verl

The environment variable ``MEGATRON_GDN`` says which layers this package builds: ``gdn`` (also when
unset), ``mamba`` or ``gdn,mamba``.
"""

import os
from importlib import import_module

import torch

from .frameworks.patch import patch_megatron
from .ops import obstacles
from .ops.obstacles import warn_once

_LAYERS = ("gdn", "mamba")
_given = os.environ.get("MEGATRON_GDN") or "gdn"
_asked = {name.strip() for name in _given.split(",")}
if not _asked <= set(_LAYERS):
    raise ValueError(
        f"MEGATRON_GDN={_given!r} names layers for megatron_gdn to build: 'gdn', 'mamba' or "
        f"'gdn,mamba'. Change it, or unset it for 'gdn'."
    )
patch_megatron(**{name: name in _asked for name in _LAYERS})
import_module("megatron_gdn.specs")  # hybrid patterns may have the letter
if torch.cuda.device_count() and obstacles.no_kernels_installed():
    warn_once(obstacles.PLAIN_ON_GPU)
