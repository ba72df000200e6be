"""Compiles the kernels of a run before the run:
``python -m megatron_gdn.warm_up --help``."""
