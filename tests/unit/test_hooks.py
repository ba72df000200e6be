"""Hooks of modules whose parameters a mixer reads without calling the modules."""

import pytest
from torch import nn

from megatron_gdn.mixers import hooks

FSDP = "megatron_fsdp.megatron_fsdp"
# Module and name of the hooks that wait for parameters.
WAITING = {
    "ddp": (hooks._DDP_MODULE, "hook"),
    "megatron-fsdp": (FSDP, "_pre_forward_param_unshard"),
    "megatron-core's copy": (
        f"megatron.core.distributed.fsdp.src.{FSDP}",
        "_pre_forward_param_unshard",
    ),
}


@pytest.mark.parametrize("place", WAITING.values(), ids=WAITING)
def test_gathered_parameters_are_waited_for_once_and_the_hooks_are_back(place):
    calls = []

    def waits(module, inputs):
        calls.append("waits")

    def other(module, inputs):
        calls.append("other")

    waits.__module__, waits.__name__ = place
    other.__module__ = FSDP
    norm = nn.Identity()
    norm.register_forward_pre_hook(waits)
    assert hooks.only_waits_for_parameters(norm)
    norm.register_forward_pre_hook(other)
    assert not hooks.only_waits_for_parameters(norm)
    norm.register_forward_pre_hook({}.setdefault)  # a function of no module
    before = dict(norm._forward_pre_hooks)
    with hooks.gathered_parameters(norm):
        assert calls == ["waits"]
        norm(1)
        norm(2)
        assert calls == ["waits", "other", "other"]
    assert dict(norm._forward_pre_hooks) == before
    norm(3)
    assert calls[3:] == ["waits", "other"]


def test_the_input_of_a_module_is_made_for_its_pre_hooks_alone():
    """Hooks that do not run get none: to make it may be a copy of all tokens."""
    made = []
    norm = nn.Identity()
    norm.register_forward_hook(print)
    hooks.run_pre_hooks(norm, lambda: made.append("input"))
    assert made == []
    norm.register_forward_pre_hook(lambda module, inputs: None)
    norm.register_forward_pre_hook(lambda module, inputs: None)
    hooks.run_pre_hooks(norm, lambda: made.append("input"))
    assert made == ["input"]


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward"])
def test_hooks_of_every_kind_are_seen(kind):
    norm = nn.Identity()
    assert not hooks.has_hooks(norm)
    getattr(norm, f"register_{kind}_hook")(print)
    assert hooks.has_hooks(norm)


@pytest.mark.parametrize(
    "returned",
    [("input", "more"), (), ("other",), "other"],
    ids=str,
)
@pytest.mark.parametrize("keywords", [False, True])
def test_pre_hooks_that_return_another_input_are_refused(returned, keywords):
    norm = nn.Identity()

    def hook(module, inputs, *kwargs):
        return (returned, {}) if keywords else returned

    norm.register_forward_pre_hook(hook, with_kwargs=keywords)
    with pytest.raises(NotImplementedError, match="Identity .* another input"):
        hooks.run_pre_hooks(norm, lambda: "input")


def test_pre_hooks_that_add_keywords_are_refused():
    norm = nn.Identity()
    norm.register_forward_pre_hook(lambda *_: ("input", {"x": 1}), with_kwargs=True)
    with pytest.raises(NotImplementedError, match="Identity .* another input"):
        hooks.run_pre_hooks(norm, lambda: "input")


def test_accelerate_calls_a_modules_own_forward_only_under_a_hook():
    """Another package may store an attribute of either name."""
    names = "_hf_hook", "_old_forward"
    for given in ((), names[:1], names[1:], names):
        module = nn.Identity()
        vars(module).update(dict.fromkeys(given))
        expected = "_old_forward" if given == names else "forward"
        assert hooks.forward_name(module) == expected


def test_only_hooks_that_do_not_run_are_named(monkeypatch):
    said = []
    monkeypatch.setattr(hooks, "log_once", said.append)
    norm = nn.Identity()
    norm.register_forward_pre_hook(lambda module, inputs: None)
    hooks.run_pre_hooks(norm, lambda: "input")
    assert said == []
    norm.register_forward_hook(print)
    hooks.run_pre_hooks(norm, lambda: "input")
    assert len(said) == 1 and "forward hooks" in said[0]
