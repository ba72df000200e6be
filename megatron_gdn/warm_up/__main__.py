"""``python -m megatron_gdn.warm_up``, see :mod:`.command`."""

import gc
import sys

from .command import main

if __name__ == "__main__":
    # The garbage collector would walk the modules' objects again and again during imports. A task
    # runs in its own fork and makes too little cyclic garbage to matter.
    gc.disable()
    sys.exit(main())
