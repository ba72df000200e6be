"""``python -m megatron_gdn.warm_up``, see :mod:`.command`."""

import gc
import sys

from .command import main

if __name__ == "__main__":
    # It would walk the modules' objects again and again while they are imported. No task, in a fork
    # of its own, makes enough garbage in cycles to matter.
    gc.disable()
    sys.exit(main())
