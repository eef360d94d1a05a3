"""What the papers plan to run: the same Experiments, in the same order, whatever is rewritten around them.

`python -m tests.test_planned` writes planned.json anew; a commit that changes it says which runs changed, and why.
"""

import hashlib
import json
from pathlib import Path

import pytest

from pfl_core.experiments.experiment import Experiment
from pfl_papers.papers.base import PAPERS, PROFILES, Scope, paper

FILE = Path(__file__).with_name("planned.json")
DEFAULTS = Experiment().plain()


def said(e):
    """An Experiment without its defaults, so that a new field changes nothing here."""
    plain = {name: v for name, v in e.plain().items() if v != DEFAULTS[name]}
    if isinstance(plain.get("init_from"), dict):
        plain["init_from"] = {n: v for n, v in plain["init_from"].items() if v != DEFAULTS[n]}
    return [plain, dict(e.tags)]


def planned(name, profile):
    """How many Experiments a paper plans at a profile, and a digest of all."""
    cells = [
        [sweep.artefact, *said(e)]
        for sweep in paper(name).planned(Scope(profile))
        for e in sweep.experiments()
    ]
    text = json.dumps(cells, sort_keys=True)
    return f"{len(cells)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def of(name):
    return {profile: planned(name, profile) for profile in PROFILES}


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_plans_what_it_planned(name):
    assert of(name) == json.loads(FILE.read_text())[name]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: of(name) for name in PAPERS}, indent=1) + "\n")
