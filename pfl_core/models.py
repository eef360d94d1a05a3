"""The papers' networks as plain nn.Modules, and names of layers, heads and BatchNorm tensors.

A network is a table of units in forward order, in which FedPer counts; `build(name, input_shape,
classes)` makes one. What is asked about it (`layers`, `head`, `bn`, `buffers`) is read from any
nn.Module; `register_model` adds your own.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from pfl_core.util import checks, draws, fields, identity
from pfl_core.util.cards import Listing
from pfl_core.util.fields import Range

Shape = Sequence[int]
Units = dict[str, dict[str, nn.Module]]
BY = ("module", "child", "tensor", "block")
# What code that is not ours may raise in a trial run, and is said as a ValueError.
REFUSED = (
    *(RuntimeError, TypeError, ValueError, LookupError),
    *(AttributeError, AssertionError, ArithmeticError),
)
STEMS = ("imagenet", "cifar")


class Net(nn.Module):
    """A chain of modules in named units, of which the last is an nn.Linear: fc(features(x)).

    No dropout, no in-place ReLU: one call serves many clients under torch.func.vmap.

    Parameters
    ----------
    units : dict of dict of nn.Module
        {unit: {module name: module}} in forward order. "layer1.0" lies in a container `layer1`.
        A module without parameters may come again.

    Raises
    ------
    ValueError
        If the last module is not `fc`, an nn.Linear.
    """

    fc: nn.Linear
    changed = False  # whether a function that is not ours made it, of any layers and hooks

    def __init__(self, units: Units):
        super().__init__()
        for parts in units.values():
            for path, module in parts.items():
                *parents, name = path.split(".")
                home: nn.Module = self
                for p in parents:
                    if p not in home._modules:
                        home.add_module(p, nn.Sequential())
                    home = home.get_submodule(p)
                home.add_module(name, module)
        self._units = {unit: tuple(parts) for unit, parts in units.items()}
        self._chain = [path for parts in self._units.values() for path in parts]
        if not self._chain or self._chain[-1] != "fc" or not isinstance(self.fc, nn.Linear):
            raise ValueError(
                f"a Net ends in an nn.Linear named fc, got {self._chain[-1:]}; add it as the last "
                "unit"
            )

    def blocks(self) -> dict[str, tuple[str, ...]]:
        """{unit: names of its modules} in forward order."""
        return dict(self._units)

    def features(self, x: Tensor) -> Tensor:
        """The input of `fc`, (B, F), of a batch x (B, *input_shape)."""
        for path in self._chain[:-1]:
            x = self.get_submodule(path)(x)
        return x

    def activations(self, x: Tensor) -> dict[str, Tensor]:
        """{unit: its output (B, ...)} after activation and pooling; that of `fc` are the logits."""
        out = {}
        for unit, paths in self._units.items():
            for path in paths:
                x = self.get_submodule(path)(x)
            out[unit] = x
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


class Mean(nn.Module):
    """Mean over the dimensions `dims`: global average pooling of images, bag of words of texts."""

    def __init__(self, *dims: int):
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class Tokens(nn.Embedding):
    """nn.Embedding for tokens of any integer dtype; TypeError for floats."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise TypeError(
                f"tokens must be integers, got {x.dtype}; images need another model than fasttext"
            )
        return super().forward(x.long())


class LinearTo(nn.Linear):
    """One Linear from the flattened input (B, ...) to (B, *shape)."""

    def __init__(self, inputs: int, shape: Sequence[int]):
        super().__init__(inputs, prod(shape))
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)).unflatten(1, self.shape)


# The networks: fn(input_shape, classes, **options) -> nn.Module


def lenet(input_shape: Shape, classes: int, kernels: int = 16, bn: bool = False) -> nn.Module:
    """pFedHN's LeNet: two 5x5 convolutions (kernels, 2 kernels), fc 120, 84, C.

    bn=True adds BatchNorm after each convolution (pFedLA).
    """
    return _convnet("lenet", input_shape, classes, (kernels, 2 * kernels), (120, 84), bn=bn)


def lenet4(input_shape: Shape, classes: int, kernel: int | None = None) -> nn.Module:
    """pFedHN's Omniglot LeNet: four convolutions (16 to 128), fc 120, 84, C.

    Parameters
    ----------
    input_shape : tuple of int
        (channels, height, width).
    classes : int
        C.
    kernel : int, optional
        By default 5 for images of 76x76 and more, else 3, with padding.
    """
    if kernel is None:
        kernel = 5 if min(_image("lenet4", input_shape)[1:]) >= 76 else 3
    channels, padding = (16, 32, 64, 128), int(kernel == 3)
    return _convnet("lenet4", input_shape, classes, channels, (120, 84), kernel, padding)


