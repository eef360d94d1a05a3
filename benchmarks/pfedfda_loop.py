"""pFedFDA as a plain loop, beside its authors' curve: `python -m benchmarks.pfedfda_loop`.

By default pFedFDA ends above its authors' code, with features="epochs" beside it (docs/parity.md).
Two forms of one loop show without the engine that this is the reason, on the same clients:

- "theirs": a client estimates means, covariance and beta from the features that training passed
  through, of all batches of all epochs, each before its step. The halves of the cross-validation
  then have the same images, as other epochs saw them. beta is found by L-BFGS, and 1e-4 is added to
  every entry of the covariance.
- "ours": the features are those of the trained base, each image once, and beta is the best of a
  grid, as in pfl_core/methods/pfedfda.py.

`--parity FOLDER` is that of benchmarks/parity.py; results/pfedfda_loop.json keeps the curves.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

from benchmarks import common, parity
from benchmarks.cifarnet import cifarnet
from pfl_core.data import pools
from pfl_core.methods.pfedfda import EPS, RARE, discriminant
from pfl_core.util import provenance

FORMS = ("theirs", "ours")
ROUNDS = 10
BATCH, EPOCHS, LR, MOMENTUM, DECAY = 50, 5, 0.01, 0.5, 5e-4
Pair = tuple[Tensor, Tensor]


class Loop:
    """One federation of pFedFDA, without the engine."""

    def __init__(self, form: str, seed: int, x: Tensor, y: Tensor, train: list[Tensor]):
        self.form, self.x, self.y, self.train = form, x, y, train
        torch.manual_seed(seed)
        self.net = cifarnet((3, 32, 32), 10)
        assert isinstance(self.net, nn.Sequential)
        width = self.net[-1].in_features
        self.mean, self.cov = torch.rand(10, width), torch.eye(width)
        shares = [torch.bincount(y[i], minlength=10) / len(i) + EPS for i in train]
        self.prior = [share / share.sum() for share in shares]

    def estimated(self, z: Tensor, y: Tensor) -> Pair:
        """Class means (C, F) and covariance (F, F) of features z (n, F)."""
        n = torch.bincount(y, minlength=10)
        known = [z[y == c].mean(0) if n[c] > RARE else self.mean[c] for c in range(10)]
        mean, eye = torch.stack(known), torch.eye(z.shape[1])
        apart = z - mean[y]
        cov = apart.T @ apart / (len(z) - 1) + eye
        return mean, cov + EPS if self.form == "theirs" else cov

    def blend(self, beta: Tensor, own: Pair) -> Pair:
        """Own and global estimates, mixed by beta (2,)."""
        pairs = zip(beta, own, (self.mean, self.cov), strict=True)
        mean, cov = (b * a + (1 - b) * g for b, a, g in pairs)
        return mean, cov

    def adapted(self, z: Tensor, y: Tensor, prior: Tensor) -> Pair:
        """A client's blend, with the beta that cross-validation in two halves finds."""
        enough = torch.bincount(y, minlength=10)[y] >= 2
        z_some, y_some = z[enough], y[enough]
        folds = StratifiedKFold(2, shuffle=True, random_state=0).split(z_some, y_some)
        halves = [(self.estimated(z_some[a], y_some[a]), z_some[b], y_some[b]) for a, b in folds]

        def loss(beta: Tensor) -> Tensor:
            out = torch.zeros(())
            for own, seen, labels in halves:
                w, b = discriminant(*self.blend(beta.clip(0, 1), own), prior)
                out = out + F.cross_entropy(seen @ w.T + b, labels)
            return out

        search = by_lbfgs if self.form == "theirs" else by_grid
        return self.blend(search(loss), self.estimated(z, y))

    def visit(self, k: int) -> tuple[nn.Module, Pair]:
        """Client k's trained network and its blend."""
        net = copy.deepcopy(self.net)
        head, at = net[-1], self.train[k]
        head.weight.data, head.bias.data = discriminant(self.mean, self.cov, self.prior[k])
        body = net[:-1]
        sgd = torch.optim.SGD(body.parameters(), LR, MOMENTUM, weight_decay=DECAY)
        passed, size = [], min(BATCH, len(at))
        for _ in range(EPOCHS):
            order = at[torch.randperm(len(at))]
            for batch in order[: len(at) // size * size].split(size):
                z = body(self.x[batch])
                sgd.zero_grad()
                F.cross_entropy(head(z), self.y[batch]).backward()
                sgd.step()
                passed.append((z.detach(), self.y[batch]))
        if self.form == "ours":
            passed = [(features(body, self.x[at]), self.y[at])]
        z, y = (torch.cat(part) for part in zip(*passed, strict=True))
        return net, self.adapted(z, y, self.prior[k])

    def round(self) -> None:
        """All clients train; bases and estimates are averaged."""
        nets, blends = zip(*[self.visit(k) for k in range(len(self.train))], strict=True)
        n = torch.tensor([float(len(i)) for i in self.train])
        mean = lambda values: torch.einsum("k,k...->...", n / n.sum(), torch.stack(values))  # noqa: E731
        with torch.no_grad():
            for old, *new in zip(*[net.parameters() for net in (self.net, *nets)], strict=True):
                old.copy_(mean(new))
        self.mean, self.cov = (mean(list(part)) for part in zip(*blends, strict=True))

    def accuracy(self, test: list[Tensor]) -> float:
        """Of all test images (%): each client under the global base and its own blend."""
        right = 0
        for at, seen, prior in zip(self.train, test, self.prior, strict=True):
            own, other = (features(self.net[:-1], self.x[i]) for i in (at, seen))
            w, b = discriminant(*self.adapted(own, self.y[at], prior), prior)
            right += int(((other @ w.T + b).argmax(1) == self.y[seen]).sum())
        return round(100 * right / sum(map(len, test)), 2)


def features(body: nn.Module, x: Tensor) -> Tensor:
    """What the classifier gets of images x."""
    with torch.no_grad():
        return body(x)


def by_grid(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The best beta (2,) of 11 by 11."""
    ratio = torch.linspace(0, 1, 11)
    tried = torch.cartesian_prod(ratio, ratio)
    return tried[torch.stack([loss(beta) for beta in tried]).argmin()]


def by_lbfgs(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """beta (2,) after ten steps of L-BFGS from 0.5."""
    beta = torch.full((2,), 0.5, requires_grad=True)
    search = torch.optim.LBFGS([beta], max_iter=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = loss(beta)
        value.backward()
        return value

    search.step(closure)
    return beta.detach().clip(0, 1)


def main(words: Sequence[str] | None = None) -> None:
    """Run both forms, or one, and keep their curves."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pfedfda_loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("forms", nargs="*", metavar="FORM", help="theirs, ours; none: both")
    parser.add_argument("--parity", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    fed, _ = parity.clients_of(pools.load("cifar10"), args.parity / "split.npz")
    x = torch.tensor(fed.x).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    train, test = ([torch.tensor(i) for i in fed.index[part]] for part in ("train", "test"))
    torch.set_num_threads(1)
    for form in args.forms or FORMS:
        loop, curve = Loop(form, args.seed, x, torch.tensor(fed.y).long(), train), {}
        for r in range(1, ROUNDS + 1):
            loop.round()
            if r % 2 == 0:
                curve[r] = loop.accuracy(test)
                print(form, r, curve[r], flush=True)
        about = common.about("cpu") | {"commit": provenance.commit()}
        common.save("pfedfda_loop", {form: {"seed": args.seed, "acc_pct": curve}}, "cpu", about)


if __name__ == "__main__":
    main()
