"""What the site has that docs/ has not: pages of the top folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

TOP_PAGES: Final = ("BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for name in TOP_PAGES:
        text = (root / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a file of the source tree becomes its name: the site has no source tree."""
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def on_link(match: re.Match[str]) -> str:
        text, target, _anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (folder / target).resolve()
        if path.name in TOP_PAGES and path.parent == Path(config.docs_dir).parent:
            depth = page.file.src_uri.count("/")
            return f"[{text}]({'../' * depth}{path.name}{match[3] or ''})"
        if path.is_relative_to(config.docs_dir) or page.file.src_uri in TOP_PAGES:
            return match[0] if files.get_file_from_path(str(path.relative_to(config.docs_dir))) else f"`{target}`"
        return f"{text} (`{path.relative_to(Path(config.docs_dir).parent)}`)"

    return LINK.sub(on_link, markdown)
