"""verl finds the plugin in a process of its own, and Megatron's spec builds our model
there."""

import pytest

from tests.processes import python

BUILD = """
import tests.frameworks.behind_te_on_cpu
import verl
from megatron_gdn.compat.one_process import start_one_process
from tests.frameworks.patch_laws import gpt, mixer
start_one_process()
print(verl.__version__, type(mixer(gpt())).__module__.partition(".")[0])
"""


def built(**environment: str) -> str:
    """verl's version, and the package of the class that a spec of Megatron builds."""
    return python("-c", BUILD, **environment).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "environment",
    [{"MEGATRON_GDN": "gdn"}, {"VERL_USE_EXTERNAL_MODULES": "megatron_gdn.enable"}],
    ids=str,
)
def test_verl_builds_our_layer(environment):
    assert built(**environment) == "0.9.1 megatron_gdn"


@pytest.mark.parametrize(
    "environment",
    [{}, {"MEGATRON_GDN": "gdn", "VERL_USE_EXTERNAL_PLUGINS": "none"}],
    ids=str,
)
def test_verl_builds_megatrons_layer_where_it_is_not_asked(environment):
    assert built(**environment) == "0.9.1 megatron"
