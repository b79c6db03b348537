"""What a release is checked for before it is built."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import dmuon

ROOT = Path(__file__).parent.parent


@pytest.fixture
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_files_name_one_version(release, tmp_path):
    assert release.version(ROOT) == dmuon.__version__
    for name in ("pyproject.toml", "src/dmuon/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert release.version(tmp_path) == dmuon.__version__
    changes = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(changes.replace("[Unreleased]", "[0.0.9]"))
    with pytest.raises(SystemExit, match="CHANGELOG"):
        release.version(tmp_path)
    citation = (tmp_path / "CITATION.cff").read_text()
    (tmp_path / "CITATION.cff").write_text(citation.replace(dmuon.__version__, "7.0"))
    with pytest.raises(SystemExit, match=r"CITATION.cff has 7\.0"):
        release.version(tmp_path)
