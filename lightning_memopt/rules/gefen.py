"""Gefen (arXiv 2606.13894): AdamW with one byte per weight of first moment and one number per block of second moment.

    v_b <- b2 v_b + (1-b2) mean over block b of g²
    m   <- decoded code + (1-b1)(g - decoded code)
    w   <- w - lr/c1 · m / (sqrt(v_b)/sqrt(c2) + eps),  then m is encoded again

State of a weight [rows, columns]:

    exp_avg         uint8    shape of the weight; code c in [-127, 127] as a two's complement byte, 0 is zero
    exp_avg_scale   bf16     [rows, columns / 64], what the code's values are multiplied by; as in `storage_8bit`
    exp_avg_sq      float32  [rows, columns / B], for blocks of B weights (`lightning_memopt.optim.gefen_blocks`)
    codebook        float32  on the CPU: [], bend k of the curve c / (127 (1+k) - k |c|);
                             or on the weight's device: [256], the value of each byte
    column_scale    float32  [columns], what gradients are multiplied by before all this, from 64 rows on;
    column_step     float32  on the CPU: [], when it was learned (`lightning_memopt.optim.gefen_columns`)

The update uses m before it is encoded. Codebook and block length are learned between the first and the second step, by
`lightning_memopt.optim.gefen_learning`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memopt.errors import UnsupportedError
from lightning_memopt.optim import gefen_columns as columns
from lightning_memopt.optim import gefen_learning as learning
from lightning_memopt.optim.codebook import LEVELS, START_BEND
from lightning_memopt.optim.gefen import Gefen
from lightning_memopt.optim.gefen_blocks import LEAST, Blocks, per_block
from lightning_memopt.optim.gefen_learning import CODEBOOK
from lightning_memopt.optim.shards import as_rows, by_rows, local, placed_as
from lightning_memopt.rules.adam import AdamWRule
from lightning_memopt.rules.base import Group, State
from lightning_memopt.rules.storage import Dense, Rounder, Storage
from lightning_memopt.rules.storage_8bit import BLOCK, Codes, block_scale
from lightning_memopt.sparsity.spans import Spans, where

# Smaller tensors and vectors (biases, norms) keep AdamW's moments: they weigh nothing and are the most sensitive.
MIN_ELEMENTS = 4096


def encode(x: Tensor, scale: Tensor, codebook: Tensor) -> Tensor:
    """Bytes of float32 `x`, |x| <= scale; zero stays zero."""
    if codebook.dim():
        levels = codebook[:LEVELS]
        middles = (levels[1:] + levels[:-1]) / 2
        code = torch.bucketize(x.abs() / scale, middles).float().copysign(x)
    else:
        bend = codebook.to(x.device)
        code = ((LEVELS - 1) * (1 + bend) * x / (scale + bend * x.abs())).round()
    return code.to(torch.int8).view(torch.uint8)


def decode(code: Tensor, scale: Tensor, codebook: Tensor) -> Tensor:
    """Inverse of `encode` up to rounding, float32."""
    if codebook.dim():
        return codebook[code.int()] * scale
    c, bend = code.view(torch.int8).float(), codebook.to(code.device)
    return c * scale / ((LEVELS - 1) * (1 + bend) - bend * c.abs())


@dataclass(frozen=True)
class LearnedCodes(Codes):
    """The first moment."""

    def entries(self) -> tuple[str, ...]:
        """Codes, scales, codebook."""
        return (self.name, self.scale_name, CODEBOOK)

    def create(self, param: Tensor) -> dict[str, Tensor]:
        """Zeros, under the start-up curve."""
        param = as_rows(param)
        return {
            self.name: torch.zeros_like(param, dtype=torch.uint8, memory_format=torch.contiguous_format),
            self.scale_name: by_rows(param, per_block(param.shape, BLOCK), torch.bfloat16),
            CODEBOOK: torch.tensor(START_BEND, dtype=torch.float32, device="cpu"),
        }

    def rows(self, state: MutableMapping[str, Any], start: int, stop: int) -> dict[str, Tensor]:
        """Rows of codes and scales; the codebook is the whole weight's."""
        views = {key: state[key][start:stop] for key in (self.name, self.scale_name)}
        return views | {CODEBOOK: state[CODEBOOK]}

    def compact(self, state: Mapping[str, Any], entries: slice, rows: slice) -> dict[str, Any]:
        """Codes of some active weights and scales of their rows; the codebook is the whole weight's."""
        views = {self.name: state[self.name][:, entries], self.scale_name: state[self.scale_name][rows]}
        return views | {CODEBOOK: state[CODEBOOK]}

    def load(self, state: MutableMapping[str, Any], dtype: torch.dtype) -> Tensor:
        """Decode in float32."""
        code, scale = state[self.name], state[self.scale_name]
        return decode(code, _blocks(state, scale).spread(scale.float(), code.shape), state[CODEBOOK]).to(dtype)

    def save(self, state: MutableMapping[str, Any], moment: Tensor, rounder: Rounder) -> None:
        """New scales, then new codes, to nearest."""
        code, scale = state[self.name], state[self.scale_name]
        blocks = _blocks(state, scale)
        scale.copy_(block_scale(blocks.largest(moment.float())))
        code.copy_(encode(moment.float(), blocks.spread(scale.float(), code.shape), state[CODEBOOK]))

    def shapes(self, param: Tensor) -> dict[str, Sequence[int]]:
        """Of codes and scales."""
        param = as_rows(param)
        return {self.name: param.shape, self.scale_name: per_block(param.shape, BLOCK)}

    def check(self, param: Tensor, saved: Mapping[str, Any]) -> None:
        """See to it that codes come with their codebook, and have the weight's shape.

        Raises:
            UnsupportedError: They do not.
        """
        moment = saved[self.name]
        if moment.is_floating_point():
            if moment.shape != param.shape:
                super().check(param, {self.name: moment})
            return
        missing = [key for key in self.entries() if key not in saved]
        if missing:
            raise UnsupportedError(
                f"the saved Gefen state of a weight of shape {tuple(param.shape)} has codes in '{self.name}' but no "
                f"{' and no '.join(map(repr, missing))}: what the codes mean is lost. Load a checkpoint that has all "
                "of the optimizer's state, or start with a fresh optimizer."
            )
        if moment.shape != as_rows(param).shape:
            raise UnsupportedError(
                f"the saved Gefen codes have shape {tuple(moment.shape)}, the weight {tuple(param.shape)}. State of "
                "flat shards (strategy 'fsdp') belongs to one model, wrapping and world size."
            )
        super().check(param, saved)

    def restore(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """As saved; from a moment that was kept whole the code is learned like from a first gradient.

        Raises:
            UnsupportedError: As `check`.
        """
        if saved[self.name].is_floating_point():
            return super().restore(param, saved)
        self.check(param, saved)
        state = {key: saved[key].detach().to(param.device, copy=True) for key in self.entries()}
        if not state[CODEBOOK].dim():
            state[CODEBOOK] = state[CODEBOOK].cpu()
        return state


@dataclass(frozen=True)
class BlockMean(Storage):
    """The second moment, one float32 per block, and the factors of columns that make blocks even.

    Attributes:
        block: Block length of a fresh state.
        finest: Shortest block length that may replace it.
        columns: How many columns have a factor, 0 or all.
    """

    block: int
    finest: int
    columns: int = 0

    def entries(self) -> tuple[str, ...]:
        """Means, and where there are factors, these and when they were learned."""
        return (self.name, columns.SCALE, columns.LEARNED) if self.columns else (self.name,)

    def create(self, param: Tensor) -> dict[str, Tensor]:
        """Zeros, and factors of one."""
        return {self.name: self._zeros(param, self.block), **self._factors(param)}

    def _zeros(self, param: Tensor, block: int) -> Tensor:
        param = as_rows(param)
        return by_rows(param, per_block(param.shape, block))

    def _factors(self, param: Tensor) -> dict[str, Tensor]:
        if not self.columns:
            return {}
        ones = torch.ones(self.columns, dtype=torch.float32, device=param.device)
        return {columns.SCALE: ones, columns.LEARNED: torch.tensor(0.0, dtype=torch.float32, device="cpu")}

    def rows(self, state: MutableMapping[str, Any], start: int, stop: int) -> dict[str, Tensor]:
        """Rows of the means; factors are the whole weight's."""
        return {key: state[key][start:stop] if key == self.name else state[key] for key in self.entries()}

    def convert(self, state: Mapping[str, Any], g: Tensor) -> Tensor:
        """Every column times its factor."""
        return g * state[columns.SCALE].view(1, *g.shape[1:]) if self.columns else g

    def per_block(self) -> dict[str, int]:
        """The means."""
        return {self.name: self.block}

    def load(self, state: MutableMapping[str, Any], dtype: torch.dtype) -> Tensor:
        """Every weight's copy of its block's value, so that the rule need not know of blocks."""
        code, mean = state["exp_avg"], state[self.name]
        return _blocks(state, mean).spread(mean, code.shape).to(dtype)

    def save(self, state: MutableMapping[str, Any], moment: Tensor, rounder: Rounder) -> None:
        """One of the copies."""
        mean = state[self.name]
        _blocks(state, mean).put(mean, moment)

    def take(self, state: MutableMapping[str, Any], moment: Tensor) -> None:
        """Its mean over each block."""
        mean = state[self.name]
        mean.copy_(_blocks(state, mean).mean(moment).clamp_(min=LEAST))

    def check(self, param: Tensor, saved: Mapping[str, Any]) -> None:
        """See to it that a whole moment has the weight's shape, or means its rows.

        Raises:
            UnsupportedError: They do not.
        """
        moment = saved[self.name]
        rows = as_rows(param).shape[:1]
        if moment.shape != param.shape and (saved["exp_avg"].is_floating_point() or moment.shape[:1] != rows):
            super().check(param, saved)

    def restore(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """As saved, with factors of one where there were none yet.

        Of a moment that was kept whole, means over the shortest blocks: they become longer, exactly, once their length
        is chosen.

        Raises:
            UnsupportedError: As `check`.
        """
        self.check(param, saved)
        moment = saved[self.name].detach()
        # Shapes do not tell: a single column is its own block.
        if saved["exp_avg"].is_floating_point():
            zeros = self._zeros(param, self.finest)
            means = local(zeros)
            whole = local(placed_as(param, moment)).to(means.device, torch.float32).view(len(means), -1)
            means.copy_(Blocks.of(whole, means).mean(whole).clamp_(min=LEAST))
            return {self.name: zeros, **self._factors(param)}
        factors = self._factors(param)
        for key in factors.keys() & saved.keys():
            factors[key].copy_(saved[key])
        return {self.name: moment.to(param.device, torch.float32, copy=True), **factors}

    def share(self, state: Mapping[str, Any], g2: Tensor) -> Tensor:
        """The mean over each block, never zero."""
        blocks = _blocks(state, state[self.name])
        return blocks.spread(blocks.mean(g2).clamp_(min=LEAST), g2.shape)


def _blocks(state: Mapping[str, Any], values: Tensor) -> Blocks | Spans:
    """The blocks that `values` belong to: of all weights, or of a sparse weight's active ones."""
    active = where(state)
    return Blocks.of(state["exp_avg"], values) if active is None else active.blocks(values)


class GefenRule(AdamWRule):
    """AdamW's rule on `LearnedCodes` and `BlockMean`."""

    optimizer = Gefen
    scalar_names = (*AdamWRule.scalar_names, "bend")
    # A regrown weight joins the second moment of its block, which is as old as the parameter.
    aged_scalars = ("step_size",)
    # The square of a larger one, times its column's factor and summed over a block, could make the second moment of
    # all its weights infinite.
    limit = 2.0**55

    def prepare(self, optimizer: Optimizer) -> None:
        """Use what the last step learned."""
        for state in optimizer.state.values():
            # Read on the host at every step, and moved to the device by Lightning when it loads a checkpoint.
            for key in ("step", CODEBOOK, columns.LEARNED):
                if key in state and not state[key].dim() and state[key].device.type != "cpu":
                    state[key] = state[key].to("cpu", torch.float32)
        learning.finish(optimizer, self)
        columns.learn(optimizer, self)

    def unsettled(self, state: State) -> bool:
        """Until code and blocks are learned."""
        return learning.is_learning(state)

    def storage(self, param: Tensor, group: Group, dtype: torch.dtype) -> tuple[Storage, ...]:
        """Codes and block means for matrices, whole moments for what is too small to gain."""
        param = as_rows(param)
        if param.dim() < 2 or param.numel() < MIN_ELEMENTS:
            whole = torch.float64 if param.dtype == torch.float64 else torch.float32
            return (Dense("exp_avg", whole), Dense("exp_avg_sq", whole, slow=True))
        lengths = learning.options(group, param)
        return (LearnedCodes("exp_avg"), BlockMean("exp_avg_sq", lengths[0], lengths[-1], columns.count(param)))

    def scalars(self, group: Group, state: State) -> dict[str, float]:
        """AdamW's, and the bend of the curve; 0 where there is none."""
        return super().scalars(group, state) | {"bend": _bend(state)}

    def cache_key(self, state: State) -> tuple[float, ...]:
        """Step and bend."""
        return (*super().cache_key(state), _bend(state))

    def cache_keys(self, states: Sequence[State]) -> list[tuple[float, ...]]:
        """Step and bend of each."""
        steps = super().cache_keys(states)
        return [(*key, _bend(state)) for key, state in zip(steps, states, strict=True)]


def _bend(state: State) -> float:
    codebook = state.get(CODEBOOK)
    return float(codebook) if codebook is not None and not codebook.dim() else 0.0
