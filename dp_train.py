"""Train a ResNet on CIFAR-10 with nn.DataParallel: one process for all GPUs. DDP (ddp_launch_train.py) is faster.

    python dp_train.py        # on one GPU, an ordinary training loop

In each step, nn.DataParallel copies the model from GPU 0 to all GPUs, gives each replica a part of the batch, and
gathers the outputs on GPU 0, where the loss is computed. The backward pass sums the replicas' gradients there.
"""

import gc
import json
import math
import os
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter

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
    args.batch_size = args.batch_size or 1024
    if args.batch_size > len(train_set):
        raise SystemExit(f"--batch-size must be at most {len(train_set)}")
    fork = "fork" if args.workers else None  # forked workers share the dataset; Python 3.14 would copy it to each
    options = dict(num_workers=args.workers, multiprocessing_context=fork, collate_fn=collate, pin_memory=cuda)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **options)
    val_loader = DataLoader(val_set, args.batch_size, **options)
    steps = len(train_loader)  # per epoch

    model = build_model(args).to(device)  # [DP 1/3] on GPU 0, from where DataParallel copies it
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer, args.epochs * steps)
    stateful = dict(model=model, optimizer=optimizer, scheduler=scheduler)  # all that changes in training
    shapes = [list(weight.shape) for group in optimizer.param_groups for weight in group["params"]]
    flags = dict(vars(args), steps=steps, train_size=len(train_set), val_size=len(val_set), weight_order=shapes)
    flags = json.loads(json.dumps(flags, default=str))  # plain values, which torch.load() trusts
    if args.checkpoint:
        lock = FileLock(f"{args.checkpoint}.lock")  # makes the folder, too
        lock.acquire(timeout=30)  # held until the end: a second run on this checkpoint fails after 30 s
    epochs_done, metrics = load_checkpoint(args.checkpoint, flags, stateful)

    # [DP 2/3] Wrap the model, if there are several GPUs. `dp_model` and `model` share their weights.
    dp_model = nn.DataParallel(Autocast(model)) if gpus > 1 else model
    if args.compile:
        dp_model = torch.compile(dp_model, mode="reduce-overhead")  # also saves work of the CPU

    print(f"process {os.getpid()} on {gpus} GPUs: {epochs_done} epochs are done", flush=True)
    for epoch in range(epochs_done + 1, args.epochs + 1):
        common.seed_everything(args.seed, epoch)  # for shuffling and augmentation

        dp_model.train()
        train_sums = Counter()  # its update() adds up
        start = time.perf_counter()
        for step, batch in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss, sums = compute_loss(args, dp_model, batch, device, training=True)
            loss.backward()
            if args.clip_grad:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            train_sums.update(sums)
            if step % 20 == 0:
                value, seconds = loss.item(), time.perf_counter() - start  # .item() waits for the GPU
                print(f"epoch {epoch} step {step}/{steps} loss {value:.4g} {seconds:.1f} s", flush=True)
        epoch_metrics = {f"train_{name}": float(v) for name, v in metrics_from(train_sums).items()}
        images_per_second = steps * args.batch_size / (time.perf_counter() - start)  # float() waited for the GPU

        epoch_metrics |= {f"val_{name}": float(v) for name, v in validate(args, model, val_loader, device).items()}
        improved = epoch_metrics[MAIN_METRIC] > metrics["best"]
        metrics = epoch_metrics | dict(best=epoch_metrics[MAIN_METRIC] if improved else metrics["best"])
        speed = f"images_per_second {images_per_second:.0f}"
        print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), speed, flush=True)
        for name, value in epoch_metrics.items():
            if not math.isfinite(value):
                raise SystemExit(f"{name} is {value}: --lr is too large, or a process has divided by a count of 0")

        # [DP 3/3] Save `model`: the names of `dp_model`'s weights begin with "module."
        if args.checkpoint:
            save_checkpoint(args.checkpoint, flags, stateful, epoch, metrics, improved)
        if epoch == epochs_done + 1:  # everything is compiled now
            gc.collect()
            gc.freeze()  # otherwise, Python's garbage collector stops the process for up to a second now and then

    result = dict(metrics, batch_size=args.batch_size, gpus=gpus, world_size=1)
    result["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20  # of the first GPU
    print("RESULT", json.dumps(result))  # for the table of run_all.sh


class Autocast(nn.Sequential):
    """A model with its own autocast: in nn.DataParallel's threads, an autocast outside would be float16."""

    def forward(self, *inputs, **named_inputs):
        with torch.autocast("cuda", torch.bfloat16, enabled=torch.is_autocast_enabled("cuda")):
            return self[0](*inputs, **named_inputs)


# ------------------------------------------------------------ Replace these in your own project
MAIN_METRIC = "val_accuracy"  # FILE.best has the epoch with its largest value: for an error rate, return -error
collate = None  # or a function that makes a batch of a list of items, such as one that pads texts


def load_data(args):
    """Return the training and the validation set. Here, their items are (image, label).

    An image is uint8 (height, width, 3), or float (3, height, width) as the dataset has prepared it. If there are
    masks, use floats: compute_loss() augments the image alone. Other items are for `collate` and compute_loss().
    For batches of similar lengths, see RECIPES.md. Open files in __getitem__: forked workers share positions.
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
    """Return the mean loss of a batch, and sums over its items (a dict) for metrics_from().

    A sum is a number or a detached tensor of any shape, such as a confusion matrix, best left on the GPU.
    """
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    images = common.prepare(images, args.image_size, args.pretrained, augment=training)  # labels stay as they are
    with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        outputs = model(images)
    loss = nn.functional.cross_entropy(outputs.float(), labels)
    correct = (outputs.argmax(1) == labels).sum(dtype=torch.float64)
    return loss, dict(loss=loss.detach().double() * len(labels), correct=correct, images=len(labels))


def metrics_from(sums):
    """Return the metrics (numbers) from the sums over all images. main() calls them train_NAME and val_NAME."""
    return dict(loss=sums["loss"] / sums["images"], accuracy=sums["correct"] / sums["images"])


# ------------------------------------------------------------ Validation, checkpoints and flags


@torch.no_grad()
def validate(args, model, loader, device):
    """Return the metrics of the whole validation set."""
    model.eval()
    sums = Counter()
    for batch in loader:
        sums.update(compute_loss(args, model, batch, device, training=False)[1])
    return metrics_from(sums)


def save_checkpoint(path, flags, stateful, epoch, metrics, improved):
    """Save what a resumed run needs, and in FILE.best the weights of the first epoch with the best metric."""
    states = {name: part.state_dict() for name, part in stateful.items()}
    if improved:
        save_atomically(states["model"], f"{path}.best")
    save_atomically(dict(states, epoch=epoch, metrics=metrics, flags=flags), path)


def save_atomically(state, path):
    """Write the whole file or nothing: a run that is killed meanwhile leaves the old file as it was."""
    torch.save(state, f"{path}.tmp")
    torch.load(f"{path}.tmp", "cpu", mmap=True, weights_only=True)  # if it cannot be loaded, fail now, not later
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path, flags, stateful):
    """Load the checkpoint, if there is one. Return the number of epochs done, and the metrics of the last one."""
    checkpoint = torch.load(path, map_location="cpu", weights_only=True) if path and os.path.exists(path) else None
    if checkpoint is None:
        return 0, dict(best=-math.inf)
    for name, saved in checkpoint["flags"].items():  # some may change:
        if name not in ("data_dir", "precision", "compile", "workers", "checkpoint") and saved != flags.get(name):
            raise SystemExit(f"{path} has {name}={saved!s:.99}: use the same flags and data, or another file")
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
    add("--batch-size", type=int, help="images per step over all GPUs (default: about 1024)")
    add("--lr", type=float, help="peak learning rate (default: 0.4 for each 512 images of a batch, at most 1.6)")
    best = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported(False) else "fp32"  # not emulated
    add("--precision", choices=["fp32", "bf16"], default=best, help="fp32 may use TF32 (default: %(default)s)")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--workers", type=int, default=0, help="worker processes of each DataLoader (default: 0)")
    add("--clip-grad", type=float, help="clip the gradients to this norm (default: do not)")
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
