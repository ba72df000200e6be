"""verl's plugin: with ``MEGATRON_GDN`` set, every verl process builds our layers.

verl finds this module by an entry point of the group ``verl.plugins`` and imports it.
"""

import logging
import os

if os.environ.get("MEGATRON_GDN"):
    try:
        import megatron_gdn.enable  # noqa: F401
    except Exception:
        # verl logs a plugin's error only at the level DEBUG, and goes on without the
        # plugin.
        logging.getLogger(__name__).exception(
            "MEGATRON_GDN is set, and megatron_gdn could not replace Megatron's "
            "layers, so this process trains Megatron's own. Repair the error below, or "
            "unset MEGATRON_GDN."
        )
        raise
