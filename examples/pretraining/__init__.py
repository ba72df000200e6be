"""The parts of `examples/pretrain_hybrid.py`, one job per file."""
