"""Measure what a script could reach if data cost nothing: each step takes the same batch, prepared and on the GPU.

    torchrun --standalone --nproc-per-node=1 results/ceiling.py ddp_launch_train --workers 0 --batch-size 512

The first argument names ddp_launch_train or apex_amp_train; the flags after it are those of the script. Its
images_per_second is then that of the training loop without data loading and augmentation; the accuracy means
nothing.
"""

import importlib
import sys
from pathlib import Path
from unittest import mock

from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parent.parent))
import common


class SameBatch:
    """As long as a loader, and gives its first batch again and again, prepared and on `device`."""

    def __init__(self, loader, args, device):
        images, labels = next(iter(loader))
        images = common.prepare(images.to(device), args.image_size, args.pretrained, augment=True)
        self.batch, self.length = (images, labels.to(device)), len(loader)

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([self.batch] * self.length)


def epoch_without_data(args, device, *others):
    """Train one epoch on one batch."""
    others = [SameBatch(other, args, device) if isinstance(other, DataLoader) else other for other in others]
    with mock.patch.object(common, "prepare", lambda images, *_: images):
        return train_epoch(args, device, *others)


if __name__ == "__main__":
    script = importlib.import_module(sys.argv.pop(1))
    script.__file__ = f"ceiling of {script.__name__}"  # its name in RESULT
    train_epoch, script.train_epoch = script.train_epoch, epoch_without_data
    script.main(script.parse_args())
