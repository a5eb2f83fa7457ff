"""Train a ResNet on CIFAR-10 on several GPUs with DistributedDataParallel (DDP): one process per GPU.

    CUDA_VISIBLE_DEVICES=0,1 python ddp_spawn_train.py        # two processes; else one for each GPU of the machine

Each process (its number is its rank) has a copy of the network and its own share of every batch. DDP
- copies rank 0's weights to all processes once, and its BatchNorm statistics before each training step;
- averages the gradients of all processes in each backward pass. So all must train for the same number of steps.
"""

import argparse
import datetime
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
    """Start one process per GPU; return the metrics. In a notebook: ddp_spawn_train.launch(["--epochs", "5"])"""
    args = parse_args(argv)
    world_size = torch.cuda.device_count() if args.device == "cuda" else 2  # processes; on the CPU two, for tests
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")  # loopback: no other machine can connect
    with tempfile.TemporaryDirectory() as folder:  # processes meet in one file there, and leave their metrics
        # [DDP 1/8] Start the processes. Each calls main(rank, world_size, folder, args); its rank is 0, 1, 2, ...
        try:
            torch.multiprocessing.spawn(main, (world_size, folder, args), nprocs=world_size)
        except torch.multiprocessing.ProcessExitedException as error:  # the process has printed why, or was killed
            raise SystemExit(f"{error}") from None
        return torch.load(f"{folder}/metrics0")


def main(rank, world_size, folder, args):  # in each process
    local_rank = rank  # index of this process on its machine: there is only one machine
    common.setup_for_distributed(rank == 0)  # from here on, print() prints on rank 0 only, or with force=True

    # [DDP 2/8] Each process uses its own GPU. Without set_device, every process would take memory of GPU 0, too.
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C does not end a process that waits in NCCL

    # [DDP 3/8] Connect the processes: GPUs by NCCL, CPUs by gloo. If one waits --timeout seconds, the run ends.
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    timeout = datetime.timedelta(seconds=args.timeout)
    meet = f"file://{folder}/store"  # the processes meet in this file, so they need no port
    dist.init_process_group(backend, meet, timeout, world_size=world_size, rank=rank, device_id=device_id)

    common.seed_everything(args.seed)  # the same initial weights in every run
    train_set, val_set = load_data(args)
    if args.batch_size > len(train_set) or args.batch_size % world_size:
        raise SystemExit(f"--batch-size must be at most {len(train_set)}, and divisible by {world_size} processes")
    net = build_network(args).to(device)

    # [DDP 4/8] Each process gets an equal share of each batch, so DDP's average is the whole batch's gradient.
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)  # equal shares
    val_set = Subset(val_set, range(rank, len(val_set), world_size))  # each image once, unlike DistributedSampler
    loading = dict(
        batch_size=args.batch_size // world_size,  # of each process
        num_workers=args.workers,  # processes that load data
        persistent_workers=args.workers > 0,  # start them once, not in each epoch
        generator=torch.Generator().manual_seed(args.seed + rank),  # seeds the workers, differently on each rank
        pin_memory=cuda,
        multiprocessing_context="fork" if args.workers else None,  # faster than spawn. Data must not use CUDA
    )
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)  # only full batches
    val_loader = DataLoader(val_set, **loading)

    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # normalises over the images of all GPUs, not of each
    optimizer, scheduler = build_optimizer(args, net, args.epochs * len(train_loader))
    stateful = dict(net=net, optimizer=optimizer, scheduler=scheduler)  # what a checkpoint holds
    epochs_done, metrics = load_checkpoint(args, stateful)

    # [DDP 5/8] Wrap the network last: no layer may be replaced or frozen later. `model` and `net` share weights.
    model = DDP(net, gradient_as_bucket_view=True)  # no device_ids: net is on its GPU; bucket views avoid copies
    if args.compile:
        model = torch.compile(model, mode="reduce-overhead")  # records CUDA graphs: fewer calls from Python

    print(f"precision {args.precision}, {epochs_done} of {args.epochs} epochs are done")
    print(f"rank {rank}: process {os.getpid()} on {device}", force=True, flush=True)
    start = time.perf_counter()
    for epoch in range(epochs_done + 1, args.epochs + 1):
        # [DDP 6/8] Another order in each epoch, and other random numbers in each process.
        sampler.set_epoch(epoch)
        common.seed_everything(args.seed, epoch, rank)  # so a resumed run equals an unbroken one (not in workers)
        train_sums, speed = train_epoch(args, device, epoch, train_loader, model, optimizer, scheduler)

        # [DDP 7/8] The last step left each process its own BatchNorm statistics. Copy rank 0's, which are saved.
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)
        # Validate with `net`: a forward pass of `model` may communicate, and hang if a process has fewer batches.
        val_sums = validate(args, device, val_loader, net)
        dist.all_reduce(train_sums)  # add up the sums of all processes
        dist.all_reduce(val_sums)
        metrics = report(epoch, metrics_from(train_sums, val_sums), speed, previous=metrics)

        # [DDP 8/8] Only rank 0 writes checkpoints. Save `net`: in `model`, names of weights begin with "module."
        if args.checkpoint and rank == 0:
            save_checkpoint(args, stateful, epoch, metrics)

    run = dict(gpus=world_size if cuda else 0, world_size=world_size, seconds=time.perf_counter() - start)
    print("RESULT", json.dumps(dict(script=os.path.basename(__file__)) | vars(args) | metrics | run), flush=True)
    print(f"rank {rank}: peak GPU memory {torch.cuda.max_memory_allocated() // 2**20} MiB", force=True)
    torch.save(metrics, f"{folder}/metrics{rank}")  # launch() loads those of rank 0
    dist.destroy_process_group()


