"""Hooks of the documentation site (`mkdocs.yml`): pages that live outside docs/, and pictures that follow the theme.

The pages in docs/ read well as plain Markdown in the repository, so their links point at files there. On the site,
`OUTSIDE` become pages, links to them are turned, links to source files become plain text, and SVG pictures are put into
the page, where they take its colours.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/grpo_arithmetic/README.md": "example.md",
    "examples/grpo_tasks/README.md": "example-tasks.md",
    "examples/agent_tools/README.md": "example-tools.md",
    "examples/trl_grpo/README.md": "example-trl.md",
    "examples/production_traffic/README.md": "example-traffic.md",
}
"""Files of the repository that are pages of the site."""

OPTIONAL = {"trainers.md": "Trainers"}
"""Pages that are in the navigation, after the quickstart, once they exist."""

_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+\.svg)\)")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the optional pages that are there to the navigation."""
    there = [{title: uri} for uri, title in OPTIONAL.items() if (Path(config.docs_dir) / uri).is_file()]
    config.nav = [*config.nav[:2], *there, *config.nav[2:]]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links and inline pictures, outside code."""
    uri = page.file.src_uri
    source = next((path for path, target in OUTSIDE.items() if target == uri), f"docs/{uri}")

    def link(match: re.Match[str]) -> str:
        return _turned(match[1], match[2], posixpath.dirname(source), posixpath.dirname(uri))

    parts, at = [], 0
    for fence in [*_FENCE.finditer(markdown), None]:
        text = markdown[at : fence.start() if fence else None]
        parts += [_LINK.sub(link, _IMAGE.sub(_picture, text)), fence[0] if fence else ""]
        at = fence.end() if fence else at
    return "".join(parts)


def _turned(text: str, target: str, folder: str, page_folder: str) -> str:
    """The link `[text](target)` of a file in `folder` as it has to be in a page in `page_folder`."""
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return f"[{text}]({target})"
    repository = posixpath.normpath(posixpath.join(folder, path))
    uri = OUTSIDE.get(repository)
    if uri is None and repository.startswith("docs/"):
        uri = repository.removeprefix("docs/")
    if uri is None:
        if not (ROOT / repository).exists():
            return f"[{text}]({target})"  # a broken link: the strict build reports it
        return text if text.startswith("`") else f"{text} (`{repository}`)"
    return f"[{text}]({posixpath.relpath(uri, page_folder or '.')}{'#' + anchor if anchor else ''})"


def _picture(match: re.Match[str]) -> str:
    svg = (ROOT / "docs" / match[2]).read_text(encoding="utf-8")
    # One line: a blank line would end the HTML block.
    return f'<figure class="diagram">{" ".join(svg.split())}<figcaption>{match[1]}</figcaption></figure>'
