"""Train a ResNet on CIFAR-10 in float16 mixed precision with DDP: by torch.amp's GradScaler, or by NVIDIA Apex.

    torchrun --standalone --nproc-per-node=gpu apex_amp_train.py                   # torch.amp with GradScaler
    torchrun --standalone --nproc-per-node=gpu apex_amp_train.py --backend apex    # needs NVIDIA Apex 25.04:
    git clone --branch 25.04 https://github.com/NVIDIA/apex && pip install --no-build-isolation ./apex

The default is for GPUs before Ampere. On newer ones, use ddp_launch_train.py: bfloat16 needs no GradScaler.

Mixed precision computes convolutions and matrix products in float16, which is faster. Small gradients would become
zero there, so the loss is multiplied by a scale before the backward pass, and gradients are divided by it before
the optimizer's step. If they overflow, the step is skipped and the scale is halved, which is normal at first.

Apex brought this to PyTorch, and torch.amp has replaced it. Of Apex's levels, O0 is float32, and O1 uses float16
where it is safe, as torch.amp does. At O2, weights are float16, except BatchNorm's, and the optimizer updates
float32 copies. O3 is float16 without a loss scale. Apex also has its own DDP and SyncBatchNorm (apex.parallel).
With CUDA kernels, this DDP needs torch.contiguous_format. Without them, this SyncBatchNorm fails at O2.
"""

import gc
import json
import math
import os
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter

import torch
import torch.distributed as dist
from filelock import FileLock  # installed with PyTorch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

try:
    from apex import amp
except ImportError:  # Apex is not installed, or is newer than 25.04
    amp = None

import common


