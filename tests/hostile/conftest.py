"""Laws that attack: what comes from outside, and sizes at the ends of integers."""

from tests.hf.conftest import hf_folder, refused  # noqa: F401
from tests.kernels.conftest import INTERPRETED

if not INTERPRETED:
    collect_ignore = ["test_offsets.py"]
