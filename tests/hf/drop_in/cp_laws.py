"""What runs on the ranks, in float64; transformers' norms and rotations round to fp32
in there."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_gdn.context_parallel import local_indices
from megatron_gdn.hf import ContextParallelTrainerMixin, PackingCollator
from megatron_gdn.hf.drop_in import patch, shard_gates
from megatron_gdn.hf.drop_in.layer import DropInOptions, become_drop_in
from megatron_gdn.hf.drop_in.patching import GATHERED_ATTENTION, prepare_forward
from tests.hf.drop_in.conftest import in_float64, mixer_of, results
from tests.hf.tiny_models import build, cache_name
from tests.parallel import assert_close

TOKENS = 48


def mesh() -> DeviceMesh:
    return DeviceMesh.from_group(dist.group.WORLD, "cpu")


def offsets_of(lengths) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def own_positions(order: str, tokens: int, lengths=None) -> torch.Tensor:
    size = dist.get_world_size()
    rank = dist.get_rank()
    return local_indices(lengths if order == "zigzag" else [tokens], size, rank, order)


def told_by(order: str) -> tuple[str, str, bool]:
    """The order of the tokens, the option ``cp_layout``, and whether ``seq_index``
    tells it."""
    real = order.removeprefix("seq_index: ")
    if real == order:
        return real, real, False
    return real, "zigzag_buffer" if real == "contiguous" else "contiguous", True


def gradients(module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in module.named_parameters()
    }


def sum_gradients(module) -> dict[str, torch.Tensor]:
    found = {name: grad.clone() for name, grad in gradients(module).items()}
    for grad in found.values():
        dist.all_reduce(grad)
    return found


def compare(ours, truth, mine, ours_grads, truth_grads, what, tolerance) -> None:
    assert_close(f"{what}: output", ours, truth[:, mine], tolerance)
    assert ours_grads.keys() == truth_grads.keys()
    for name, grad in truth_grads.items():
        assert_close(f"{what}: {name}", ours_grads[name], grad, tolerance)


def compare_layers(one, many, mine, told, told_many, what, rows=1, times=1) -> None:
    """Outputs, input gradients and the parameters', which ``times`` groups of ranks sum
    up."""
    one.zero_grad(), many.zero_grad()
    torch.manual_seed(1)
    x, weight = torch.randn(2, rows, TOKENS, 24, dtype=torch.float64)
    whole, part = (y.clone().requires_grad_() for y in (x, x[:, mine]))
    y = one(whole, **told)
    local = many(part, **told_many)
    (y * weight).sum().backward()
    (local * weight[:, mine]).sum().backward()
    assert_close(f"{what}: input gradient", part.grad, whole.grad[:, mine], 1e-11)
    summed = {name: grad / times for name, grad in sum_gradients(many).items()}
    compare(local, y, mine, summed, gradients(one), what, 1e-11)


def pair(model, **options):
    """Two copies, patched: for one rank, and for all of them."""
    one = copy.deepcopy(model)
    many = copy.deepcopy(model)
    patch(one, unpacked="fused")
    patch(many, mesh(), attention="gathered", **options)
    return one, many


def layers_equal_one_rank(family: str, cases: list[tuple]) -> None:
    """One layer; ``cases`` are (order, linear_cp_mode, lengths or None, rows)."""
    model = build(family).double()
    theirs = mixer_of(model)
    for order, mode, lengths, rows in cases:
        what = f"{family} {order} {mode} {lengths}"
        order, layout, by_index = told_by(order)
        one, many = (copy.deepcopy(theirs) for _ in range(2))
        config = model.config.get_text_config()
        become_drop_in(one, config, DropInOptions(unpacked="fused"))
        options = DropInOptions(cp_mesh=mesh(), cp_layout=layout, linear_cp_mode=mode)
        become_drop_in(many, config, options)
        mine = own_positions(order, TOKENS, lengths or [TOKENS])
        told = {"cu_seqlens": None if lengths is None else offsets_of(lengths)}
        told_many = told | {"seq_index": mine if by_index else None}
        compare_layers(one, many, mine, told, told_many, what, rows)


def a_mesh_that_is_set_counts(cases: list[tuple]) -> None:
    """A parallelizer sets ``_cp_mesh`` on a built layer: another one each time, then
    None."""
    model = build("Qwen3_5ForCausalLM").double()
    theirs = mixer_of(model)
    one, many = (copy.deepcopy(theirs) for _ in range(2))
    become_drop_in(one, model.config, DropInOptions(unpacked="fused"))
    become_drop_in(many, model.config, DropInOptions(unpacked="fused"))
    pairs = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp")
    )
    for cp_mesh, lengths in [
        (one_mesh, x) for x in cases for one_mesh in (mesh(), pairs["cp"])
    ]:
        many._cp_mesh = cp_mesh
        assert many._cp_mesh is cp_mesh
        size = cp_mesh.size()
        rank = cp_mesh.get_local_rank()
        mine = local_indices([TOKENS], size, rank, "zigzag_buffer")
        told = {} if lengths is None else {"cu_seqlens": offsets_of(lengths)}
        what = f"over {size} ranks {lengths}"
        compare_layers(
            one, many, mine, told, told, what, times=dist.get_world_size() // size
        )
    x = torch.randn(1, TOKENS, 24, dtype=torch.float64)
    cache = model(torch.zeros(1, 3, dtype=torch.long), use_cache=True)[
        cache_name(model)
    ]
    with pytest.raises(ValueError, match="a cache cannot be filled"):
        many(x[:, mine], cache)
    many._cp_mesh = None
    assert torch.equal(many(x), one(x))
    without_names = init_device_mesh("cpu", tuple(pairs.shape))
    for several, words in ((pairs, r"\('dp', 'cp'\)"), (without_names, "2")):
        with pytest.raises(ValueError, match=f"the dimensions {words}; .* over one"):
            many._cp_mesh = several
    assert many._cp_mesh is None


def a_mesh_set_on_a_patched_model_counts() -> None:
    """Resolved batch, positions, softmax attention and the other layers follow the mesh
    of one layer."""
    model = build("Qwen3_5ForCausalLM").double()
    one = copy.deepcopy(model)
    many = copy.deepcopy(model)
    patch(one, unpacked="fused")
    patched = patch(many, unpacked="fused", attention="gathered")
    own = many.config._attn_implementation
    tokens = torch.randint(67, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    mine = own_positions("zigzag_buffer", TOKENS)
    offsets = offsets_of((5, 1, 23, 19))
    logits = one(tokens, use_cache=False, cu_seq_lens_q=offsets).logits
    for cp_mesh in (None, mesh(), None, mesh()):
        *_, last = patched.layers.values()
        last._cp_mesh = cp_mesh
        given = slice(None) if cp_mesh is None else mine
        local = many(tokens[:, given], use_cache=False, cu_seq_lens_q=offsets).logits
        assert_close(f"logits over {cp_mesh}", local, logits[:, given], 1e-5)
    assert many.config._attn_implementation == GATHERED_ATTENTION
    next(iter(patched.layers.values()))._cp_mesh = None
    assert {layer._cp_mesh for layer in patched.layers.values()} == {None}
    patched.undo()
    assert many.config._attn_implementation == own


def a_mesh_of_one_rank_leaves_attention_alone() -> None:
    """Gathered attention takes no mask, so padding before tokens would be seen."""
    one = build("Qwen3_5ForCausalLM")
    alone = build("Qwen3_5ForCausalLM")
    by_itself = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp")
    )
    patch(alone, by_itself["cp"], attention="gathered")
    tokens = torch.randint(67, (2, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    expected = one(tokens, attention_mask=mask).logits
    assert torch.equal(alone(tokens, attention_mask=mask).logits, expected)


def a_patch_says_on_how_many_ranks_it_runs_what() -> None:
    said = repr(patch(build("Qwen3_5ForCausalLM"), mesh()))
    assert f"on {dist.get_world_size()} context-parallel ranks; every batch" in said


def gates_that_alone_are_sharded() -> None:
    """transformers' own forward reads them, and checkpoints have transformers' keys."""
    theirs = build("Qwen3_5ForCausalLM")
    ours = copy.deepcopy(theirs)
    patched = patch(ours)
    shard_gates(ours, mesh=mesh())
    tokens = torch.arange(9)[None]
    expected = theirs(tokens, use_cache=False).logits
    assert torch.equal(ours(tokens, use_cache=False).logits, expected)
    assert list(get_model_state_dict(ours)) == list(theirs.state_dict())
    values = {key: 1.25 * x for key, x in theirs.state_dict().items()}
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(ours, dict(values), options=whole)
    found = get_model_state_dict(ours, options=whole)
    assert all(torch.equal(found[key], value) for key, value in values.items())
    with pytest.raises(RuntimeError, match=r"\(perhaps it was sharded\)"):
        patched.undo()


class Trains:
    """What the mixin calls of transformers' Trainer: the loss is the sum of the token
    ids."""

    args = SimpleNamespace(label_smoothing_factor=0.0)
    compute_loss_func = None
    model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False):
        loss = inputs["input_ids"].double().sum()
        return (loss, model) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only):
        return prediction_loss_only


class CPTrains(ContextParallelTrainerMixin, Trains):
    pass


def a_trainer_gives_each_rank_its_share() -> None:
    """Unless the model is on one rank; an evaluation has the mean of all ranks."""
    size = dist.get_world_size()
    alone, trainer = CPTrains(), CPTrains()
    alone.model = build("Qwen3_5ForCausalLM")
    trainer.model = copy.deepcopy(alone.model)
    patch(alone.model)
    patch(trainer.model, mesh(), attention="gathered")
    assert (alone.get_cp_size(), trainer.get_cp_size()) == (1, size)
    batch = PackingCollator(2 * size)([{"input_ids": [*range(1, 14)]}])
    ids = batch["input_ids"]
    own = ids[:, own_positions("zigzag_buffer", ids.shape[1])].sum()
    assert alone.compute_loss(alone.model, batch) == ids.sum()
    assert trainer.compute_loss(torch.nn.Sequential(trainer.model), batch) == own
    with torch.no_grad():
        mean = trainer.compute_loss(trainer.model, batch)
        told = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert mean == ids.sum() / size and told == (mean, trainer.model)
    fully_shard(trainer.model, mesh=mesh())
    assert trainer.compute_loss(trainer.model, batch) == own
    assert trainer.prediction_step(trainer.model, batch, True)
    assert not alone.prediction_step(alone.model, batch, False)


def a_trainer_deals_one_batch_to_all_ranks() -> None:
    from accelerate.data_loader import BatchSamplerShard

    rank, size = dist.get_rank(), dist.get_world_size()
    trainer = CPTrains()
    trainer.model = build("Qwen3_5ForCausalLM")
    patch(trainer.model, mesh())
    batches = torch.utils.data.BatchSampler(range(8), 2, drop_last=False)
    dealt = BatchSamplerShard(batches, num_processes=size, process_index=rank)
    loader = SimpleNamespace(batch_sampler=dealt)
    assert trainer._share_batches_in_group(loader) is loader
    assert list(dealt) == list(batches)


def indexed_attention_is_refused() -> None:
    """Its indexer would rank the keys of one rank's tokens."""
    model = build("Qwen4ExpForCausalLM")
    patch(model, mesh(), attention="gathered")
    said = "its indexer ranks the keys of the tokens that a rank holds"
    with pytest.raises(NotImplementedError, match=said):
        model(torch.randint(67, (1, 8)), use_cache=False)


