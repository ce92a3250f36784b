"""The README, the docs and the examples do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BIN = Path(sys.executable).parent


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return kept | {"PATH": f"{BIN}{os.pathsep}{kept['PATH']}", "COLUMNS": "120"}


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_as_a_new_user(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    run([sys.executable, "-c", code], tmp_path)
    commands = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    shows = [line.split() for line in commands if line.startswith("otel-rollout show")]
    assert len(shows) == 2
    for command in shows:
        shown = run(command, tmp_path)
        assert "4 trajectories" in shown
        assert "completed" in shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    run([sys.executable, str(ROOT / "examples" / "own_loop.py")], tmp_path)
    for code in blocks(page, "python"):
        assert run([sys.executable, "-c", code], tmp_path) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_english_and_chinese_pages_are_the_same() -> None:
    english = {page.name for page in (ROOT / "docs" / "en").glob("*.md")}
    assert english <= {page.name for page in (ROOT / "docs" / "zh").glob("*.md")}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_leaves_trajectories(example: Path, tmp_path: Path) -> None:
    run([sys.executable, str(example)], tmp_path)
    shown = run(["otel-rollout", "show", "otel-rollout"], tmp_path)
    assert "trajectories" in shown


def test_every_variable_of_ours_is_documented() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    ours = set(re.findall(r'"(OTEL_ROLLOUT_[A-Z_]+)"', sources)) - {"OTEL_ROLLOUT_RERAISE"}
    assert ours
    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "configuration.md").read_text()
        assert not [name for name in ours if name not in page]
