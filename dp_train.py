"""Train a ResNet on CIFAR-10 with nn.DataParallel: one process for all GPUs. DDP (ddp_launch_train.py) is faster.

    python dp_train.py        # all GPUs, or those in CUDA_VISIBLE_DEVICES; with one GPU, an ordinary program

In each forward pass, nn.DataParallel copies the network from GPU 0 to all GPUs, gives each of these replicas a
part of the batch, and gathers the outputs on GPU 0, where the loss is computed. The backward pass sums the
gradients of all replicas in the network on GPU 0. Then the replicas are deleted, with all that forward() assigned
to `self`. BatchNorm normalises each part of the batch by itself, and only GPU 0's replica shares its statistics
with the network. In DDP, the replicas stay on their GPUs.
"""

import argparse
import fcntl
import json
import math
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import common


def main(args):
    cuda = args.device == "cuda"
    device = torch.device(args.device)  # "cuda" is GPU 0
    gpus = torch.cuda.device_count() if cuda else 0

    common.seed_everything(args.seed)  # the same initial weights in every run
    train_set, val_set = load_data(args)
    if args.batch_size is None:
        args.batch_size = 512 * max(gpus, 1)
    if args.batch_size > len(train_set):
        raise SystemExit(f"--batch-size must be at most {len(train_set)}")
    # [DP 1/3] Put the network on GPU 0: DataParallel copies it from there.
    net = build_network(args).to(device)
    checkpoint = load_checkpoint(args)

    sampler = RandomSampler(train_set)
    loading = dict(
        batch_size=args.batch_size,
        num_workers=args.workers,
        multiprocessing_context="fork" if args.workers else None,  # Python 3.14's default copies the data set
        persistent_workers=args.workers > 0,  # start them once, not in every epoch
        # Workers are seeded from this generator when they start, once in a run. From the global one, that would
        # change the augmentation in the first epoch after a resume.
        generator=torch.Generator().manual_seed(args.seed),
        pin_memory=cuda,
    )
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    val_loader = DataLoader(val_set, **loading)

    optimizer, scheduler = build_optimizer(args, net, args.epochs * len(train_loader))
    stateful = dict(net=net, optimizer=optimizer, scheduler=scheduler)
    epochs_done, metrics = resume(checkpoint, stateful)

    # [DP 2/3] Wrap the network. `model` and `net` share weights. Validation uses `net`, and so one GPU.
    model = LoopDataParallel(net) if gpus > 1 else net
    if args.compile:
        model = torch.compile(model, mode="reduce-overhead")  # fuses kernels and records CUDA graphs

    print(f"process {os.getpid()} on {gpus} GPUs", flush=True)
    print(f"{epochs_done} of {args.epochs} epochs are done")
    start = time.perf_counter()
    for epoch in range(epochs_done + 1, args.epochs + 1):
        common.seed_everything(args.seed, epoch)  # for shuffling and augmentation

        model.train()
        loss_sum = torch.zeros((), device=device)
        epoch_start = time.perf_counter()
        for step, batch in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss, _, _ = compute_loss(args, model, batch, device, training=True)
            loss.backward()  # sums the gradients of the replicas; `loss` is the mean of the whole batch
            if args.clip_grad:
                nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()  # stays on the GPU: .item() would wait for it in every step
            if step % args.log_every == 0:
                print(f"epoch {epoch} step {step}/{len(train_loader)} loss {loss.item():.5g}", flush=True)
        train_loss = loss_sum.item() / len(train_loader)  # waits for the GPU before the time is taken
        images_per_second = len(train_loader) * args.batch_size / (time.perf_counter() - epoch_start)

        val_sums = validate(args, net, val_loader, device)
        best = metrics["best"]  # of the epochs before
        metrics = dict(train_loss=train_loss, **metrics_from(val_sums), images_per_second=images_per_second)
        metrics = check_metrics(epoch, metrics)
        metrics["best"] = max(best, metrics[MAIN_METRIC])
        print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)

        # [DP 3/3] Save `net`: the names of DataParallel's weights begin with "module."
        if args.checkpoint:
            save_checkpoint(args, stateful, epoch, metrics)

    seconds = time.perf_counter() - start
    peak_mib = max(torch.cuda.max_memory_allocated(gpu) // 2**20 for gpu in range(max(gpus, 1)))
    if cuda:
        print(f"peak GPU memory {peak_mib} MiB")
    # For run_all.sh, which compares the scripts.
    result = dict(script=os.path.basename(__file__)) | vars(args) | metrics
    result |= dict(gpus=gpus, world_size=1, seconds=seconds, peak_mib=peak_mib)
    print("RESULT", json.dumps(result), flush=True)


class LoopDataParallel(nn.DataParallel):
    """nn.DataParallel calls the replicas in threads. They are slow, and ignore the dtype of autocast: they compute
    in float16, not bfloat16. This class calls the replicas in a loop. The GPUs still work at the same time.
    """

    def parallel_apply(self, replicas, inputs, kwargs):
        outputs = []
        for gpu, replica, part, options in zip(self.device_ids, replicas, inputs, kwargs):
            with torch.cuda.device(gpu):
                outputs.append(replica(*part, **options))  # only queues work, unless forward() waits (.item())
        return outputs


# ------------------------------------------------------------ Replace these in your own project

MAIN_METRIC = "val_accuracy"  # of metrics_from(). FILE.best has the weights with its largest value.


def load_data(args):
    """Return the training and the validation set. Their items are (uint8 image (height, width, 3), label).

    Random transforms in a data set run in the data-loading processes. A resumed run starts these with other random
    numbers: see "Random transforms" in RECIPES.md.
    """
    return common.load_cifar10(args.data_dir, args.limit, args.synthetic)


def build_network(args):
    """Return the network on the CPU. Parameters with requires_grad=False stay frozen.

    common.prepare() returns images in channels_last memory format. Convert a convolutional network to it, too, as
    build_resnet() does. Otherwise, DDP warns: "Grad strides do not match bucket view strides".
    """
    return common.build_resnet(args.arch, args.image_size, args.pretrained, args.freeze_backbone)


def build_optimizer(args, net, total_steps):
    """Return the optimizer and its learning rate schedule. The rate follows --batch-size, over all GPUs."""
    lr = 0.4 * min(args.batch_size / 512, 4) if args.lr is None else args.lr
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.95, weight_decay=5e-4, nesterov=True, fused=True)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps)  # sets the momentum, too