@record  # if an exception ends this process, torchrun's summary shows its traceback
def main(args):
    # [DDP 1/7] torchrun starts this script once per GPU and tells each process which one it is.
    rank = int(os.environ["RANK"])  # index of this process among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # index of this process on its machine
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes
    common.setup_for_distributed(rank == 0)  # from here on, print() prints on rank 0 only, unless force=True

    # [DDP 2/7] Each process uses its own GPU. set_device makes it the default, in place of GPU 0.
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    # It connects to the others, with NCCL on GPUs and gloo on CPUs. If a process stops responding, the others wait
    # for ten minutes. Then NCCL aborts them, and no `try` can catch that. (gloo raises an error after thirty.)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    common.seed_everything(args.seed)  # the same initial weights in every run
    train_set, val_set = load_data(args)
    args.batch_size = args.batch_size or 1024 // world_size * world_size  # by default, for any number of GPUs
    if args.batch_size > len(train_set) or args.batch_size % world_size:
        raise SystemExit(f"--batch-size must be at most {len(train_set)}, and divisible by {world_size} processes")

    # [DDP 3/7] In each epoch, DistributedSampler shuffles the images and deals them out. Each process trains on
    # its own share, in batches of batch_size / world_size. (drop_last: all shares and batches are equally large.)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    val_share = Subset(val_set, range(rank, len(val_set), world_size))  # the sampler would repeat some images
    fork = "fork" if args.workers else None  # forked workers share the dataset; Python 3.14 would copy it to each
    options = dict(num_workers=args.workers, multiprocessing_context=fork, collate_fn=collate, pin_memory=cuda)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_share, args.batch_size // world_size, **options)
    steps = len(train_loader)  # per epoch

    model = build_model(args).to(device)
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # BatchNorm's statistics are of all GPUs' images
    optimizer = build_optimizer(args, model)
    shapes = [list(weight.shape) for group in optimizer.param_groups for weight in group["params"]]
    # [AMP 1/4] Apex patches PyTorch's functions (O1) or changes the model and the optimizer in place (O2, O3).
    use_apex = args.backend == "apex"
    if use_apex:
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    else:
        scaler = torch.amp.GradScaler(device.type)  # holds the loss scale
    scheduler = build_scheduler(args, optimizer, args.epochs * steps)  # last, as Apex replaces optimizer.step
    # [AMP 2/4] Save the loss scale, too. Loading it makes O2's float32 copies, which the optimizer's state needs.
    amp_state = ApexState(optimizer) if use_apex else scaler
    stateful = dict(model=model, amp=amp_state, optimizer=optimizer, scheduler=scheduler)
    flags = dict(vars(args), steps=steps, train_size=len(train_set), val_size=len(val_set), weight_order=shapes)
    flags = json.loads(json.dumps(flags, default=str))  # plain values, which torch.load() trusts
    of_all = [None] * world_size
    dist.all_gather_object(of_all, flags)  # each process may have been started with flags of its own
    for name in [name for name in flags if name not in ("data_dir", "workers", "checkpoint")]:
        if any(other.get(name) != flags[name] for other in of_all):
            raise SystemExit(f"the processes need the same {name}: {[other.get(name) for other in of_all]!s:.99}")
    if args.checkpoint and rank == 0:
        lock = FileLock(f"{args.checkpoint}.lock")  # makes the folder, too
        lock.acquire(timeout=30)  # held until the end: a second run on this checkpoint fails after 30 s
    epochs_done, metrics = load_checkpoint(args.checkpoint, flags, stateful)

    # [DDP 4/7] Wrap the model, after all changes to its layers. `ddp_model` and `model` share their weights: train
    # with `ddp_model`, which averages the gradients, and use `model` for everything else.
    ddp_model = DDP(model)  # needs no device_ids, since the inputs are on this process's GPU as well
    # By default, DDP also copies rank 0's buffers (BatchNorm's statistics) to all processes before each step.
    # [DDP 6/7] does it once an epoch, which is faster. (DDP(broadcast_buffers=False) is deprecated since 2.13.)
    ddp_model.broadcast_buffers = False
    if args.compile:
        torch._dynamo.config.optimize_ddp = False  # one piece is faster; DDP then averages after backward()
        ddp_model = torch.compile(ddp_model, mode="reduce-overhead")  # also saves work of the CPU

    print(f"rank {rank}: process {os.getpid()} on {device}: {epochs_done} epochs are done", force=True, flush=True)
    for epoch in range(epochs_done + 1, args.epochs + 1):
        # [DDP 5/7] Shuffle differently in each epoch. Augment with other random numbers in each epoch and process.
        sampler.set_epoch(epoch)
        common.seed_everything(args.seed, epoch, rank)

        ddp_model.train()
        train_sums = Counter()  # its update() adds up
        start = time.perf_counter()
        for step, batch in enumerate(train_loader, 1):
            optimizer.zero_grad()
            loss, sums = compute_loss(args, ddp_model, batch, device, training=True)  # contains [AMP 3/4]
            # [AMP 4/4] Scale the loss, unscale the gradients, and skip the step if they have overflowed.
            # DDP has averaged them, so they are the same in all processes: all skip the same steps.
            if use_apex:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
                # The end of the `with` has unscaled the gradients, and has halved the scale if they overflowed.
                if args.clip_grad:
                    nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip_grad)  # at O2, float32 copies
                optimizer.step()  # at O1 and O2, does nothing if a gradient was infinite or NaN
            else:
                scaler.scale(loss).backward()
                if args.clip_grad:
                    scaler.unscale_(optimizer)  # without clipping, step() unscales
                    nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                scaler.step(optimizer)  # does nothing if a gradient is infinite or NaN
                scaler.update()  # halves the scale after a skipped step, doubles it after 2,000 steps without one
            scheduler.step()  # also after a skipped step
            train_sums.update(sums)
            if step % 20 == 0:
                value, seconds = loss.item(), time.perf_counter() - start  # .item() waits for the GPU
                print(f"epoch {epoch} step {step}/{steps} loss {value:.4g} (rank 0) {seconds:.1f} s", flush=True)
        epoch_metrics = {f"train_{name}": float(v) for name, v in metrics_from(sum_of_all(train_sums)).items()}
        images_per_second = steps * args.batch_size / (time.perf_counter() - start)  # float() waited for the GPU

        # A safeguard, not part of DDP: if the weights have drifted apart, the run ends before it saves.
        if weights_differ(optimizer, device):
            causes = "was model(...) called in place of ddp_model(...)? TROUBLESHOOTING.md has other causes"
            raise SystemExit(f"after epoch {epoch}, the weights of the processes differ: {causes}")

        # [DDP 6/7] Each process validates its own share of the images, and sum_of_all() adds up their sums. Use
        # `model` here: `ddp_model` can communicate, and can hang if one process has more batches than another.
        # BatchNorm's statistics differ between the processes: take rank 0's, so that all validate what is saved.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        epoch_metrics |= {f"val_{name}": float(v) for name, v in validate(args, model, val_loader, device).items()}
        improved = epoch_metrics[MAIN_METRIC] > metrics["best"]
        metrics = epoch_metrics | dict(best=epoch_metrics[MAIN_METRIC] if improved else metrics["best"])
        speed = f"images_per_second {images_per_second:.0f}"
        print(f"epoch {epoch}", *(f"{name} {value:.5g}" for name, value in metrics.items()), speed, flush=True)
        for name, value in epoch_metrics.items():
            if not math.isfinite(value):
                raise SystemExit(f"{name} is {value}: --lr is too large, or a process has divided by a count of 0")

        scale = amp.state_dict()["loss_scaler0"]["loss_scale"] if use_apex else scaler.get_scale()
        print(f"epoch {epoch} loss scale {scale:g}")  # if smaller than before, steps were skipped
        if scale < 1e-3:
            raise SystemExit("the loss scale is near 0: the gradients are NaN or infinite in each step")

        # [DDP 7/7] Only rank 0 saves. It saves `model`: `ddp_model`'s names of the weights begin with "module."
        if args.checkpoint and rank == 0:
            save_checkpoint(args.checkpoint, flags, stateful, epoch, metrics, improved)
        if epoch == epochs_done + 1:  # everything is compiled now
            gc.collect()
            gc.freeze()  # otherwise, Python's garbage collector stops the process for up to a second now and then

    result = dict(metrics, batch_size=args.batch_size, gpus=world_size if cuda else 0, world_size=world_size)
    result["peak_mib"] = torch.cuda.max_memory_allocated() // 2**20  # of the first GPU
    print("RESULT", json.dumps(result))  # for the table of run_all.sh
    dist.destroy_process_group()


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
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
    # If fused SGD skips its first step, it leaves garbage in its momentum. So start with zeros. (Only for SGD.)
    for weight in model.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def build_scheduler(args, optimizer, total_steps):
    """Return the learning rate schedule. Its unit is a batch: main() calls scheduler.step() after each."""
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rates, total_steps, cycle_momentum=False)


