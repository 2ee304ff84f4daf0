"""Hooks of mkdocs: pages may link to any file of the repository, which the site then shows as a page.

Markdown outside docs/ (CONTRIBUTING.md, zoo/README.md, ...) becomes a page of its own; other files, such as
results and sources, are shown as they are under source/.
"""

import os
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from cmcl.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MIRRORED = {  # a document outside docs/ -> its page
    ROOT / "README.md": "README.md",
    ROOT / "CONTRIBUTING.md": "project/contributing.md",
    ROOT / "CHANGELOG.md": "project/changelog.md",
    ROOT / "zoo" / "README.md": "reference/zoo.md",
}
ORIGINS = {page: path for path, page in MIRRORED.items() if page != "README.md"}
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml"}
LONGEST = 100_000  # characters of a file that are shown
LINK = re.compile(r"(\]\()((?!\w+:|#)[^)\s#]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def page_of(target: Path) -> str | None:
    """The address of a path of the repository inside the site; None if there is nothing."""
    if target in MIRRORED:
        return MIRRORED[target]
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"source/{target.relative_to(ROOT).as_posix()}.md" if target.exists() else None


def relink(markdown: str, origin: Path, page: str) -> tuple[str, set[Path]]:
    """The text with links that fit its page, and the paths outside docs/ that it links to."""
    outside = set()

    def fit(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin.parent / link[2]))
        if (address := page_of(target)) is None:
            return link[0]  # mkdocs reports it
        if address.startswith("source/"):
            outside.add(target)
        return f"{link[1]}{os.path.relpath(address, Path(page).parent)}{link[3]}"

    parts, at = [], 0
    for code in CODE.finditer(markdown):  # links inside code are left alone
        parts += [LINK.sub(fit, markdown[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, LINK.sub(fit, markdown[at:])]), outside


def shown(path: Path) -> str:
    """A page that shows a file, or the names of a folder."""
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith((".", "_")))
        return title + "\n".join(f"- `{name}`" for name in names)
    text = path.read_text(encoding="utf-8")
    cut = "" if len(text) <= LONGEST else f"The first {LONGEST:,} of {len(text):,} characters.\n\n"
    return f"{title}{cut}~~~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text[:LONGEST]}\n~~~~~~\n"


def options() -> str:
    """The page of all commands with their arguments and options, from typer."""
    root: Any = typer.main.get_command(app)
    parts = ["# Options of the commands", "[Commands](commands.md) explains them with examples."]
    for name, command in sorted(root.commands.items()):
        parts += section(f"cmcl {name}", command)
    return "\n\n".join(parts) + "\n"


def section(name: str, command: Any) -> list[str]:
    """The help of a command, and of those below it."""
    parts = [f"## {name}", command.help or ""]
    if commands := getattr(command, "commands", {}):
        return parts + [part for below in commands for part in section(f"{name} {below}", commands[below])]
    rows = ["| argument or option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            words = (parameter.metavar or parameter.name).upper()
        else:
            words = ", ".join([*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        default = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
        meaning = (getattr(parameter, "help", None) or "").replace("|", "\\|")
        rows.append(f"| `{words}` | {default} | {meaning} |")
    return [*parts, "\n".join(rows)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text is elsewhere."""
    for page, origin in ORIGINS.items():
        files.append(File.generated(config, page, content=origin.read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference/options.md", content=options()))
    outside = set()
    for file in files.documentation_pages():
        uri = file.src_uri
        outside |= relink(file.content_string, ORIGINS.get(uri, DOCS / uri), uri)[1]
    for path in sorted(outside):
        files.append(File.generated(config, page_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make the links fit."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    return relink(markdown, ORIGINS.get(uri, DOCS / uri), uri)[0]
