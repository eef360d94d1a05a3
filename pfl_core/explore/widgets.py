"""notebooks/explore.ipynb from the inside: each view of `views` under its controls, and a panel that trains in the background.

Where nobody can move a slider (papermill, nbval), a view is its default figure.
"""

from __future__ import annotations

import base64
import html
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
from IPython.display import Image, display

from pfl_core.analysis import plots
from pfl_core.experiments import run as runs
from pfl_core.explore import sources, views
from pfl_core.explore.background import Background
from pfl_core.explore.views import Choice, Shown
from pfl_core.papers import parameters
from pfl_core.util import progress
from pfl_core.util.version import __version__

# What stands before a control where its name does not say it, and what some say when pointed at.
SAYS = dict(
    dataset="Data",
    scheme="Partition",
    k="Classes each",
    source="Results",
    column="Setting",
    rows="Methods",
)
SAYS |= dict(row="Method", select="Which round")
TIPS = dict.fromkeys(("rows", "seeds"), "several: Ctrl or Shift with click or arrow keys")
TIPS |= dict(alpha="the smaller, the more clients differ", smoothing="mean of so many evaluations")
TIPS |= dict(when="before: models as served; after: after local training")


def live(interactive: str = "auto") -> bool:
    """Whether widgets make sense here: "yes" and "no" decide, "auto" sees whether this is a kernel that a person uses."""
    if interactive not in ("auto", "yes", "no"):
        raise ValueError(f"interactive={interactive!r} is unknown; use auto, yes or no")
    return (
        interactive == "yes"
        or interactive == "auto"
        and progress.mode(os.environ, sys.stdout) == "widget"
    )


def page(shown: Shown) -> str:
    """A view as HTML: its picture (with the sentence as alternative text), sentence, table, and the line of code with its button."""
    out = []
    if shown.figure is not None:
        picture = base64.b64encode(plots.compact(shown.figure, 110)).decode()
        out.append(
            f'<img alt="{html.escape(shown.said)}" src="data:image/png;base64,{picture}" style="max-width:100%">'
        )
    out.append(f'<p aria-live="polite">{html.escape(shown.said)}</p>')
    if shown.table is not None:
        out.append(f'<div class="jp-RenderedHTMLCommon">{shown.table.to_html(border=0)}</div>')
    copy = "navigator.clipboard.writeText(this.nextElementSibling.textContent);this.textContent='Copied'"
    button = (
        f'<button class="jupyter-button" style="width:auto" onclick="{copy}">Copy as code</button>'
    )
    code = f'<code style="user-select:all;overflow-wrap:anywhere">{html.escape(shown.code)}</code>'
    return f'<div style="line-height:1.4">{"".join(out)}<p>{button} {code}</p></div>'


def _tried(show: Callable[..., Shown], values: Mapping[str, Any]) -> str:
    try:
        return page(show(**values))
    except (
        ValueError,
        OSError,
        KeyError,
    ) as error:  # what was chosen cannot be: the message says what can
        return f'<p role="alert">{html.escape(str(error))}</p>'


def static(shown: Shown) -> None:
    """Show a view where there are no widgets."""
    if shown.figure is not None:
        display(Image(data=plots.compact(shown.figure)))
    print(shown.said)
    if shown.table is not None:
        display(shown.table)
    print(shown.code)


class Panel:
    """Controls beside a page of HTML, which `draw(values)` gives at the start and whenever a control changes."""

    def __init__(
        self,
        choices: Callable,
        start: Mapping[str, Any],
        draw: Callable[[dict], str],
        more: Sequence = (),
    ):
        self.choices, self.draw, self.more, self.busy = choices, draw, more, False
        self.values, self.controls, self.page = (
            dict(start),
            {},
            ipywidgets.HTML(layout={"flex": "1 1 30em"}),
        )
        self.left = ipywidgets.VBox(layout={"width": "24em", "flex": "0 0 auto"})
        self.box = ipywidgets.Box(
            [self.left, self.page], layout={"flex_flow": "row wrap", "width": "100%"}
        )
        self.settle()

    def settle(self) -> None:
        """Bring controls and values in line with each other, and draw."""
        self.busy = True  # what is set here is no choice of the user's
        offered = self.choices(self.values)
        self.left.children = [
            *(self.control(name, c) for name, c in offered.items() if c.options),
            *self.more,
        ]
        self.left.layout.display = "" if self.left.children else "none"
        self.busy = False
        self.values |= offered.values
        self.page.value = self.draw(offered.values)

    def control(self, name: str, c: Choice) -> ipywidgets.Widget:
        """The control of this name, made when first asked for, with these options."""
        if name not in self.controls:
            kind = dict(one="Dropdown", several="SelectMultiple", slide="SelectionSlider")[c.kind]
            how = dict(description=SAYS.get(name, name.capitalize()), tooltip=TIPS.get(name, ""))
            how |= dict(style={"description_width": "7em"}, layout={"width": "23em"})
            how |= {"continuous_update": False} if c.kind == "slide" else {}
            self.controls[name] = getattr(ipywidgets, kind)(options=c.options, value=c.value, **how)
            self.controls[name].observe(lambda change: self.chosen(name, change.new), "value")
        w = self.controls[name]
        if tuple(w.options) != c.options:
            w.options = c.options
        w.value = c.value
        return w

    def chosen(self, name: str, value: Any) -> None:
        """A control has changed."""
        if not self.busy:
            self.values[name] = value
            self.settle()


