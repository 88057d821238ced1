"""What works with what: one table that drives the errors, the page in ``docs/`` and the parametrised tests.

A feature that is not listed here is a bug of this table. ``python -m lightning_memopt.compat`` prints the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memopt.errors import UnsupportedError

Verdict = Literal["exact", "falls back", "refused"]


@dataclass(frozen=True)
class Case:
    """One feature under the fused strategies.

    Attributes:
        feature: Short name, unique; what code and tests refer to.
        verdict: Exact; exact by a route that saves less; or refused at set-up (or at the call) with `message`.
        message: Why, and what works instead.
        optimizers: Which optimizers the line is about.
    """

    feature: str
    verdict: Verdict
    message: str
    optimizers: str = "all"


_PRECISION = "Use precision='32-true', 'bf16-true', 'bf16-mixed' or '64-true'."

CASES = (
    Case("nn.Linear weight", "exact", "updated inside backward; no weight gradient is stored"),
    Case("nn.Linear subclass with a forward of its own", "falls back", "autograd's gradient, consumed at once"),
    Case("other parameters", "falls back", "autograd's gradient, consumed and freed as soon as it is complete"),
    Case("tied or reused weight", "exact", "one update from the summed gradient, once all uses have delivered"),
    Case("weight with gradient hooks", "falls back", "the hooks see the gradient, which is then consumed"),
    Case("activation checkpointing, use_reentrant=False", "exact", "recomputation is not a second use"),
    Case(
        "activation checkpointing, use_reentrant=True",
        "exact",
        "parameters other than once-used nn.Linear weights are updated at the end of the backward pass",
    ),
    Case("checkpoint=[patterns] of the strategy", "exact", "a pattern that matches no module is refused"),
    Case("frozen parameters", "exact", "no state, no update; parameters unfrozen later are taken in"),
    Case(
        "accumulate_grad_batches",
        "exact",
        "factors of earlier micro-batches wait for the last; past the break-even, a buffer",
    ),
    Case("gradient_clip_val, algorithm 'value'", "exact", "clamped in the kernel"),
    Case(
        "gradient_clip_val, algorithm 'norm'",
        "exact",
        "factors wait for the norm, which needs no gradient",
    ),
    Case(
        "configure_gradient_clipping calling self.clip_gradients",
        "exact",
        "the call finishes the deferred step",
    ),
    Case(
        "configure_gradient_clipping without self.clip_gradients",
        "refused",
        "the overridden configure_gradient_clipping did not call self.clip_gradients(optimizer, ...), and there are no "
        "gradients to treat otherwise. Call it (gradient_clip_val=0.0 clips nothing), or remove the override.",
    ),
    Case(
        "precision 32-true, bf16-true, bf16-mixed",
        "exact",
        "bf16-true weights are rounded as `rounding` says",
    ),
    Case("precision 64-true", "falls back", "plain-torch kernels in float64"),
    Case(
        "precision 16-mixed",
        "refused",
        "precision '16-mixed' scales the loss, so a fused update would apply scaled gradients. " + _PRECISION,
    ),
    Case("precision 16-true", "refused", "float16 weights lose small updates. " + _PRECISION),
    Case("other precision plugins", "refused", "weights would not be what the update expects. " + _PRECISION),
    Case("manual optimization with fused_step", "exact", "the pass in the context updates, others accumulate"),
    Case(
        "manual optimization without fused_step",
        "refused",
        "optimizer.step() found gradients of a backward pass that was not fused. Write "
        "`with memopt.fused_step(optimizer): self.manual_backward(loss)` before `optimizer.step()`.",
    ),
    Case(
        "clip_gradients after fused_step",
        "refused",
        "self.clip_gradients(...) came after the gradients were consumed. Pass gradient_clip_val to `memopt.fused_step`.",
    ),
    Case(
        "second fused_step before optimizer.step()",
        "refused",
        "a second fused_step began before optimizer.step() closed the first; call optimizer.step() after each.",
    ),
    Case(
        "several devices",
        "refused",
        "strategy 'forge' trains on one device. Pass devices=1.",
    ),
    Case(
        "optimizer options foreach, fused",
        "exact",
        "they choose torch's kernels, which are not used; said once",
    ),
    Case("optimizer option maximize", "exact", "the gradient's sign is turned in the kernel"),
    Case("optimizer options amsgrad, capturable, differentiable", "refused", "the message names the option"),
    Case("SGD with dampening and momentum", "refused", "the message names the option", "SGD"),
    Case("tensor learning rates", "exact", "read at the start of each step"),
    Case("optimizer without a rule", "refused", "the message lists the optimizers that have one", "unknown"),
    Case("float16 or complex parameters", "refused", "the message names the parameter"),
    Case("sparse embedding gradients", "refused", "build nn.Embedding and nn.EmbeddingBag with sparse=False."),
    Case(
        "kernel 'fused' on a CPU",
        "refused",
        "kernel='fused' needs a GPU. Use kernel='auto', which picks what the device has.",
    ),
    Case("a second backward pass in one fused step", "refused", "the message names the parameter"),
    Case(
        "modules of the package pytorch_lightning",
        "refused",
        "the strategies belong to the package `lightning`: write `import lightning.pytorch as pl`, not "
        "`import pytorch_lightning as pl`.",
    ),
)

_BY_FEATURE = {case.feature: case for case in CASES}


def refusal(feature: str, where: str = "strategy 'forge'") -> UnsupportedError:
    """The error of a refused feature, to be raised by the caller."""
    case = _BY_FEATURE[feature]
    assert case.verdict == "refused", feature
    return UnsupportedError(f"{where}: {case.message}")


def page() -> str:
    """The compatibility page in Markdown."""
    lines = [
        "# What works with the fused strategies",
        "",
        "`exact`: equal to the plain run. `falls back`: equal as well, by a route that saves less memory. `refused`: an",
        "error that says what works instead. Generated from `lightning_memopt/compat.py`.",
        "",
        "| feature | optimizers | verdict | how, or what works instead |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {c.feature} | {c.optimizers} | {c.verdict} | {c.message} |" for c in CASES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
