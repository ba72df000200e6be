"""Run on every rank: ``--ckpt-format torch``, which keeps the optimizer's state in one file."""

import torch
import torch.distributed as dist

from tests.parallel import parallel
from tests.precision.empty_share_laws import assert_equal, shares
from tests.precision.fault_laws import raised, remedy, stepped
from tests.precision.training import build, made_up_step


def outcome_of_resuming(remedied: bool, folder: str) -> str | None:
    """The error of the load. Without one, the resumed run is the uninterrupted one, bit for bit."""
    rank_file, states_file = f"{folder}/{dist.get_rank()}.pt", f"{folder}/states.pt"
    with parallel():
        training = stepped("fully_reshardable")
        torch.save((training.model.state_dict(), training.optimizer.state_dict()), rank_file)
        training.optimizer.save_parameter_state(states_file)
        now = shares(training)
        made_up_step(training, 2)
        later = shares(training)
        training = build("fully_reshardable", seed=99)
        model, optimizer = torch.load(rank_file, weights_only=False)
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)
        with remedy(remedied):
            error = raised(lambda: training.optimizer.load_parameter_state(states_file))
        if error is None:
            assert_equal(shares(training), now)
            made_up_step(training, 2)
            assert_equal(shares(training), later)
        return error
