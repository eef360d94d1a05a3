"""The networks: counts of the papers, names of layers and heads, seeds, stacked clients (vmap), a user's own module."""

import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from pfl_core import models
from pfl_core.models import build, head, layers, linear_base

RGB, GRAY = (3, 32, 32), (1, 28, 28)


class Features(nn.Module):
    """models.features as a forward, which functional_call can run."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return models.features(self.model, x)


def features_at(model: nn.Module, p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """models.features with the model's tensors replaced by p {name: (*shape)}."""
    return functional_call(Features(model), {f"model.{n}": v for n, v in p.items()}, (x,))


COUNTS = [  # name, input_shape, classes, options, parameters
    ("lenet", RGB, 10, {"kernels": 8}, 62_958),
    ("lenet", RGB, 100, {"kernels": 8}, 70_608),
    ("lenet", RGB, 10, {}, 121_182),
    ("lenet", RGB, 100, {}, 128_832),
    ("lenet", RGB, 10, {"kernels": 32}, 256_830),
    ("lenet", RGB, 100, {"kernels": 32}, 264_480),
    ("lenet", GRAY, 10, {}, 85_822),
    ("lenet", RGB, 10, {"bn": True}, 121_278),
    ("lenet", RGB, 100, {"bn": True}, 128_928),
    ("lenet4", (1, 105, 105), 1623, {}, 479_119),
    ("lenet4", (1, 105, 105), 55, {}, 345_839),
    ("lenet4", GRAY, 10, {}, 122_796 + 850),
    ("mlp", GRAY, 10, {}, 79_510),
    ("cnn", RGB, 10, {}, 878_538),
    ("cnn", RGB, 100, {}, 924_708),
    ("cnn", (3, 64, 64), 200, {}, 5_694_600),
    ("cnn_bn", RGB, 10, {}, 878_730),
    ("cnn_bn", RGB, 100, {}, 924_900),
    ("cnn_bn", (3, 64, 64), 200, {}, 5_694_792),
    ("resnet18", RGB, 10, {}, 11_181_642),
    ("resnet18", RGB, 100, {}, 11_227_812),
    ("resnet18", (3, 64, 64), 200, {}, 11_279_112),
    ("resnet34", RGB, 5, {}, 21_287_237),
    ("resnet34", RGB, 10, {}, 21_289_802),
    ("resnet34", RGB, 100, {}, 21_335_972),
    ("resnet34", RGB, 10, {"stem": "cifar"}, 21_282_122),
    ("mobilenet", RGB, 5, {}, 2_674_501),
    ("mobilenet", RGB, 10, {}, 2_679_626),
    ("mobilenet", RGB, 100, {}, 2_771_876),
    ("mobilenet", RGB, 5, {"blocks": 13}, 3_212_101),
    ("mobilenet", RGB, 10, {"blocks": 13}, 3_217_226),
    ("mobilenet", RGB, 100, {"blocks": 13}, 3_309_476),
    ("fasttext", (200,), 4, {}, 3_157_508),
    ("fasttext", (200,), 4, {"vocab": 32_000, "dim": 512}, 16_648_708),
    ("fasttext", (200,), 4, {"vocab": 32_000}, 1_025_188),
]

SMALL = [  # under 200,000 parameters, for gradients and stacked clients
    ("lenet", {"bn": True}),
    ("lenet4", {}),
    ("mlp", {"hidden": 20}),
    ("resnet18", {"width": 1 / 8}),
    ("resnet18", {"width": 1 / 16, "stem": "cifar"}),
    ("resnet34", {"width": 1 / 16}),
    ("mobilenet", {"width": 1 / 5}),
    ("fasttext", {"vocab": 50, "dim": 8}),
]


def count(model, names=None):
    return sum(p.numel() for n, p in model.named_parameters() if names is None or n in names)


def sizes(model, by):
    return {layer: count(model, names) for layer, names in layers(model, by).items()}