def tables_do_not_follow_the_default_device() -> None:
    """On meta, which stands for a GPU here, what is worked out on the host would have
    no values."""
    model = build("Qwen3_5ForCausalLM")
    patch(model, mesh(), attention="gathered")
    tokens = torch.randint(67, (1, TOKENS), generator=torch.Generator().manual_seed(4))
    weight = torch.randn(1, TOKENS, 67, generator=torch.Generator().manual_seed(5))
    ids = torch.repeat_interleave(
        torch.tensor([1, 2, 3, 0]), torch.tensor([5, 1, 23, 19])
    )[None]
    positions = torch.cat([torch.arange(n) for n in (5, 1, 23, 19)])[None]
    mine = own_positions("zigzag_buffer", TOKENS)
    offsets = offsets_of((5, 1, 23, 19))

    index = {"seq_index": mine}
    sources = [
        {},
        index,
        {"attention_mask": ids[:, mine]},
        {"position_ids": positions[:, mine], **index},
        {"cu_seq_lens_q": offsets},
        {"cu_seq_lens_q": offsets, **index},
    ]
    usual = results(model, tokens[:, mine], sources, weight[:, mine])
    with torch.device("meta"):
        elsewhere = results(model, tokens[:, mine], sources, weight[:, mine])
    assert all(torch.equal(a, b) for a, b in zip(usual, elsewhere, strict=True))


