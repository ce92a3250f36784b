"""A pytest plugin (`-p totals`) that counts over several runs, because `make test` has one for each environment."""

import os
from pathlib import Path

COUNTED = ("passed", "failed", "error", "skipped", "xfailed")


def pytest_terminal_summary(terminalreporter):
    """Add this run to the file that OTEL_ROLLOUT_TEST_TOTALS names, and show all that are in it."""
    name = os.environ.get("OTEL_ROLLOUT_TEST_TOTALS")
    if not name:
        return
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in COUNTED}
    line = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no tests"
    file = Path(name)
    with file.open("a") as totals:
        totals.write(f"{os.environ.get('OTEL_ROLLOUT_TEST_RUN', 'tests')}: {line}\n")
    runs = file.read_text().splitlines()
    if len(runs) > 1:
        terminalreporter.section("all runs")
        for run in runs:
            terminalreporter.write_line(run)
