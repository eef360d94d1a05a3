"""A paper's card: every headline claim is on it, and its words and counts are those of `judged`."""

import re
import shlex

import pytest

from pfl_papers.__main__ import parser
from pfl_papers.compare import card, judged
from pfl_papers.compare.readable import listed
from pfl_papers.papers import base as papers
from pfl_papers.papers.base import KINDS, PAPERS

FORMS = {"html": card.Card._repr_html_, "text": repr, "markdown": card.Card.markdown}


def plain(text: str) -> str:
    """A card's words, without its marks."""
    for sign, name in {"&#x27;": "'", "&lt;": "<", "&gt;": ">", "&amp;": "&"}.items():
        text = text.replace(sign, name)
    return re.sub(r"<[^<>]*>|\*\*|`", "", text)


@pytest.mark.parametrize("name", PAPERS)
def test_every_headline_claim_is_on_the_card_with_its_word(name):
    made, said = card.card(name), judged.claims(name).query(f"kind == {card.HEADLINE!r}")
    assert len(said) and list(said.paper.unique()) == [name]
    ran = said[said.verdict != card.NOT_RUN]
    assert [(c.says, c.verdict) for c in made.headline] == [
        *zip(ran.says, ran.verdict, strict=True)
    ]
    for form in FORMS.values():
        text = plain(form(made))
        assert [says for says in said.says if says not in text] == []
        for c in made.headline:
            assert c.number and c.number in text and c.verdict in text


@pytest.mark.parametrize("name", PAPERS)
def test_counts_are_those_of_all_claims(name):
    made, said = card.card(name), judged.claims(name)
    for kind in KINDS:
        words = said[said.kind == kind].verdict
        assert made.counted(kind) == words.value_counts().to_dict()
    assert plain(made.line()["headline claims"]) == listed(made.counted())
    leads = judged.leads(name)
    assert (
        sum(map(int, re.findall(r"of (\d+) ", made.leads)))
        == ((leads.kind == judged.PERSONAL) & (leads.reported > 0)).sum()
    )


@pytest.mark.parametrize("name", PAPERS)
def test_every_claim_that_was_run_says_its_difference_and_its_budget(name):
    made = card.card(name)
    for c in made.headline:
        ends = r" \[[+-]\d+\.\d+, [+-]\d+\.\d+\]|[^;]*, 1 seed; one seed has no interval"
        assert re.search(rf"-?[+-]\d+\.\d+({ends})", c.number), c
    said = lambda title: {title, title.replace("Figure", "Fig.")}  # noqa: E731
    tables = {t for c in made.headline for t in made.budgets if any(n in c.where for n in said(t))}
    assert tables == set(made.budgets) and bool(made.headline) == bool(made.budgets)
    for said in made.budgets.values():
        assert re.search(r"\(\d+ of \d+ columns\), \d.* seeds?, \w.*\d (rounds|samples)", said), (
            said
        )
        assert (lambda some, of: 0 < some <= of)(
            *map(int, re.search(r"(\d+) of (\d+) c", said).groups())
        )


@pytest.mark.parametrize("name", PAPERS)
def test_what_was_not_run_has_a_command_that_is_understood(name):
    made, about = card.card(name), papers.paper(name).artefacts
    lines = re.findall(r"`python -m pfl_papers ([^`]*)`", made.markdown())
    train, plan = [parser().top.parse_args(shlex.split(line)) for line in lines]
    assert plan.paper == train.paper == name and plan.profile == train.profile
    named = set(train.artefacts or about)
    assert named <= set(made.left) <= set(about) and train.profile in papers.FULL
    assert train.profile == "paper" or all(about[a].medium for a in named)


def test_titles_of_a_kind_stand_together():
    assert (
        card.titles(["table2", "table5a", "fig3", "appc5"])
        == "Tables 2, 5a; Figure 3; Appendix C.5"
    )


def test_an_unknown_paper_is_refused():
    with pytest.raises(ValueError, match="paper 'fedpr' is unknown; did you mean 'fedper'"):
        card.card("fedpr")