# ------------------------------------------------------------ Replace these in your own project


def load_data(args):
    """Return the training set and the validation set. Their items: (uint8 image (height, width, 3), label)."""
    return common.load_cifar10(args.data_dir, args.limit, args.synthetic)


def build_network(args):
    """Return the network. Weights that shall not be trained have requires_grad=False."""
    return common.build_resnet(args.arch, args.image_size, args.pretrained, args.freeze_backbone)


def build_optimizer(args, net, total_steps):
    """Return SGD and its schedule. The learning rate follows --batch-size, which counts the images of all GPUs."""
    lr = 0.4 * min(args.batch_size / 512, 4) if args.lr is None else args.lr
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.95, weight_decay=5e-4, nesterov=True, fused=True)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps)  # sets the momentum, too


def compute_loss(args, model, images, labels, augment):
    """Normalise and augment a batch; return its mean loss and the network's outputs."""
    images = common.prepare(images, args.image_size, args.pretrained, augment)
    with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16"):
        outputs = model(images)
    return nn.functional.cross_entropy(outputs.float(), labels), outputs  # the loss in float32


def validate(args, device, loader, network):
    """Return sums over all images of the loader: loss, correct answers, number of images."""
    network.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss, outputs = compute_loss(args, network, images, labels, augment=False)
            sums[0] += loss.double() * len(labels)
            sums[1] += (outputs.argmax(1) == labels).sum()
            sums[2] += len(labels)
    return sums


def metrics_from(train_sums, val_sums):
    """Return the metrics, as floats, from the sums over all images. The largest val_accuracy decides FILE.best."""
    train_loss, train_count = train_sums.tolist()
    val_loss, correct, count = val_sums.tolist()
    return dict(train_loss=train_loss / train_count, val_loss=val_loss / count, val_accuracy=correct / count)


# ------------------------------------------------------------ Training and checkpoints


def train_epoch(args, device, epoch, loader, model, optimizer, scheduler):
    """Train on all batches. Return sums over their images (loss, number of images), and images per second."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    start = time.perf_counter()
    for step, (images, labels) in enumerate(loader, 1):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss, _ = compute_loss(args, model, images, labels, augment=True)
        loss.backward()  # meanwhile, DDP averages the gradients of all processes
        if args.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        scheduler.step()
        sums[0] += loss.detach().double() * len(labels)  # .item() would wait for the GPU in every step
        sums[1] += len(labels)
        if step % args.log_every == 0:
            print(f"epoch {epoch} step {step}/{len(loader)} loss of rank 0: {loss.item():.5g}", flush=True)
    loss.item()  # wait for the GPU; only then read the clock
    return sums, len(loader) * args.batch_size / (time.perf_counter() - start)


def report(epoch, metrics, speed, previous):
    """Add the best accuracy so far and the speed to the metrics of this epoch. Print and return them."""
    metrics |= dict(best_accuracy=max(previous["best_accuracy"], metrics["val_accuracy"]), images_per_second=speed)
    print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), flush=True)
    if not all(map(math.isfinite, metrics.values())):
        raise SystemExit(f"epoch {epoch}: NaN or infinite metrics; use a smaller --lr and a new --checkpoint")
    return metrics


def save_atomically(state, path):
    """Write a file completely or not at all: if the process is killed meanwhile, the old file remains."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def save_checkpoint(args, stateful, epoch, metrics):
    """Save all that a resumed run needs, and the weights of the best epoch in FILE.best."""
    states = {name: part.state_dict() for name, part in stateful.items()}
    if metrics["val_accuracy"] == metrics["best_accuracy"]:  # no epoch before was better
        save_atomically(states["net"], f"{args.checkpoint}.best")
    save_atomically(dict(states, flags=vars(args), epoch=epoch, metrics=metrics), args.checkpoint)


