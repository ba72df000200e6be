"""Laws that attack: what comes from outside, and sizes at the ends of integers."""

from tests.hf.conftest import hf_folder, refused  # noqa: F401
