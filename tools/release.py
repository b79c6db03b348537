"""Builds the distribution into dist/ and checks it. Uploads nothing: the last line printed says how to.

    make dist

1. The version is the same in pyproject.toml, in the package and in CITATION.cff; CHANGELOG.md has a
   section for it, or one called Unreleased.
2. The wheel holds the package, its type marker and the license, nothing else, and asks for torch alone.
3. Installed into an environment of its own, it imports without any extra, and its command line runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/dmuon/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}


def version(root: Path) -> str:
    """The version that all files agree on.

    Raises:
        SystemExit: if they do not, or the changelog does not know it.
    """
    found = {}
    for name, pattern in _VERSIONS.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else "none"
    if len(set(found.values())) > 1:
        raise SystemExit("versions differ: " + ", ".join(f"{name} has {it}" for name, it in found.items()))
    (only,) = set(found.values())
    sections = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if only not in sections and "Unreleased" not in sections:
        raise SystemExit(f"CHANGELOG.md has a section neither for {only} nor for Unreleased")
    return only


def check_wheel(wheel: Path) -> None:
    """Look inside.

    Raises:
        SystemExit: for what is missing or should not be there.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    info = about.rpartition("/")[0]
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "dmuon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    strange = {name for name in names - package if not name.startswith(info)}
    if strange or package - names:
        raise SystemExit(f"{wheel.name} lacks {sorted(package - names)} and has {sorted(strange)} besides")
    if not any(name.startswith(info) and name.endswith("LICENSE") for name in names):
        raise SystemExit(f"{wheel.name} has no LICENSE")
    needed = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    if [re.split(r"[^\w-]", line)[0] for line in needed] != ["torch"]:
        raise SystemExit(f"{wheel.name} asks for {needed}, not for torch alone")


def try_wheel(wheel: Path) -> None:
    """Install it beside this environment's torch, without its other packages' help."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False, system_site_packages=False)
        python = Path(folder) / "bin" / "python"
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet"]
        subprocess.run([*install, str(wheel)], check=True)
        # torch and what it needs come from here, behind the wheel's own folder.
        site = next(path for path in sys.path if (Path(path) / "torch").is_dir())
        code = (
            f"import sys; sys.path.append({site!r}); import dmuon; print(dmuon.__file__, dmuon.__version__); "
            f"assert {folder!r} in dmuon.__file__; assert 'rich' not in sys.modules; "
            "from dmuon.__main__ import main; main(['plan', '--help'])"
        )
        done = subprocess.run(
            [str(python), "-c", code], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode or "--mesh" not in done.stdout:
            raise SystemExit(f"{wheel.name} does not run:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Build and check."""
    this = version(ROOT)
    out = ROOT / "dist"
    for old in out.glob("dmuon-*"):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True)
    (wheel,) = out.glob(f"dmuon-{this}-*.whl")
    check_wheel(wheel)
    try_wheel(wheel)
    print(
        f"dmuon {this} is in {out} and runs. To publish it: git tag v{this}, and upload dist/* to the index."
    )


if __name__ == "__main__":
    main()
