"""Reads and writes files a few tensors at a time: safetensors and Megatron's checkpoints."""
