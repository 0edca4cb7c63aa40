"""Says how Sphinx builds the documentation: `make docs`. Everything comes from this repository; nothing is fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Here, since autodoc imports as a type checker does, and then LlamaIndex cannot be imported.
import llama_index.core  # noqa: F401
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.nodes import make_refnode

import cacheblend_rag

ROOT = Path(__file__).parent.parent
GENERATED = Path(__file__).parent / "generated"

project = "CacheBlend RAG"
author = "the CacheBlend RAG authors"
version = release = cacheblend_rag.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "CacheBlend RAG"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
smartquotes = False

myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 3
# The examples' tests run the notebooks; here the outputs that are kept in them are shown.
nb_execution_mode = "off"
# A reader copies commands without the prompt and without what they printed.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_here_doc_delimiter = "EOF"

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["vllm"]
# What pydantic adds to a class is no part of its interface.
_PYDANTIC = "model_config, model_post_init, model_computed_fields, model_fields"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": _PYDANTIC}
napoleon_use_ivar = True
# A reference to something of ours must lead somewhere; what others document is not on this machine.
nitpicky = True
nitpick_ignore_regex = [("py:.*", rf"(?!(cacheblend_rag\.)?({'|'.join(cacheblend_rag.__all__)})\b).*")]


# Files outside of docs/ that are pages of the site: links may lead to either, so that they work in the repository, too.
PAGES = {
    "README": "index",
    "CONTRIBUTING": "contributing",
    "CHANGELOG": "changelog",
    "cacheblend_rag/demo/model/README": "reference/bundled-model",
    "examples/chatbot/README": "howto/chatbot",
    "examples/kubernetes/README": "howto/kubernetes",
    "examples/third_party_policy/README": "howto/own-policy",
    "examples/third_party_tier/README": "howto/own-tier",
    "examples/langchain_rag": "generated/langchain_rag",
    "examples/llamaindex_rag": "generated/llamaindex_rag",
    "examples/tuned_retriever": "generated/tuned_retriever",
    "integrations/langchain-cacheblend/README": "howto/langchain",
    "integrations/llama-index-cacheblend/README": "howto/llamaindex",
}


def generate(app: Sphinx) -> None:
    """Write what is made of code and of the examples, where it has changed: the commands' reference and the notebooks."""
    GENERATED.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "typer", "cacheblend_rag.cli", "utils", "docs", "--name", "cacheblend"]
    commands = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    # The page that includes this has a heading of its own.
    write(GENERATED / "commands.txt", whole_summaries(commands).partition("\n")[2])
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        if not (copy := GENERATED / notebook.name).exists() or copy.read_bytes() != notebook.read_bytes():
            shutil.copyfile(notebook, copy)


def whole_summaries(commands: str) -> str:
    """Let lists of commands say what each command says of itself; Typer cuts it off after 45 characters."""
    said = dict(re.findall(r"^#+ `(cacheblend[^`]*)`\n\n(.+)", commands, flags=re.MULTILINE))
    lines, group = [], ""
    for line in commands.splitlines():
        if heading := re.match(r"#+ `(cacheblend[^`]*)`", line):
            group = heading[1]
        item = re.match(r"\* `([\w-]+)`: ", line)
        whole = said.get(f"{group} {item[1]}") if item else None
        lines.append(f"{item[0]}{whole}" if item and whole else line)
    return "\n".join(lines) + "\n"


def write(file: Path, text: str) -> None:
    """Write a file, unless it holds that already: Sphinx reads again what is newer."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def lead_inside(app: Sphinx, doctree: nodes.document) -> None:
    """Lead links to the files of ``PAGES`` to their pages."""
    for link in doctree.findall(pending_xref):
        target = Path(link.get("reftarget") or "")
        # What MyST found is an absolute path; a link in a file at the root, which a page here includes, it does not find.
        file = target.relative_to(ROOT) if target.is_relative_to(ROOT) else target.with_suffix("")
        if link.get("reftype") == "myst" and (page := PAGES.get(file.as_posix())):
            link["refdomain"], link["reftarget"] = "doc", page
            link["reftargetid"] = link.get("reftargetid")


def without_the_types_own(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Take out a constant's docstring: it is that of `str` or `int`."""
    if what == "data" and isinstance(value, str | int):
        lines.clear()


def public_name(app: Sphinx, env: Any, node: nodes.Element, content: nodes.Node) -> nodes.Node | None:
    """Lead a reference to where a class is defined to the page of its public name."""
    parts = str(node.get("reftarget", "")).split(".")
    names = [index for index, part in enumerate(parts) if part in cacheblend_rag.__all__]
    if node.get("refdomain") != "py" or not names:
        return None
    objects = env.get_domain("py").objects
    whole = ".".join(["cacheblend_rag", *parts[names[0] :]])
    # A field of a dataclass is described with its class.
    if found := objects.get(whole) or objects.get(f"cacheblend_rag.{parts[names[0]]}"):
        return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, content)
    return None


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.connect("builder-inited", generate)
    app.connect("doctree-read", lead_inside)
    app.connect("autodoc-process-docstring", without_the_types_own)
    app.connect("missing-reference", public_name)
