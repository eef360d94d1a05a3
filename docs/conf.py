"""Settings of the documentation site, which `./run_all.sh docs` builds (tools/site.py).

The repository is the source folder, so that links between pages are the same here and on GitHub.
"""

import sys
import warnings
from pathlib import Path

import docutils.nodes
import latex2mathml.converter
import matplotlib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pfl_core.util.version import __version__ as release  # noqa: E402

project, author, copyright = "pfl_core", "pfl_core contributors", "pfl_core contributors, MIT"
root_doc = "README"
include_patterns = ["*.md", "docs/**", "notebooks/*.ipynb", "figures/**.md"]
include_patterns += ["benchmarks/README.md", "results/README.md"]
exclude_patterns = [".*", "*.egg-info", "runs", "build", "dist", "tests", "data"]
extensions = ["sphinx.ext.autodoc", "numpydoc", "myst_nb", "pydata_sphinx_theme", "tools.site"]

html_theme = "pydata_sphinx_theme"
# The signs of equations, where a reader has no mathematical font: matplotlib brings them along.
html_static_path = ["site.css", matplotlib.get_data_path() + "/fonts/ttf/STIXGeneral.ttf"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_title = f"pfl_core {release}"
html_context = {"default_mode": "auto"}
html_sidebars = {"README": []}
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
pygments_style = "default"
html_math_renderer = "mathml"

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # they would come from elsewhere; a notebook's sliders move in JupyterLab
myst_enable_extensions = ["attrs_block", "attrs_inline", "dollarmath"]
myst_heading_anchors = 4

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
numpydoc_show_class_members = False
warnings.filterwarnings("ignore", "Unknown section Hyper-parameters")  # tools/site.py renames it


def _math(self, node):
    """Equations as MathML, which browsers draw themselves: no script, no picture."""
    latex = node.astext()
    tall = node.tagname == "math_block" or latex.startswith(r"\displaystyle")
    latex = latex.removeprefix(r"\displaystyle")
    mathml = latex2mathml.converter.convert(latex, display="block" if tall else "inline")
    if node.tagname == "math_block":
        mathml = f'<div class="display">{mathml}</div>'
    else:
        mathml = mathml.replace('display="block"', 'display="inline" displaystyle="true"', 1)
    self.body.append(mathml)
    raise docutils.nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
