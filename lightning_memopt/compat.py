"""What works with what: one table that drives the errors, the page in ``docs/`` and the parametrised tests.

A feature that is not listed here is a bug of this table. ``python -m lightning_memopt.compat`` prints the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_memopt.errors import UnsupportedError

Verdict = Literal["exact", "falls back", "warned", "not detected", "refused"]


@dataclass(frozen=True)
class Case:
    """One feature under the fused strategies.

    Attributes:
        feature: Short name, unique; what code and tests refer to.
        verdict: Exact; exact by a route that saves less; a warning that something has no effect; a use that cannot be
            seen and must be avoided; or refused at set-up (or at the call) with `message`.
        message: Why, and what works instead.
        optimizers: Which optimizers the line is about.
        strategies: Which strategies it is about.
    """

    feature: str
    verdict: Verdict
    message: str
    optimizers: str = "all"
    strategies: str = "all"


_SINGLE, _SHARDED = "forge", "forge_fsdp"
_PRECISION = "Use precision='32-true', 'bf16-true' or 'bf16-mixed', or on one device '64-true'."

CASES = (
    Case("nn.Linear weight", "exact", "updated inside backward; no weight gradient is stored"),
    Case("nn.Linear subclass with a forward of its own", "falls back", "autograd's gradient, consumed at once"),
    Case(
        "nn.Embedding weight",
        "exact",
        "updated from what was looked up; a gradient of the table is stored only where it also takes part in other "
        "layers, or with max_norm or scale_grad_by_freq",
        strategies=_SINGLE,
    ),
    Case("other parameters", "falls back", "autograd's gradient, consumed and freed as soon as it is complete"),
    Case("tied or reused weight", "exact", "one update from the summed gradient, once all uses have delivered"),
    Case("weight.detach() used beside its layer", "refused", "the message says to clone it"),
    Case("weight with gradient hooks", "falls back", "the hooks see the gradient, which is then consumed"),
    Case("activation checkpointing, use_reentrant=False", "exact", "recomputation is not a second use"),
    Case(
        "activation checkpointing, use_reentrant=True",
        "exact",
        "once-used nn.Linear weights inside a segment are updated at once, all else at the end of the backward pass",
    ),
    Case(
        "weight used without its layer in a segment of reentrant checkpointing",
        "refused",
        "the message says to pass use_reentrant=False",
    ),
    Case(
        "value used outside autograd's sight",
        "not detected",
        "`weight.data`, or in a checkpointed segment (or under saved_tensors_hooks) `parameter.detach()` and values "
        "under no_grad, may be read after the update; take a clone in the forward pass, outside checkpointed segments",
    ),
    Case(
        "layers changed or copied behind Lightning's back",
        "not detected",
        "a layer's forward or class set after set-up, a shallow copy of a layer with another weight (copy.copy, clones "
        "of its __dict__; copy.deepcopy and torch.func.functional_call are exact), F.linear replaced or under a torch "
        "function mode, hooks on a weight's AccumulateGrad node",
    ),
    Case(
        "a checkpoint of another optimizer",
        "refused",
        "the checkpoint's optimizer state lacks what this optimizer needs, or has what it does not know, so another "
        "one saved it. Resume with that one, or load the weights only. (Gefen and AdamW8bit take AdamW's.)",
    ),
    Case(
        "a checkpoint folder on one device",
        "refused",
        "a folder as strategy 'forge_fsdp' writes them. Resume with strategy='forge_fsdp' and devices=1; with its "
        "save_distributed_checkpoint=False checkpoints become files, which strategy='forge' reads.",
        strategies=_SINGLE,
    ),
    Case("layer applied to a parameter", "exact", "its input is copied, as it may be updated first"),
    Case("a parameter in two optimizers", "refused", "the message names the parameter"),
    Case(
        "a parameter twice in one optimizer",
        "refused",
        "an optimizer lists it twice (as tied layers' parameters() do, added up), and torch would step it twice. Pass "
        "module.parameters(), which names each once.",
    ),
    Case("two parameters in one memory (b.data = a.data)", "refused", "the message names both"),
    Case(
        "a layer's output gradient changed in place after its use (g.mul_ in a hook)",
        "refused",
        "the message names the weight; return a new tensor (what torch does not count, as a Triton kernel's writes, is "
        "not seen)",
    ),
    Case(
        "torch.compile of the module or its parts",
        "exact",
        "fused layers run between the compiled graphs, each of which ends at such a layer",
    ),
    Case("checkpoint=[patterns] of the strategy", "exact", "a pattern that matches no module is refused"),
    Case("frozen parameters", "exact", "no state, no update; parameters unfrozen later are taken in"),
    Case(
        "accumulate_grad_batches",
        "exact",
        "factors of earlier micro-batches wait for the last; past the break-even, their gradient",
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
        "self.clip_gradients called twice in one step",
        "refused",
        "the first call of self.clip_gradients has used the gradients, a second one would clip nothing. Call it once.",
    ),
    Case(
        "gradient_clip_val changed in a step",
        "refused",
        "the Trainer's gradient_clip_val or gradient_clip_algorithm was changed after the step began, with the one "
        "before. Change it between steps, in on_train_batch_start for example.",
    ),
    Case(
        "self.clip_gradients in another hook",
        "refused",
        "self.clip_gradients was called outside of configure_gradient_clipping, where gradients are consumed already. "
        "Pass Trainer(gradient_clip_val=...), or override configure_gradient_clipping and call it there.",
    ),
    Case(
        "configure_gradient_clipping without self.clip_gradients",
        "refused",
        "the overridden configure_gradient_clipping or clip_gradients did not call Lightning's "
        "self.clip_gradients(optimizer, ...), and there are no gradients to treat otherwise. Call it "
        "(gradient_clip_val=0.0 clips nothing), or remove the override.",
    ),
    Case(
        "on_after_backward, on_before_optimizer_step, on_before_zero_grad",
        "warned",
        "the hooks run, but find no gradients to read or change, and weights that are updated already; clip by "
        "Trainer(gradient_clip_val=...), log norms by lightning_memopt.callbacks.GradNorm",
    ),
    Case(
        "optimizer_zero_grad or optimizer_step overridden",
        "falls back",
        "gradients of earlier micro-batches accumulate as autograd's own",
    ),
    Case(
        "gradients read or changed elsewhere",
        "not detected",
        "parameter.grad is None after a fused backward pass, and torch.nn.utils.clip_grad_norm_ then clips nothing: in "
        "an overridden backward, optimizer_step or configure_gradient_clipping, after fused_step, in a closure, or "
        "between micro-batches, where only zero_grad() of the optimizer and of the LightningModule is seen",
    ),
    Case(
        "an error in the backward pass that the module catches",
        "refused",
        "an error inside the backward pass was caught by the module's own code. Some weights are updated by then and "
        "others are not, so the run cannot go on. Check the loss before its backward pass instead.",
    ),
    Case(
        "gradients that are NaN or infinite",
        "refused",
        "NonFiniteError; what is affected stays as it was. With nonfinite='skip' the run goes on, and counts skips",
    ),
    Case(
        "zero_grad(set_to_none=False)",
        "refused",
        "zero gradients would update parameters that a step does not use. Use zero_grad(), which sets them to None.",
    ),
    Case(
        "optimizer_zero_grad that keeps gradients",
        "refused",
        "the overridden optimizer_zero_grad leaves gradients in place, but each step consumes them, so they cannot add "
        "up over steps. Set them to None in the hook, and accumulate with accumulate_grad_batches.",
    ),
    Case(
        "precision 32-true, bf16-true, bf16-mixed",
        "exact",
        "bf16-true weights are rounded as `rounding` says",
    ),
    Case("precision 64-true", "falls back", "plain-torch kernels in float64", strategies=_SINGLE),
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
        "optimizer.step() found gradients of a backward pass that was not fused, or broke off. Write "
        "`with memopt.fused_step(optimizer): self.manual_backward(loss)` before `optimizer.step()`.",
    ),
    Case(
        "clip_gradients after fused_step",
        "refused",
        "self.clip_gradients(...) came after the gradients were consumed. Pass gradient_clip_val to `fused_step`.",
    ),
    Case(
        "second fused_step before optimizer.step()",
        "refused",
        "a second fused_step began before optimizer.step() closed the first; call optimizer.step() after each.",
    ),
    Case(
        "several devices",
        "refused",
        "strategy 'forge' trains on one device. Pass devices=1, num_nodes=1, or strategy='forge_fsdp' for several.",
        strategies=_SINGLE,
    ),
    Case(
        "optimizer options foreach, fused",
        "exact",
        "they choose torch's kernels, which are not used; said once",
    ),
    Case(
        "optimizer options rounding, seed",
        "warned",
        "the strategy's options of these names hold",
        "AdamW8bit, Gefen",
    ),
    Case("optimizer option maximize", "exact", "the gradient's sign is turned in the kernel"),
    Case("optimizer options amsgrad, capturable, differentiable", "refused", "the message names the option"),
    Case("SGD with dampening and momentum", "refused", "the message names the option", "SGD"),
    Case("tensor learning rates", "exact", "read when the backward pass of a step begins"),
    Case(
        "options or states of the optimizer changed in training_step",
        "exact",
        "read again when the backward pass begins; cuda_graph does not capture such a step",
    ),
    Case(
        "options or states of the optimizer changed between a step's backward pass and its end",
        "refused",
        "followed in on_after_backward, where updates wait for a norm; else change them before, or after the step",
    ),
    Case(
        "parameters taken out of their optimizer in training",
        "exact",
        "not updated any more",
        strategies=_SINGLE,
    ),
    Case(
        "parameters taken out of their optimizer, sharded",
        "refused",
        "Freeze it instead: parameter.requires_grad_(False).",
        strategies=_SHARDED,
    ),
    Case(
        "configure_optimizers that returns None",
        "refused",
        "without an optimizer there is nothing to fuse. Use strategy='auto'.",
    ),
    Case("optimizer without a rule", "refused", "the message lists the optimizers that have one", "unknown"),
    Case(
        "subclass of an optimizer with a rule",
        "refused",
        "it may step in another way; the message names the class to use instead",
        "unknown",
    ),
    Case("float16 or complex parameters", "refused", "the message names the parameter"),
    Case("sparse embedding gradients", "refused", "build nn.Embedding and nn.EmbeddingBag with sparse=False."),
    Case(
        "kernel 'fused' on a CPU",
        "refused",
        "kernel='fused' needs a GPU. Use kernel='auto', which picks what the device has.",
    ),
    Case("a second backward pass in one fused step", "refused", "the message names the parameter"),
    Case(
        "cuda_graph",
        "exact",
        "the captured step replays the kernels an eager step would launch; captured anew when layers are frozen or "
        "unfrozen, or states replaced",
        strategies=_SINGLE,
    ),
    Case(
        "cuda_graph without a GPU",
        "refused",
        "cuda_graph=True needs a CUDA GPU. Leave it out, or use cuda_graph='auto', which runs eagerly elsewhere.",
        strategies=_SINGLE,
    ),
    Case(
        "cuda_graph with SMET",
        "exact",
        "a topology update writes masks and moments where they lie, so the captured step serves on; a step whose "
        "gradient decides what grows runs eagerly",
        strategies=_SINGLE,
    ),
    Case(
        "cuda_graph with SMET in plain torch",
        "refused",
        "the message names the parameter; docs/smet.md says which updates run in plain torch",
        strategies=_SINGLE,
    ),
    Case(
        "cuda_graph in manual optimization",
        "refused",
        "cuda_graph=True captures automatic optimization only. Leave it out, or use cuda_graph='auto'.",
        strategies=_SINGLE,
    ),
    Case(
        "cuda_graph with accumulate_grad_batches",
        "refused",
        "cuda_graph=True captures steps of one micro-batch. Use accumulate_grad_batches=1, or cuda_graph='auto'.",
        strategies=_SINGLE,
    ),
    Case(
        "cuda_graph with nonfinite='skip' and norm clipping",
        "refused",
        "skipping a step asks the GPU whether its norm is finite, which a graph cannot. Use nonfinite='raise'.",
        strategies=_SINGLE,
    ),
    Case("SMET", "exact", "moments of active weights only; weights off the mask stay zero"),
    Case(
        "SMET with Adagrad",
        "exact",
        "`lr_decay` counts the parameter's steps, not a weight's age: it is a schedule",
        "Adagrad",
    ),
    Case(
        "SMET with RMSprop, Adagrad, SGD, Lion",
        "exact",
        "they correct no bias, so ages matter for the warm-up only",
        "RMSprop, Adagrad, SGD, Lion",
    ),
    Case(
        "SMET with AdamW8bit",
        "exact",
        "blocks are the active weights in a span of a row; a topology update encodes codes anew",
        "AdamW8bit",
    ),
    Case(
        "SMET with Gefen",
        "exact",
        "as AdamW8bit; a regrown weight joins its block's second moment, so only the first corrects by its age; blocks "
        "have the default length, columns no factors",
        "Gefen",
    ),
    Case(
        "SMET under another strategy",
        "refused",
        "SMET keeps optimizer state for active weights only, which needs an update that knows of masks. "
        "Use strategy='forge' or 'forge_fsdp'.",
    ),
    Case(
        "SMET on sharded weights",
        "exact",
        "each rank has mask, ages and moments of its rows; masks are those of one process, checkpoints reshard",
        strategies=_SHARDED,
    ),
    Case(
        "SMET on a weight that is shared with an embedding",
        "refused",
        "a sparse layer's weight is the embedding matrix too. Untie them, or exclude the layer.",
    ),
    Case(
        "SMET with two densities for one weight",
        "refused",
        "two layers share it, and `density` gives each another. Give both the same, or name one of them in `exclude`.",
    ),
    Case(
        "weight averaging callbacks with SMET",
        "refused",
        "averages over several masks are of no mask: weights that are inactive in the end are not zero in them. Leave "
        "the callback out, or keep the first masks with prune_fraction=0.",
    ),
    Case(
        "a checkpoint of SMET without SMET",
        "refused",
        "the checkpoint holds optimizer state of active weights only. Add the callback lightning_memopt.SMET with the "
        "arguments that the run began with.",
    ),
    Case(
        "sharded nn.Linear weight",
        "exact",
        "factors are exchanged, or blocks of the gradient reduced; its rows need not be divisible by the ranks",
        strategies=_SHARDED,
    ),
    Case(
        "other sharded parameters",
        "falls back",
        "FSDP2 averages their gradients; used at the end of the backward pass",
        strategies=_SHARDED,
    ),
    Case("other token counts on each rank", "exact", "padded to the largest by zeros", strategies=_SHARDED),
    Case(
        "ranks that run different layers",
        "refused",
        "found before the exchange; all ranks raise the same error",
        strategies=_SHARDED,
    ),
    Case("resume with another number of devices", "exact", "folders and single files", strategies=_SHARDED),
    Case(
        "configure_model that shards",
        "exact",
        "left as it is; every trained parameter must be sharded, by rows",
        strategies=_SHARDED,
    ),
    Case(
        "weight shared between sharded blocks",
        "refused",
        "each block would get a copy of its own. Pass wrap=[classes] so that all modules that use it belong to one "
        "block, or none of them to any.",
        strategies=_SHARDED,
    ),
    Case(
        "scalar parameters, sharded",
        "refused",
        "FSDP2 shards tensors of one dimension or more. Give it one before the optimizer is built, in `__init__` or "
        "configure_model: module.scale = torch.nn.Parameter(module.scale.detach()[None]).",
        strategies=_SHARDED,
    ),
    Case(
        "parameters without elements, sharded",
        "refused",
        "FSDP2 cannot average their gradients. Leave the parameter out, or make it a buffer.",
        strategies=_SHARDED,
    ),
    Case(
        "precision 64-true, sharded",
        "refused",
        "float64 is not exchanged between devices. Use precision='32-true', 'bf16-true' or 'bf16-mixed'.",
        strategies=_SHARDED,
    ),
    Case(
        "callbacks StochasticWeightAveraging, WeightAveraging, EMAWeightAveraging",
        "exact",
        "averages are of the same weights; with BatchNorm, plain StochasticWeightAveraging ends its pass over the data "
        "with a step by gradients left of the epoch before, which are not there",
        strategies=_SINGLE,
    ),
    Case(
        "weight averaging callbacks, sharded",
        "refused",
        "Lightning's averages are copies of the whole module, which sharded weights do not go into. Use "
        "strategy='forge' on one device, or leave the callback out.",
        strategies=_SHARDED,
    ),
    Case(
        "shards toggled while their weights are gathered",
        "refused",
        "FSDP2 does not notice that requires_grad of a shard changes between its gathering and the backward pass. In "
        "manual optimization, leave sharding to the strategy, or call fully_shard with reshard_after_forward=True for "
        "roots as well.",
        strategies=_SHARDED,
    ),
    Case(
        "CPU offload",
        "refused",
        "the update runs on the device, where states and weights must be. Leave out offload_policy.",
        strategies=_SHARDED,
    ),
    Case(
        "parameters of the LightningModule itself in manual optimization",
        "refused",
        "in manual optimization each child module is sharded on its own; put the parameter into one of them.",
        strategies=_SHARDED,
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
        "`exact`: equal to the plain run. `falls back`: equal as well, by a route that saves less memory. `warned`:",
        "a warning at set-up. `not detected`: to be avoided, as it cannot be seen. `refused`: an error that says what",
        "works instead. Generated from `lightning_memopt/compat.py`.",
        "",
        "| feature | strategies | optimizers | verdict | how, or what works instead |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {c.feature} | {c.strategies} | {c.optimizers} | {c.verdict} | {c.message} |" for c in CASES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
