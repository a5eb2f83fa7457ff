"""Train a ResNet on CIFAR-10 with DistributedDataParallel (DDP): one process per GPU, started by the script.

    python ddp_spawn_train.py        # one process for each GPU, or for those in CUDA_VISIBLE_DEVICES

Each process runs main() on its own GPU, with its own replica of the network and its own share of every
batch. DDP keeps the replicas equal. It
- copies the weights of rank 0 to all processes once;
- averages the gradients of all processes in each backward pass (an all-reduce), so all take the same step.
So all processes must train for the same number of steps. BatchNorm's statistics are not averaged: each process
computes its own, and those of rank 0 are validated and saved.
"""

import argparse
import fcntl
import json
import math
import os
import signal
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import common


def launch(argv=None):
    """Train in one process per GPU; return the metrics. In a notebook: ddp_spawn_train.launch(["--epochs=5"])"""
    args = parse_args(argv)
    world_size = torch.cuda.device_count() if args.device == "cuda" else 2  # number of processes; two on the CPU
    with tempfile.TemporaryDirectory() as folder:
        # [DDP 1/8] Start the processes. Each calls main(rank, world_size, folder, args), with rank 0, 1, 2, ...
        try:
            torch.multiprocessing.spawn(main, (world_size, folder, args), nprocs=world_size)
        except torch.multiprocessing.ProcessExitedException as error:  # the process has said why, or was killed
            raise SystemExit(str(error)) from None
        return torch.load(f"{folder}/metrics")