class Trainer:
    """The panel that trains: Run and Stop, and a curve that is drawn at most twice a second while a `Background` runs."""

    def __init__(self, start: Mapping[str, Any], device: str):
        self.device, self.job, self.experiment = device, None, None
        self.run = ipywidgets.Button(
            description="Run", tooltip="train, or go on where it was stopped"
        )
        self.stop = ipywidgets.Button(
            description="Stop", tooltip="after this round; a checkpoint is kept", disabled=True
        )
        self.run.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self.job.stop())
        buttons = ipywidgets.HBox([self.run, self.stop])
        self.panel = Panel(views.training_choices, start, self.draw, [buttons])

    def draw(self, values: Mapping[str, Any]) -> str:
        """The page: the run that is going on, else what Run would begin."""
        if self.job is None or self.job.state != "running":
            return _tried(
                lambda **v: views.training(
                    views.experiment(**v), None, "Run begins this, or goes on with it."
                ),
                values,
            )
        return self.shown()

    def shown(self) -> str:
        """The page of the run begun last."""
        state, curve = self.job.state, self.job.curve
        done = (
            "no round yet"
            if curve is None
            else f"round {curve['round'].max()} of {self.experiment.rounds}"
        )
        said = f"{state}: {done}" + ". Run goes on from there." * (state == "stopped")
        return page(views.training(self.experiment, curve, said))

    def begin(self) -> None:
        """Start what is chosen in a process of its own, and a thread that watches it."""
        self.experiment = views.experiment(**self.panel.choices(self.panel.values).values)
        self.job = Background(self.experiment, device=self.device)
        self.run.disabled, self.stop.disabled = True, False
        self.panel.page.value = self.shown()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Draw what is new, twice a second, until the end."""
        while self.job.state == "running":
            time.sleep(0.5)
            if self.job.poll():
                self.panel.page.value = self.shown()
        self.run.disabled, self.stop.disabled = False, True


class Explore:
    """The explorers of a notebook, its parameters checked first; a view is shown with its default, or under its controls.

    profile, datasets: which results and data come first; methods, seeds: which of them are chosen; artefacts: which explorers there
    are, empty for all; recompute: train the panel's run where nobody can press Run; interactive: see `live`. Raises ValueError.
    """

    def __init__(
        self, *, profile="quick", datasets=None, methods=None, seeds=None, artefacts=None, recompute=False, device="auto",
        interactive="auto",
    ):  # fmt: skip
        self.began, known = time.monotonic(), [*views.VIEWS, "train"]
        some = dict(datasets=datasets, methods=methods, seeds=seeds, artefacts=artefacts)
        parameters.check(known, profile=profile, recompute=recompute, **some)
        self.artefacts, self.recompute, self.live = artefacts or known, recompute, live(interactive)
        self.device = runs.pick_device(device)
        self.start: dict[str, Any] = {
            "rounds": {"smoke": 2, "quick": 20, "medium": 50, "paper": 50}[profile]
        }
        self.start |= {"dataset": datasets[0]} if datasets else {}
        self.start |= {"rows": tuple(methods), "method": methods[0]} if methods else {}
        self.start |= {"seeds": tuple(seeds), "seed": seeds[0]} if seeds else {}
        first = f".{profile}-{datasets[0] if datasets else ''}"
        self.start["source"] = next((s for s in sources.names() if first in s), None)
        plt.rcParams.update({"font.size": 8, "axes.titlesize": 9})

    def show(self, name: str, **start: Any) -> None:
        """Show the view of this name; `start` are values of its controls. ValueError for an unknown view."""
        if name not in views.VIEWS:
            raise ValueError(f"no explorer {name!r}; there are {', '.join(views.VIEWS)}")
        view, choices = views.VIEWS[name]
        if name not in self.artefacts:
            print(f"{name}: not among artefacts={self.artefacts}")
        elif self.live:
            display(Panel(choices, self.start | start, lambda values: _tried(view, values)).box)
        else:
            try:
                static(view(**choices(self.start | start).values))
            except OSError as error:  # data that are not here
                print(f"{name}: {error}")

    def train(self, **start: Any) -> None:
        """Show the panel that trains; where nobody can press Run, what it would train (recompute: trained)."""
        if "train" not in self.artefacts:
            print(f"train: not among artefacts={self.artefacts}")
        elif self.live:
            display(Trainer(self.start | start, self.device).panel.box)
        else:
            e = views.experiment(**views.training_choices(self.start | start).values)
            job = Background(e, device=self.device) if self.recompute else None
            said = (
                f"{job.wait()} after round {e.rounds}"
                if job
                else "In JupyterLab, Run begins this, and Stop ends it."
            )
            static(views.training(e, job and job.curve, said))

    def finish(self) -> str:
        """One line on what was read, versions and time."""
        read, took = ", ".join(sources.names()) or "none", time.monotonic() - self.began
        return f"results: {read}; pfl_core {__version__}, Python {platform.python_version()}; {took:.0f} s"