def inputs(name, batch, shape=GRAY, seed=0):
    g = torch.Generator().manual_seed(seed)
    if name == "fasttext":
        return torch.randint(0, 50, (batch, 20), generator=g, dtype=torch.int32)
    return torch.randn(batch, *shape, generator=g, dtype=torch.float64)


def small(name, options, seed=0):
    return build(name, (20,) if name == "fasttext" else GRAY, 5, seed=seed, **options).double()


@pytest.mark.parametrize(("name", "shape", "classes", "options", "expected"), COUNTS)
def test_parameter_counts_of_the_papers(name, shape, classes, options, expected):
    model = build(name, shape, classes, **options)
    assert count(model) == expected
    assert (model.fc.out_features, list(layers(model))[-1]) == (classes, "fc")


def test_extractor_counts_of_pfedhn_pc():
    for kernels, extractor in (8, 62_108), (16, 120_332), (32, 255_980):
        model = build("lenet", RGB, 10, kernels=kernels)
        assert count(model) - count(model, head(model)) == extractor
    for shape, extractor in ((1, 105, 105), 341_164), (GRAY, 122_796):
        model = build("lenet4", shape, 55)
        assert count(model) - count(model, head(model)) == extractor


@pytest.mark.parametrize("shape", [GRAY, RGB, (3, 64, 64)])
@pytest.mark.parametrize("name", [n for n in models.list_models() if n != "fasttext"])
def test_every_image_model_takes_every_image(name, shape):
    options = {"width": 1 / 8} if name in ("resnet18", "resnet34", "mobilenet") else {}
    model = build(name, shape, 7, **options).double().eval()
    x = inputs(name, 2, shape)
    assert model(x).shape == (2, 7)
    assert torch.equal(model(x), model.fc(model.features(x)))
    assert torch.equal(model.activations(x)["fc"], model(x))


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_small_widths(name, options):
    assert count(small(name, options)) < 200_000


# ResNets are torchvision's


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_resnets_are_torchvisions(name):
    torchvision = pytest.importorskip("torchvision")
    ours = build(name, RGB, 10, seed=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        theirs = getattr(torchvision.models, name)(num_classes=10)
    a, b = ours.state_dict(), theirs.state_dict()
    assert list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)
    x = inputs(name, 4, RGB).float()
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.layer4[0].bn2.running_var, theirs.layer4[0].bn2.running_var)


def test_resnet18_layers():
    model = build("resnet18", RGB, 10)
    assert [len(layers(model, by)) for by in ("module", "child", "tensor", "block")] == [
        41,
        7,
        62,
        10,
    ]
    assert sizes(model, "child") == {
        "conv1": 9408,
        "bn1": 128,
        "layer1": 147_968,
        "layer2": 525_568,
        "layer3": 2_099_712,
        "layer4": 8_393_728,
        "fc": 5130,
    }
    assert len(models.bn(model)) == 20 * 5 and "layer2.0.downsample.1.running_mean" in models.bn(
        model
    )
    assert models.buffers(model) == [
        n for n in models.bn(model) if n.split(".")[-1] not in ("weight", "bias")
    ]
    statistics = [
        f"layer4.1.bn2.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")
    ]
    flayer = ["layer4.1.bn2.weight", "layer4.1.bn2.bias", "fc.weight", "fc.bias"]
    assert head(model, 4, by="tensor") == head(model, 2, by="module") == flayer + statistics
    assert head(model, 3, by="module") == ["layer4.1.conv2.weight", *flayer, *statistics]


def test_resnet34_heads_by_depth():
    model = build("resnet34", RGB, 10)
    assert list(layers(model, "block")) == [
        "stem",
        *(f"layer{i}.{j}" for i, n in enumerate((3, 4, 6, 3), 1) for j in range(n)),
        "fc",
    ]
    expected = [5130, 4_720_640, 4_720_640, 3_673_088]
    for depth in range(1, 5):
        names = head(model, depth)
        assert count(model, names) == sum(expected[:depth])
        assert {n.rsplit(".", 2)[0] for n in names if "running" in n} == {
            n.rsplit(".", 2)[0] for n in names if "bn" in n or "downsample" in n
        }
    assert all(n.startswith(("layer4.2.", "fc.")) for n in head(model, 2))
    assert len([n for n in head(model, 2) if "running_mean" in n]) == 2


