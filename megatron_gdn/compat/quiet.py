"""Keeps the screen of a script for what the script has to say. This imports no Megatron."""

import logging
import warnings


def hide_import_notes() -> None:
    """Hide what Megatron and fla say about packages and GPUs being absent.

    Call it before they are imported. The library itself never calls it: whoever starts the process
    decides.
    """
    for module in ("megatron", "fla"):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
