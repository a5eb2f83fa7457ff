"""What the four recipes share and what is not the lesson: CIFAR-10, the ResNet, printing, seeding.

Copy this file together with the recipe that you take.
"""

import builtins
import contextlib
import os
import random
import signal
import sys
import textwrap
import time
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
import torchvision
from filelock import FileLock
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10

# ---------------------------------------------------------------------------------------- CIFAR-10


def load_cifar10(data_dir, limit=None):
    """Return CIFAR-10 as (training set, test set), downloaded first where `data_dir` lacks it.

    Each is a TensorDataset of uint8 images (n, 32, 32, 3) and int64 labels (n,): the first `limit`
    of 50,000 and of 10,000. Any number of processes may call this at once: one of them downloads
    and the others wait for it. torchvision checks the md5 of every file before it is read.
    """
    what = f"no complete CIFAR-10 in {data_dir}, and it could not be downloaded"
    advice = f"put {CIFAR10.filename} there, name the folder that has it with --data-dir, or use --synthetic"
    with fail_on((OSError, RuntimeError, HTTPException), what, advice):
        try:
            splits = [CIFAR10(data_dir, train) for train in (True, False)]
        except RuntimeError:  # missing or damaged
            Path(data_dir).mkdir(parents=True, exist_ok=True)
            with FileLock(Path(data_dir, ".cifar10.lock")):
                splits = [CIFAR10(data_dir, train, download=True) for train in (True, False)]
    return [TensorDataset(torch.from_numpy(s.data[:limit]), torch.tensor(s.targets[:limit])) for s in splits]


def synthetic_cifar10(seed, limit=None):
    """Return the same two sets as `load_cifar10`, made from `seed`: coarse colours of the class, half noise.

    The classes can be learnt, so a loss that falls means that training works.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(256, (10, 4, 4, 3), dtype=torch.uint8, generator=generator)
    classes = coarse.repeat_interleave(8, 1).repeat_interleave(8, 2)  # (10, 32, 32, 3)

    def split(n):
        labels = torch.randint(10, (n,), generator=generator)
        noise = torch.randint(256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator)
        return TensorDataset(classes[labels] // 2 + noise // 2, labels)

    return [split(min(n, limit or n)) for n in (50_000, 10_000)]


class BatchTransform(nn.Module):
    """Turn a batch of images into the network's input, on the device that holds the batch.

    From uint8 (n, 32, 32, 3) to normalised float32 (n, 3, size, size) in channels_last memory. With
    `train=True` every image gets its own random crop (up to 4 pixels off, mirrored at the border) and
    flip.
    """

    def __init__(self, size, pretrained=False):
        super().__init__()
        self.size = size
        mean, std = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))  # of CIFAR-10's training images
        if pretrained:
            mean, std = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # what torchvision's weights expect
        self.register_buffer("mean", 255 * torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(3, 1, 1))

    def forward(self, images, train):
        if train:
            n, pixels = len(images), torch.arange(32, device=images.device)
            shift = torch.randint(-4, 5, (2, n, 1), device=images.device)
            rows, columns = 31 - (31 - (pixels + shift).abs()).abs()  # (n, 32) each; -1 becomes 1, 32 becomes 30
            flip = torch.rand(n, 1, device=images.device) < 0.5
            columns = torch.where(flip, columns.flip(1), columns)
            each = torch.arange(n, device=images.device)[:, None, None]
            images = images[each, rows[:, :, None], columns[:, None, :]]
        images = (images.permute(0, 3, 1, 2) - self.mean) / self.std
        if self.size != 32:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=self.size < 32)
        return images


# ------------------------------------------------------------------------------------------ ResNet


def build_resnet(arch, image_size, pretrained=False):
    """Return torchvision's ResNet `arch` for 10 classes, in channels_last memory.

    Images of up to 64 pixels get the CIFAR stem (3x3 convolution, stride 1, no max pool), as the paper
    has it for CIFAR-10 (https://arxiv.org/abs/1512.03385); larger ones keep the ImageNet stem.
    `pretrained` loads torchvision's newest ImageNet weights for all but the last layer.
    """
    net = torchvision.models.get_model(arch, zero_init_residual=True)  # each block starts as the identity
    # With the usual 1 here the last layer's input starts so long that the loss jumps as the learning rate rises.
    nn.init.constant_(net.layer4[0].downsample[1].weight, 0.2)
    if pretrained:
        weights = torchvision.models.get_model_weights(arch).DEFAULT
        folder = Path(torch.hub.get_dir(), "checkpoints")
        advice = f"put {weights.url} into {folder} or drop --pretrained"
        with fail_on(Exception, f"{weights} could not be loaded", advice):  # networks and damaged files raise anything
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f"{arch}.lock"):
                net.load_state_dict(weights.get_state_dict(progress=False, check_hash=True))
    if image_size <= 64:
        net.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
        net.maxpool = nn.Identity()
    net.fc = nn.Linear(net.fc.in_features, 10)
    return net.to(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------ Printing and seeding

_print, _is_master = builtins.print, True


def setup_for_distributed(is_master):
    """Let print() speak in the main process alone; print(..., force=True) speaks in any."""

    def print(*args, force=False, **kwargs):
        if is_master or force:
            _print(*args, **kwargs)

    global _is_master
    builtins.print, _is_master = print, is_master


def fail(sentence, code=2):
    """End the process over something that the user did or can mend: one sentence on stderr, no traceback."""
    if code != 2:  # a signal: neither it once more nor the end of DataLoader's processes may interrupt what follows
        for number in signal.SIGTERM, signal.SIGCHLD:
            signal.signal(number, lambda *_: None)
    if not _is_master:
        if code != 2:
            sys.exit(code)
        time.sleep(9)  # what all processes meet, the main process says; its end then ends this one
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: {sentence}\n")
    sys.exit(code)


@contextlib.contextmanager
def fail_on(errors, what, advice):
    """Around lines (`with`) or a function (`@`): any of `errors` ends the process with `fail`: what (error); advice."""
    try:
        yield
    except errors as error:
        reason = str(error).partition("\nException raised from")[0] or type(error).__name__  # without the stack of C++
        fail(f"{what} ({textwrap.shorten(reason, 300)}); {advice}")


def seed_everything(seed, epoch=0, rank=0):
    """Seed Python, NumPy and PyTorch (the CPU and every GPU) from the three numbers together.

    The same three numbers give the same random numbers, so a resumed run repeats an unbroken one;
    ranks and epochs that differ share none, so no two processes augment alike.
    """
    mixed = int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
