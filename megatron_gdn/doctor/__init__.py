"""What runs a Gated DeltaNet layer on this machine: ``python -m megatron_gdn.doctor``."""