def mlp(input_shape: Shape, classes: int, hidden: int = 100) -> nn.Module:
    """pFedHN's MNIST network: fc hidden, C; any input shape, flattened."""
    return _convnet("mlp", input_shape, classes, (), (hidden,))


def cnn(input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    """The CNN of FLAYER and PFLlib: two 5x5 convolutions (32, 64), fc 512, C.

    width multiplies 32, 64 and 512.
    """
    a, b, hidden = (max(1, round(width * n)) for n in (32, 64, 512))
    return _convnet("cnn", input_shape, classes, (a, b), (hidden,))


def cnn_bn(input_shape: Shape, classes: int) -> nn.Module:
    """FedAGHN's CNN: `cnn` with BatchNorm after each convolution."""
    return _convnet("cnn_bn", input_shape, classes, (32, 64), (512,), bn=True)


def resnet18(
    input_shape: Shape, classes: int, stem: str = "imagenet", width: float = 1.0
) -> nn.Module:
    """torchvision's ResNet-18 (FedAGHN, FLAYER).

    stem "cifar": 3x3 of stride 1 and no max pool; width multiplies the channels.
    """
    return _resnet("resnet18", input_shape, classes, (2, 2, 2, 2), stem, width)


def resnet34(
    input_shape: Shape, classes: int, stem: str = "imagenet", width: float = 1.0
) -> nn.Module:
    """torchvision's ResNet-34 (FedPer), 16 residual blocks; stem and width as in resnet18."""
    return _resnet("resnet34", input_shape, classes, (3, 4, 6, 3), stem, width)


def mobilenet(
    input_shape: Shape, classes: int, blocks: int = 11, width: float = 1.0, stem: str | None = None
) -> nn.Module:
    """MobileNet-v1 of 11 (FedPer) or 13 blocks.

    Parameters
    ----------
    input_shape : tuple of int
        (channels, height, width).
    classes : int
        The number of classes.
    blocks : int
        The number of depthwise separable blocks.
    width : float
        The number of channels is multiplied by it.
    stem : str, optional
        "cifar" has stride 1 (the default up to 32x32), "imagenet" stride 2.
    """
    c, *size = _image("mobilenet", input_shape)
    stem = stem or ("cifar" if min(size) <= 32 else "imagenet")
    out = [64, 128, 128, 256, 256, *[512] * (blocks - 7), 1024, 1024]
    a, *out = [max(1, round(width * n)) for n in (32, *out)]
    conv = nn.Conv2d(c, a, 3, 1 if stem == "cifar" else 2, 1, bias=False)
    units: Units = {"stem": {"conv1": conv, "bn1": nn.BatchNorm2d(a), "relu": nn.ReLU()}}
    for i, b in enumerate(out, 1):
        stride = 2 if i in (2, 4, 6, blocks - 1) else 1
        units[f"block{i}"] = {f"block{i}": _separable(a, b, stride)}
        a = b
    units[f"block{blocks}"]["avgpool"] = Mean(2, 3)
    return Net({**units, "fc": {"fc": nn.Linear(a, classes)}})


def fasttext(input_shape: Shape, classes: int, vocab: int = 98_635, dim: int = 32) -> nn.Module:
    """FLAYER's fastText for tokens (B, T): embedding, mean over all T positions, fc dim, C.

    Token 0 is padding.
    """
    if len(input_shape) != 1:
        raise ValueError(
            f"fasttext takes texts, input_shape (length,), got {tuple(input_shape)}; use an image "
            "model"
        )
    embedding = {"embedding": Tokens(vocab, dim, padding_idx=0), "mean": Mean(1)}
    return Net(
        {
            "embedding": embedding,
            "fc1": {"fc1": nn.Linear(dim, dim)},
            "fc": {"fc": nn.Linear(dim, classes)},
        }
    )


def _convnet(
    name: str,
    input_shape: Shape,
    classes: int,
    channels: Sequence[int],
    hidden: Sequence[int],
    kernel: int = 5,
    padding: int = 0,
    bn: bool = False,
) -> Net:
    """Units conv (BatchNorm) pool ReLU for each of `channels`, fc ReLU for each of `hidden`, fc.

    Pooling first: the same numbers (a maximum of rectified values is the rectified maximum) for a
    quarter of the ReLU's work.
    """
    units: Units = {}
    relu, pool, least = nn.ReLU(), nn.MaxPool2d(2), 1
    c, *size = _image(name, input_shape) if channels else (prod(input_shape),)
    for i, out in enumerate(channels, 1):
        norm = {f"bn{i}": nn.BatchNorm2d(out)} if bn else {}
        units[f"conv{i}"] = {
            f"conv{i}": nn.Conv2d(c, out, kernel, padding=padding),
            **norm,
            "pool": pool,
            "relu": relu,
        }
        c, size = out, [(s + 2 * padding - kernel + 1) // 2 for s in size]
        least = 2 * least + kernel - 1 - 2 * padding
    if min(size, default=1) < 1:
        raise ValueError(
            f"{name} needs {least}x{least} pixels or more, got {tuple(input_shape)}; use mlp or "
            "larger images"
        )
    inputs = c * prod(size)
    for i, out in enumerate(hidden, 1):
        flatten = {"flatten": nn.Flatten()} if i == 1 else {}
        units[f"fc{i}"] = {**flatten, f"fc{i}": nn.Linear(inputs, out), "relu": relu}
        inputs = out
    return Net({**units, "fc": {"fc": nn.Linear(inputs, classes)}})


def _resnet(
    name: str, input_shape: Shape, classes: int, depths: Sequence[int], stem: str, width: float
) -> Net:
    """torchvision's blocks, made and initialised in its order.

    So names are the same and, from one seed, weights.
    """
    from torchvision.models.resnet import BasicBlock  # here alone: the import takes seconds

    c, *_ = _image(name, input_shape)
    w = [max(1, round(width * n)) for n in (64, 128, 256, 512)]
    kernel, stride, padding = (3, 1, 1) if stem == "cifar" else (7, 2, 3)
    conv = nn.Conv2d(c, w[0], kernel, stride, padding, bias=False)
    units: Units = {"stem": {"conv1": conv, "bn1": nn.BatchNorm2d(w[0]), "relu": nn.ReLU()}}
    if stem == "imagenet":
        units["stem"]["maxpool"] = nn.MaxPool2d(3, 2, 1)
    for i, depth in enumerate(depths):
        for j in range(depth):
            if i and j == 0:
                down = nn.Sequential(
                    nn.Conv2d(w[i - 1], w[i], 1, 2, bias=False), nn.BatchNorm2d(w[i])
                )
                block = BasicBlock(w[i - 1], w[i], 2, down)
            else:
                block = BasicBlock(w[i], w[i])
            units[f"layer{i + 1}.{j}"] = {f"layer{i + 1}.{j}": block}
    units[f"layer4.{depths[-1] - 1}"]["avgpool"] = Mean(2, 3)
    net = Net({**units, "fc": {"fc": nn.Linear(w[3], classes)}})
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(m, nn.ReLU):
            m.inplace = False
    return net


def _separable(a: int, b: int, stride: int) -> nn.Sequential:
    """Depthwise 3x3, BatchNorm, ReLU, pointwise 1x1, BatchNorm, ReLU: a to b channels."""
    dw, pw = nn.Conv2d(a, a, 3, stride, 1, groups=a, bias=False), nn.Conv2d(a, b, 1, bias=False)
    bn1, bn2 = nn.BatchNorm2d(a), nn.BatchNorm2d(b)
    return nn.Sequential(
        OrderedDict(dw=dw, bn1=bn1, relu1=nn.ReLU(), pw=pw, bn2=bn2, relu2=nn.ReLU())
    )


def _image(name: str, input_shape: Shape) -> Shape:
    if len(input_shape) != 3:
        raise ValueError(
            f"{name} takes (channels, height, width), got {tuple(input_shape)}; give float images "
            "of one channel as x[:, None], and "
            "use fasttext for texts"
        )
    if input_shape[2] in (1, 3) and input_shape[0] == input_shape[1] > 3:
        raise ValueError(
            f"{name} takes (channels, height, width), got {tuple(input_shape)}; give float images "
            "with their channels first, as x.transpose(0, 3, 1, 2)"
        )
    return input_shape


def linear(
    input_shape: Shape, classes: int, of: str = "mobilenet", depth: int = 1, **options: object
) -> nn.Module:
    """FedPer's linear base (Sec. 4.4): the last `depth` blocks of `of`, below them one Linear."""
    return linear_base(
        build(of, input_shape, classes, draws.current_seed() % 2**31, **options),
        depth,
        input_shape,
        draws.current_seed(),
    )


# The registry

_OURS = {
    fn.__name__: fn
    for fn in (lenet, lenet4, mlp, cnn, cnn_bn, resnet18, resnet34, mobilenet, fasttext, linear)
}
_MODELS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    name: (fn, (inspect.getdoc(fn) or "").partition("\n")[0]) for name, fn in _OURS.items()
}
_LEGAL: dict[str, Any] = {  # option of our networks: what is allowed
    **dict.fromkeys(("kernels", "hidden", "vocab", "dim", "depth"), Range(low=1)),
    "width": Range(above=0),
    "blocks": Range(low=8),
    "kernel": (None, 3, 5),
    "stem": (None, *STEMS),
}


def register_model(name: str, fn: Callable[..., nn.Module], doc: str = "") -> None:
    """Add a model of your own, `fn(input_shape, classes, **options) -> nn.Module`.

    Parameters
    ----------
    name : str
        What an Experiment calls it. A name of yours may be registered again, as when a notebook's
        cell runs twice.
    fn : callable
        Makes the model of (input_shape, classes, **options).
    doc : str
        Its line in `list_models`, by default the first one of fn's docstring.

    Raises
    ------
    ValueError
        If the name is that of a network of the papers.
    """
    if name in _OURS:
        raise ValueError(f"{name!r} is a network of the papers; register yours under another name")
    where = f"register_model({name!r})"
    if isinstance(fn, nn.Module):
        got = f"{where} got a network, {type(fn).__name__}"
        raise TypeError(f"{got}; give a function that makes one: fn(input_shape, classes)")
    checks.name("register_model(name)", name)
    checks.takes(where, fn, "input_shape", "classes")
    identity.note(fn)
    _MODELS[name] = fn, doc or (inspect.getdoc(fn) or "").partition("\n")[0]


def function(name: str) -> Callable[..., nn.Module]:
    """The function registered as `name`."""
    return _MODELS[name][0]


def list_models() -> Listing:
    """{name: one line about it} of every model that `build` knows.

    Examples
    --------
    >>> list_models()["cnn"]
    'The CNN of FLAYER and PFLlib: two 5x5 convolutions (32, 64), fc 512, C.'
    """
    return Listing({name: doc for name, (_, doc) in _MODELS.items()})


def arguments(name: str) -> dict[str, inspect.Parameter]:
    """The options that a model has."""
    checks.known("model", name, _MODELS, "add your own with register_model")
    return dict(list(checks.parameters(_MODELS[name][0]).items())[2:])


def functions(name: str, options: Mapping[str, object]) -> list[Callable[..., nn.Module]]:
    """The functions that make a model: `linear` has that of the network that it is `of`, too."""
    of = options.get("of") if name == "linear" else None
    return [function(n) for n in (name, of) if isinstance(n, str) and n in _MODELS]


def options_of(name: str, given: Mapping[str, object]) -> dict[str, inspect.Parameter]:
    """The options that a model has; `linear` has those of the network that it is `of`, too."""
    own = arguments(name)
    of = given.get("of", own["of"].default) if name == "linear" else None
    more = arguments(of) if isinstance(of, str) and of in _MODELS else {}
    return {n: p for n, p in (more | own).items() if p.kind is not p.VAR_KEYWORD}


def check(name: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for a model or option that `build` does not know, or an illegal value."""
    own, known = arguments(name), options_of(name, options)
    free = any(p.kind is p.VAR_KEYWORD for p in own.values())
    for option, value in options.items():
        checks.known(f"option of model {name!r}:", option, [*known, *([option] if free else [])])
        if option in known and not (value is None is known[option].default):
            checks.kind(name, option, value, known[option].annotation)
        if name in _OURS and option in _LEGAL and value not in _LEGAL[option]:
            what = fields.said(str(known[option].annotation), _LEGAL[option])
            raise ValueError(f"{name}({option}={value!r}): allowed is {what}")


def build(
    name: str, input_shape: Shape, classes: int, seed: int = 0, **options: object
) -> nn.Module:
    """A new model on the CPU, whose weights depend on `seed` only.

    Parameters
    ----------
    name
        One of `list_models()`.
    input_shape
        (channels, height, width), or (length,) for tokens.
    classes
        Number of outputs.
    options
        The model's own arguments.

    Raises
    ------
    ValueError
        For an unknown name or option, and for shapes that the network cannot take.
    """
    check(name, options)
    fn, _ = _MODELS[name]
    if not input_shape or min(input_shape) < 1 or classes < 1:
        got = f"{tuple(input_shape)} and {classes}"
        raise ValueError(f"{name}: input_shape and classes must be positive, got {got}")
    # Without gradients: what a module keeps that was made of its weights can then be copied.
    with draws.seeded(seed), torch.no_grad():
        model = fn(tuple(input_shape), classes, **options)
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(f"the function registered as {name!r} must return an nn.Module, got {got}")
    model = _as_written(model)
    if isinstance(model, Net):
        model.changed = not all(map(identity.is_ours, functions(name, options)))
    if any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
        raise ValueError(
            f"model {name!r} is made by torch.jit, and each client's tensors cannot be put into "
            "it; return the module that was scripted or traced"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [n for n, v in tensors if nn.parameter.is_lazy(v)]:
        raise ValueError(
            f"model {name!r} has layers whose size is not known yet ({lazy[0]}); give them their "
            "sizes, or call the model once on torch.zeros(2, *input_shape) before you return it"
        )
    return model


def _as_written(model: nn.Module) -> nn.Module:
    # What torch.compile was given: its code is of one module's tensors, and clients have many.
    def inside(m: nn.Module) -> nn.Module:
        return getattr(m, "_orig_mod", m) if type(m).__name__ == "OptimizedModule" else m

    model = inside(model)
    for module in list(model.modules()):
        for child, part in module._modules.items():
            if part is not None:
                module._modules[child] = inside(part)
    return model


def is_ours(model: nn.Module) -> bool:
    """Whether a network is one of ours, of which all is known that is tried out with others."""
    return type(model) is Net and not model.changed


def in_dtype(model: nn.Module, dtype: str) -> nn.Module:
    """The model with all its real numbers in float32 or float64; others stay as they are."""
    return model.double() if dtype == "float64" else model.float()


def copied(name: str, model: nn.Module) -> nn.Module:
    """A copy of the model `name`; ValueError if it holds what cannot be copied."""
    try:
        return copy.deepcopy(model)
    except REFUSED as error:
        raise ValueError(
            f"model {name!r} cannot be copied, which each client needs: {error}; keep only "
            "modules, parameters, buffers and plain values in it"
        ) from error


# What the methods ask about a model


def trained(model: nn.Module) -> list[str]:
    """Names of the parameters that are trained; the others are frozen (requires_grad=False)."""
    return [n for n, p in model.named_parameters() if p.requires_grad]


def tied(model: nn.Module) -> dict[str, str]:
    """{further name: first name} of each tensor that the model's state has under several names."""
    every: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    every += model.named_buffers(remove_duplicate=False)
    first: dict[int, str] = {}
    for n, v in every:
        first.setdefault(id(v), n)
    kept = model.state_dict()
    return {n: first[id(v)] for n, v in every if n in kept and first[id(v)] != n}


def still(model: nn.Module) -> list[str]:
    """Names of the BatchNorm modules that stay in evaluation mode while the model is trained.

    Their statistics are constants. Such a module is frozen and was given in evaluation mode
    (`norm.requires_grad_(False).eval()`), or the model's own `train` leaves it in that mode.
    """
    # A copy for its modes alone: it has the model's own tensors.
    held = {id(v): v for v in (*model.parameters(), *model.buffers())}
    modes = {n: m.training for n, m in copy.deepcopy(model, held).train().named_modules()}
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _NormBase)}
    return [n for n, m in norms.items() if not modes[n] or _is_frozen(m) and not m.training]


