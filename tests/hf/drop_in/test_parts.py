"""Parts of a drop-in by themselves, with stand-ins around them."""

import inspect
import sys
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from megatron_gdn.hf import (
    ContextParallelTrainerMixin,
    assert_no_packing_leak,
    packing_reach,
    plain_functions_on_cpu,
)
from megatron_gdn.hf.drop_in.families import (
    _KERNEL_FUNCTION_NAMES,
    _call_by_device,
    transformers_class,
)
from megatron_gdn.hf.drop_in.gates import HOLDER_NAME, GateOwner
from megatron_gdn.hf.drop_in.layer import _DropInState
from megatron_gdn.hf.drop_in.training import PackingLeak
from tests.hf.drop_in.conftest import DENSE, mixer_of


@pytest.mark.parametrize("group", ["old", "new"])
def test_a_mixer_follows_the_group_of_its_batch(group):
    """cp_mesh may have been set in another layer."""
    used = []
    state = object.__new__(_DropInState)
    state.loader_layout = SimpleNamespace(option=None)
    state.micro_batches = SimpleNamespace(
        group="old", use_group=used.append, of=lambda *_, documents: documents
    )
    share = SimpleNamespace(group=group, layout="zigzag", documents="documents")
    made = state.micro_batch(SimpleNamespace(share=share), torch.zeros(1))
    assert made == "documents" and state.loader_layout.option == "zigzag"
    assert used == ([] if group == "old" else ["new"])


class Owner(GateOwner, nn.Linear):
    pass


def test_sharded_gates_are_saved_and_loaded_as_shards(monkeypatch):
    """FSDP's gathered copies are freed first."""
    freed = []

    class Holder(nn.Module):
        def reshard(self):
            freed.append(self)

    monkeypatch.setattr(GateOwner, "_gates_are_sharded", True)
    owner = Owner(2, 2)
    owner._modules[HOLDER_NAME] = Holder()
    saved = owner.state_dict()
    assert len(freed) == 1 and saved.keys() == {"weight", "bias"}
    owner.load_state_dict(saved)
    assert len(freed) == 2


def test_on_a_cpu_boundaries_reach_the_function_that_transformers_chose():
    """It refuses them there; the plain function would ignore them."""
    called = partial(
        _call_by_device,
        lambda x, **_: "chosen",
        lambda x, **keywords: ["plain", *keywords],
        frozenset({"known"}),
    )
    x = torch.zeros(2)
    assert called(x, known=1, other=2, cu_seqlens=None) == ["plain", "known"]
    assert called(x, cu_seqlens=x) == called(x, seq_idx=x) == "chosen"
    assert called(x.to("meta")) == "chosen"


@pytest.mark.parametrize("name", _KERNEL_FUNCTION_NAMES)
def test_kernels_that_transformers_chose_are_left_to_other_devices(
    fresh, monkeypatch, name
):
    """What wraps no plain function, or is no function, stays as it is."""
    model = fresh(DENSE)
    modeling = sys.modules[transformers_class(mixer_of(model)).__module__]

    @wraps(lambda x: "plain")
    def kernel(x):
        return "kernel"

    x = torch.zeros(2)
    monkeypatch.setattr(modeling, name, kernel, raising=False)
    plain_functions_on_cpu(model)
    called = getattr(modeling, name)
    assert (called(x), called(x.to("meta"))) == ("plain", "kernel")
    for other in (called, kernel.__wrapped__, nn.Identity()):
        monkeypatch.setattr(modeling, name, other)
        plain_functions_on_cpu(model)
        assert getattr(modeling, name) is other


def test_leaks_are_measured_on_a_cpu_whatever_kernels_transformers_chose(
    fresh, monkeypatch
):
    mixer = mixer_of(fresh(DENSE))
    modeling = sys.modules[transformers_class(mixer).__module__]
    refused = []
    for name in _KERNEL_FUNCTION_NAMES:
        chosen = getattr(modeling, name, None)
        if chosen is not None:
            plain = inspect.unwrap(chosen)
            kernel = wraps(plain)(lambda *_, name=name, **__: refused.append(name))
            monkeypatch.setattr(modeling, name, kernel)
    packing_reach(mixer)
    assert refused == []


