"""Hook of MkDocs: files outside docs/ that its pages link to become part of the site.

A page of the repository becomes a page of the site, and so does a notebook; any other file becomes a copy. So no link
needs the repository's address. A notebook is shown with the output that it holds; nothing is run.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)#\s]+)")
"""The target of a relative link, without its anchor."""


def repository_path(src_uri: str) -> str:
    """Return where a page of the site stands in the repository."""
    return f"docs/{src_uri}" if (ROOT / "docs" / src_uri).exists() else src_uri.replace("readme.md", "README.md")


def site_path(path: str) -> str:
    """Return where a file of the repository stands on the site. For MkDocs a README would be an index."""
    return path.removeprefix("docs/").replace("README.md", "readme.md").replace(".ipynb", ".md")


def linked(path: str) -> set[str]:
    """Return the files of the repository that a page links to."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for target in LINK.findall(text)}


def notebook_page(path: str) -> str:
    """Return a notebook of the repository as a page: its texts, its code, and the output that it holds."""
    parts = []
    for cell in json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if picture := data.get("image/png"):
                parts.append(f"![Output of the cell](data:image/png;base64,{''.join(picture).strip()})")
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    title, _, rest = parts[0].partition("\n")
    name = posixpath.basename(path)
    opened = f'This is <a href="{name}" download>{name}</a>. To run it in a checkout: `jupyter lab {path}`.'
    return "\n\n".join([title, opened, rest.strip(), *parts[1:]])


def added(path: str, config: MkDocsConfig) -> list[File]:
    """Return the files of the site for one of the repository: a page, or a copy; for a notebook both."""
    if path.endswith(".ipynb"):
        copy = File.generated(config, path, abs_src_path=str(ROOT / path))
        return [File.generated(config, site_path(path), content=notebook_page(path)), copy]
    return [File.generated(config, site_path(path), abs_src_path=str(ROOT / path))]


def on_config(config: MkDocsConfig) -> None:
    """Name the repository at the foot of each page. With `repo_url`, pages would ask its host for stars."""
    if url := os.environ.get("TRANSFORMER_FAST_URL"):
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": url, "name": "Repository"}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what is linked from there."""
    seen = {repository_path(file.src_uri) for file in files.documentation_pages()}
    todo = [*seen, *(path for path in ("CONTRIBUTING.md", "CHANGELOG.md") if path not in seen)]
    for path in todo:
        for target in {path, *linked(path)} - seen:
            if not target.startswith(("docs/", "../")) and (ROOT / target).is_file():
                seen.add(target)
                for file in added(target, config):
                    files.append(file)
                todo += [target] * target.endswith((".md", ".ipynb"))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn the links of a page from paths of the repository into paths of the site; home names the repository."""
    here = repository_path(page.file.src_uri)
    if here == "docs/index.md" and (url := os.environ.get("TRANSFORMER_FAST_URL")):
        markdown = markdown.replace("[Install](", f"[Repository]({url}). [Install](", 1)
    if here.startswith("benchmarks/results/"):  # a record: found by the page that links to it
        page.meta["search"] = {"exclude": True}
        if not markdown.startswith("# "):
            markdown = f"# Record: {here.removeprefix('benchmarks/results/')}\n\n{markdown}"

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        return "](" + posixpath.relpath(site_path(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)
