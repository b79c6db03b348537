"""What mkdocs does for the site beside its plugins (see mkdocs.yml).

- README files of other folders, CONTRIBUTING.md, CHANGELOG.md and the measured results are pages too. Links
  to any file of the repository lead to its page, or to a copy of it.
- Names of the package in `code` lead to the API reference.
- Troubleshooting comes first in the search.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import dmuon

ROOT = Path(__file__).parents[1]
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md"]
RESULTS = "benchmarks/results/**/*.md"  # reached by links, not in the navigation
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
FENCE = re.compile(r"^(```.*?^```\w*$)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?<!\[)`dmuon\.(\w+)(\([^`]*\))?`")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and whatever files of the repository they or others link to."""
    results = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(RESULTS))
    for path in [*PAGES, *results]:
        add(files, config, path, InclusionLevel.NOT_IN_NAV if path in results else InclusionLevel.INCLUDED)
    for file in list(files.documentation_pages()):
        place = repository_path(file.src_uri)
        for target in LINK.findall(FENCE.sub("", (ROOT / place).read_text(encoding="utf-8"))):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            known = ":" in target or files.get_file_from_path(site_path(path)) is not None
            if not known and (ROOT / path).is_file():
                add(files, config, path, InclusionLevel.INCLUDED)
    return files


def add(files: Files, config: MkDocsConfig, path: str, inclusion: InclusionLevel) -> None:
    """A file of the repository as one of the site."""
    files.append(File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=inclusion))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they have to be in the site, and links to the API reference."""
    if page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 4}  # whoever searches for a message finds it first
    place = repository_path(page.file.src_uri)
    parts = FENCE.split(markdown)
    for number in range(0, len(parts), 2):  # outside of code blocks
        parts[number] = LINK.sub(lambda link: in_site(link[1], place), parts[number])
        if page.file.src_uri != "api.md":
            parts[number] = NAME.sub(to_reference, parts[number])
    return "".join(parts)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Public names in the docstrings as links within the reference."""
    if page.file.src_uri != "api.md":
        return html
    names = "|".join(dmuon.__all__)
    return re.sub(rf"<code>(?:dmuon\.)?({names})</code>", r'<a href="#dmuon.\1">\g<0></a>', html)


def to_reference(name: re.Match[str]) -> Any:
    """`dmuon.name` as a link, if it is a public name."""
    return f"[{name[0]}][dmuon.{name[1]}]" if name[1] in dmuon.__all__ else name[0]


def in_site(target: str, place: str) -> str:
    """A link as it stands in the file `place` of the repository, from the same page of the site."""
    if ":" in target:
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    return posixpath.relpath(site_path(path), posixpath.dirname(site_path(place)))


def repository_path(uri: str) -> str:
    """Where the source of a page of the site is."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def site_path(path: str) -> str:
    """What the site calls a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