def main(rank, world_size, folder, args):
    local_rank = rank  # index of this process on its machine: there is only one machine
    common.setup_for_distributed(rank == 0)  # from here on, print() prints on rank 0 only, unless force=True

    # [DDP 2/8] Each process uses its own GPU. Without set_device, each would also take memory on GPU 0.
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    common.seed_everything(args.seed)  # the same initial weights in every run
    train_set, val_set = load_data(args)
    if args.batch_size is None:
        args.batch_size = 512 * world_size
    if args.batch_size > len(train_set) or args.batch_size % world_size:
        raise SystemExit(f"--batch-size must be at most {len(train_set)}, and divisible by {world_size} processes")
    net = build_network(args).to(device)
    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # BatchNorm over the images of all GPUs, not of each
    # Rank 0 reads the checkpoint, if there is one, and sends it to the other processes when they are connected.
    checkpoint = [load_checkpoint(args) if rank == 0 else None]

    # [DDP 3/8] Connect the processes: NCCL on GPUs, gloo on CPUs. What can fail or take long comes before.
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")  # loopback: no other machine can connect
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # lets Ctrl-C end a process that waits in NCCL
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",  # a file in which the processes find each other; needs no port
        world_size=world_size,
        rank=rank,
        device_id=device if cuda else None,
    )
    dist.broadcast_object_list(checkpoint, src=0)  # replaces None in the lists of the other processes

    # [DDP 4/8] Each process loads an equal share of each batch: the mean of equal shares is the mean of the batch.
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    val_share = Subset(val_set, range(rank, len(val_set), world_size))  # DistributedSampler would repeat images
    loading = dict(
        batch_size=args.batch_size // world_size,  # of each process
        num_workers=args.workers,
        multiprocessing_context="fork" if args.workers else None,  # Python 3.14's default copies the data set
        persistent_workers=args.workers > 0,  # start them once, not in every epoch
        # Workers are seeded from this generator when they start, once in a run. From the global one, that would
        # change the augmentation in the first epoch after a resume.
        generator=torch.Generator().manual_seed(args.seed + rank),
        pin_memory=cuda,
    )
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    val_loader = DataLoader(val_share, **loading)

    optimizer, scheduler = build_optimizer(args, net, args.epochs * len(train_loader))
    stateful = dict(net=net, optimizer=optimizer, scheduler=scheduler)
    epochs_done, metrics = resume(checkpoint.pop(), stateful)  # pop: do not keep it in memory

    # [DDP 5/8] Wrap the network last: no layer may be replaced or frozen later. `model` and `net` share weights.
    model = DDP(net, gradient_as_bucket_view=True)  # gradients are views of DDP's buffers: saves a copy
    # By default, DDP also copies rank 0's buffers (BatchNorm's statistics) to all processes before each step.
    # [DDP 7/8] does it once an epoch, which is faster. (DDP's argument of this name is deprecated since 2.13.)
    model.broadcast_buffers = False
    if args.compile:
        # By default, the graph is split to begin the all-reduce earlier. That is better over a slow network only.
        torch._dynamo.config.optimize_ddp = False
        model = torch.compile(model, mode="reduce-overhead")  # fuses kernels and records CUDA graphs

    print(f"rank {rank}: process {os.getpid()} on {device}", force=True, flush=True)  # on every rank
    print(f"{epochs_done} of {args.epochs} epochs are done")
    start = time.perf_counter()
    for epoch in range(epochs_done + 1, args.epochs + 1):
        # [DDP 6/8] Shuffle differently in each epoch, and augment with other random numbers on each rank.
        sampler.set_epoch(epoch)
        common.seed_everything(args.seed, epoch, rank)

        model.train()
        loss_sum = torch.zeros((), device=device)
        epoch_start = time.perf_counter()
        for step, batch in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss, _, _ = compute_loss(args, model, batch, device, training=True)
            loss.backward()  # meanwhile, DDP averages the gradients over all processes
            if args.clip_grad:
                nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()  # stays on the GPU: .item() would wait for it in every step
            if step % args.log_every == 0:
                print(f"epoch {epoch} step {step}/{len(train_loader)} loss {loss.item():.5g} (rank 0)", flush=True)
        dist.all_reduce(loss_sum)  # the sum over all processes
        train_loss = loss_sum.item() / len(train_loader) / world_size  # waits for the GPU before the time is taken
        images_per_second = len(train_loader) * args.batch_size / (time.perf_counter() - epoch_start)

        # [DDP 7/8] Each process validates its own share, and all_reduce adds up the sums. Validate with `net`, not
        # `model`: DDP may communicate in a forward pass, which hangs if the processes have unequal shares.
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)  # the last step left each process its own BatchNorm statistics
        val_sums = validate(args, net, val_loader, device)
        dist.all_reduce(val_sums)
        best = metrics["best"]  # of the epochs before
        metrics = dict(train_loss=train_loss, **metrics_from(val_sums), images_per_second=images_per_second)
        metrics = check_metrics(epoch, metrics)
        metrics["best"] = max(best, metrics[MAIN_METRIC])
        print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)

        # [DDP 8/8] Only rank 0 saves. It saves `net`: the names of `model`'s weights begin with "module."
        if args.checkpoint and rank == 0:
            save_checkpoint(args, stateful, epoch, metrics)

    seconds = time.perf_counter() - start
    peak_mib = torch.cuda.max_memory_allocated() // 2**20
    if cuda:
        print(f"peak GPU memory {peak_mib} MiB")
    # For run_all.sh, which compares the scripts.
    result = dict(script=os.path.basename(__file__)) | vars(args) | metrics
    result |= dict(gpus=world_size if cuda else 0, world_size=world_size, seconds=seconds, peak_mib=peak_mib)
    print("RESULT", json.dumps(result), flush=True)
    if rank == 0:
        torch.save(metrics, f"{folder}/metrics")  # for launch()
    dist.destroy_process_group()


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
    add("--sync-bn", action="store_true", help="compute BatchNorm's statistics over all GPUs")
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
    if args.sync_bn and args.device == "cpu":
        parser.error("--sync-bn needs GPUs: PyTorch has no SyncBatchNorm for CPUs")
    if args.clip_grad is not None and not args.clip_grad > 0:
        parser.error("--clip-grad must be greater than 0")
    if args.precision is None:
        bf16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        args.precision = "bf16" if bf16 else "fp32"
    return args


if __name__ == "__main__":
    launch()  # the processes that it starts import this file, too, but must not launch again
