"""Train a ResNet on CIFAR-10 with nn.DataParallel: one process for all GPUs. DDP (ddp_launch_train.py) is faster.

    python dp_train.py        # on one GPU, an ordinary training loop

In each forward pass, nn.DataParallel copies the model from GPU 0 to all GPUs, gives each replica a part of the
batch, and gathers the outputs on GPU 0, where the loss is computed. The backward pass sums the gradients of all
replicas on GPU 0. BatchNorm normalises each part by itself, and keeps the statistics of GPU 0's part only. What
`forward` assigns to `self` on a replica is lost after the step, and a replica's `parameters()` is empty.
"""

import json
import math
import os
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
from filelock import FileLock  # installed with PyTorch
from torch import nn
from torch.utils.data import DataLoader

import common


def main(args):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")  # "cuda" is GPU 0
    gpus = torch.cuda.device_count()

    common.seed_everything(args.seed)  # the same initial weights in every run
    train_set, val_set = load_data(args)
    args.batch_size = args.batch_size or 512 * max(gpus, 1)
    if args.batch_size > len(train_set):
        raise SystemExit(f"--batch-size must be at most {len(train_set)}")
    options = dict(batch_size=args.batch_size, num_workers=args.workers, pin_memory=cuda)
    options["multiprocessing_context"] = "fork" if args.workers else None  # otherwise, Python 3.14 copies the data
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)
    steps = args.steps = len(train_loader)  # per epoch; a resume with another number is refused

    # [DP 1/3] Put the model on GPU 0: DataParallel copies it from there.
    model = build_model(args).to(device)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer, args.epochs * steps)
    stateful = dict(model=model, optimizer=optimizer, scheduler=scheduler)  # all that changes in training
    if args.checkpoint:
        lock = FileLock(f"{args.checkpoint}.lock")  # makes the folder, too
        lock.acquire(timeout=30)  # held until the end: a second run on this checkpoint fails after 30 s
    epochs_done, metrics = load_checkpoint(args, stateful)

    # [DP 2/3] Wrap the model, if there are several GPUs. `dp_model` and `model` share their weights.
    dp_model = nn.DataParallel(Autocast(model, args)) if gpus > 1 else model
    if args.compile:
        dp_model = torch.compile(dp_model, mode="reduce-overhead")  # also saves work of the CPU

    print(f"process {os.getpid()} on {gpus} GPUs: {epochs_done} epochs are done", flush=True)
    for epoch in range(epochs_done + 1, args.epochs + 1):
        common.seed_everything(args.seed, epoch)  # for shuffling and augmentation

        dp_model.train()
        loss_sum = torch.zeros((), device=device)
        start = time.perf_counter()
        for step, batch in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss, _, _ = compute_loss(args, dp_model, batch, device, training=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()  # stays on the GPU: .item() would wait for it in every step
            if step % 20 == 0:
                value, seconds = loss.item(), time.perf_counter() - start  # .item() waits for the GPU
                print(f"epoch {epoch} step {step}/{steps} loss {value:.4g} {seconds:.1f} s", flush=True)
        train_loss = loss_sum.item() / steps  # waits for the GPU before the time is taken
        images_per_second = steps * args.batch_size / (time.perf_counter() - start)

        val_sums = validate(args, model, val_loader, device)  # on GPU 0: `dp_model` copies `model` for each batch
        epoch_metrics = dict(train_loss=train_loss, **metrics_from(val_sums), images_per_second=images_per_second)
        epoch_metrics = {name: float(value) for name, value in epoch_metrics.items()}  # no NumPy numbers
        metrics = dict(epoch_metrics, best=max(metrics["best"], epoch_metrics[MAIN_METRIC]))
        print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)
        if not all(map(math.isfinite, metrics.values())):
            raise SystemExit("a metric is NaN or infinite: use a smaller --lr and a new --checkpoint")

        # [DP 3/3] Save `model`: the names of `dp_model`'s weights begin with "module."
        if args.checkpoint:
            save_checkpoint(args, stateful, epoch, metrics)

    result = dict(metrics, batch_size=args.batch_size, gpus=gpus, world_size=1)
    result["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20  # of the first GPU
    print("RESULT", json.dumps(result, default=float))  # for the table of run_all.sh


class Autocast(nn.Module):
    """A model with its own autocast: nn.DataParallel's threads ignore the dtype of an autocast outside."""

    def __init__(self, model, args):
        super().__init__()
        self.model, self.bf16 = model, args.precision == "bf16"

    def forward(self, images):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            return self.model(images)


# ------------------------------------------------------------ Replace these in your own project

MAIN_METRIC = "val_accuracy"  # FILE.best has the weights of the epoch with its largest value


def load_data(args):
    """Return the training and the validation set. Their items are (image, label).

    An image is uint8 (height, width, 3), or float (3, height, width), prepared for the model by the dataset.
    With --workers, open files in __getitem__, once per process: forked workers share the position in an open file.
    """
    return common.load_cifar10(args.data_dir, args.synthetic)


def build_model(args):
    """Return the model, on the CPU. Do not freeze BatchNorm by eval(): main() calls train() in each epoch."""
    return common.build_resnet(args.arch, args.image_size, args.pretrained)  # channels_last, as the images are


def build_optimizer(args, model):
    """Return the optimizer. A resumed run takes its settings, such as weight_decay, from the checkpoint."""
    lr = 0.4 * min(args.batch_size / 512, 4) if args.lr is None else args.lr
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)