def compute_loss(args, model, batch, device, training):
    """Return the mean loss of a batch, and sums over its items (a dict) for metrics_from().

    A sum is a number or a detached tensor of any shape, such as a confusion matrix, best left on the GPU.
    DDP averages the gradients of the processes' mean losses. That is right if all have equally many labels of
    equal weight. If not (class weights, ignored labels, padding), or if the loss compares images with each other,
    see RECIPES.md. --clip-grad clips by the norm of the averaged gradient, which is the same in all processes.
    """
    images, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    images = common.prepare(images, args.image_size, args.pretrained, augment=training)  # labels stay as they are
    # [AMP 3/4] Compute in float16 where it is safe. Apex needs no autocast: amp.initialize() has prepared all.
    with torch.autocast(device.type, torch.float16, enabled=args.backend == "torch"):
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
    return metrics_from(sum_of_all(sums))


class ApexState:
    """What a checkpoint needs of Apex: the loss scale and the weights that the optimizer updates."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return dict(scale=amp.state_dict(), weights=[w.detach() for w in amp.master_params(self.optimizer)])

    def load_state_dict(self, state):
        self.optimizer._amp_lazy_init()  # makes O2's float32 weights now, not in the first step; a private method
        for weight, saved in zip(amp.master_params(self.optimizer), state["weights"], strict=True):
            weight.data.copy_(saved)
        amp.load_state_dict(state["scale"])


def sum_of_all(sums):
    """Return the sums over all processes, in float64. A process without a batch has no sums, and adds nothing."""
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, {name: torch.as_tensor(v).to("cpu", torch.float64) for name, v in sums.items()})
    return {name: sum(sums.get(name, 0) for sums in of_all) for name in set().union(*of_all)}


def weights_differ(optimizer, device):
    """Return whether a process has other weights than rank 0, by more than rounding."""
    different = torch.zeros((), device=device)
    for weight in [weight.detach() for group in optimizer.param_groups for weight in group["params"]]:
        of_rank_0 = weight.clone(memory_format=torch.contiguous_format)  # as broadcast() needs it
        dist.broadcast(of_rank_0, src=0)  # overwrites the copy with rank 0's weight
        different += (weight - of_rank_0).abs().float().norm() > 1e-5 * of_rank_0.abs().float().norm()
    dist.all_reduce(different, op=dist.ReduceOp.SUM)
    return bool(different)


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
    """Load the checkpoint, if there is one. Return the number of epochs done, and the metrics of the last one.

    Rank 0 reads it and sends it to the others. So they need no shared disk, and all resume from the same epoch.
    """
    exists = dist.get_rank() == 0 and path and os.path.exists(path)
    objects = [torch.load(path, map_location="cpu", weights_only=True) if exists else None]
    dist.broadcast_object_list(objects, src=0)
    if (checkpoint := objects[0]) is None:
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
    add("--sync-bn", action="store_true", help="compute BatchNorm's statistics over all GPUs")
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--workers", type=int, default=0, help="worker processes of each DataLoader (default: 0)")
    add("--clip-grad", type=float, help="clip the gradients to this norm (default: do not)")
    add("--backend", choices=["torch", "apex"], default="torch", help="torch.amp or NVIDIA Apex (default: torch)")
    add("--opt-level", choices=["O0", "O1", "O2", "O3"], default="O1", help="how much is float16 (default: O1)")
    add("--seed", type=int, default=21, help="default: 21")
    add("--checkpoint", type=os.path.expanduser, metavar="FILE", help="save and resume; best weights: FILE.best")
    args = parser.parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        parser.error(f"start this script with torchrun: torchrun --standalone --nproc-per-node=gpu {__file__}")
    if args.backend == "apex" and (amp is None or args.compile or not torch.cuda.is_available()):
        parser.error("--backend apex needs a GPU, NVIDIA Apex 25.04, and no --compile")
    if args.backend == "torch" and args.opt_level != "O1":
        parser.error("--opt-level is for --backend apex")
    if any(n is not None and n < 1 for n in (args.synthetic, args.image_size, args.epochs, args.batch_size)):
        parser.error("--synthetic, --image-size, --epochs and --batch-size must be at least 1")
    args.image_size = args.image_size or (224 if args.pretrained else 32)
    return args


if __name__ == "__main__":
    main(parse_args())
