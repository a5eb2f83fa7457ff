"""CIFAR-10, the ResNet, printing and seeding. Copy this file together with a training script."""

import builtins
import functools
import os
import random
import sys

import numpy as np
import torch
import torchvision
from filelock import FileLock
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10


def load_cifar10(data_dir, synthetic=None):
    """Return CIFAR-10 as (training set, test set), each of uint8 images (n, 32, 32, 3) and int64 labels (n,).

    If it is not in `data_dir`, one process downloads it and the others wait. torchvision checks all files' md5.
    If `synthetic` is a number N, each set has N generated images instead, each with the colour of its class.
    """
    if synthetic:
        generator = torch.Generator().manual_seed(119)  # gives ten colours that differ clearly
        colours = torch.randint(256, (10, 1, 1, 3), dtype=torch.uint8, generator=generator)
        sets = []
        for _ in range(2):
            labels = torch.randint(10, (synthetic,), generator=generator)
            noise = torch.randint(256, (synthetic, 32, 32, 3), dtype=torch.uint8, generator=generator)
            sets.append(TensorDataset(colours[labels] // 2 + noise // 2, labels))
        return sets
    try:
        splits = [CIFAR10(data_dir, train) for train in (True, False)]
    except RuntimeError:  # missing or damaged
        try:
            with FileLock(f"{data_dir}/.cifar10.lock"):  # creates the folder, too
                splits = [CIFAR10(data_dir, train, download=True) for train in (True, False)]
        except Exception as error:
            use = f"put {CIFAR10.filename} into {data_dir}, or use --synthetic"
            raise SystemExit(f"no data: {error}; {use}") from None
    return [TensorDataset(torch.from_numpy(s.data), torch.tensor(s.targets)) for s in splits]


def prepare(images, size, pretrained=False, augment=False):
    """Turn uint8 images (n, height, width, 3) into normalised float32 images (n, 3, size, size), on their device.

    Float images are returned as they are: their dataset has prepared them.
    If `size` is None, images keep their size. `augment` shifts each image at random by up to 4 pixels (mirrored at
    the border), and flips about half of them left-right.
    """
    if images.is_floating_point():
        return images
    images = shift_and_flip(images) if augment else images
    mean, std = mean_and_std(bool(pretrained), images.device)
    images = (images.permute(0, 3, 1, 2) - mean) / std
    if size and images.shape[-2:] != (size, size):
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    return images


@functools.cache  # copy them to the GPU once, not in every step
def mean_and_std(pretrained, device):
    """Return mean and standard deviation per colour: ImageNet's for pretrained weights, else CIFAR-10's."""
    cifar10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return 255 * torch.tensor(imagenet if pretrained else cifar10, device=device)[:, :, None, None]  # (2, 3, 1, 1)


def shift_and_flip(images):
    """Shift and flip each of the uint8 images (n, height, width, 3) at random."""
    (n, height, width, _), device = images.shape, images.device

    def shifted(length):  # the positions (n, length) to read from, mirrored at the border: -1 becomes 1
        positions = torch.arange(length, device=device) + torch.randint(-4, 5, (n, 1), device=device)
        return length - 1 - (length - 1 - positions.abs()).abs()

    rows, columns = shifted(height), shifted(width)
    columns = torch.where(torch.rand(n, 1, device=device) < 0.5, columns.flip(1), columns)
    return images[torch.arange(n, device=device)[:, None, None], rows[:, :, None], columns[:, None, :]]


def build_resnet(arch, image_size, pretrained=None, classes=10):
    """Return torchvision's ResNet `arch` with `classes` outputs, in channels_last memory format (faster on GPUs).

    Without `pretrained`, a model for images of up to 64 pixels begins with a 3x3 convolution and no pooling:
    ImageNet's first layers would shrink them to a quarter of their width. `pretrained` loads ImageNet weights, to
    train "all" layers or the "last" one, with all others frozen, BatchNorm included.
    """
    norm_layer = torchvision.ops.FrozenBatchNorm2d if pretrained == "last" else nn.BatchNorm2d
    # Residual branches that start at zero help large batches (https://arxiv.org/abs/1706.02677).
    model = torchvision.models.get_model(arch, norm_layer=norm_layer, zero_init_residual=True)
    if pretrained:
        url = torchvision.models.get_model_weights(arch).DEFAULT.url
        folder, name = f"{torch.hub.get_dir()}/checkpoints", os.path.basename(url)
        try:
            if not os.path.exists(f"{folder}/{name}"):
                with FileLock(f"{folder}/{name}.lock"):  # one process downloads, the others wait
                    torch.hub.load_state_dict_from_url(url, progress=False, check_hash=True, weights_only=True)
            model.load_state_dict(torch.load(f"{folder}/{name}", map_location="cpu", weights_only=True))
        except Exception as error:
            raise SystemExit(f"no ImageNet weights: {error}; download {url} into {folder}") from None
    elif image_size <= 64:
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    model.requires_grad_(pretrained != "last")
    model.fc = nn.Linear(model.fc.in_features, classes)
    return model.to(memory_format=torch.channels_last)


builtin_print = builtins.print


def setup_for_distributed(is_master):
    """Silence print() except on rank 0; print(..., force=True) and print(..., file=f) always print."""

    def print(*args, sep=None, end=None, force=False, file=None, **kwargs):
        if is_master or force or file not in (None, sys.stdout):
            text = (" " if sep is None else sep).join(map(str, args)) + ("\n" if end is None else end)
            builtin_print(text, end="", file=file, **kwargs)  # in one piece, so that lines do not mix

    builtins.print = print


def seed_everything(seed, epoch=0, rank=0):
    """Seed Python, NumPy and PyTorch (CPU and GPUs) from the three numbers together."""
    mixed = int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
