"""Words of the command lines, and what they print."""

from tests.made import main

TINY = dict(
    dataset="digits",
    partition="dirichlet",
    partition_args={"alpha": 0.5, "split": "70/10/20"},
    clients=3,
)
TINY |= dict(model="mlp", rounds=2, max_samples=20, batch=10, method="fedper")
WORDS = "--partition_args alpha=.5,split=70/10/20 --clients 3 --model mlp --rounds 2 --max-samples 20 --batch 10"


def said(capsys, words: str, code: int = 0) -> str:
    assert main(words.split()) == code
    out = capsys.readouterr()
    return out.err if code else out.out
