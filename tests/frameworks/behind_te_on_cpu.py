"""``pytest -p tests.frameworks.behind_te_on_cpu``: the stand-in, before Megatron is
imported."""

from tests.frameworks.te_on_cpu import install

install()
