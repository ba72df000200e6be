"""Runs transformers models in place, with context parallelism and with separate
documents.

A function that needs transformers imports it when called; Megatron is never imported.
"""

from .. import __getattr__ as __getattr__  # of names that `megatron_gdn.hf` lists
