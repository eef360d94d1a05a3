"""What notebooks/explore.ipynb is made of: views under their controls, and a panel that trains.

Where nobody can move a slider (papermill, nbval), each view is shown once, with its defaults.
"""

from __future__ import annotations

import base64
import contextlib
import html
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib

from pfl_core.analysis import plots
from pfl_core.experiments import run as runs
from pfl_core.experiments.experiment import Experiment
from pfl_core.util import checks, progress
from pfl_core.util.version import __version__
from pfl_papers.compare import parameters
from pfl_papers.explore import sources, training, views
from pfl_papers.explore.background import Background
from pfl_papers.explore.choices import Choice, Choices, Shown

with checks.extra("notebooks", "pfl_papers.explore"):
    import ipywidgets
    from IPython.display import Image, Markdown, display

# Descriptions of controls that are not their name.
SAYS = dict(
    dataset="Data",
    scheme="Partition",
    k="Classes each",
    source="Results",
    column="Setting",
    rows="Methods",
    row="Method",
    first="First method",
    second="Second method",
    alpha="α",
    against="Against",
    when="Evaluated",
    select="Which round",
    model="Network",
    batch="Batch size",
    lr="Learning rate",
)
# What a control says when it is pointed at.
TIPS = dict(
    rows="several: Ctrl or Shift with click or arrow keys",
    seeds="several: Ctrl or Shift with click or arrow keys",
    alpha="the smaller, the more clients differ",
    against="equal rounds may cost clients and the network very different amounts",
    smoothing="mean of so many evaluations",
)
ROUNDS = {"smoke": 2, "quick": 20, "medium": 50, "paper": 50}  # of the panel that trains, at first
STYLE = {"font.size": 8, "axes.titlesize": 9}  # of figures: matplotlib's settings
_drawing = threading.RLock()


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw figures in `STYLE`, one thread at a time: matplotlib's settings are the process's."""
    style: dict[Any, Any] = {**STYLE}
    with _drawing, matplotlib.rc_context(style):
        yield


def live(interactive: str = "auto") -> bool:
    """Whether to show widgets.

    Parameters
    ----------
    interactive : {"auto", "yes", "no"}
        "yes" and "no" decide. "auto": widgets in a kernel that a person uses.

    Raises
    ------
    ValueError
        For another value.
    """
    if interactive not in ("auto", "yes", "no"):
        raise ValueError(f"interactive={interactive!r} is unknown; use auto, yes or no")
    if interactive == "auto":
        return progress.mode(os.environ, sys.stdout) == "widget"
    return interactive == "yes"


# -- what is shown, as HTML or as outputs of a cell ------------------------------------------------


def page(shown: Shown) -> str:
    """The HTML of a figure, its sentence (also its alternative text), table and line of code.

    A button beside the code copies it.
    """
    said, parts = html.escape(shown.said), []
    if shown.figure is not None:
        picture = base64.b64encode(plots.compact(shown.figure, 110)).decode()
        source = f"data:image/png;base64,{picture}"
        parts.append(f'<img alt="{said}" src="{source}" style="max-width:100%">')
    parts.append(f'<p aria-live="polite">{said}</p>')
    if shown.table is not None:
        parts.append(f'<div class="jp-RenderedHTMLCommon">{shown.table.to_html(border=0)}</div>')
    return f'<div style="line-height:1.4">{"".join(parts)}<p>{_copied(shown.code)}</p></div>'


def _copied(code: str) -> str:
    """The HTML of a line of code, with the button that copies it."""
    copy = (
        "navigator.clipboard.writeText(this.nextElementSibling.textContent);"
        "this.textContent='Copied'"
    )
    button = (
        f'<button class="jupyter-button" style="width:auto" onclick="{copy}">Copy as code</button>'
    )
    style = "user-select:all;overflow-wrap:anywhere"
    return f'{button} <code style="{style}">{html.escape(code)}</code>'


def tried(show: Callable[..., Shown], values: Mapping[str, Any]) -> str:
    """The page of `show(**values)`; where that is not possible, the message that says what is."""
    try:
        with styled():
            return page(show(**values))
    except (ValueError, OSError, KeyError) as error:
        return f'<p role="alert">{html.escape(str(error))}</p>'


def static(shown: Shown) -> None:
    """Show a figure, its sentence, table and line of code as outputs of a cell."""
    if shown.figure is not None:
        display(Image(data=plots.compact(shown.figure), alt=plots.described(shown.figure)))
    display(Markdown(shown.said))
    if shown.table is not None:
        display(shown.table)
    print(shown.code)


# -- panels ----------------------------------------------------------------------------------------


class Panel:
    """Controls beside a page, which is drawn at the start and whenever a control changes.

    Parameters
    ----------
    choices : function of {name: value} -> Choices
        What the controls offer, given what is chosen so far.
    start : mapping
        What is chosen at first, {name: value}.
    draw : function of {name: value} -> str
        The page's HTML, given what is chosen.
    more : sequence of widgets
        What stands below the controls.
    """

    def __init__(
        self,
        choices: Callable[[Mapping[str, Any]], Choices],
        start: Mapping[str, Any],
        draw: Callable[[dict[str, Any]], str],
        more: Sequence[ipywidgets.Widget] = (),
    ):
        self.choices, self.draw, self.more = choices, draw, more
        self.busy = False  # whether `settle` is at work
        self.values = dict(start)
        self.controls: dict[str, ipywidgets.Widget] = {}
        self.page = ipywidgets.HTML(layout={"flex": "1 1 30em"})
        self.left = ipywidgets.VBox(layout={"width": "24em", "flex": "0 0 auto"})
        layout = {"flex_flow": "row wrap", "width": "100%"}
        self.box = ipywidgets.Box([self.left, self.page], layout=layout)
        self.settle()

    def settle(self) -> None:
        """Let the controls offer what fits what is chosen, and draw the page."""
        self.busy = True  # values that are set here were not chosen by the user
        offered = self.choices(self.values)
        controls = [self.control(name, c) for name, c in offered.items() if c.options]
        self.left.children = [*controls, *self.more]
        self.left.layout.display = "" if self.left.children else "none"
        self.busy = False
        self.page.value = self.draw(offered.values)

    def control(self, name: str, choice: Choice) -> Any:
        """The control of this name with these options; it is made when first asked for."""
        if name not in self.controls:
            self.controls[name] = _widget(name, choice)
            self.controls[name].observe(lambda change: self.chosen(name, change.new), "value")
        widget: Any = self.controls[name]
        options = _options(choice)
        if widget.options != options:
            widget.options = options
            if choice.kind == "several":
                widget.rows = _lines(choice)
        widget.value = choice.value
        return widget

    def chosen(self, name: str, value: Any) -> None:
        """Take in that a control has changed."""
        if not self.busy:
            self.values[name] = value
            self.settle()


def _widget(name: str, choice: Choice) -> ipywidgets.Widget:
    how = dict(
        options=_options(choice),
        value=choice.value,
        description=SAYS.get(name, name.capitalize()),
        tooltip=TIPS.get(name, ""),
        style={"description_width": "7em"},
        layout={"width": "23em"},
    )
    if choice.kind == "several":
        return ipywidgets.SelectMultiple(**how, rows=_lines(choice))
    if choice.kind == "slide":
        return ipywidgets.SelectionSlider(**how, continuous_update=False)
    return ipywidgets.Dropdown(**how)


def _options(choice: Choice) -> tuple[tuple[str, Any], ...]:
    """What a control shows and means."""
    return tuple(zip(choice.words, choice.options, strict=True))


def _lines(choice: Choice) -> int:
    """How many options a list shows without scrolling."""
    return min(max(len(choice.options), 2), 12)


class Trainer:
    """The panel that trains: controls, Run and Stop, and a curve that grows while a run goes on.

    Parameters
    ----------
    start : mapping
        What is chosen at first, {name: value}.
    device : {"auto", "cpu", "cuda"}
        Where runs are trained.
    """

    def __init__(self, start: Mapping[str, Any], device: str):
        self.device = device
        self.job: Background | None = None  # the run that was begun last, and its Experiment
        self.experiment: Experiment | None = None
        self.run = ipywidgets.Button(
            description="Run", tooltip="train, or go on where it was stopped"
        )
        self.stop = ipywidgets.Button(
            description="Stop", tooltip="after this round; a checkpoint is kept", disabled=True
        )
        self.run.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self.job and self.job.stop())
        buttons = ipywidgets.HBox([self.run, self.stop])
        self.panel = Panel(training.choices, start, self.draw, [buttons])

    def draw(self, values: Mapping[str, Any]) -> str:
        """The page: the run that goes on, else what Run would begin."""
        if self.job is not None and self.job.state == "running":
            return self.shown()
        return tried(_offered, values)

    def shown(self) -> str:
        """The page of the run that was begun last."""
        assert self.job is not None and self.experiment is not None  # begun before
        state, curve = self.job.state, self.job.curve
        done = "no round yet"
        if curve is not None:
            done = f"round {curve['rounds'].max()} of {self.experiment.rounds}"
        hint = ". Run goes on from there." if state == "stopped" else ""
        with styled():
            return page(training.shown(self.experiment, curve, f"{state}: {done}{hint}"))

    def begin(self) -> None:
        """Start what is chosen in a process of its own, and a thread that watches it."""
        values = self.panel.choices(self.panel.values).values
        try:
            self.experiment = training.experiment(**values)
        except ValueError:
            self.panel.page.value = tried(_offered, values)  # says what does not go together
            return
        self.job = Background(self.experiment, device=self.device)
        self.run.disabled, self.stop.disabled = True, False
        self.panel.page.value = self.shown()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """Draw what is new, at most twice a second, until the run ends."""
        while self.job is not None and self.job.state == "running":
            time.sleep(0.5)
            if self.job.poll():
                self.panel.page.value = self.shown()
        self.run.disabled, self.stop.disabled = False, True


def _offered(**values: Any) -> Shown:
    """What Run would begin."""
    return training.shown(
        training.experiment(**values), None, "Run begins this, or goes on with it."
    )


# -- the notebook ----------------------------------------------------------------------------------


class Explore:
    """The explorers of a notebook: each view with its defaults, or under its controls.

    Parameters
    ----------
    profile : {"smoke", "quick", "medium", "paper"}
        How many rounds the panel trains at first.
    datasets : list of str, optional
        Which data are chosen at first: those of the first name, for partitions and training.
        Results open on the best evidence there is.
    methods, seeds : list, optional
        Which methods and seeds are chosen at first; by default the methods of `views.FIRST`, and
        all seeds.
    artefacts : list of str, optional
        Which explorers are shown: names of `views.VIEWS`, or "train"; all by default.
    train : bool
        Whether the panel's run is trained where nobody can press Run.
    device : {"auto", "cpu", "cuda"}
        Where runs are trained.
    interactive : {"auto", "yes", "no"}
        Whether there are widgets, as for `live`.

    Raises
    ------
    ValueError
        If a parameter has a value that is not allowed.
    """

    def __init__(
        self,
        *,
        profile: str = "quick",
        datasets: list[str] | None = None,
        methods: list[str] | None = None,
        seeds: list[int] | None = None,
        artefacts: list[str] | None = None,
        train: bool = False,
        device: str = "auto",
        interactive: str = "auto",
    ):
        self.began = time.monotonic()
        known = [*views.VIEWS, "train"]
        some: dict[str, Any] = dict(datasets=datasets, methods=methods, seeds=seeds)
        some |= dict(artefacts=artefacts)
        parameters.check(known, profile=profile, train=train, **some)
        self.artefacts, self.trains = artefacts or known, train
        self.live = live(interactive)
        self.device = runs.pick_device(device)
        self.start: dict[str, Any] = {"rounds": ROUNDS[profile]}
        if datasets:
            self.start["dataset"] = datasets[0]
        if methods:
            self.start |= {"rows": tuple(methods), "method": methods[0]}
        if seeds:
            self.start |= {"seeds": tuple(seeds), "seed": seeds[0]}

    def show(self, name: str, **start: Any) -> None:
        """Show a view.

        Parameters
        ----------
        name : str
            One of `views.VIEWS`.
        **start
            What its controls have chosen at first.

        Raises
        ------
        ValueError
            If there is no such view.
        """
        if name not in views.VIEWS:
            raise ValueError(f"no explorer {name!r}; there are {', '.join(views.VIEWS)}")
        view, choices = views.VIEWS[name]
        if name not in self.artefacts:
            print(f"{name}: not among artefacts={self.artefacts}")
        elif self.live:
            display(Panel(choices, self.start | start, lambda values: tried(view, values)).box)
        else:
            try:
                with styled():
                    static(view(**choices(self.start | start).values))
            except OSError as error:  # the data are not on this computer
                print(f"{name}: {error}")

    def train(self, **start: Any) -> None:
        """Show the panel that trains; `start` is what its controls have chosen at first.

        Without widgets it says what it would train, or, with `train`, trains that.
        """
        if "train" not in self.artefacts:
            print(f"train: not among artefacts={self.artefacts}")
            return
        if self.live:
            display(Trainer(self.start | start, self.device).panel.box)
            return
        experiment = training.experiment(**training.choices(self.start | start).values)
        curve, said = None, "In JupyterLab, Run begins this, and Stop ends it."
        if self.trains:
            job = Background(experiment, device=self.device)
            said = f"{job.wait()} after round {experiment.rounds}"
            curve = job.curve
        with styled():
            static(training.shown(experiment, curve, said))

    def finish(self) -> str:
        """A line on the results that were read, the versions, and the time since the start."""
        read = "; ".join(map(sources.title, sources.names())) or "none"
        seconds = time.monotonic() - self.began
        versions = f"pfl_core {__version__}, Python {platform.python_version()}"
        return f"results: {read}; {versions}; {seconds:.0f} s"
