"""verl's plugin: where ``MEGATRON_GDN`` is set, every verl process builds our layers.

verl imports this module by itself, in every process, because of an entry point in the group
``verl.plugins``. Without the environment variable it does nothing.
"""

import logging
import os

if os.environ.get("MEGATRON_GDN"):
    try:
        import megatron_gdn.enable  # noqa: F401
    except Exception:
        # verl goes on without a plugin that failed, and says so at the level DEBUG alone.
        logging.getLogger(__name__).exception(
            "MEGATRON_GDN is set, and megatron_gdn could not replace Megatron's layers: this "
            "process trains Megatron's own. Mend what follows, or unset MEGATRON_GDN."
        )
        raise
