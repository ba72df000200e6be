"""Compiles ahead of a run what the run needs: ``python -m megatron_gdn.warm_up --help``."""
