"""Makes `examples/` importable the way torchrun does for the script that lies in it."""

import sys
from pathlib import Path

from hypothesis import settings

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

# A slow moment of a shared machine is not a failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
