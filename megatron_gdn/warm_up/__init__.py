"""Compiles ahead of a run what the run needs: ``python -m megatron_gdn.warm_up --help``.

arguments.py      the command line
command.py        from there to compiled kernels
needs.py          the heads of one rank, and the tasks that compile for them
model_file.py     sizes from config.json, a launch script or YAML
hopper.py         a GPU's stand-in: kernels are compiled for Hopper, not run
flash_qla.py      FlashQLA's kernels as tasks
mixer_kernels.py  the Triton kernels of the mixer as tasks
fla_tuning.py     fla's kernels, which are tuned on a GPU
tasks.py          tasks in parallel processes
"""
