"""Tools that put a computation under pressure and say whether its bits hold:

    check_repeats(run, 200)             the same bits again and again, over poisoned memory and
                                        beside a competing stream
    in_processes(work, processes=2)     the same in several processes that share the device
    compare_processes(reports)          and the same bits in all of them
    check_batch_invariance(run, ...)    a document's bits do not depend on its neighbours
    check_generation(model, tokens)     a model generates with the probabilities it trains with

Only the last needs a Megatron model. The others know nothing of Gated DeltaNet: ``run`` is any
function that returns named tensors. :func:`forward_backward` makes one from a module, for
:func:`check_repeats`. All tools work on the CPU too.
"""

from .generation import GenerationGap, check_generation
from .invariance import Arrangement, arrangements, check_batch_invariance
from .pressure import Competitor, poison_free_memory
from .processes import compare_processes, in_processes
from .repeats import Difference, Report, check_repeats, difference_of, digest, forward_backward

__all__ = [
    "Arrangement",
    "Competitor",
    "Difference",
    "GenerationGap",
    "Report",
    "arrangements",
    "check_batch_invariance",
    "check_generation",
    "check_repeats",
    "compare_processes",
    "difference_of",
    "digest",
    "forward_backward",
    "in_processes",
    "poison_free_memory",
]