def _is_frozen(module: nn.Module) -> bool:
    own = list(module.parameters())
    return bool(own) and not any(p.requires_grad for p in own)


def layers(
    model: nn.Module, by: str = "module", root: str = "", every: bool = False
) -> dict[str, list[str]]:
    """{layer: names of its trained parameters} as registered; each is in exactly one layer.

    An Anatomy (anatomy.py) has them in forward order, whatever the order of registration. A tied
    parameter is in the layer that has it first. With `every`, frozen parameters count, too.

    What counts as a layer, `by`:

    - "module": each convolution, BatchNorm, Linear or Embedding (pFedLA, FedAGHN);
    - "child": each top-level child of the model (FLAYER);
    - "tensor": each parameter (FLAYER's masks);
    - "block": stem, residual or separable blocks, fc (FedPer), as the class's
      `blocks() -> {unit: names of its modules}` has it; a model without it is counted by child.

    `root` names the module whose children and blocks are meant, in place of the model.

    Raises
    ------
    ValueError
        For another `by`, or if blocks() leaves a parameter out.
    """
    key = layer_namer(model, by, root)
    out: dict[str, list[str]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad or every:
            out.setdefault(key(name), []).append(name)
    return out


def head(model: nn.Module, depth: int = 1, by: str = "block") -> list[str]:
    """Names of the last `depth` layers' trained parameters, and then of their BatchNorm buffers.

    Parameters
    ----------
    model : nn.Module
    depth : int
        K_P of FedPer, Sec. 4.3. 0 is no head (FedAvg), all layers are the whole model (Local).
    by : str
        What counts as a layer, as for `layers`.

    Raises
    ------
    ValueError
        If the model has fewer layers.
    """
    parts = layers(model, by)
    check_depth(depth, parts, by)
    names = [n for layer in list(parts)[len(parts) - depth :] for n in parts[layer]]
    return names + statistics(model, names, by)


def check_depth(depth: int, parts: Mapping[str, object], by: str) -> None:
    """Raise ValueError unless a model of these layers has a head of `depth` layers."""
    if not 0 <= depth <= len(parts):
        most = f"{len(parts)}, the number of layers by {by!r} of this model"
        raise ValueError(f"head depth {depth} is not in 0..{most}")


def statistics(model: nn.Module, names: Sequence[str], by: str, root: str = "") -> list[str]:
    """Names of the BatchNorm buffers in the layers that the parameters `names` are of.

    Counted by tensor, statistics follow their module, even if only its bias is among them.
    """
    key = layer_namer(model, "module" if by == "tensor" else by, root)
    inside, change = {key(n) for n in names}, set(buffers(model))
    return [n for n in bn(model) if n in change and key(n) in inside]


def bn(model: nn.Module) -> list[str]:
    """Names of all parameters and buffers of BatchNorm modules, which are found by type (FedBN)."""
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
    return [name for n, m in norms for name in m.state_dict(prefix=n + "." if n else "")]


def buffers(model: nn.Module) -> list[str]:
    """Names of all buffers in the model's state, but for those of modules that are `still`.

    Buffers that are not in it, such as positions in a text, are constants, and so are those that
    hold infinite numbers before training, such as a mask of attention.
    """
    kept, fixed = model.state_dict(), set(still(model))
    inside = [(n, v) for n, v in model.named_buffers() if n.rpartition(".")[0] not in fixed]
    return [n for n, v in inside if n in kept and v.isfinite().all()]


def last_linear(model: nn.Module) -> tuple[str, ...]:
    """Names of weight and bias (if it has one) of the nn.Linear that was registered last.

    Raises
    ------
    ValueError
        If that is another layer.
    """
    names = [n for n, _ in model.named_parameters()]
    path = names[-1].rpartition(".")[0] if names else ""
    last, inside = model.get_submodule(path), path + "." if path else ""
    found = tuple(n for n in (inside + "weight", inside + "bias") if n in names)
    if not isinstance(last, nn.Linear) or found[:1] != (inside + "weight",):
        raise ValueError(
            "it needs a model whose last layer is an nn.Linear that gives the scores, and "
            f"{type(model).__name__} ends in "
            f"{names[-1:]} of {type(last).__name__}; let it end in an nn.Linear, registered last "
            "and not shared"
        )
    return found


def features(model: nn.Module, x: Tensor, path: str | None = None) -> Tensor:
    """The input of the last nn.Linear, (B, F), of a batch x (B, *input_shape).

    Parameters
    ----------
    model : nn.Module
    x : Tensor
        (B, *input_shape).
    path : str, optional
        That layer, where a trial run found it (anatomy.py); by default the one registered last.

    Raises
    ------
    ValueError
        For a model whose scores are not what that layer gives.
    """
    found = path is not None
    if isinstance(model, Net) and not found:
        return model.features(x)
    path = path if found else last_linear(model)[0].rpartition(".")[0]
    seen: list[tuple[Tensor, Tensor]] = []
    keep = lambda _, args, named, out: seen.append(((*args, *named.values())[0], out))  # noqa: E731
    hook = model.get_submodule(path).register_forward_hook(keep, with_kwargs=True)
    try:
        scores = model(x)
    finally:
        hook.remove()
    if found and seen:
        return seen[-1][0].reshape(len(x), -1)
    if not seen or seen[-1][1] is not scores:
        raise ValueError(
            "features are the input of the layer that gives the scores, and the scores of "
            f"{type(model).__name__} are not the output of "
            f"its last nn.Linear {path!r}; let its forward end in that layer, without a softmax "
            "or a reshape after it"
        )
    return seen[-1][0]


def check_fit(name: str, model: nn.Module, x: Tensor, classes: int) -> None:
    """Raise ValueError unless the model makes scores (B, classes) of inputs x (B, *input_shape).

    A copy of it is tried, in evaluation mode.
    """
    _check_trained(name, model)
    trial = copied(name, model).eval()
    try:
        with torch.no_grad(), draws.Draws(0) as drawn:
            scores = trial(x.clone())
    except REFUSED as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"model {name!r} cannot take samples of shape {tuple(x.shape[1:])}, {x.dtype}: "
            f"{error}{_why_refused(error, model, x)}"
        ) from error
    want, got = (len(x), classes), tuple(getattr(scores, "shape", ())) or type(scores).__name__
    if got != want:
        raise ValueError(
            f"model {name!r} makes of {len(x)} samples {got}, and these data have {classes} "
            f"classes: it must give scores {want}, so {_instead(scores)}"
        )
    if not scores.isfinite().all():
        raise ValueError(
            f"model {name!r} gives scores that are not finite before it is trained; look at what "
            "its forward divides by, and of what it takes a logarithm or a root"
        )
    if drawn.count:
        with torch.no_grad(), draws.Draws(1):
            again = trial(x.clone())
        if not torch.equal(again, scores):
            raise ValueError(
                f"model {name!r} draws random numbers in evaluation mode, so the same samples get "
                "other scores each time; draw in training mode alone: nn.Dropout, or "
                "F.dropout(x, p, training=self.training)"
            )