def test_mobilenet_blocks():
    model = build("mobilenet", RGB, 10)
    expected = [
        928,
        2528,
        9152,
        18_048,
        34_688,
        68_864,
        134_912,
        *[268_800] * 3,
        531_968,
        1_061_888,
        10_250,
    ]
    assert list(sizes(model, "block").values()) == expected
    assert list(sizes(model, "block")) == ["stem", *(f"block{i}" for i in range(1, 12)), "fc"]
    assert list(sizes(build("mobilenet", RGB, 10, blocks=13), "block").values())[-8:] == [
        *[268_800] * 5,
        *expected[-3:],
    ]
    for depth in range(1, 5):
        assert count(model, head(model, depth)) == sum(expected[-depth:])
    assert build("mobilenet", RGB, 10).conv1.stride == (1, 1)
    assert build("mobilenet", (3, 224, 224), 10).conv1.stride == (2, 2)
    assert build("mobilenet", RGB, 10, stem="imagenet").conv1.stride == (2, 2)


# Layers and heads


def test_layers_of_the_small_networks():
    assert sizes(build("cnn_bn", RGB, 10), "module") == {
        "conv1": 2432,
        "bn1": 64,
        "conv2": 51_264,
        "bn2": 128,
        "fc1": 819_712,
        "fc": 5130,
    }
    assert list(layers(build("cnn", RGB, 10), "child")) == ["conv1", "conv2", "fc1", "fc"]
    assert layers(build("cnn_bn", RGB, 10), "block")["conv2"] == [
        "conv2.weight",
        "conv2.bias",
        "bn2.weight",
        "bn2.bias",
    ]
    assert len(layers(build("lenet", RGB, 10))) == 5
    assert list(layers(build("lenet", RGB, 10, bn=True))) == [
        "conv1",
        "bn1",
        "conv2",
        "bn2",
        "fc1",
        "fc2",
        "fc",
    ]
    assert list(sizes(build("lenet4", (1, 105, 105), 55), "block").values())[:6] == [
        416,
        12_832,
        51_264,
        204_928,
        61_560,
        10_164,
    ]
    assert list(layers(build("fasttext", (20,), 4, vocab=9), "block")) == ["embedding", "fc1", "fc"]


@pytest.mark.parametrize("by", models.BY)
@pytest.mark.parametrize(("name", "options"), SMALL)
def test_layers_hold_every_parameter_once_and_heads_grow(name, options, by):
    model = small(name, options)
    parts = layers(model, by)
    assert [n for names in parts.values() for n in names] == [
        n for n, _ in model.named_parameters()
    ]
    assert head(model, 0, by) == []
    assert set(head(model, len(parts), by)) == set(model.state_dict())
    for depth in range(1, len(parts) + 1):
        inner, outer = head(model, depth - 1, by), head(model, depth, by)
        assert set(inner) < set(outer) and len(outer) == len(set(outer))


def test_frozen_parameters_are_in_no_layer():
    model = build("cnn", GRAY, 10)
    model.conv1.requires_grad_(False)
    assert list(layers(model)) == ["conv2", "fc1", "fc"]
    assert len(head(model, 3)) == 6


# Seeds


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_weights_are_a_function_of_the_seed(name, options):
    before = torch.random.get_rng_state()
    a, b, c = (small(name, options, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)  # another global state
    d = small(name, options, 1).state_dict()
    assert all(torch.equal(a[n], b[n]) and torch.equal(a[n], d[n]) for n in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])


def test_models_can_be_pickled():
    model = small("resnet18", {"width": 1 / 16}).eval()
    x = inputs("resnet18", 2)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


# Stacked clients


def loss(model, weights, stats, x, y):
    """Loss, logits and advanced buffers of one client; its tensors are left as they were."""
    stats = {n: v.clone() for n, v in stats.items()}
    out = functional_call(model, weights | stats, (x,))
    return cross_entropy(out, y), (out, stats)


