"""The page says what the recorded runs say."""

import csv
from pathlib import Path

from benchmarks.smet_learning import table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_page_has_the_recorded_losses():
    with (RESULTS / "smet_learning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} >= {"dense", "static", "no warm-up", "SMET"}
    assert all(int(row["seeds"]) >= 3 for row in rows)
    recorded = table(rows)
    assert recorded == (RESULTS / "smet_learning.md").read_text()
    assert recorded in (ROOT / "docs" / "smet.md").read_text()
    assert (ROOT / "docs" / "smet.png").is_file()
