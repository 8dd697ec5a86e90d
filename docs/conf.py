"""The site: `make docs` builds README.md and docs/ with Sphinx into build/site."""

import re
import shutil
from pathlib import Path
from typing import Any

project = "Offline sample packing"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "examples/first_packs.ipynb",
    "examples/knapsack/README.md",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # a test executes it
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = project
html_show_sourcelink = False

#: The left column, and what each group holds. CONTRIBUTING.md links the pages of docs/dev.
GROUPS = {
    "Packing": [
        *(f"docs/{p}" for p in "input records media choosing configuration mixtures".split()),
        *(f"docs/{p}" for p in "set_aside checking large_runs what_it_costs".split()),
    ],
    "Training": [
        *(f"docs/{p}" for p in "training training_options resuming energon integrations".split()),
        *(f"docs/{p}" for p in "recipes which_packing shared_prefixes".split()),
    ],
    "Coming from": [
        f"docs/coming_from_{p}"
        for p in "llava_onevision neva ms_swift megatron_bridge veomni".split()
    ],
    "Reference": [f"docs/{p}" for p in "glossary api command from_python formats".split()],
    "Examples": ["examples/first_packs", "examples/knapsack/README"],
    "Development": ["CONTRIBUTING", "CHANGELOG"],
}


def contents() -> str:
    """Return the table of contents, which README.md does not show where it is read as a file."""
    trees = [
        "\n".join(["```{toctree}", ":hidden:", f":caption: {name}", *pages, "```"])
        for name, pages in GROUPS.items()
    ]
    return "\n\n" + "\n\n".join(trees)


def setup(app: Any) -> None:
    """Append the table of contents to the front page, and name it as web servers expect."""

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = re.sub(r"\[(\S+/)\]\((?:\.\./)*examples\)", r"`\1`", source[0])  # a folder
        if name == root_doc:
            source[0] += contents()
        if name.startswith("docs/dev/"):  # not in the left column
            source[0] = f"---\norphan: true\n---\n\n{source[0]}"

    def finish(app: Any, failure: Exception | None) -> None:
        if failure is None:
            shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))

    app.connect("source-read", read)
    app.connect("build-finished", finish)
