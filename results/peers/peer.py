"""What the peers share: flags, the training set with torchvision's transforms, the network, the clock."""

import argparse
import sys
import time
from pathlib import Path

import torch
import torchvision
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common


def arguments(text):
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=1024, help="images per step over all GPUs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=14, help="data-loading processes per GPU")
    parser.add_argument("--limit", type=int, help="use only the first images")
    return parser.parse_args()


def training_set(args):
    """Return CIFAR-10; each image is cropped, flipped and normalised on its own, on the CPU."""
    normalise = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*augment, transforms.ToTensor(), normalise])
    data_set = torchvision.datasets.CIFAR10(args.data_dir, transform=transform)
    return torch.utils.data.Subset(data_set, range(args.limit)) if args.limit else data_set


def network_and_optimizer(args, total_steps, device="cpu"):
    net = common.build_resnet(args.arch, 32).to(device)
    lr = 0.4 * min(args.batch_size / 512, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.95, weight_decay=5e-4, nesterov=True, fused=True)
    return net, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps)


class Speed:
    """Print the images per second of each epoch: of all steps, and of those after the first 20."""

    def __init__(self, args):
        self.batch = args.batch_size

    def start(self):
        self.began, self.after_20, self.steps = time.perf_counter(), None, 0

    def step(self, number):
        self.steps = number
        if number == 20:
            self.after_20 = wait()

    def end(self, epoch, is_master):
        now = wait()
        whole = self.batch * self.steps / (now - self.began)
        rest = self.batch * (self.steps - 20) / (now - self.after_20) if self.steps > 20 else 0
        if is_master:
            print(f"epoch {epoch} images_per_second {whole:.0f} after 20 steps {rest:.0f}", flush=True)


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
