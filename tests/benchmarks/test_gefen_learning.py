"""The page says what the recorded runs say."""

import re
from pathlib import Path

from benchmarks.gefen_learning import read, table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_recorded_losses():
    recorded = table(read(ROOT / "benchmarks" / "results" / "gefen_learning.csv"))
    assert recorded == (ROOT / "benchmarks" / "results" / "gefen_learning.md").read_text()
    page = (ROOT / "docs" / "gefen.md").read_text()
    losses = re.findall(r"\d\.\d{4} ± \d\.\d{4}", recorded)
    assert len(losses) == 6
    assert all(loss in page for loss in losses)
