"""Hides the messages of packages, so that the run's own are seen."""

import logging
import os
import warnings

from megatron_gdn.compat import observe


def say_what_takes_time() -> None:
    """Print what the program does during its imports, which take long."""
    if os.environ.get("RANK", "0") == "0":
        print("loading torch and Megatron ...", flush=True)


def hide_import_notes() -> None:
    """Hide what packages print about absent packages; call it before importing them."""
    observe.hide_import_notes()
    notes = r"torch\.distributed\.checkpoint"
    warnings.filterwarnings("ignore", category=UserWarning, module=notes)
    # Megatron says this of every save, asynchronous or not, of saves that fail (which
    # the run says in its own words) and of every distributed optimizer.
    for name, note in (
        ("dist_checkpointing.strategies.torch", "async save is deprecated"),
        ("dist_checkpointing.strategies.filesystem_async", "encountered an error"),
        ("dist_checkpointing.strategies.filesystem_async", "An error is caught"),
        ("distributed.distributed_data_parallel", "full_param_layout not provided"),
    ):
        logging.getLogger(f"megatron.core.{name}").addFilter(
            lambda record, note=note: note not in record.getMessage()
        )