def models_equal_one_rank(family: str, cases: list[tuple]) -> None:
    """A model with attention; ``cases`` are (order, mode, lengths or None, source)."""
    model = in_float64(build(family))
    for order, mode, lengths, source in cases:
        what = f"{family} {order} {mode} {lengths} {source}"
        order, layout, by_index = told_by(order)
        one, many = pair(model, cp_layout=layout, linear_cp_mode=mode)
        torch.manual_seed(2)
        tokens = torch.randint(67, (1, TOKENS))
        weight = torch.randn(1, TOKENS, 67, dtype=torch.float64)
        mine = own_positions(order, TOKENS, lengths or [TOKENS])
        given = {}
        told = {}
        if lengths is not None:
            given["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
            ids = torch.repeat_interleave(
                torch.arange(len(lengths)) + 1, torch.tensor(lengths)
            )
            told = {
                "position_ids": {"position_ids": given["position_ids"][:, mine]},
                "offsets": {"cu_seq_lens_q": offsets_of(lengths)},
                "ids": {"_packed_seq_ids": ids[None, mine]},
                "mask": {"attention_mask": ids[None, mine]},
            }[source]
        if by_index:
            told["seq_index"] = mine
        logits = one(tokens, use_cache=False, **given).logits
        (logits * weight).sum().backward()
        local = many(tokens[:, mine], use_cache=False, **told).logits
        (local * weight[:, mine]).sum().backward()
        compare(local, logits, mine, sum_gradients(many), gradients(one), what, 1e-5)


def all_refused(cases: list[tuple]) -> None:
    """``cases`` are (order, options, what the layer is told, the error, rows if not
    1)."""
    for order, options, told, message, *rows in cases:
        model = build("Qwen3_5ForCausalLM")
        layer = mixer_of(model)
        options = {"cp_layout": order, **options}
        become_drop_in(layer, model.config, DropInOptions(cp_mesh=mesh(), **options))
        x = torch.randn(*(rows or [1]), told.pop("tokens", 8), 24)
        with pytest.raises((ValueError, NotImplementedError), match=message):
            layer(x, **told)


def padded_rows_and_padding_in_a_row() -> None:
    model = build("Qwen3_5ForCausalLM").double()
    theirs = mixer_of(model)
    several = torch.ones(2, 16, dtype=torch.long)
    several[1, 9:] = 0
    one_row = torch.tensor([[1] * 5 + [0] * 2 + [2] * 6 + [0] * 3])
    for mask, seq_index in ((several, False), (one_row, False), (one_row, True)):
        one, many = (copy.deepcopy(theirs) for _ in range(2))
        become_drop_in(one, model.config, DropInOptions(unpacked="fused"))
        become_drop_in(many, model.config, DropInOptions(cp_mesh=mesh()))
        torch.manual_seed(1)
        x = torch.randn(*mask.shape, 24, dtype=torch.float64)
        mine = own_positions("contiguous" if seq_index else "zigzag_buffer", 16)
        y = one(x, attention_mask=mask)
        told = {"seq_index": mine} if seq_index else {}
        local = many(x[:, mine], attention_mask=mask[:, mine], **told)
        assert_close("padded", local, y[:, mine], 1e-12)
        assert not local[mask[:, mine] == 0].any()


def without_tokens_there_is_no_output() -> None:
    model = build("Qwen3_5ForCausalLM")
    patch(model, cp_mesh=mesh())
    layer = mixer_of(model)
    for mask in (None, torch.ones(1, 0, dtype=torch.long)):
        assert layer(torch.randn(1, 0, 24), attention_mask=mask).shape == (1, 0, 24)


def a_mask_in_a_dict_is_passed_on() -> None:
    """Whatever it is, to the attention of the caller's own; documents are packed."""
    text = build("Qwen3_5ForCausalLM").model
    patch(text, cp_mesh=mesh())
    ids = torch.tensor([[1] * 5 + [2] * 11])[:, own_positions("zigzag_buffer", 16)]
    for mask in (
        object(),
        torch.ones(1, 1, 8, 16, dtype=torch.bool),
        torch.ones(1, 16),  # linear attention gets no such mask of all ranks' tokens
    ):
        told = {"input_ids": ids, "_packed_seq_ids": ids}
        told["attention_mask"] = {"full_attention": mask}
        given = prepare_forward(text, DropInOptions(cp_mesh=mesh()), told)
        assert given["attention_mask"]["full_attention"] is mask


def fully_sharded_equals_one_rank(family: str) -> None:
    """FSDP2 over the context-parallel ranks, the fp32 gates in groups of their own."""
    one, many = pair(build(family))
    policy = MixedPrecisionPolicy()
    shard_gates(many, mesh=mesh())
    for layer in many.model.layers:
        fully_shard(layer, mesh=mesh(), mp_policy=policy)
    fully_shard(many, mesh=mesh(), mp_policy=policy)
    torch.manual_seed(2)
    tokens = torch.randint(67, (1, 16))
    weight = torch.randn(1, 16, 67)
    ids = torch.tensor([[1] * 5 + [2] * 8 + [3] * 3])
    mine = own_positions("zigzag_buffer", 16)
    logits = one(tokens, _packed_seq_ids=ids).logits
    (logits * weight).sum().backward()
    local = many(tokens[:, mine], _packed_seq_ids=ids[:, mine]).logits
    (local * weight[:, mine] * dist.get_world_size()).sum().backward()
    assert_close("logits", local, logits[:, mine], 1e-4)
    truth = gradients(one)
    for name, parameter in many.named_parameters():
        gradient = parameter.grad.full_tensor()
        assert gradient.dtype == torch.float32
        # A random model magnifies roundings in fp32; the same law in float64 is above.
        assert_close(name, gradient, truth[name], 1e-3)
    # Shards in new memory, as after the meta device, and what is written there.
    for layer in (*one.model.layers, *many.model.layers):
        values = [1.25 * parameter.detach() for parameter in layer.parameters()]
        layer.to_empty(device="cpu")
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.data.copy_(value)
    logits = one(tokens, _packed_seq_ids=ids).logits
    local = many(tokens[:, mine], _packed_seq_ids=ids[:, mine]).logits
    assert_close("logits in new memory", local, logits[:, mine], 1e-3)
    if family == "KimiLinearForCausalLM":
        return  # its gate is no function of one number per head
    alone, sharded = (each.model.layers[0].linear_attn for each in (one, many))
    a = torch.randn(3, 8)
    assert torch.equal(sharded._compute_gate(a), alone._compute_gate(a))


def a_sharded_model_has_the_parameters_of_transformers(family: str) -> None:
    """Names, order, casts, states of model and optimizer; with and without groups of
    gates."""
    theirs = build(family)
    tokens = torch.randint(67, (1, 16), generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[1] * 5 + [2] * 8 + [3] * 3])
    expected = in_float64(copy.deepcopy(theirs))
    expected.load_state_dict(
        {name: 1.25 * x for name, x in theirs.state_dict().items()}
    )
    logits = expected(tokens).logits
    for own_groups in (True, False):
        model = copy.deepcopy(theirs)
        if family == "KimiLinearForCausalLM":
            model.set_experts_implementation("eager")  # in float64
        patch(model)
        if own_groups:
            shard_gates(model, mesh=mesh())
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh(), reshard_after_forward=False)
        fully_shard(model, mesh=mesh())
        names = [name for name, _ in theirs.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names
        model.double()  # a cast counts in the shards too
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for told in ({}, {"_packed_seq_ids": ids}):
            model(tokens, use_cache=False, **told).logits.square().mean().backward()
        model(tokens, use_cache=False)  # leaves gathered parameters behind
        whole = StateDictOptions(full_state_dict=True)
        assert list(model.state_dict()) == list(theirs.state_dict())
        kept = dict(model.named_buffers())
        for name, value in model.state_dict().items():
            assert name in kept or isinstance(value, DTensor), (own_groups, name)
        state = get_model_state_dict(model, options=whole)
        assert state.keys() == theirs.state_dict().keys()
        for name, value in theirs.state_dict().items():
            assert torch.equal(state[name], value.double()), name
        optimizer.step()
        steps = get_optimizer_state_dict(model, optimizer, options=whole)
        assert list(steps["state"]) == names == steps["param_groups"][0]["params"]
        set_model_state_dict(model, dict(expected.state_dict()), options=whole)
        assert_close("loaded", model(tokens).logits, logits, 1e-5)


def different_batches_are_refused() -> None:
    """What a data loader does that deals batches to context-parallel ranks, as
    Trainer's does."""
    model = build("Qwen3_5ForCausalLM")
    patch(model, mesh(), attention="gathered")
    rank = dist.get_rank()
    ids = torch.ones(1, 8, dtype=torch.long)
    for tokens, told, message in (
        (8, {"cu_seq_lens_q": offsets_of((5 + rank, 11 - rank))}, "different offsets:"),
        (
            8,
            {
                "cu_seq_lens_q": offsets_of((5, 11)[rank:])
                if rank
                else offsets_of((5, 11))
            },
            "different numbers of offsets, offsets:",
        ),
        (
            8,
            {"_packed_seq_ids": ids} if rank else {"attention_mask": ids},
            "different kinds of attention_mask, kinds of packed_seq_ids:",
        ),
        (8, {"seq_index": torch.arange(8)} if rank else {}, "kinds of seq_index:"),
        (8 + 4 * rank, {}, "different tokens:"),
    ):
        with pytest.raises(ValueError, match=message):
            model(torch.zeros(1, tokens, dtype=torch.long), **told)


def padding_beside_offsets() -> None:
    """A 0/1 mask with offsets: what it leaves out is neither read by conv and rule nor
    a key."""
    one, many = pair(build("Qwen3_5ForCausalLM").double())
    tokens = torch.randint(67, (1, 16), generator=torch.Generator().manual_seed(4))
    offsets = offsets_of((7, 9))
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[0, 7:9] = 0  # before the second document's tokens
    mask[0, 14:] = 0
    mine = own_positions("zigzag_buffer", 16)
    logits = one(tokens, attention_mask=mask, cu_seq_lens_q=offsets).logits
    told = {"attention_mask": mask[:, mine], "cu_seq_lens_q": offsets}
    local = many(tokens[:, mine], **told).logits
    keep = mask[0, mine] > 0
    assert_close("logits", local[:, keep], logits[:, mine][:, keep], 1e-5)
    alone = one(tokens[:, 9:14], use_cache=False).logits
    assert_close("alone", logits[:, 9:14], alone, 1e-5)
