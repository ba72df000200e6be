"""Keeps the screen for what a run has to say."""

import logging
import warnings


def hide_import_notes() -> None:
    """Hide what packages say about other packages being absent; call it before importing them.

    The run's first lines say which modules, device and precision are used instead.
    """
    for module in ("megatron", "fla", r"torch\.distributed\.checkpoint"):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Megatron says this of every save, asynchronous or not.
    logging.getLogger("megatron.core.dist_checkpointing.strategies.torch").addFilter(
        lambda record: "async save is deprecated" not in record.getMessage()
    )