def linear_based(depth):
    return lambda seed: linear_base(
        small("resnet18", {"width": 1 / 16, "stem": "cifar"}, seed), depth, GRAY, seed
    )


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, lambda seed, n=name, o=options: small(n, o, seed)) for name, options in SMALL]
    + [("linear_base 1", linear_based(1)), ("linear_base 3", linear_based(3))],
)
def test_stacked_training_equals_each_client_alone(name, make):
    clients = [make(seed).train() for seed in range(3)]
    for i, m in enumerate(clients):  # buffers that differ from client to client
        for b in m.buffers():
            b += i if b.dtype == torch.int64 else 0.1 * i
    weights = {
        n: torch.stack([dict(m.named_parameters())[n].detach() for m in clients])
        for n, _ in clients[0].named_parameters()
    }
    stats = {
        n: torch.stack([dict(m.named_buffers())[n] for m in clients])
        for n, _ in clients[0].named_buffers()
    }
    x = torch.stack([inputs(name, 6, seed=i) for i in range(3)])
    y = torch.arange(18).reshape(3, 6) % 5
    model = make(9).train()
    gradient, (logits, moved) = vmap(grad(partial(loss, model), has_aux=True))(weights, stats, x, y)
    model.eval()
    features = vmap(partial(features_at, model))(weights | stats, x)
    for i, m in enumerate(clients):
        torch.testing.assert_close(features[i], m.eval().features(x[i]), rtol=1e-9, atol=1e-12)
        out = m.train()(x[i])
        cross_entropy(out, y[i]).backward()
        torch.testing.assert_close(logits[i], out.detach(), rtol=1e-9, atol=1e-12)
        for n, p in m.named_parameters():
            torch.testing.assert_close(gradient[n][i], p.grad, rtol=1e-8, atol=1e-12)
        for n, b in m.named_buffers():
            torch.testing.assert_close(moved[n][i], b, rtol=1e-9, atol=1e-12)
            assert not torch.equal(
                moved[n][i], stats[n][i]
            )  # BatchNorm did advance, and not in the caller's tensors


def test_tokens_of_any_integer_type_and_padding():
    model = build("fasttext", (6,), 4, vocab=50, dim=8)
    x = torch.tensor([[3, 4, 0, 0, 0, 0], [49, 1, 2, 3, 4, 5]])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(model(x.to(dtype)), model(x))
    e = model.embedding.weight
    torch.testing.assert_close(
        model.features(x)[0], model.fc1((e[3] + e[4]) / 6)
    )  # padding counts in the mean
    model(x).sum().backward()
    assert not e[0].any() and not e.grad[0].any() and e.grad[3].any()
    with pytest.raises(TypeError, match="tokens must be integers, got torch.float32"):
        model(x.float())


# FedPer's linear base


@pytest.mark.parametrize(
    ("name", "options", "base"), [("mobilenet", {}, 3_146_752), ("resnet34", {}, 1_573_376)]
)
def test_linear_base_of_the_paper(name, options, base):
    model = build(name, RGB, 100, **options)
    flat = linear_base(model, 1, RGB)
    assert sizes(flat, "block") == {"base": base, "fc": count(model.fc)}
    assert head(flat, 1) == head(model, 1)
    x = inputs(name, 2, RGB).float()
    assert torch.equal(flat(x), model.fc(flat.base(x)))
    two = linear_base(model, 2, RGB)
    assert head(two, 2) == head(model, 2)
    last = list(layers(model, "block"))[-2]
    assert list(layers(two, "block")) == ["base", last, "fc"]
    state = two.state_dict()
    assert all(
        torch.equal(v, state[n]) for n, v in model.state_dict().items() if n in head(model, 2)
    )
    # The input of the last block: 1024 x 2 x 2 (stem stride 1), 512 x 1 x 1 (ImageNet stem).
    assert two.base.shape == ((1024, 2, 2) if name == "mobilenet" else (512, 1, 1))


