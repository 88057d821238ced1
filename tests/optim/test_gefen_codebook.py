"""The layout of the 8-bit code: the optimum, the curve, and what both cost."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from lightning_memopt.optim.codebook import (
    BINS,
    LEVELS,
    START_BEND,
    centres,
    curve,
    fit_bends,
    optimal_levels,
    spread_counts,
)


def noise(kind: str, block: int = 128, blocks: int = 4000) -> np.ndarray:
    """Histogram of noise in units of each block's largest magnitude."""
    generator = np.random.default_rng(0)
    x = {
        "normal": generator.normal(size=(blocks, block)),
        "laplace": generator.laplace(size=(blocks, block)),
        "student": generator.standard_t(3, size=(blocks, block)),
    }[kind]
    return np.histogram(np.abs(x) / np.abs(x).max(1, keepdims=True), BINS, (0, 1))[0]


def squared_error(counts: np.ndarray, levels: np.ndarray) -> float:
    """Mean squared error of rounding the counted magnitudes to the nearest of ascending `levels`."""
    x = centres(len(counts))
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    return float(counts @ (x - nearest) ** 2 / max(counts.sum(), 1.0))


def fit_bend(counts: np.ndarray) -> float:
    return float(fit_bends(counts[None])[0])


def brute_force(counts: np.ndarray, levels: int) -> float:
    """Least squared error over all ways to cut the bins into `levels` runs, the outer ones around 0 and 1."""
    x = (np.arange(len(counts)) + 0.5) / len(counts)
    best = np.inf
    for cuts in itertools.combinations_with_replacement(range(len(counts) + 1), levels - 1):
        total = 0.0
        for k, (i, j) in enumerate(itertools.pairwise((0, *cuts, len(counts)))):
            w, y = counts[i:j], x[i:j]
            if w.sum():
                level = 0.0 if k == 0 else 1.0 if k == levels - 1 else (w @ y) / w.sum()
                total += w @ (y - level) ** 2
        best = min(best, total)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_dynamic_programming_finds_the_best_cuts_there_are(seed: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 4, generator.integers(3, 11)) * generator.integers(0, 9)
    levels = int(generator.integers(2, 6))
    found = squared_error(counts, optimal_levels(counts, levels)) * max(counts.sum(), 1)
    assert found == pytest.approx(brute_force(counts, levels), abs=1e-9)


def test_more_levels_never_cost_more() -> None:
    counts = noise("laplace")
    errors = [squared_error(counts, optimal_levels(counts, k)) for k in (2, 3, 5, 8, 16, 17, 32, 64, 128)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 1000


def test_optimum_pins_zero_and_one_ascends_and_takes_less_than_a_second() -> None:
    counts = noise("normal")
    start = time.process_time()
    levels = optimal_levels(counts)
    assert time.process_time() - start < 1.0
    assert len(levels) == LEVELS and levels[0] == 0 and levels[-1] == 1
    assert (np.diff(levels) > 0).all()


@pytest.mark.parametrize("occupied", [[], [3], [0, BINS - 1], [5, 6, 900]])
def test_optimum_of_hardly_any_bins(occupied: list[int]) -> None:
    counts = np.zeros(BINS)
    counts[occupied] = 7
    levels = optimal_levels(counts)
    assert np.isfinite(levels).all() and (np.diff(levels) >= 0).all()
    assert squared_error(counts, levels) < 1e-12 + 1e-6 * len({0, BINS - 1} & set(occupied))


@pytest.mark.parametrize(("kind", "excess"), [("normal", 0.05), ("laplace", 0.02), ("student", 0.02)])
def test_curve_costs_a_few_per_cent_more_than_the_optimum(kind: str, excess: float) -> None:
    counts, codes = noise(kind), np.arange(float(LEVELS))
    optimum = squared_error(counts, optimal_levels(counts))
    fitted = squared_error(counts, curve(codes, fit_bend(counts)))
    assert optimum < fitted < (1 + excess) * optimum
    # An even code and one of squares, neither of which learns anything.
    assert squared_error(counts, codes / 127) > 1.2 * optimum
    assert squared_error(counts, (codes / 127) ** 2) > 1.2 * optimum


@pytest.mark.parametrize("bend", [0.0, START_BEND, 7.0])
def test_curve_is_odd_ascends_and_ends_at_one(bend: float) -> None:
    values = curve(np.arange(-127.0, 128.0), bend)
    assert (np.diff(values) > 0).all() and np.array_equal(values, -values[::-1])
    assert values[127] == 0 and values[-1] == pytest.approx(1)


def test_a_learned_bend_is_never_the_start_up_one() -> None:
    assert (START_BEND * 64) % 1 != 0
    assert all((fit_bend(noise(kind)) * 64) % 1 == 0 for kind in ("normal", "student"))


@pytest.mark.parametrize("kind", ["normal", "laplace", "student"])
def test_codes_tell_as_much_as_a_histogram(kind: str) -> None:
    counts = noise(kind)
    x = (np.arange(BINS) + 0.5) / BINS
    k = START_BEND
    codes = np.floor((LEVELS - 1) * (1 + k) * x / (1 + k * x) + 0.5).astype(int)
    used = np.bincount(codes, counts, LEVELS)
    spread = spread_counts(used[None], k)[0]
    assert spread.sum() == pytest.approx(used[1:].sum())
    codes, bend = np.arange(float(LEVELS)), fit_bend(spread)
    best = squared_error(counts, curve(codes, fit_bend(counts)))
    assert squared_error(counts, curve(codes, bend)) < 1.002 * best
    assert squared_error(counts, optimal_levels(spread)) < 1.03 * squared_error(counts, optimal_levels(counts))


def test_bends_of_a_large_model_are_fitted_at_once() -> None:
    counts = np.stack([noise(kind) for kind in ("normal", "laplace", "student")] * 75)
    fit_bends(counts[:1])
    start = time.process_time()
    bends = fit_bends(counts)
    assert time.process_time() - start < 1.0
    assert np.array_equal(bends[:3], [fit_bend(row) for row in counts[:3]])


def test_a_weight_without_gradients_gets_a_bend_next_to_the_start() -> None:
    (bend,) = fit_bends(np.zeros((1, BINS)))
    assert START_BEND < bend < START_BEND + 1 / 64
