"""Memory that exact norm clipping holds, over tokens per step: factors, stored gradients, and what is chosen.

``python -m benchmarks.clipping_memory`` writes ``docs/clipping.png`` and ``benchmarks/results/clipping_memory.csv``.
Computed from shapes (Llama-3.1-8B, bf16), by the rule of `lightning_memopt.backward.slot.Slot.fold`; nothing is timed.
"""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCKS, HIDDEN, FFN, KV, VOCAB = 32, 4096, 14336, 1024, 128256
# (out, in, input shared with the layer above: q, k and v read the same x, so do gate and up)
LAYERS = [(HIDDEN, HIDDEN, False), (KV, HIDDEN, True), (KV, HIDDEN, True), (HIDDEN, HIDDEN, False)]
LAYERS += [(FFN, HIDDEN, False), (FFN, HIDDEN, True), (HIDDEN, FFN, False)]
GIB = 2**30
OPERAND = STORED = 2  # bytes of an element in bf16, of factors and of a gradient


def held(tokens: int, choose: bool) -> float:
    """Bytes waiting at the end of a backward pass; with `choose`, a layer past its break-even holds its gradient."""
    total = 0
    for out, inputs, shared in LAYERS * BLOCKS + [(VOCAB, HIDDEN, False)]:
        factors = tokens * (out + inputs) * OPERAND
        if choose and factors > out * inputs * STORED:
            total += out * inputs * STORED
        else:
            total += tokens * (out + (0 if shared else inputs)) * OPERAND
    return total


def main() -> None:
    """Write table and plot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    weights = sum(out * inputs for out, inputs, _ in LAYERS * BLOCKS) + VOCAB * HIDDEN
    tokens = [2**k for k in range(6, 15)]
    rows = [
        {
            "tokens": t,
            "factors_gib": round(held(t, False) / GIB, 3),
            "chosen_gib": round(held(t, True) / GIB, 3),
            "gradients_gib": round(weights * STORED / GIB, 3),
        }
        for t in tokens
    ]
    with (ROOT / "benchmarks/results/clipping_memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for column, style, label in (
        ("factors_gib", "--", "all factors"),
        ("gradients_gib", "-.", "gradients of a plain run"),
        ("chosen_gib", "-", "what forge holds"),
    ):
        axes.plot(tokens, [row[column] for row in rows], style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens per optimizer step", ylabel="GiB held until the norm is known")
    axes.set_xticks(tokens, [str(t) for t in tokens], minor=False)
    axes.legend(frameon=False)
    axes.set_title("Exact norm clipping, Llama-3.1-8B shapes")
    figure.savefig(ROOT / "docs/clipping.png", dpi=120)


if __name__ == "__main__":
    main()
