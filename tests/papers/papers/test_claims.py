"""Claims as lines: each names what there is, and one that is wrong is named."""

import csv
from dataclasses import replace

import pytest

from pfl_papers.evidence import judges
from pfl_papers.evidence.asks import Terms
from pfl_papers.papers import base, claims


@pytest.mark.parametrize("name", base.PAPERS)
def test_every_line_names_what_there_is(name):
    paper = base.paper(name)
    claims.check(paper)
    assert len({c.key for c in paper.claims}) == len(paper.claims) > 10
    assert any(c.kind == "headline" for c in paper.claims)


def test_few_claims_need_a_judge_of_their_own():
    every = [claim for name in base.PAPERS for claim in base.paper(name).claims]
    assert len(every) == 105 and 5 * sum(c.ask is None for c in every) <= len(every)
    assert {c.ask.judge for c in every if c.ask} == set(judges.JUDGES)


GOOD = dict(key="k", artefact="table2", where="Sec. 1", judge="ahead", compares="flayer > fedavg")
GOOD |= dict(how="", says="It is", limit="", kind="headline", why_kind="", status="")
# What a line has instead, and what its error says.
BAD = [
    (dict(says=""), "says is missing"),
    (dict(where=""), "where is missing"),
    (dict(judge="ahed"), "judge 'ahed' is unknown; did you mean 'ahead'"),
    (dict(kind="main"), "kind 'main' is unknown"),
    (dict(kind="by construction"), "why_kind is for 'by construction', which needs it"),
    (dict(why_kind="so it is"), "why_kind is for 'by construction'"),
    (dict(compares="flayer"), "compares 'flayer': not what judge 'ahead' compares"),
    (dict(compares="a > b > c"), "not what judge 'ahead' compares"),
    (dict(compares="a > b < c"), "one of >, < and == is allowed"),
    (dict(compares="a > "), "not what judge 'ahead' compares|a name is missing"),
    (dict(judge="ladder"), "not what judge 'ladder' compares"),
    (dict(judge="best"), "not what judge 'best' compares"),
    (dict(judge="alike", compares="a | b"), "judge 'alike' needs within"),
    (dict(how="within=2"), "judge 'ahead' needs row, and no within|no within"),
    (dict(judge="change", compares="N=20 > N=50"), "judge 'change' needs row"),
    (dict(how="than=2"), "how 'than=2': allowed are mean, metrics, most, row="),
    (dict(how="mean=yes"), "how 'mean=yes': allowed are"),
    (dict(how="by=two"), "how 'by=two': by is a number"),
    (dict(how="asked=all"), "allowed are printed, behind"),
    (dict(how="by=2"), "neither it nor says tells of 2"),
    (dict(judge="own", how="by=2"), "judge 'own' is a function"),
]
UNKNOWN = [
    (dict(artefact="table9"), "artefact 'table9' is unknown"),
    (dict(compares="flayer > fedavgg"), "row 'fedavgg' is unknown; did you mean 'fedavg'"),
    (dict(compares="flayer > fedavg @ CIFAR-10"), "column 'CIFAR-10' is unknown"),
    (dict(compares="flayer > fedavg @ MNIST*"), r"column 'MNIST\*' is unknown"),
    (dict(how="metric=rounds"), "metric 'rounds' is unknown"),
    (dict(how="but=apple @ nowhere"), "column 'nowhere' is unknown"),
    (dict(judge="change", compares="here > there", how="row=*"), "column 'here' is unknown"),
]


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Writes lines in place of FLAYER's and reads them."""
    monkeypatch.setattr(claims, "PUBLISHED", tmp_path)

    def read(*changes):
        with open(tmp_path / "flayer.claims.csv", "w", encoding="utf-8") as f:
            writer = csv.DictWriter(f, claims.COLUMNS)
            writer.writeheader()
            writer.writerows(GOOD | change for change in changes)
        return claims.read("flayer", base.paper("flayer").claims[0].ask.terms, own=len)

    return read


@pytest.mark.parametrize(("change", "error"), BAD)
def test_a_line_that_is_wrong_is_named(lines, change, error):
    with pytest.raises(ValueError, match=rf"^flayer\.claims\.csv, line 3: .*({error})"):
        lines({}, dict(key="other") | change)


@pytest.mark.parametrize(("change", "error"), UNKNOWN)
def test_a_name_that_the_artefact_lacks_is_named(lines, change, error):
    own = replace(base.paper("flayer"), claims=lines({}, dict(key="other") | change))
    with pytest.raises(ValueError, match=rf"^flayer\.claims\.csv, line 3: .*({error})"):
        claims.check(own)


def test_keys_and_columns_are_what_they_are(lines, tmp_path):
    with pytest.raises(ValueError, match="line 3: key 'k' stands twice"):
        lines({}, {})
    lines({}, dict(key="other"))
    with open(tmp_path / "flayer.claims.csv", "a") as f:
        f.write("of two,values\n")
    with pytest.raises(ValueError, match="line 4: 2 values for 11 columns"):
        claims.read("flayer", Terms())
    (tmp_path / "flayer.claims.csv").write_text("key,says\n")
    with pytest.raises(ValueError, match="line 1: allowed are the columns key, artefact"):
        claims.read("flayer", Terms())
