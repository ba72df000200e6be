"""Checks a machine for Gated DeltaNet layers: ``python -m megatron_gdn.doctor``."""
