import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import otel_rollout

ROOT = Path(__file__).resolve().parents[2]
CORE = {"opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "wrapt", "click", "rich"}


@pytest.fixture(scope="session")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def metadata(wheel):
    (text,) = (content.decode() for name, content in wheel.items() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(text)


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    source = ROOT / "src"
    modules = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel if ".dist-info/" not in name} == modules
    assert {Path(name).suffix for name in modules} <= {".py", ".typed", ".json", ".yaml"}


def test_the_wheel_is_typed_and_licensed(wheel, metadata):
    assert wheel["otel_rollout/py.typed"] == b""
    (licence,) = (content for name, content in wheel.items() if name.endswith(".dist-info/licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_wheel_says_what_it_is(metadata):
    assert metadata["Name"] == "otel-rollout"
    assert metadata["Version"] == otel_rollout.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_the_core_asks_for_bounded_opentelemetry_and_little_else(metadata):
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split("<")[0].split(">")[0] for line in needed} == CORE
    assert all("<" in line and ">=" in line for line in needed)


def test_every_extra_can_be_installed_now(metadata):
    assert set(metadata.get_all("Provides-Extra")) == {"grpc", "instrument", "instruments", "verl"}


def test_the_sdist_holds_what_the_wheel_is_built_from(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"src/otel_rollout/__init__.py", "src/otel_rollout/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} - {"", ".gitignore", "PKG-INFO"} == {
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src",
    }