@pytest.mark.parametrize("name", ["cnn_bn", "lenet", "mlp", "mobilenet", "resnet18"])
def test_linear_base_of_any_depth(name):
    model = (
        build(name, GRAY, 5, **({"width": 1 / 16} if "net" in name and name != "lenet" else {}))
        .double()
        .eval()
    )
    x = inputs(name, 2)
    units = list(layers(model, "block"))
    outputs = model.activations(x)
    for depth in range(1, len(units)):
        flat = linear_base(model, depth, GRAY, seed=4)
        assert list(layers(flat, "block")) == ["base", *units[-depth:]]
        assert not flat.training and not any(m.training for m in flat.modules())
        # Where the base gives what the replaced units gave, the rest of the network is unchanged.
        flat.base.forward = lambda _, out=outputs[units[-depth - 1]]: out
        assert torch.equal(flat(x), model(x))
    before = torch.random.get_rng_state()
    a, b, c = (linear_base(model, 1, GRAY, seed=s).base.weight for s in (0, 0, 1))
    assert (
        torch.equal(a, b)
        and not torch.equal(a, c)
        and torch.equal(before, torch.random.get_rng_state())
    )
    assert model.fc.weight.data_ptr() != linear_base(model, 1, GRAY).fc.weight.data_ptr()


# A user's own module


class Own(nn.Module):
    """A direct parameter, a BatchNorm not called so, a child called blocks, and a last layer `fc`."""

    def __init__(self, input_shape, classes, hidden=6):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.Sequential(
            nn.Linear(input_shape[0], hidden), nn.BatchNorm1d(hidden), nn.Tanh()
        )
        self.norm = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.fc(self.norm(self.blocks(x * self.scale)))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))


def test_a_users_own_module(registry):
    models.register_model("own", Own, "mine")
    models.register_model("own", Own)
    assert models.list_models()["own"].startswith("A direct parameter")
    model = build("own", (4,), 3, seed=1, hidden=5).double().eval()
    assert list(layers(model)) == ["scale", "blocks.0", "blocks.1", "norm", "fc"]
    assert layers(model, "block") == layers(model, "child")
    assert list(layers(model, "block")) == ["scale", "blocks", "norm", "fc"]
    statistics = ["blocks.1.running_mean", "blocks.1.running_var", "blocks.1.num_batches_tracked"]
    assert models.bn(model) == ["blocks.1.weight", "blocks.1.bias", *statistics]
    assert models.buffers(model) == statistics
    assert head(model, 2) == ["norm.weight", "norm.bias", "fc.weight", "fc.bias"]
    assert head(model, 3)[-3:] == statistics
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(model.fc(models.features(model, x)), model(x))
    p = {n: v.expand(3, *v.shape) for n, v in model.state_dict().items()}
    stacked = vmap(lambda p: features_at(model, p, x))(p)
    torch.testing.assert_close(stacked[2], models.features(model, x))
    assert not model.fc._forward_pre_hooks


def test_own_units_and_a_bare_batchnorm():
    class Units(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.norm, self.fc = (
                nn.Parameter(torch.ones(1)),
                nn.BatchNorm1d(2),
                nn.Linear(2, 2),
            )

        def blocks(self):
            return {"body": ["scale", "norm"], "last": ["fc"]}

    assert layers(Units(), "block") == {
        "body": ["scale", "norm.weight", "norm.bias"],
        "last": ["fc.weight", "fc.bias"],
    }
    assert "norm.running_var" in head(Units(), 2) and "norm.running_var" not in head(Units(), 1)
    model = Units()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="leaves out extra.weight"):
        layers(model, "block")
    assert models.bn(nn.BatchNorm2d(2))[:2] == ["weight", "bias"]
    assert models.bn(nn.Sequential(nn.GroupNorm(1, 2), nn.InstanceNorm2d(2, affine=True))) == []


