"""Let the site show files that live outside docs/, under the links that work on a code host too.

Pages here link to `../CONTRIBUTING.md` and `../screenshots/x.svg`. MkDocs serves docs/ only, so
those files are added to the site under the same names, and the links lose their `../`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "engine/families/README.md",
    "tests/bench/README.md",
    "tests/support/cuda_stub/README.md",
)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the files from outside docs/."""
    pictures = sorted(path.relative_to(ROOT) for path in (ROOT / "screenshots").glob("*.svg"))
    for name in (*OUTSIDE, *map(str, pictures)):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links between docs/ and the rest of the repository links within the site."""
    if page.file.src_uri in OUTSIDE:
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../", "](")
