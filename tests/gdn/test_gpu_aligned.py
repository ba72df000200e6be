"""An aligned rule on a GPU: a token's bits depend on its sequence alone, and on no call's cut."""

import pytest
import torch

from megatron_gdn.gdn.rule import RuleInputs
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.base import Bits
from tests.ops.delta_rule.states import documents_of, run_whole

from . import test_gpu_states as gpu
from .test_gpu_mixer import errors

pytestmark = pytest.mark.gpu

CHUNK = 64


def rule_of(name: str):
    return (
        PlainRule(Bits.ON_GRID) if name == "reference" else gpu.rule_named(name, bits=Bits.ON_GRID)
    )


def rules(*names: str):
    return pytest.mark.parametrize("name", names)


def cut(inputs: RuleInputs, start: int, end: int) -> RuleInputs:
    return RuleInputs(*(x[:, start:end].contiguous() for x in inputs))


def filled_up(inputs: RuleInputs) -> RuleInputs:
    missing = CHUNK - inputs.k.shape[1]
    return RuleInputs(*(torch.cat([x, x.new_zeros(1, missing, *x.shape[2:])], 1) for x in inputs))


@rules("flash_qla", "reference")
@pytest.mark.parametrize("decay", gpu.DECAYS)
def test_calls_that_begin_at_any_chunk_have_the_bits_of_one_call(name, decay):
    rule, S = rule_of(name), 64 * 40 + 17
    inputs, d_o = gpu.make_inputs(S, decay=decay)
    whole, final, _ = rule.begin(inputs, None).run(final=True)
    assert torch.equal(run_whole(rule, inputs, d_o)[0], whole)  # the call that a backward follows
    for chunks in ([1] * 40, [3, 30, 7]):
        state, at = None, 0
        for count in chunks:
            end = at + count * CHUNK
            o, state, _ = rule.begin(cut(inputs, at, end), None).run(state, final=True)
            assert torch.equal(o, whole[:, at:end]), (chunks, at)
            at = end
        o, state, _ = rule.begin(cut(inputs, at, S), None).run(state, final=True)
        assert torch.equal(o, whole[:, at:]) and torch.equal(state, final)


@rules("flash_qla", "reference")
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 63, 64])
def test_what_follows_in_the_chunk_changes_no_bit(name, tokens):
    rule = rule_of(name)
    inputs, _ = gpu.make_inputs(3 * CHUNK)
    whole = rule.begin(inputs, None).run().o[:, 2 * CHUNK :]
    _, state, _ = rule.begin(cut(inputs, 0, 2 * CHUNK), None).run(final=True)
    chunk = cut(inputs, 2 * CHUNK, 2 * CHUNK + tokens)
    for given in (chunk, filled_up(chunk)):
        o = rule.begin(given, None).run(state).o
        assert torch.equal(o[:, :tokens], whole[:, :tokens])


@rules("flash_qla", "reference")
@pytest.mark.parametrize("length", [1, 777, 4500])
def test_neighbours_change_no_bit(name, length):
    rule = rule_of(name)
    inputs, d_o = gpu.make_inputs(5000 + 4500 + 8200)
    mine, _ = gpu.part(inputs, d_o, 1000, length)
    alone = rule.begin(mine, None).run().o
    for place, (before, after) in gpu.NEIGHBOURS.items():
        lengths, start = (*before, length, *after), sum(before)
        around, _ = gpu.part(inputs, d_o, 0, sum(lengths))
        for whole, x in zip(around, mine, strict=True):
            whole[:, start : start + length] = x
        among = rule.begin(around, documents_of(lengths, "cuda")).run().o
        assert torch.equal(alone, among[:, start : start + length]), place


@pytest.mark.parametrize("decay", gpu.DECAYS)
def test_the_backward_is_as_exact_as_that_of_deterministic_mode_and_repeats(decay):
    inputs, d_o = gpu.make_inputs(4500, decay=decay)
    exact = gpu.exact_run(inputs, d_o)
    usual = errors(
        run_whole(gpu.rule_named("flash_qla", bits=Bits.DETERMINISTIC), inputs, d_o), exact
    )
    found = [run_whole(rule_of("flash_qla"), inputs, d_o) for _ in range(2)]
    assert all(map(torch.equal, *found))
    gpu.assert_as_exact(errors(found[0], exact), usual, slack=0.0)