# Errors


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("lenett", RGB, 10), {}, "model 'lenett' is unknown; did you mean 'lenet'"),
        (
            ("lenet", RGB, 10),
            {"kernel": 3},
            "option of model 'lenet': 'kernel' is unknown; did you mean 'kernels'",
        ),
        (("lenet", (3, 12, 32), 10), {}, r"lenet needs 16x16 pixels or more, got \(3, 12, 32\)"),
        (("cnn", (3, 8, 8), 10), {}, "cnn needs 16x16 pixels or more"),
        (("lenet4", RGB, 10), {"kernel": 5}, "lenet4 needs 76x76 pixels or more"),
        (("lenet4", RGB, 10), {"kernel": 4}, r"lenet4\(kernel=4\): allowed is one of None, 3, 5"),
        (("cnn", (200,), 10), {}, r"cnn takes \(channels, height, width\), got \(200,\)"),
        (
            ("cnn", (8, 8), 10),
            {},
            r"got \(8, 8\); give float images of one channel as x\[:, None\]",
        ),
        (("resnet18", (200,), 10), {}, "resnet18 takes"),
        (("fasttext", RGB, 4), {}, r"fasttext takes texts.*got \(3, 32, 32\)"),
        (("cnn", (0, 32, 32), 10), {}, "must be positive"),
        (("cnn", RGB, 0), {}, "must be positive"),
        (
            ("resnet34", RGB, 10),
            {"stem": "tiny"},
            r"resnet34\(stem='tiny'\): allowed is one of None, imagenet, cifar",
        ),
        (("resnet34", RGB, 10), {"width": 0}, r"resnet34\(width=0\): allowed is a number > 0"),
        (("cnn", RGB, 10), {"width": -1.0}, r"cnn\(width=-1.0\): allowed is a number > 0"),
        (
            ("mobilenet", RGB, 10),
            {"blocks": 7},
            r"mobilenet\(blocks=7\): allowed is an integer >= 8",
        ),
        (("mlp", GRAY, 10), {"hidden": 0}, r"mlp\(hidden=0\): allowed is an integer >= 1"),
        (("lenet", RGB, 10), {"kernels": 0}, r"lenet\(kernels=0\): allowed is an integer >= 1"),
        (("fasttext", (20,), 4), {"vocab": 0}, r"fasttext\(vocab=0\): allowed is an integer >= 1"),
        (("fasttext", (20,), 4), {"dim": -3}, r"fasttext\(dim=-3\): allowed is an integer >= 1"),
    ],
)
def test_build_says_what_is_wrong(args, options, message):
    with pytest.raises(ValueError, match=message):
        build(*args, **options)


def test_other_errors(registry):
    model = build("cnn", GRAY, 10)
    with pytest.raises(ValueError, match="layers are counted by one of .* got 'layer'"):
        layers(model, "layer")
    for depth in (-1, 5):
        with pytest.raises(ValueError, match=rf"head depth {depth} is not in 0..4"):
            head(model, depth)
    for depth in (0, 4):
        with pytest.raises(ValueError, match=rf"head_depth {depth} is not in 1..3"):
            linear_base(model, depth, GRAY)
    with pytest.raises(ValueError, match="linear_base takes a Net .* got Linear"):
        linear_base(nn.Linear(2, 2), 1, GRAY)
    with pytest.raises(ValueError, match="linear_base takes a Net and an image shape"):
        linear_base(build("fasttext", (20,), 4, vocab=9), 1, (20,))
    with pytest.raises(ValueError, match="'cnn' is a network of the papers"):
        models.register_model("cnn", Own)
    models.register_model("none", lambda input_shape, classes: None)
    with pytest.raises(TypeError, match="'none' must return an nn.Module, got NoneType"):
        build("none", GRAY, 2)
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    tied[2].weight = tied[0].weight
    ends = {
        "Conv2d": nn.Conv2d(1, 2, 3),
        "LayerNorm": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
    }
    for kind, other in (ends | {"Sequential": nn.Sequential(nn.ReLU()), "of Linear": tied}).items():
        with pytest.raises(
            ValueError, match=f"whose last layer is an nn.Linear that gives the scores.*{kind}"
        ):
            models.features(other, torch.zeros(1, 2))
    for last in (nn.LogSoftmax(1), nn.Unflatten(1, (1, 2))):
        with pytest.raises(
            ValueError,
            match="Sequential are not the output of its last nn.Linear '0'; let its forward",
        ):
            models.features(nn.Sequential(nn.Linear(2, 2), last), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"a Net ends in an nn.Linear named fc, got \['a'\]"):
        models.Net({"a": {"a": nn.Linear(2, 2)}})