def compute_loss(args, model, batch, device, training):
    """Return the mean loss of a batch from the DataLoader, the outputs (n, classes) and the labels (n).

    DDP averages the gradients of the processes' mean losses. That is right if all have equally many labels, of
    equal weight. With class weights, ignored labels or padding, see RECIPES.md. The processes may communicate here
    while training. While validating, they must not: they may have unequal numbers of batches.
    """
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    images = common.prepare(images, args.image_size, args.pretrained, augment=training)  # on the GPU
    with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
        outputs = model(images)
    return nn.functional.cross_entropy(outputs.float(), labels), outputs, labels


@torch.no_grad()
def validate(args, model, loader, device):
    """Return sums over the images of the loader, as one tensor: loss, correct predictions, number of images.

    The mean loss of a batch is multiplied by its number of labels.
    """
    model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros_like(loss_sum)
    count = torch.zeros_like(loss_sum)
    for batch in loader:
        loss, outputs, labels = compute_loss(args, model, batch, device, training=False)
        loss_sum += loss.double() * len(labels)
        correct += (outputs.argmax(1) == labels).sum()
        count += len(labels)
    return torch.stack([loss_sum, correct, count])


def metrics_from(val_sums):
    """Return the metrics from the sums over all images. One is named by MAIN_METRIC: larger is better."""
    loss_sum, correct, count = val_sums.tolist()
    return dict(val_loss=loss_sum / count, val_accuracy=correct / count)


# ------------------------------------------------------------ Metrics and checkpoints


def check_metrics(epoch, metrics):
    """Return the metrics as Python floats. End the run if one is NaN or infinite, before its weights are saved."""
    metrics = {name: float(value) for name, value in metrics.items()}  # also from tensors and NumPy numbers
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise SystemExit(f"epoch {epoch}: {name} is {value}; use a smaller --lr and a new --checkpoint")
    return metrics


