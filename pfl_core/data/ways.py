"""Ways to a Federation: dealt by a partition, or from data that say whose they are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch import Tensor

from pfl_core.data import arrays, files, frames, grouping, images, names, shifts
from pfl_core.data.partition import function
from pfl_core.data.partition import partition as deal
from pfl_core.data.readers import held_out
from pfl_core.util import identity, paths

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class Ways:
    """Federations of data in the forms in which users have them."""

    if TYPE_CHECKING:

        def __init__(self, x: Any, y: Any, train: Any, **about: Any): ...

    @classmethod
    def dealt(
        cls,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        partition: str = "dirichlet",
        *,
        clients: int,
        seed: int = 0,
        test: float = 0.2,
        classes: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        name: str = "own",
        class_names: Sequence[str] | None = None,
        **args: Any,
    ) -> Self:
        """Arrays of your own, dealt to clients by a partition of `list_partitions()`.

        Parameters
        ----------
        x, y, classes, mean, std, name, class_names
            As for Federation.
        partition
            Name of the partition; `args` are its own arguments, such as alpha=0.3.
        clients
            How many clients, K.
        seed
            Decides who gets which samples; equal seeds deal alike.
        test
            Share of each class that is the test part, for partitions that deal it apart from the
            training part ("iid", for example). The others divide what each client has.

        Raises
        ------
        ValueError
            As Federation, and where the partition cannot deal these samples so.

        Examples
        --------
        >>> pool = load("digits")
        >>> Federation.dealt(pool.x, pool.y, "iid", clients=3)
        Federation(own: 3 clients, 1,797 images of 1 x 28 x 28, 10 classes;
        a client has 479 to 480 train, 119 to 120 test)
        """
        if not isinstance(test, float | np.floating) or not 0 < test < 1:
            raise ValueError(f"Federation.dealt(test={test!r}): allowed is a share in (0, 1)")
        y, classes, known = names.labels(y, classes, class_names)
        pool = SimpleNamespace(y=y, is_test=held_out(y, test, seed), classes=classes, extra={})
        dealt = deal(partition, pool, clients, seed, **args)
        x, y, classes, split = shifts.applied(arrays.samples(x), y, classes, dealt)
        about: dict[str, Any] = dict(classes=classes, mean=mean, std=std, name=name)
        about["class_names"] = known if dealt.relabel is None else None
        fed = cls(x, y, split.train, val=split.val, test=split.test, **about)
        fed.__dict__["rule"] = _rule(partition, dict(clients=clients, test=float(test)) | args)
        return fed

    @classmethod
    def grouped(
        cls,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        by: Sequence[Any],
        *,
        split: str | Sequence[str] = "70/10/20",
        seed: int = 0,
        small: str = "refuse",
        **about: Any,
    ) -> Self:
        """Arrays of your own, a client for each value of `by`.

        Clients are in the order of their names, whole numbers first and by size; `client_names` has
        them. Samples keep their places, so that index lists are of your rows.

        Parameters
        ----------
        x, y
            As for Federation.
        by : (n,)
            Whose each sample is: texts or integers.
        split
            Shares in percent, train/test or train/val/test, drawn from each client's samples; test,
            then val, are rounded up. Or "train", "val" or "test" for each sample.
        seed
            Draws the shares.
        small : {"refuse", "drop", "train"}
            What happens where a client has too few samples for the split (2 of "70/30", 3 of
            "70/10/20"): a ValueError that names it, the client is left out, or it trains on all
            that it has and is neither validated nor tested.
        about
            classes, class_names, mean, std and name, as for Federation.

        Raises
        ------
        ValueError
            As Federation, for missing values in `by`, and for clients that are too small.

        Examples
        --------
        >>> pool = load("digits")
        >>> users = ["ann", "bob", "cat"] * 599
        >>> federation = Federation.grouped(pool.x, pool.y, by=users, split="70/10/20")
        >>> federation
        Federation(own: 3 clients, 1,797 images of 1 x 28 x 28, 10 classes;
        a client has 419 train, 60 val, 120 test)
        >>> federation.client_names
        ('ann', 'bob', 'cat')
        """
        who, clients = names.numbered("by", by)
        return cls._of_clients(x, y, who, clients, split, seed, small, about)

    @classmethod
    def _of_clients(
        cls,
        x: Any,
        y: Any,
        who: np.ndarray,
        clients: Sequence[str],
        split: Any,
        seed: int,
        small: str,
        about: dict[str, Any],
    ) -> Self:
        # Sample i is of client who[i].
        x = arrays.samples(x)
        if len(who) != len(x):
            raise ValueError(f"by has {len(who)} values for {len(x)} samples; give one for each")
        if "client_names" in about:
            raise TypeError("client_names: leave it out, clients are named by the data")
        lists, kept = grouping.divided(who, clients, split, seed, small)
        fed = cls(x, y, **lists, client_names=kept, **about)
        if isinstance(split, str):
            owners = [arrays.digest([who]), list(clients)]
            fed.__dict__["rule"] = json.dumps(["grouped", split, small, *owners])
        return fed

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        size: int | tuple[int, int] | None = None,
        colour: bool | None = None,
        split: str = "70/10/20",
        seed: int = 0,
        small: str = "refuse",
        **about: Any,
    ) -> Self:
        """Images in files: a folder a client, in it a folder a class, as anna/cat/1.png.

        Clients, classes and files are in the order of their names, whole numbers first and by size;
        the names of classes are kept for predictions. A client need not have all classes.

        Parameters
        ----------
        path
            The folder of the clients' folders.
        size
            (height, width), or one number for both, to which images are resampled. Without it they
            must have one size.
        colour
            Whether images are read as RGB or as grey; by default as grey if all of them are.
        split, seed, small, about
            As for `grouped`; `name` is by default the folder's.

        Raises
        ------
        ValueError
            As `grouped`, and for images that cannot be read, of more than 8 bits or of several
            sizes, and for what lies at another place; it names the files.
        """
        root = paths.expanded(path, "path")
        seen = images.found(root)
        x = arrays.owned(images.pixels(seen.files, root, size, colour))
        about = {"class_names": seen.classes, "name": root.resolve().name} | about
        return cls._of_clients(x, seen.label, seen.client, seen.clients, split, seed, small, about)

    @classmethod
    def from_table(
        cls,
        frame: Any,
        *,
        client: str = "client",
        label: str = "label",
        features: Sequence[str] | None = None,
        split: str = "70/10/20",
        seed: int = 0,
        small: str = "refuse",
        **about: Any,
    ) -> Self:
        """A pandas frame, a sample a row; numbers become float32, used as they are.

        Parameters
        ----------
        frame : DataFrame
        client, label
            The columns that say whose a sample is and what it is; texts or integers.
        features
            The columns that are numbers of a sample, in this order; by default all others.
        split
            As for `grouped`, or a column of "train", "val" and "test".
        seed, small, about
            As for `grouped`.

        Raises
        ------
        ValueError
            As `grouped`, and for columns that are not there, not numbers, or have missing values;
            it names them.

        Examples
        --------
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"age": [20.0, 30, 40, 50], "hospital": [1, 1, 2, 2]})
        >>> frame["ill"] = ["no", "yes", "no", "yes"]
        >>> federation = Federation.from_table(
        ...     frame, client="hospital", label="ill", split="50/50"
        ... )
        >>> federation.client_names, federation.class_names, federation.input_shape
        (('1', '2'), ('no', 'yes'), (1,))
        """
        x, y, by, split = frames.columns(frame, client, label, features, split)
        who, clients = names.numbered(f"column {client!r}", by)
        return cls._of_clients(x, y, who, clients, split, seed, small, about)

    @classmethod
    def from_torch(
        cls,
        datasets: Dataset | Sequence[Dataset] | Mapping[str, Dataset],
        clients: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None = None,
        *,
        val: Sequence[Dataset] | Mapping[str, Dataset] | None = None,
        test: Sequence[Dataset] | Mapping[str, Dataset] | None = None,
        split: str | None = None,
        seed: int = 0,
        small: str = "refuse",
        **about: Any,
    ) -> Self:
        """Data sets of torch, a Dataset or Subset a client; or one, and who holds which samples.

        Each sample is read once, as (sample, label), with the transforms of its data set. Names of
        classes are taken from torchvision's `classes`.

        Parameters
        ----------
        datasets
            A list, or {name of the client: Dataset}; or one Dataset, which `clients` divides.
        clients
            A list of one list of indices a client, or {name: indices}.
        val, test
            Likewise, if they are apart; then `datasets` are for training only.
        split, seed, small, about
            As for `grouped`; `split` is by default "70/10/20", and left out where test is given.

        Raises
        ------
        ValueError
            As `grouped`, and for other objects, samples of several shapes or types, a sample that
            is listed twice, and random transforms.
        """
        from pfl_core.data import torch_data as sets

        given = sets.read(datasets, clients, val, test)
        if (val is not None or test is not None) and split is not None:
            raise ValueError(
                f"split={split!r} beside val or test; leave it out: these data sets are divided"
            )
        parts = given.part if val is not None or test is not None else split or "70/10/20"
        if not {"classes", "class_names"} & about.keys():
            about["class_names"] = given.classes
        x = arrays.owned(given.x)
        return cls._of_clients(x, given.y, given.client, given.clients, parts, seed, small, about)

    @classmethod
    def from_pfllib(cls, folder: str | Path, **kw: Any) -> Self:
        """A data set as PFLlib writes it: train/<k>.npz and test/<k>.npz for each client k.

        A file holds arrays x and y, or `data` = {"x", "y"}, a pickled dict. Texts, (tokens, length)
        each, become tokens, padded with 0.

        Files that need unpickling are refused unless `trusted=True`: only say so for files that you
        made yourself.
        """
        folder, trusted = paths.expanded(folder, "folder"), kw.pop("trusted", False)
        given = files.read_pfllib(folder, trusted)
        given |= {"x": arrays.owned(given["x"]), "name": folder.name}
        return cls(**given | kw)


def _rule(partition: str, args: dict[str, Any]) -> str:
    # How a partition deals, as text; "" where its code draws from what changes.
    with contextlib.suppress(ValueError):
        code = identity.digest(function(partition))
        return json.dumps([partition, args, code], sort_keys=True, default=repr)
    return ""