def _check_trained(name: str, model: nn.Module) -> None:
    own = dict(model.named_parameters())
    if not any(p.requires_grad for p in own.values()):
        what, cure = "only frozen parameters", "let its last layer at least have requires_grad=True"
        if not own:
            what = "no parameters"
            cure = "keep layers in an nn.ModuleList or nn.ModuleDict instead of a list or dict"
        raise ValueError(f"model {name!r} has {what}, so that nothing of it can be trained; {cure}")
    if numbers := [n for n, p in own.items() if p.is_complex()]:
        raise ValueError(
            f"model {name!r} has complex parameters ({numbers[0]}), which are not trained here; "
            "keep real and imaginary part as two"
        )
    if hooked := [n for n, p in own.items() if p._backward_hooks or _after_grad(p)]:
        raise ValueError(
            f"model {name!r} has a hook on the gradient of {hooked[0]}, and clients train tensors "
            "of their own, without it; do the same in forward (weight * mask), or freeze the "
            "parameter (requires_grad_(False))"
        )
    if wide := [n for n, p in own.items() if _repeats(p)]:
        raise ValueError(
            f"model {name!r}: entries of {wide[0]} share memory, as after expand, so that they "
            "cannot be trained one by one; give each its own (.clone())"
        )
    first: dict[int, str] = {}
    for n, p in own.items():
        other = first.setdefault(p.data_ptr(), n) if p.numel() else n
        if other != n:
            raise ValueError(
                f"model {name!r}: {n} and {other} are two parameters in one piece of memory; tie "
                "them as one parameter (a.weight = b.weight), or give each its own (.clone())"
            )


