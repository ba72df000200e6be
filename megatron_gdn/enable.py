"""Importing this module calls `megatron_gdn.patch_megatron` and allows 'K' in hybrid
patterns.

Some launchers take the name of a module to import in each process that builds a model::

    VERL_USE_EXTERNAL_MODULES=megatron_gdn.enable       # verl

The environment variable ``MEGATRON_GDN`` names the layers that this package builds:
``gdn`` (the default), ``mamba`` or ``gdn,mamba``.
"""

import os
from importlib import import_module

import torch

from .frameworks.patch import patch_megatron
from .ops import obstacles
from .ops.obstacles import warn_once

_LAYER_NAMES = ("gdn", "mamba")
_given_names = os.environ.get("MEGATRON_GDN") or "gdn"
_layers_to_build = {name.strip() for name in _given_names.split(",")}
if not _layers_to_build <= set(_LAYER_NAMES):
    raise ValueError(
        f"MEGATRON_GDN={_given_names!r} is not legal; it names the layers that "
        "megatron_gdn builds: 'gdn', 'mamba' or 'gdn,mamba'. Change it, or unset it "
        "for 'gdn'."
    )
patch_megatron(**{name: name in _layers_to_build for name in _LAYER_NAMES})
import_module("megatron_gdn.specs")  # makes hybrid patterns accept 'K'
if torch.cuda.device_count() and obstacles.no_kernels_installed():
    warn_once(obstacles.PLAIN_ON_GPU_WARNING)
