"""pFedFDA's network for CIFAR-10, as its authors' code has it: model "cifarnet" of a parity run."""

from torch import nn

from pfl_core.models import Shape, register_model


def cifarnet(input_shape: Shape, classes: int) -> nn.Module:
    """Three convolutions with leaky ReLU and max pooling, linear 128, linear C (32x32 pixels)."""
    channels, layers = input_shape[0], []
    for width, kernel, padding in ((16, 5, 0), (32, 5, 1), (64, 3, 1)):
        conv = nn.Conv2d(channels, width, kernel, padding=padding)
        layers += [conv, nn.LeakyReLU(), nn.MaxPool2d(2)]
        channels = width
    hidden = nn.Linear(64 * 3 * 3, 128)
    return nn.Sequential(*layers, nn.Flatten(), hidden, nn.LeakyReLU(), nn.Linear(128, classes))


register_model("cifarnet", cifarnet)