def _after_grad(p: Tensor) -> Any:
    return getattr(p, "_post_accumulate_grad_hooks", None)  # torch 2.1


def _repeats(p: Tensor) -> bool:
    return any(n > 1 and not step for n, step in zip(p.shape, p.stride(), strict=True))


def _instead(scores: Any) -> str:
    # What a model is to do whose output are no scores (B, classes).
    if isinstance(scores, dict):
        key = "logits" if "logits" in scores else next(iter(scores), "logits")
        return f"return model(x)[{key!r}] from a module around it"
    if isinstance(scores, tuple | list):
        return "return model(x)[0], if these are the scores, from a module around it"
    last = "let its last layer have as many outputs as `classes` says"
    single = isinstance(scores, Tensor) and scores.dim() in (1, 2) and scores.shape[1:].numel() == 1
    return last + "; regression is not served, and two classes have two scores" * single


def _why_refused(error: Exception, model: nn.Module, x: Tensor) -> str:
    # What torch does not say of inputs that a model cannot take.
    forward = getattr(type(model).forward, "__qualname__", "")
    if str(error).startswith(f"{forward}() missing"):
        return (
            "; a model gets one tensor, the samples, and returns class scores: forward(self, x); "
            "the loss is a method's"
        )
    if x.is_floating_point() and x.dim() == 2 and _looks_up(error):
        low, high = x.min().item(), x.max().item()
        return (
            f"; these samples are floats from {low:.3g} to {high:.3g} (uint8 is taken for images "
            "and scaled): give tokens as int64"
        )
    if isinstance(error, IndexError):
        low, high = x.min().item(), x.max().item()
        why = f"; tokens are counted from 0, and these go from {low} to {high}"
        if low < 0:
            return why
        rows = high + 1
        cure = f"take an embedding of {rows} rows or more, such as model_args={{'vocab': {rows}}}"
        return f"{why}: {cure}"
    if not x.is_floating_point():
        return (
            "; integers (n, length) are tokens, for models such as fasttext: "
            "give other numbers as floats"
        )
    return ""


