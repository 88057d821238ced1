"""``strategy="forge_fsdp"``: the fused backward on parameters sharded over many devices by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_memopt.backward import NonFinite
from lightning_memopt.backward.exchange import Ranks
from lightning_memopt.backward.groups import kept_mesh, ranks_of, renew, spoil
from lightning_memopt.backward.peers import Peers
from lightning_memopt.backward.sharded_updater import ShardedUpdater
from lightning_memopt.backward.windows import any_reason, why_not
from lightning_memopt.compat import refusal
from lightning_memopt.errors import UnsupportedError
from lightning_memopt.kernels import Kernel, Rounding
from lightning_memopt.kernels.update import Beside
from lightning_memopt.sparsity import portable
from lightning_memopt.strategies import sharded_checkpoint, sharding
from lightning_memopt.strategies.gathering import by_copies, gather_by_collectives, gather_by_copies
from lightning_memopt.strategies.mixin import ForgeMixin, averaging_callbacks, check_choice


class ForgeFSDPStrategy(ForgeMixin, sharded_checkpoint.CompleteCheckpoints):
    """Train on many devices with parameters, gradients and states sharded, each update fused into the backward pass.

    The module needs no ``configure_model``: the strategy shards it by blocks. A module that shards itself there is left
    as it is. Optimizers, state keys and checkpoints are those of torch's FSDP2 and of the single-device strategy; the
    number of devices may change between runs.

    Args:
        rounding: How a bf16 weight is stored: ``"stochastic"`` (unbiased, reproducible) or to the ``"nearest"``. The
            random bits do not depend on the number of devices.
        kernel: ``"auto"``, or one of ``"reference"``, ``"two_pass"``, ``"fused"`` for every parameter that allows it.
        nonfinite: What a NaN or infinite gradient does: ``"raise"`` an error that names parameter and step, or
            ``"skip"`` that update and count it in the logs. All ranks do the same.
        state_dtype: Moments of bf16 weights, and gradients where they have to wait (norm clipping, accumulation), in
            the weight's precision (``"param"``, as torch) or in ``"float32"``.
        seed: Seed of stochastic rounding.
        checkpoint: Modules that run again in the backward pass instead of keeping their activations, by name pattern:
            ``["*.layers.*"]`` for the blocks of a transformer.
        wrap: Classes whose instances are gathered and freed as one, by name; ``"auto"`` takes the repeated blocks.
        reshard_after_forward: Free a block's gathered weights after forward and gather them again for backward. Without
            it, less communication and more memory.
        replicate: Keep this many replicas of the model, each sharded over its part of the devices.
        route: How gradients of linear layers are summed: ``"exchange"`` of their factors, ``"reduce"`` of the gradient
            block by block, or ``"auto"``: for each layer what moves fewer bytes.
        peer_memory: Gather weights and exchange factors by copies out of the other ranks' memory instead of NCCL's
            collectives; None does so on GPUs where they can read each other's: on one host, as a rule.
        save_distributed_checkpoint: Write checkpoints as folders, a file per rank; else one file, as on one device.
        process_group_backend: ``"nccl"``, ``"gloo"``, …; None takes the device's usual one.
        timeout_seconds: How long a rank waits for the others before it gives up.
    """

    strategy_name = "forge_fsdp"
    updater: ShardedUpdater
    updater_class = ShardedUpdater

    def __init__(
        self,
        rounding: Rounding = "stochastic",
        kernel: Kernel = "auto",
        nonfinite: NonFinite = "raise",
        state_dtype: Literal["param", "float32"] = "param",
        seed: int = 0,
        checkpoint: Sequence[str] = (),
        wrap: Sequence[str] | str = "auto",
        reshard_after_forward: bool = True,
        replicate: int = 1,
        route: Literal["auto", "exchange", "reduce"] = "auto",
        peer_memory: bool | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout_seconds: int = 1800,
    ) -> None:
        check_choice("route", route, ("auto", "exchange", "reduce"))
        super().__init__(
            rounding=rounding,
            kernel=kernel,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
            seed=seed,
            checkpoint=checkpoint,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.timeout = timedelta(seconds=timeout_seconds)
        self.updater.route = route
        self.wrap, self.reshard_after_forward, self.replicate = wrap, reshard_after_forward, replicate
        self.peer_memory = peer_memory
        self._mesh: DeviceMesh | None = None
        self._names_before: dict[nn.Parameter, str] = {}
        self._peers: Peers | None = None
        self._ranks: Ranks | None = None
        self._fitting = False
        self._in_step = False  # of the module, as its forward pass
        self._outside: RemovableHandle | None = None
        self._near = False  # whether all ranks can read each other's memory

    # ---------------------------------------------------------------- set-up

    def connect(self, model: pl.LightningModule) -> None:
        """Take in the module, and remember its parameters as they are before sharding replaces them."""
        self._names_before = {param: name for name, param in model.named_parameters()}
        super().connect(model)

    def setup_environment(self) -> None:
        """Join the other ranks; all of them train one model."""
        ranks = self.num_nodes * self.num_processes
        if ranks % self.replicate:
            raise UnsupportedError(f"replicate={self.replicate} does not divide the {ranks} devices.")
        self._data_parallel_size, self._tensor_parallel_size = ranks, 1
        # As Lightning's strategy does, but for the mesh, of which it makes one per run: its groups would never end.
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        renew(self.root_device)
        kind, module = self.root_device.type, self.lightning_module
        self._device_mesh = kept_mesh(kind, {"data_parallel": ranks, "tensor_parallel": 1})
        assert module is not None
        module._device_mesh = self._device_mesh  # what `configure_model` may use
        if self.replicate > 1:
            self._mesh = kept_mesh(kind, {"replicate": self.replicate, "shard": ranks // self.replicate})
        else:
            self._mesh = self.device_mesh["data_parallel"]

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the module, then create and check the optimizers."""
        assert self.accelerator is not None and self.model is not None and self._mesh is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        self._check_precision()
        self._check_callbacks(trainer)
        if not sharding.is_sharded(module):
            # A step runs as the module's forward pass, so that the whole of it may use the root's weights. In manual
            # optimization it holds backward passes too; there each child is a root, gathered when it is called.
            roots = [module] if module.automatic_optimization else _children_with_parameters(module)
            # These, and all blocks, are freed after it: what no backward pass follows would stay gathered while it is
            # toggled.
            keep = module.automatic_optimization
            sharding.shard(roots, self._mesh, self.wrap, self.reshard_after_forward or not keep, self._place, keep)
        self._outside = module.register_forward_hook(lambda *_: self._free_outside_of_steps())
        _materialize_distributed_module(module, self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.barrier()
        self._use_peer_memory(module)
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        if self._fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self._fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _use_peer_memory(self, module: nn.Module) -> None:
        """Gather weights from now on out of the other ranks' memory, and send factors so, where that works.

        Raises:
            UnsupportedError: It was asked for and does not work.
        """
        assert self._mesh is not None
        wanted = self.root_device.type == "cuda" if self.peer_memory is None else self.peer_memory
        if not wanted or self.world_size == 1:
            return
        near, everyone = self._mesh.get_group(self._mesh.ndim - 1), dist.group.WORLD
        assert everyone is not None
        reason = any_reason(why_not(near, self.root_device), everyone)  # one for all replicas
        if reason is None:
            gather_by_copies(sharding.groups(module), self.timeout)
            reason = why_not(everyone, self.root_device) if self.replicate > 1 else None
            self._near = reason is None
        if reason is not None and self.peer_memory:
            raise UnsupportedError(f"peer_memory=True, but {reason}. Leave it out, and collectives are used instead.")
        if reason is not None:
            rank_zero_info(f"Ranks do not read each other's memory, but use collectives: {reason}.")

    def _place(self, module: nn.Module) -> None:
        self.precision_plugin.convert_module(module)
        module.to(self.root_device)

    def _check_precision(self) -> None:
        if isinstance(self.precision_plugin, DoublePrecision):
            raise refusal("precision 64-true, sharded", f"strategy '{self.strategy_name}'")

    def _check_callbacks(self, trainer: pl.Trainer) -> None:
        """Refuse averages of the weights: Lightning's copy of the module was made of it before it was sharded."""
        names = averaging_callbacks(trainer)
        if names and trainer.state.fn == TrainerFn.FITTING:
            raise refusal("weight averaging callbacks, sharded", names[0])

    def _prepare_optimizers(self) -> None:
        """Hand the optimizers the sharded parameters, and the updater what it must know of them."""
        module = self.lightning_module
        assert module is not None
        unsharded = sharding.unsharded_parameters(module)
        sharding.rebind(self.optimizers, self._names_before, module)
        self._names_before = {}
        if self._peers is None:
            self._peers = Peers(self.world_size, self.timeout)
        if self._ranks is None:
            assert self._mesh is not None
            self._ranks = ranks_of(self._mesh, self.timeout, self.root_device if self._near else None)
        beside: Beside = "collectives" if self.world_size > 1 else "nothing"
        if self._near and by_copies(sharding.groups(module)):
            beside = "barriers"
        self.updater.share(self._ranks, self._peers, unsharded, sharding.units(module), beside)

    # ---------------------------------------------------------------- steps

    def _redirected(self, method: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """A step of the module, run as its forward pass where that gathers the root's weights."""
        module = self.lightning_module
        assert module is not None
        self._in_step = True
        try:
            if sharding.is_root(module):
                return self._forward_redirection(module, module, method, *args, **kwargs)
            return getattr(module, method)(*args, **kwargs)
        finally:
            self._in_step = False

    def _free_outside_of_steps(self) -> None:
        """A callback has called the module: as after a validation step, none of its weights stays gathered."""
        if not self._in_step and not torch.is_grad_enabled():
            self.free_gathered()

    def _evaluated(self, method: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """A step without backward pass, after which, while fitting, all of the module's parameters are shards.

        A callback that froze or wrote gathered ones would do so in vain.
        """
        output = self._redirected(method, *args, **kwargs)
        if self._fitting:
            self.free_gathered()
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's, as its forward pass."""
        assert self._peers is not None
        with self._peers.explained(), self.precision_plugin.train_step_context():
            output = self._redirected("training_step", *args, **kwargs)
            if output is None:  # there is no backward pass that would free what is gathered
                self.free_gathered()
            return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As for one device; an error that another rank caused says so."""
        assert self._peers is not None
        with self._peers.explained():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's, as its forward pass."""
        with self.precision_plugin.val_step_context():
            return self._evaluated("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's, as its forward pass."""
        with self.precision_plugin.test_step_context():
            return self._evaluated("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's, as its forward pass."""
        with self.precision_plugin.predict_step_context():
            return self._evaluated("predict_step", *args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks."""
        spoil()
        if self._peers is not None:
            self._peers.fail(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave a module whose parameters are all sharded."""
        if self._outside is not None:
            self._outside.remove()
        if self.lightning_module is not None:
            sharding.abandon(self.lightning_module)
            gather_by_collectives(sharding.groups(self.lightning_module))
        super().teardown()

    def free_gathered(self) -> None:
        """Free what was gathered of shards, so that what is written to these is seen."""
        assert self.lightning_module is not None
        sharding.reshard(self.lightning_module)

    # ---------------------------------------------------------------- checkpoints

    def _states_to_save(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Inside, states are in the form that all ranks write alike."""
        return portable.portable(optimizer)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder or a single file, written by any number of ranks.

        Raises:
            UnsupportedError: The folder is not complete.
        """
        path = Path(self.broadcast(checkpoint_path))
        module = self.lightning_module
        assert module is not None and self.model is not None
        sharded_checkpoint.refuse_incomplete(path)
        sharding.reshard(module)
        checkpoint = sharded_checkpoint.load_module(path, self.model, module.strict_loading, weights_only)
        if self.optimizers:
            states = sharded_checkpoint.read_optimizers(path, checkpoint, self.model, self.optimizers)
            for optimizer, saved in zip(self.optimizers, states, strict=True):
                self.updater.load(optimizer, saved)
            self.updater.mend()
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has done so."""


def _children_with_parameters(module: pl.LightningModule) -> list[nn.Module]:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise refusal("parameters of the LightningModule itself in manual optimization", own[0])
    return [child for child in module.children() if next(child.parameters(), None) is not None]
