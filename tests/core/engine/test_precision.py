"""How float32 is multiplied: as an Experiment says, whatever was set before, and afterwards as it was."""

import subprocess
import sys
import textwrap

import pytest
import torch

from pfl_core import Experiment, run
from pfl_core.engine.sgd import PRECISIONS, precision

NEW = hasattr(torch.backends, "fp32_precision")
b = torch.backends
# What a user may have set, by either interface of torch, or by both.
BEFORE = {
    "nothing": "",
    "new, products": "b.cuda.matmul.fp32_precision = 'tf32'",
    "new, convolutions": "b.cudnn.conv.fp32_precision = 'ieee'",
    "new, everything": "b.fp32_precision = 'tf32'",
    "new, a GPU": "b.cudnn.fp32_precision = 'tf32'; b.cudnn.conv.fp32_precision = 'none'",
    "new, bfloat16 on a CPU": "b.mkldnn.matmul.fp32_precision = 'bf16'",
    "old, products": "b.cuda.matmul.allow_tf32 = True",
    "old, convolutions": "b.cudnn.allow_tf32 = False",
    "old, bfloat16 on a CPU": "torch.set_float32_matmul_precision('medium')",
    "new over old": "b.cudnn.allow_tf32 = False; b.fp32_precision = 'tf32'",
    "old under new": "b.cuda.matmul.fp32_precision = 'tf32'; b.cudnn.allow_tf32 = False",
    "algorithms": "b.cudnn.deterministic = False; b.cudnn.benchmark = True",
}


def flags():
    """All that torch shows, "mixed" where it refuses to."""

    def shown(read):
        try:
            return read()
        except RuntimeError:
            return "mixed"

    old = [lambda: b.cuda.matmul.allow_tf32, lambda: b.cudnn.allow_tf32]
    old.append(torch.get_float32_matmul_precision)
    new = []
    if NEW:
        new = [b, b.cudnn, b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn]
        new += [b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
    algorithms = [b.cudnn.deterministic, b.cudnn.benchmark]
    return [f.fp32_precision for f in new], [shown(read) for read in old], algorithms


def within(kind):
    tf32 = kind == "tf32"
    gpu = "tf32" if tf32 else "ieee"
    new = ["none", "none", gpu, gpu, gpu, "ieee", "ieee", "ieee"] if NEW else []
    return new, [tf32, tf32, "high" if tf32 else "highest"], [True, False]


@pytest.fixture
def as_it_was():
    """Torch's flags are those of the process: each case has one of its own to spoil."""
    algorithms = b.cudnn.deterministic, b.cudnn.benchmark
    with precision("full"):  # restores all that it knows of
        yield
    b.cudnn.deterministic, b.cudnn.benchmark = algorithms


@pytest.mark.parametrize("case", [c for c in BEFORE if NEW or "new" not in c])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_it_holds_whatever_was_set_before_and_leaves_that(kind, case, as_it_was):
    exec(BEFORE[case])
    before = flags()
    with precision(kind):
        assert flags() == within(kind)
    assert flags() == before
    with pytest.raises(KeyError), precision(kind):
        raise KeyError
    assert flags() == before


@pytest.mark.skipif(not NEW, reason="torch before 2.9 has no flags that follow one another")
def test_a_flag_that_followed_another_follows_it_afterwards(as_it_was):
    for f in (b, b.cudnn, b.cuda.matmul, b.cudnn.conv):
        f.fp32_precision = "none"
    b.fp32_precision = "tf32"
    with precision("full"):
        assert b.cuda.matmul.fp32_precision == b.cudnn.conv.fp32_precision == "ieee"
    assert b.cuda.matmul.fp32_precision == b.cudnn.conv.fp32_precision == "tf32"
    b.fp32_precision = "ieee"
    assert b.cuda.matmul.fp32_precision == b.cudnn.conv.fp32_precision == "ieee"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["new, everything", "old, bfloat16 on a CPU", "new over old"])
def test_a_run_is_the_same_whatever_was_set_before(case, store, tmp_path):
    tiny = dict(clients=3, rounds=1, model="mlp", batch=6, max_samples=14)
    code = f"""
    import torch
    from pfl_core import Experiment, run
    b = torch.backends
    {BEFORE[case]}
    print("loss", float(run(Experiment(**{tiny!r}), store={str(tmp_path)!r}).arrays["before/test/loss"].sum()))
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    here = run(Experiment(**tiny), store=store).arrays["before/test/loss"].sum()
    assert f"loss {float(here)}" in said