def _looks_up(error: Exception) -> bool:
    # Whether an embedding was given floats, or what was made of them.
    return isinstance(error, IndexError) or "indices" in str(error) or "tokens" in str(error)


def linear_base(model: nn.Module, head_depth: int, input_shape: Shape, seed: int = 0) -> Net:
    """FedPer's linear base (Sec. 4.4): the last `head_depth` units, and below them one Linear.

    The Linear, `base`, takes the flat image. Its output has the shape of the input of the first
    unit kept (depth 1: the pooled features), without an activation. The units kept are copies of
    the model's, under their names; the weights of `base` depend on `seed` only.

    Raises
    ------
    ValueError
        For a model that is not a Net, other input than images, or head_depth outside 1..units-1.
    """
    if not isinstance(model, Net) or len(input_shape) != 3:
        got = f"{type(model).__name__} and {tuple(input_shape)}"
        raise ValueError(
            f"linear_base takes a Net and an image shape (channels, height, width), got {got}"
        )
    units = list(model.blocks().items())
    if not 1 <= head_depth < len(units):
        allowed = f"1..{len(units) - 1}: the base and fc must both remain"
        raise ValueError(f"head_depth {head_depth} is not in {allowed}")
    kept = units[len(units) - head_depth :]
    net = copy.deepcopy(model)
    with torch.no_grad():
        outputs = net.eval().activations(torch.zeros(1, *input_shape).to(net.fc.weight))
    with draws.seeded(seed):
        shape = outputs[units[-head_depth - 1][0]].shape[1:]
        base = LinearTo(prod(input_shape), shape).to(net.fc.weight)
    parts = {unit: {path: net.get_submodule(path) for path in paths} for unit, paths in kept}
    return Net({"base": {"base": base}, **parts}).train(model.training)


