"""Which delta rule runs here, is it as exact as plain torch, and does it repeat?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..gdn.api import run_rule
from ..gdn.rule import resolve_rule
from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.delta_rule.plain import PlainRule
from ..ops.documents import Documents
from ..ops.rules.base import Rule
from .packages import Finding

_NAMES = ("o", "dq", "dk", "dv", "dg", "dbeta")
_REPEATS = 10


def rules(sizes: HeadSizes, tokens: int) -> Iterator[Finding]:
    """The rule of training and of deterministic mode: the choice, its errors, its repeats.

    Two packed documents of ``tokens`` tokens together; bf16 on a GPU, fp32 on a CPU.
    """
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    inputs = _inputs(sizes, tokens, torch.device(device), dtype)
    documents = Documents((0, tokens // 3, tokens), torch.device(device))
    for subject, deterministic in (("rule", False), ("deterministic rule", True)):
        choice = resolve_rule(device=device, dtype=dtype, sizes=sizes, deterministic=deterministic)
        slow = gpu and choice.rule.name == "reference"
        yield Finding(subject, "note" if slow else "ok", f"{choice.rule.name}: {choice.reason}")
        yield _parity(subject, choice.rule, inputs, documents)
        if deterministic:
            yield _repeats(choice.rule, inputs, documents)


def _parity(subject: str, rule: Rule, inputs: RuleInputs, documents: Documents) -> Finding:
    """Errors against fp64, of root mean square, beside those of plain torch in the same dtype."""
    exact = _results(PlainRule(), RuleInputs(*(x.double() for x in inputs)), documents)
    plain = _errors(_results(PlainRule(), inputs, documents), exact)
    errors = _errors(_results(rule, inputs, documents), exact)
    worst = max(_NAMES, key=lambda name: errors[name] / plain[name])
    ratio = errors[worst] / plain[worst]
    text = f"{worst} {errors[worst]:.1e}, {ratio:.2f} of plain torch's error against fp64"
    if ratio <= 2:  # kernels round their operands once more than plain torch does
        return Finding(f"{subject}, errors", "ok", text)
    return Finding(
        f"{subject}, errors", "wrong", f"{text}: choose another backend, and report this"
    )


def _repeats(rule: Rule, inputs: RuleInputs, documents: Documents) -> Finding:
    first = _results(rule, inputs, documents)
    for repeat in range(1, _REPEATS):
        now = _results(rule, inputs, documents)
        if other := [name for name in _NAMES if not torch.equal(first[name], now[name])]:
            return Finding("repeats", "wrong", f"{', '.join(other)} differ in repeat {repeat}")
    return Finding("repeats", "ok", f"{_REPEATS} repeats equal in {len(_NAMES)} tensors")


def _results(rule: Rule, inputs: RuleInputs, documents: Documents) -> dict[str, Tensor]:
    leaves = RuleInputs(*(x.detach().requires_grad_() for x in inputs))
    with torch.enable_grad():
        out, _ = run_rule(rule, leaves, documents, use_qk_l2norm_in_kernel=True)
    d_out = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return dict(zip(_NAMES, (out.detach(), *torch.autograd.grad(out, leaves, d_out)), strict=True))


def _errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: ((found[name].double() - x).norm() / x.norm()).item() for name, x in exact.items()
    }


def _inputs(sizes: HeadSizes, tokens: int, device: torch.device, dtype: torch.dtype) -> RuleInputs:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    key, value = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)
    q, k, v = (draw(*shape).to(device, dtype) for shape in (key, key, value))
    g = -draw(sizes.value_heads).exp().to(device)
    return RuleInputs(q, k, v, g, draw(sizes.value_heads).sigmoid().to(device))