def build_scheduler(args, optimizer, total_steps):
    """Return the learning rate schedule. Its unit is a batch: main() calls scheduler.step() after each."""
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rates, total_steps, cycle_momentum=False)


def compute_loss(args, model, batch, device, training):
    """Return the mean loss of a batch, the outputs (n, classes) and the labels (n)."""
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    images = common.prepare(images, args.image_size, args.pretrained, augment=training)  # labels stay as they are
    with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        outputs = model(images)
    return nn.functional.cross_entropy(outputs.float(), labels), outputs, labels


@torch.no_grad()
def validate(args, model, loader, device):
    """Return sums over the images of the loader, as one tensor: loss, correct predictions, number of images."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in loader:
        loss, outputs, labels = compute_loss(args, model, batch, device, training=False)
        sums[0] += loss.double() * len(labels)
        sums[1] += (outputs.argmax(1) == labels).sum()
        sums[2] += len(labels)
    return sums


def metrics_from(val_sums):
    """Return the metrics, finite numbers, from the sums over all images."""
    loss, correct, count = val_sums.tolist()
    return dict(val_loss=loss / count, val_accuracy=correct / count)


# ------------------------------------------------------------ Checkpoints and flags


def save_checkpoint(args, stateful, epoch, metrics):
    """Save what a resumed run needs, and in FILE.best the weights of the best epoch so far."""
    states = {name: part.state_dict() for name, part in stateful.items()}
    if metrics[MAIN_METRIC] == metrics["best"]:
        save_atomically(states["model"], f"{args.checkpoint}.best")
    flags = json.loads(json.dumps(vars(args), default=str))  # plain values, which torch.load() trusts
    save_atomically(dict(states, epoch=epoch, metrics=metrics, flags=flags), args.checkpoint)


def save_atomically(state, path):
    """Write the whole file or nothing: a run that is killed meanwhile leaves the old file as it was."""
    torch.save(state, f"{path}.tmp")
    torch.load(f"{path}.tmp", "cpu", mmap=True, weights_only=True)  # if it cannot be loaded, fail now, not later
    os.replace(f"{path}.tmp", path)


def load_checkpoint(args, stateful):
    """Load the checkpoint, if there is one. Return the number of epochs done, and the metrics of the last one."""
    if not args.checkpoint or not os.path.exists(args.checkpoint):
        return 0, dict(best=-math.inf)
    checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    may_change = {"data_dir", "precision", "compile", "workers", "checkpoint"}
    for name, saved in checkpoint["flags"].items():
        if name not in may_change and json.dumps(saved) != json.dumps(vars(args).get(name), default=str):
            raise SystemExit(f"{args.checkpoint} has {name}={saved}: use its flags and data, or a new file")
    for name, part in stateful.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["epoch"], checkpoint["metrics"]


def parse_args(argv=None):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--data-dir", type=os.path.expanduser, default="data", help="folder of CIFAR-10, downloaded if missing")
    add("--synthetic", type=int, metavar="N", help="train on N generated images instead")
    add("--arch", default="resnet50", choices=[f"resnet{depth}" for depth in (18, 34, 50, 101, 152)])
    add("--image-size", type=int, help="in pixels (default: 32; with --pretrained, 224)")
    add("--pretrained", choices=["all", "last"], help="start from ImageNet weights; train all layers or the last")
    add("--epochs", type=int, default=30, help="default: 30")
    add("--batch-size", type=int, help="images per step over all GPUs (default: 512 per GPU)")
    add("--lr", type=float, help="peak learning rate (default: 0.4 for each 512 images of a batch, at most 1.6)")
    default = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported(False) else "fp32"  # natively
    add("--precision", choices=["fp32", "bf16"], default=default, help="fp32 may use TF32 (default: %(default)s)")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--workers", type=int, default=0, help="worker processes of each DataLoader (default: 0)")
    add("--seed", type=int, default=21, help="default: 21")
    add("--checkpoint", type=os.path.expanduser, metavar="FILE", help="save and resume; best weights: FILE.best")
    args = parser.parse_args(argv)
    if "LOCAL_RANK" in os.environ:
        parser.error(f"start this script without torchrun: python {__file__}")
    if args.compile and torch.cuda.device_count() > 1:
        parser.error("--compile is for one GPU: choose it with CUDA_VISIBLE_DEVICES=0")
    if any(n is not None and n < 1 for n in (args.synthetic, args.image_size, args.epochs, args.batch_size)):
        parser.error("--synthetic, --image-size, --epochs and --batch-size must be at least 1")
    args.image_size = args.image_size or (224 if args.pretrained else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
