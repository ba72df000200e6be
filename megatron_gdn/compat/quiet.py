"""Hides notes that importing Megatron and fla prints. This file imports no Megatron."""

import logging
import warnings


def hide_import_notes() -> None:
    """Hide what Megatron and fla print about absent packages and GPUs.

    Call it before they are imported. The library itself never calls it: whoever starts the process
    decides.
    """
    for module in ("megatron", "fla"):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