def save_checkpoint(args, stateful, epoch, metrics):
    """Save everything a resumed run needs, and the weights alone in FILE.best if this epoch is the best so far."""
    states = {name: part.state_dict() for name, part in stateful.items()}
    if metrics[MAIN_METRIC] == metrics["best"]:
        save_atomically(states["net"], f"{args.checkpoint}.best")
    save_atomically(dict(states, epoch=epoch, metrics=metrics, flags=vars(args)), args.checkpoint)


def save_atomically(state, path):
    """Write the whole file or nothing: a run that is killed meanwhile leaves the old file as it was."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def load_checkpoint(args):
    """Return what save_checkpoint() saved, or None if there is no file. Refuse a file that does not fit.

    Lock the checkpoint until this process ends, so that no other run writes it. Processes that are forked do not
    inherit this kind of lock.
    """
    if not args.checkpoint:
        return None
    try:
        fcntl.lockf(os.open(f"{args.checkpoint}.lock", os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another run uses {args.checkpoint}") from None
    except OSError as error:
        raise SystemExit(f"--checkpoint: {error}") from None
    if not os.path.exists(args.checkpoint):
        return None
    try:
        checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        missing = {"net", "optimizer", "scheduler", "epoch", "metrics", "flags"} - checkpoint.keys()
    except Exception as error:  # a damaged file can raise anything
        raise SystemExit(f"cannot read {args.checkpoint}: {error}") from None
    if missing:
        raise SystemExit(f"{args.checkpoint} is not a checkpoint of this script: it lacks {missing}")
    may_change = "data_dir", "precision", "compile", "workers", "log_every", "checkpoint", "device"
    for name, value in vars(args).items():
        if name not in may_change and (saved := checkpoint["flags"].get(name, value)) != value:
            raise SystemExit(f"{args.checkpoint} was saved with {name}={saved}, not {value}; use its flags")
    return checkpoint


def resume(checkpoint, stateful):
    """Load a checkpoint, unless it is None. Return the number of epochs done and their last metrics."""
    if checkpoint is None:
        return 0, dict(best=-math.inf)
    for name, part in stateful.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["epoch"], checkpoint["metrics"]


# ------------------------------------------------------------ Flags


def at_least(minimum):
    """Return a type for argparse: a whole number that is not less than the minimum."""

    def whole_number(text):
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return whole_number


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", default="data", help="folder with CIFAR-10; downloaded if missing (default: data)")
    add("--synthetic", action="store_true", help="train on generated images, without a download")
    add("--limit", type=at_least(1), help="use only the first LIMIT images of each set")
    add("--arch", default="resnet50", choices=[f"resnet{depth}" for depth in (18, 34, 50, 101, 152)])
    add("--image-size", type=at_least(1), default=32, help="in pixels (default: 32)")
    add("--pretrained", action="store_true", help="start from ImageNet weights; best with --image-size 224")
    add("--freeze-backbone", action="store_true", help="train only the last layer; use it with --pretrained")
    add("--epochs", type=at_least(1), default=30, help="default: 30")
    add("--batch-size", type=at_least(1), help="images per step over all GPUs (default: 512 per GPU)")
    add("--lr", type=float, help="peak learning rate (default: 0.4 per 512 images, at most 1.6)")
    add("--clip-grad", type=float, help="clip the gradients to this norm (default: do not)")
    add("--precision", choices=["fp32", "bf16"], help="default: bf16 if the GPU has it, else fp32")
    add("--compile", action="store_true", help="compile the network with torch.compile")
    add("--workers", type=at_least(0), default=4, help="data-loading processes of each loader (default: 4)")
    add("--seed", type=at_least(0), default=21, help="default: 21")
    add("--log-every", type=at_least(1), default=20, help="print the loss every LOG_EVERY steps (default: 20)")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="save and resume; best weights: FILE.best")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0])
    args = parser.parse_args(argv)
    if "LOCAL_RANK" in os.environ:
        parser.error(f"start this script without torchrun: python {__file__}")
    if args.compile and args.device == "cuda" and torch.cuda.device_count() > 1:
        parser.error("--compile needs one GPU: on several, nn.DataParallel makes new replicas in each step")
    if args.clip_grad is not None and not args.clip_grad > 0:
        parser.error("--clip-grad must be greater than 0")
    if args.precision is None:
        bf16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bf16" if bf16 else "fp32"
    return args


if __name__ == "__main__":
    main(parse_args())
