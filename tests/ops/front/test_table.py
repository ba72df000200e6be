"""Gates of a front at the ends of their range."""

import pytest
import torch

from megatron_gdn.ops.front import gates


@pytest.mark.parametrize(
    ("function", "numbers"),
    [(gates.decay, (0, 1)), (gates.bounded_decay, (-5, 1)), (gates.time_step, (0.0, 1e30))],
    ids=["decay", "bounded_decay", "time_step"],
)
def test_extreme_columns_and_rates_give_a_decay_and_no_nan(function, numbers):
    x = torch.tensor([[-1e30, 1e30, 0.0]]).T.requires_grad_()
    A_log = torch.tensor([0.0, 0.0, 1e4])[:, None].requires_grad_()
    made = function(x, A_log, *numbers)
    assert made[0].exp()[0].item() == 1 and made[0].exp()[1].item() < 0.01
    sum(y.clamp(max=1).sum() for y in made).backward()
    assert x.grad.isfinite().all() and A_log.grad.isfinite().all()