def test_a_leak_names_the_documents_and_how_much_they_change(fresh):
    """transformers' own model on a CPU."""
    with pytest.raises(PackingLeak, match=r"\n  document 0 changes document 1 by \d"):
        assert_no_packing_leak(mixer_of(fresh(DENSE)), (3, 4))


class Leaking(nn.Module):
    """The last token of the row reads the first one."""

    hidden_size = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.given = []

    def forward(self, x, **_):
        self.given.append(x)
        return torch.cat([x[:, :-1], x[:, -1:] + x[:, :1]], 1)


@pytest.mark.parametrize("draw", range(4))
def test_a_reach_is_the_largest_change_of_any_number_of_a_document(draw):
    """To two roundings of sums of up to 8."""
    layer = Leaking()
    reach = packing_reach(layer, (2, 3, 4), seed=draw)
    row, *replaced = (x[0] for x in layer.given)
    spans = (0, 2), (2, 5), (5, 9)
    expected = torch.zeros(3, 3)
    for i, (start, end) in enumerate(spans):
        expected[i, i] = (replaced[i] - row)[start:end].abs().max()
    expected[0, 2] = (replaced[0] - row)[0].abs().max()
    close = {"rtol": 0, "atol": 2 * 8 * 2**-24}
    torch.testing.assert_close(reach.change, expected, **close)
    row[-1] += row[0]
    largest = [row[start:end].abs().max() for start, end in spans]
    torch.testing.assert_close(reach.largest, torch.stack(largest), **close)
    bound = float(expected[0, 2] / max(largest))
    assert reach.leaks(0.99 * bound) == [(0, 2)] and reach.leaks(1.01 * bound) == []


class StandIn(ContextParallelTrainerMixin):
    """The mixin over ranks, with what it reads of transformers' Trainer."""

    _cp_group = object()
    args = SimpleNamespace(label_smoothing_factor=0.0)
    compute_loss_func = None
    model_accepts_loss_kwargs = True
    model = nn.Linear(2, 2)

    def _drop_in_options(self):
        return None


def train(trainer, *names: str):
    return trainer.compute_loss(trainer.model, dict.fromkeys(names))


@pytest.mark.parametrize(
    ("changes", "call", "error", "said"),
    [
        (
            {"args": SimpleNamespace(label_smoothing_factor=0.1)},
            train,
            ValueError,
            "^label_smoothing_factor with context parallelism",
        ),
        (
            {"compute_loss_func": print},
            train,
            ValueError,
            "^compute_loss_func with context parallelism",
        ),
        (
            {"model_accepts_loss_kwargs": False},
            train,
            ValueError,
            "Linear has accepts_loss_kwargs=False",
        ),
        (
            {},
            lambda trainer: train(trainer, "input_ids", "labels"),
            ValueError,
            "the batch has input_ids, labels and no shift_labels",
        ),
        (
            {},
            lambda trainer: train(trainer, "shift_labels"),
            RuntimeError,
            r"runs Linear unwrapped.* evaluate\(\) ran before train",
        ),
        (
            {},
            lambda trainer: trainer.prediction_step(None, {}, False),
            NotImplementedError,
            "Evaluate the loss",
        ),
        (
            {},
            lambda trainer: ContextParallelTrainerMixin._drop_in_options(trainer),
            ValueError,
            "Linear has no replaced modules; call megatron_gdn.hf.patch",
        ),
        (
            {},
            lambda trainer: trainer._share_batches_in_group(DataLoader([1, 2])),
            ValueError,
            "a list read by a DataLoader is dealt to processes",
        ),
    ],
)
def test_a_trainer_over_ranks_refuses_what_would_train_on_something_else(
    changes, call, error, said
):
    trainer = StandIn()
    vars(trainer).update(changes)
    with pytest.raises(error, match=said):
        call(trainer)
