"""Says what this machine runs a Gated DeltaNet layer with, and what is wrong: `python -m
megatron_gdn.doctor`."""