def load_checkpoint(args, stateful):
    """Load the checkpoint, if any, into `stateful`. Return the number of epochs done, and the metrics."""
    epochs_done, metrics = 0, dict(best_accuracy=-math.inf)
    if args.checkpoint and os.path.exists(args.checkpoint):
        try:
            saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)  # no second copy on GPU 0
            epochs_done, metrics, flags = saved["epoch"], saved["metrics"], saved["flags"]
            states = [saved[name] for name in stateful]
        except Exception as error:  # a damaged file can raise anything
            raise SystemExit(f"cannot read checkpoint {args.checkpoint} ({type(error).__name__})") from None
        may_differ = "data_dir", "precision", "compile", "workers", "log_every", "checkpoint", "timeout", "device"
        for name, value in vars(args).items():  # all others must be equal; new ones are not in the file
            if name not in may_differ and flags.get(name, value) != value:
                raise SystemExit(f"{args.checkpoint} has {name}={flags[name]}, not {value}; use its flags")
        for part, state in zip(stateful.values(), states):
            part.load_state_dict(state)
    return epochs_done, metrics


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", default="data", help="folder with CIFAR-10; downloaded if missing (default: data)")
    add("--synthetic", action="store_true", help="train on generated images, without a download")
    add("--limit", type=int, help="use only the first LIMIT images of each set")
    add("--arch", default="resnet50", choices=[f"resnet{depth}" for depth in (18, 34, 50, 101, 152)])
    add("--image-size", type=int, default=32, help="in pixels (default: 32)")
    add("--pretrained", action="store_true", help="start from ImageNet weights; best with --image-size 224")
    add("--freeze-backbone", action="store_true", help="train only the last layer")
    add("--epochs", type=int, default=30, help="default: 30")
    add("--batch-size", type=int, default=512, help="images per step over all GPUs (default: 512)")
    add("--lr", type=float, help="peak learning rate (default: 0.4 per 512 images, at most 1.6)")
    add("--clip-grad", type=float, help="clip the gradients to this norm (default: do not)")
    add("--precision", choices=["fp32", "bf16"], help="default: bf16 if the GPU has it, else fp32")
    add("--sync-bn", action="store_true", help="compute BatchNorm over the shares of all GPUs (not on the CPU)")
    add("--compile", action="store_true", help="compile the network with torch.compile")
    add("--workers", type=int, default=4, help="data-loading processes of each loader (default: 4)")
    add("--seed", type=int, default=21, help="default: 21")
    add("--log-every", type=int, default=20, help="print the loss every LOG_EVERY steps (default: 20)")
    add("--checkpoint", type=os.path.abspath, metavar="FILE", help="save here and resume; best weights: FILE.best")
    add("--timeout", type=int, default=600, help="seconds for which a process waits for the others (default: 600)")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0])
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 1 if name in ("limit", "image_size", "epochs", "batch_size", "log_every", "timeout") else 0
        if type(value) in (int, float) and not value >= least:  # `not`, since comparing NaN gives False
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.checkpoint and not os.path.isdir(os.path.dirname(args.checkpoint)):
        parser.error(f"there is no folder {os.path.dirname(args.checkpoint)} for --checkpoint")
    if "LOCAL_RANK" in os.environ:
        parser.error(f"start this script without torchrun: python {__file__}")
    bf16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    args.precision = args.precision or ("bf16" if bf16 else "fp32")
    return args


if __name__ == "__main__":
    launch()  # the new processes import this file, too, but must not launch again
