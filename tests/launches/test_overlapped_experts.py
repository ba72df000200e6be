"""``pretrain_gpt.py`` of a clone runs two micro-batches' layers in parts, by turns."""

from tests.launches.launching import held_out_losses, in_a_clone, launched, losses
from tests.launches.record import recorded
from tests.launches.test_parallel_launches import DATA, GPT, MODELS, SIZES, SPECS

pytestmark = in_a_clone

EXPERTS = f"{MODELS['gpt'][1]} --num-experts 4 --expert-model-parallel-size 2 --bf16"
OVERLAPPED = "--overlap-moe-expert-parallel-comm"


def trained(flags: str) -> list[float]:
    """Two processes of two micro-batches a step each."""
    every = f"{SPECS[GPT]} {SIZES} {EXPERTS} {DATA['']} {flags}"
    done = launched(GPT, 2, *every.split(), connections="32")
    return [*losses(done), *held_out_losses(done)]


def test_layers_in_parts_take_the_steps_of_whole_ones():
    with recorded(GPT, 2, f"{EXPERTS} {OVERLAPPED}", "the launch without the last flag") as result:
        result.equals(trained(OVERLAPPED), trained(""), rel=1e-6)
