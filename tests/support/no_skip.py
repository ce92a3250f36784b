"""A pytest plugin for CI (`-p no_skip`): a skipped test is a failed one."""

import pytest


def _fail(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: nothing may be skipped in CI ({reason})"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _fail((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _fail((yield))