class Named(nn.Module):
    """A last layer without a bias, called by the name of its argument; positions that are no part of the state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.inner = nn.ModuleDict({"body": nn.Linear(4, 3), "scores": nn.Linear(3, 2, bias=False)})

    def forward(self, x):
        return self.inner["scores"](input=self.inner["body"](x + self.positions).tanh())


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Linear(4, 2), ("weight", "bias")),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), ("2.weight", "2.bias")),
        (Named(), ("inner.scores.weight",)),
    ],
    ids=["bare", "chain", "named"],
)
def test_the_last_linear_of_any_module(model, names):
    assert models.last_linear(model) == names and models.buffers(model) == []
    x, p = torch.randn(5, 4), {n: v.detach() for n, v in model.named_parameters()}
    z = models.features(model, x)
    torch.testing.assert_close(nn.functional.linear(z, *(p[n] for n in names)), model(x))
    stacked = {n: torch.stack([v, v + 1]) for n, v in p.items()}
    both = vmap(lambda p: features_at(model, p, x))(stacked)
    torch.testing.assert_close(both[0], z)
    torch.testing.assert_close(
        both[1], features_at(model, {n: v[1] for n, v in stacked.items()}, x)
    )
    assert not any(m._forward_hooks for m in model.modules())


def test_a_model_is_tried_on_the_data_before_anything_else():
    x, chain = torch.randn(2, 4), lambda *parts: nn.Sequential(nn.Linear(4, 3), *parts)
    models.check_fit("mine", chain(nn.BatchNorm1d(3), nn.Dropout()), x, 3)
    frozen = chain(nn.Linear(3, 5)).requires_grad_(False)
    tokens = nn.Sequential(models.Tokens(50, 3), models.Mean(1))
    for model, given, said in (
        (
            chain(),
            x,
            r"'mine' makes of 2 samples \(2, 3\), and these data have 5 classes: it must give scores \(2, 5\)",
        ),
        (chain(nn.Unflatten(1, (3, 1))), x, r"\(2, 3, 1\)"),
        (
            nn.Sequential(nn.Linear(9, 5)),
            x,
            r"'mine' cannot take samples of shape \(4,\), torch.float32: .*mat1 and mat2",
        ),
        (nn.Flatten(), x, "'mine' has no parameters"),
        (frozen, x, "'mine' has only frozen parameters, so that nothing of it can be trained"),
        (
            tokens,
            torch.tensor([[0, 1], [2, 50]]),
            r"go from 0 to 50: take an embedding of 51 rows or more.*'vocab': 51",
        ),
        (
            tokens,
            torch.tensor([[0, -1], [2, 3]]),
            "tokens are counted from 0, and these go from -1 to 3$",
        ),
        (
            chain(),
            torch.ones(2, 4, dtype=torch.int16),
            r"\(4,\), torch.int16: .* are tokens, .* other numbers as floats",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            models.check_fit("mine", model, given, 5)
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    before = torch.random.get_rng_state(), {n: v.clone() for n, v in norm.state_dict().items()}
    models.check_fit("mine", norm, torch.randn(2, 4, generator=torch.Generator()), 3)
    assert norm.training and torch.equal(before[0], torch.random.get_rng_state())
    assert all(torch.equal(v, before[1][n]) for n, v in norm.state_dict().items())


def test_registry_lists_one_line_each():
    names = [
        "lenet",
        "lenet4",
        "mlp",
        "cnn",
        "cnn_bn",
        "resnet18",
        "resnet34",
        "mobilenet",
        "fasttext",
    ]
    listed = models.list_models()
    assert list(listed)[:9] == names
    assert all(doc and "\n" not in doc for doc in listed.values())
