"""``strategy="forge"``: the fused backward on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.backward import NonFinite
from lightning_memopt.compat import refusal
from lightning_memopt.kernels import Kernel, Rounding
from lightning_memopt.strategies.mixin import ForgeMixin, check_choice
from lightning_memopt.strategies.outline import outline
from lightning_memopt.strategies.step_graph import StepGraphs


class ForgeStrategy(ForgeMixin, SingleDeviceStrategy):
    """Train on one device with each optimizer update fused into the backward pass.

    The optimizer stays the user's own and keeps torch's state keys, so checkpoints move between this strategy and plain
    Lightning. What cannot be done exactly is refused at set-up; ``docs/compatibility.md`` lists it.

    Args:
        rounding: How a bf16 weight is stored: ``"stochastic"`` (unbiased, reproducible) or to the ``"nearest"``.
        kernel: ``"auto"``, or one of ``"reference"``, ``"two_pass"``, ``"fused"`` for every parameter that allows it.
        nonfinite: What a NaN or infinite gradient does: ``"raise"`` an error that names parameter and step, or
            ``"skip"`` that update and count it in the logs. It never reaches a weight or a state.
        state_dtype: Moments of bf16 weights, and gradients where they have to wait (norm clipping, accumulation), in
            the weight's precision (``"param"``, as torch) or in ``"float32"``.
        seed: Seed of stochastic rounding.
        checkpoint: Modules that run again in the backward pass instead of keeping their activations, by name pattern:
            ``["*.layers.*"]`` for the blocks of a transformer.
        cuda_graph: Capture forward, backward and update in one CUDA graph after a few eager steps and replay it for
            later batches of the same shapes: the same numbers without the launches. ``training_step`` then runs in
            Python at capture only, so it must not branch on values, counters or `batch_idx`. ``True`` raises where a
            step cannot be captured, ``"auto"`` says so once and goes on eagerly.
    """

    strategy_name = "forge"

    def __init__(
        self,
        rounding: Rounding = "stochastic",
        kernel: Kernel = "auto",
        nonfinite: NonFinite = "raise",
        state_dtype: Literal["param", "float32"] = "param",
        seed: int = 0,
        checkpoint: Sequence[str] = (),
        cuda_graph: bool | Literal["auto"] = False,
    ) -> None:
        super().__init__(
            rounding=rounding,
            kernel=kernel,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
            seed=seed,
            checkpoint=checkpoint,
            device="cpu",
        )
        check_choice("cuda_graph", cuda_graph, (False, True, "auto"))
        self.cuda_graph = cuda_graph
        self._parallel_devices: list[torch.device] = []
        self._graphs: StepGraphs | None = None
        self._replayed = False

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices the Trainer chose: one. Lightning sets them after construction.

        Raises:
            UnsupportedError: The Trainer was given several devices.
        """
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise refusal("several devices", f"devices={len(devices)}")
        self._parallel_devices = devices
        if devices:
            self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        """Of how many machines the Trainer was told: one. Lightning sets it after construction.

        Raises:
            UnsupportedError: The Trainer was told of several, which would each train a model of their own.
        """
        return 1

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count > 1:
            raise refusal("several devices", f"num_nodes={count}")

    # ---------------------------------------------------------------- the whole step in one CUDA graph

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Also choose whether steps are captured; if so, everything runs on one side stream, as a capture must."""
        feature = self._no_graph(trainer) if self.cuda_graph else None
        if feature is not None and self.cuda_graph is True:
            raise refusal(feature)
        if feature is not None:
            rank_zero_info(f"cuda_graph='auto': steps run eagerly. {refusal(feature)}")
        graphs = bool(self.cuda_graph) and feature is None
        if graphs:
            torch.cuda.set_stream(torch.cuda.Stream(self.root_device))
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        rank_zero_info(outline(self.lightning_module, self.updater.slots, self.updater.fused_layers))
        if graphs:
            self._graphs = StepGraphs(self.updater, self.lightning_module, strict=self.cuda_graph is True)

    def _no_graph(self, trainer: pl.Trainer) -> str | None:
        """The feature of this run that a graph cannot hold."""
        assert self.lightning_module is not None
        if self.root_device.type != "cuda":
            return "cuda_graph without a GPU"
        if not self.lightning_module.automatic_optimization:
            return "cuda_graph in manual optimization"
        if trainer.accumulate_grad_batches > 1:
            return "cuda_graph with accumulate_grad_batches"
        if self.updater.reports.mode == "skip" and trainer.gradient_clip_val:
            return "cuda_graph with nonfinite='skip' and norm clipping"
        return None

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's step, or replay the graph that does so and the backward pass as well."""
        self._replayed = False
        eager = super().training_step
        if self._graphs is None or not self.updater.stepping or self._clips_itself:
            return eager(*args, **kwargs)
        batch, rest = args[0], args[1:]

        def whole_step(batch: Any) -> STEP_OUTPUT:
            output = eager(batch, *rest, **kwargs)
            loss = output["loss"] if isinstance(output, dict) else output
            assert isinstance(loss, Tensor) and self.lightning_module is not None
            with self.updater.backward(loss, queue=False):
                self.lightning_module.backward(loss)
            self.updater.finish()
            return torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, output)

        failed_before = self._graphs.reason
        graph = self._graphs.graph_for(batch, whole_step)
        if graph is None:
            if self._graphs.reason != failed_before:
                rank_zero_info(f"cuda_graph='auto': steps run eagerly from now on: {self._graphs.reason}")
            return eager(*args, **kwargs)
        self._replayed = True
        return graph.replay(batch)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning's backward; after a replay only its hooks, as the graph has done the rest."""
        if not self._replayed:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file, written by any number of devices.

        Raises:
            UnsupportedError: It is a folder.
        """
        if Path(checkpoint_path).is_dir():
            raise refusal("a checkpoint folder on one device", str(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def teardown(self) -> None:
        """Release the graphs' memory and go back to the default stream."""
        self._graphs = None
        if self.cuda_graph and self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)
            torch.cuda.set_stream(torch.cuda.default_stream(self.root_device))
        super().teardown()
