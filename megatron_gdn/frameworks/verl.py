"""verl's plugin: where ``MEGATRON_GDN`` is set, every verl process builds our layers.

verl imports this module in every process, by an entry point in the group ``verl.plugins``.
"""

import logging
import os

if os.environ.get("MEGATRON_GDN"):
    try:
        import megatron_gdn.enable  # noqa: F401
    except Exception:
        # verl logs a plugin that failed at the level DEBUG only and goes on without it.
        logging.getLogger(__name__).exception(
            "MEGATRON_GDN is set, and megatron_gdn could not replace Megatron's layers: this "
            "process trains Megatron's own. Mend what follows, or unset MEGATRON_GDN."
        )
        raise