def units(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """What a class calls `blocks`, if that can be called; a child of this name is none."""
    own: Any = getattr(type(module), "blocks", None)
    return own if callable(own) else None


def layer_namer(model: nn.Module, by: str, root: str = "") -> Callable[[str], str]:
    """Parameter or buffer name -> layer; see `layers`."""
    if by not in BY:
        raise ValueError(f"layers are counted by one of {BY}, got {by!r}")
    if by == "tensor":
        return lambda n: n
    if by == "module":
        return lambda n: _module_of(model, n)
    top, inside = model.get_submodule(root), root + "." if root else ""
    if by == "block" and units(top):
        return _unit_namer(top, inside)

    def child(name: str) -> str:
        start = inside if name.startswith(inside) else ""
        return start + name[len(start) :].partition(".")[0]

    return child


def _module_of(model: nn.Module, name: str) -> str:
    # A list of parameters is no layer, and what makes a weight (parametrizations) is none either.
    path = name.partition(".parametrizations.")[0] if ".parametrizations." in name else ""
    path = path or name.rpartition(".")[0]
    listed = isinstance(model.get_submodule(path), nn.ParameterList | nn.ParameterDict)
    return name if listed else path or name


def _unit_namer(top: nn.Module, inside: str) -> Callable[[str], str]:
    blocks = units(top)
    found = blocks(top) if blocks else {}
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{type(top).__name__}.blocks() returned {type(found).__name__}, allowed is a dict "
            "{unit: names of its modules}; rename the function, or use head_by='child'"
        )
    unit = {inside + path: inside + u for u, paths in found.items() for path in paths}

    def find(name: str) -> str:
        if not name.startswith(inside):  # beside the module that has blocks
            return name.partition(".")[0]
        path = name
        while path not in unit:
            if not path:
                lost = f"{type(top).__name__}.blocks() leaves out {name}"
                raise ValueError(f"{lost}; every parameter needs a unit")
            path = path.rpartition(".")[0]
        return unit[path]

    return find
