"""Train a ResNet on CIFAR-10 in mixed precision with DDP: by PyTorch itself (torch.amp), or by NVIDIA Apex.

    torchrun --standalone --nproc-per-node=gpu apex_amp_train.py        # gpu: one process for each GPU

For GPUs without bfloat16 (before Ampere). If yours has it, use ddp_launch_train.py, which is simpler.

Each process (its number is its rank) has a copy of the network and its own share of every batch. DDP
- copies rank 0's weights to all processes once, and its BatchNorm statistics before each training step;
- averages the gradients of all processes in each backward pass. So all must train for the same number of steps.

Mixed precision computes convolutions and matrix products in float16, which is faster; the weights stay float32.
Small gradients would become zero in float16. So the loss is multiplied by a scale before the backward pass, and
the gradients are divided by it before the optimizer's step. The scale is found by trial: it begins with 65,536. If
that is too large, gradients become infinite: the step is skipped, and the scale is halved. A few skipped steps are
normal. Steps [AMP 1/6] to [AMP 6/6] do this by torch.amp. (bfloat16 has the range of float32: it needs no scale.)
Old programs may use NVIDIA Apex (--backend apex), or another --opt-level: see the section "For old programs".
"""

import argparse
import datetime
import json
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

import common


@record  # if a process fails, torchrun shows its traceback
def main(args):
    # [DDP 1/8] torchrun starts this script once per GPU and tells each process who it is.
    rank = int(os.environ["RANK"])  # index of this process among all processes
    local_rank = int(os.environ["LOCAL_RANK"])  # index of this process on its machine
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes
    common.setup_for_distributed(rank == 0)  # from here on, print() prints on rank 0 only, or with force=True

    # [DDP 2/8] Each process uses its own GPU. Without set_device, every process would take memory of GPU 0, too.
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    # [DDP 3/8] Connect the processes: GPUs by NCCL, CPUs by gloo. If one waits --timeout seconds, the run ends.
    backend, device_id = ("nccl", device) if cuda else ("gloo", None)
    timeout = datetime.timedelta(seconds=args.timeout)
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)

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
    )
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)  # only full batches
    val_loader = DataLoader(val_set, **loading)

    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # normalises over the images of all GPUs, not of each
    optimizer, scheduler = build_optimizer(args, net, args.epochs * len(train_loader))
    # [AMP 1/6] Make the gradient scaler: it holds the scale of the loss.
    scaler = torch.amp.GradScaler(args.device)
    if not args.torch_amp:  # see the section "For old programs"
        scaler = use_other_level(args, net, optimizer)
    # [AMP 2/6] A checkpoint holds the scale, too.
    stateful = dict(net=net, scaler=scaler, optimizer=optimizer, scheduler=scheduler)  # in the order of loading
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
        train_sums, speed = train_epoch(args, device, epoch, train_loader, model, optimizer, scheduler, scaler)
        print(f"epoch {epoch} scale {scaler.get_scale():g}")  # smaller than before: steps were skipped

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
    # With fused=True, training is 18% faster. But a fused optimizer skips steps by itself: if SGD skips its first,
    # its momentum is left uninitialised. So begin with zeros. With another optimizer, delete this loop.
    for weight in net.parameters():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps)  # sets the momentum, too


def compute_loss(args, model, images, labels, augment):
    """Normalise and augment a batch; return its mean loss and the network's outputs."""
    images = common.prepare(images, args.image_size, args.pretrained, augment)
    # [AMP 3/6] Compute convolutions and matrix products in float16. Keep this `with` if you replace compute_loss.
    with torch.autocast(args.device, torch.float16, enabled=args.torch_amp):
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


def train_epoch(args, device, epoch, loader, model, optimizer, scheduler, scaler):
    """Train on all batches. Return sums over their images (loss, number of images), and images per second."""
    model.train()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    start = time.perf_counter()
    for step, (images, labels) in enumerate(loader, 1):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss, _ = compute_loss(args, model, images, labels, augment=True)
        # [AMP 4/6] Scale the loss, so that small gradients do not become zero in float16.
        scaler.scale(loss).backward()  # meanwhile, DDP averages the gradients of all processes
        if args.clip_grad:
            # [AMP 5/6] Divide the gradients by the scale before clipping.
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        # [AMP 6/6] Step. If one GPU's gradients are infinite, DDP's average is, too: all processes skip the step.
        scaler.step(optimizer)  # divides the gradients by the scale, unless done; skips if one is infinite or NaN
        scaler.update()  # halves the scale after a skipped step; doubles it after 2,000 steps without one
        scheduler.step()  # also after a skipped step: it counts batches
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
        may_differ = "data_dir", "compile", "workers", "log_every", "checkpoint", "timeout", "device"
        for name, value in vars(args).items():  # all others must be equal; new ones are not in the file
            if name not in may_differ and flags.get(name, value) != value:
                raise SystemExit(f"{args.checkpoint} has {name}={flags[name]}, not {value}; use its flags")
        for part, state in zip(stateful.values(), states):
            part.load_state_dict(state)
    found = [None] * dist.get_world_size()  # all must go on from the same epoch, or they would wait for each other
    dist.all_gather_object(found, epochs_done)
    if len(set(found)) > 1:
        raise SystemExit(f"the processes find different versions of {args.checkpoint}; use a shared disk")
    return epochs_done, metrics


# ------------------------------------------------------------ For old programs: NVIDIA Apex, and other levels

# The levels of precision (--opt-level) have Apex's names:
#     O0    float32
#     O1    mixed precision, as above (the default)
#     O2    float16 weights except BatchNorm's; the optimizer updates float32 copies of them (by Apex only)
#     O3    float16, without a scale

try:
    import apex.amp
except Exception:  # not installed, without amp (after release 25.04), or another package of that name
    apex = None


def use_other_level(args, net, optimizer):
    """Change the network and the optimizer in place, if the level needs it. Return what replaces the scaler."""
    if args.backend == "apex":
        return ApexScaler(args, net, optimizer)
    if args.opt_level == "O3":  # weights, images and momentum in float16
        net.half()
        net.register_forward_pre_hook(lambda module, inputs: inputs[0].half())
        optimizer.load_state_dict(optimizer.state_dict())  # gives the momentum the dtype of the weights
    return torch.amp.GradScaler(enabled=False)  # without a scale: its step() is optimizer.step()


class ApexScaler:
    """NVIDIA Apex behind the methods of torch.amp.GradScaler, so that the loop is the same. Apex's own calls:

    __init__()                   net, optimizer = amp.initialize(net, optimizer, opt_level="O1")
    scale(loss).backward()       with amp.scale_loss(loss, optimizer) as scaled_loss:
                                     scaled_loss.backward()
    step(optimizer), update()    optimizer.step()
    """

    def __init__(self, args, net, optimizer):
        self.net, self.optimizer = net, optimizer
        # This changes both in place. O1 patches PyTorch's functions; O2 and O3 make the weights of `net` float16.
        apex.amp.initialize(net, optimizer, opt_level=args.opt_level, verbosity=0)
        optimizer.zero_grad = self.zero_grad

    def zero_grad(self):  # Apex's own fails at O2, because DDP's gradients are views (gradient_as_bucket_view)
        for weight in (*self.net.parameters(), *apex.amp.master_params(self.optimizer)):
            weight.grad = None

    def scale(self, loss):
        self.loss = loss
        return self  # in place of the scaled loss: the loop calls its backward()

    def backward(self):
        with apex.amp.scale_loss(self.loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()  # when the `with` ends, Apex divides the gradients by the scale, and adapts it

    def unscale_(self, optimizer):
        pass  # done in backward()

    def step(self, optimizer):
        optimizer.step()  # Apex skips it if the gradients are infinite or NaN

    def update(self):
        pass  # done in backward()

    def get_scale(self):
        return apex.amp.state_dict()["loss_scaler0"]["loss_scale"]

    def state_dict(self):  # with the weights that the optimizer updates: at O2, float32 copies of those of `net`
        masters = [weight.detach() for weight in apex.amp.master_params(self.optimizer)]
        return dict(scale=apex.amp.state_dict(), masters=masters)

    def load_state_dict(self, state):  # before the optimizer's, whose momentum belongs to O2's copies
        self.optimizer._amp_lazy_init()  # private: makes O2's copies now, not in the first step
        for weight, saved in zip(apex.amp.master_params(self.optimizer), state["masters"], strict=True):
            weight.data.copy_(saved)
        apex.amp.load_state_dict(state["scale"])


# ------------------------------------------------------------ Flags


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
    add("--opt-level", choices=["O0", "O1", "O2", "O3"], default="O1", help="how much is float16 (default: O1)")
    add("--backend", choices=["apex", "torch"], default="torch", help="NVIDIA Apex or PyTorch (default: torch)")
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
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        parser.error(f"start this script with torchrun: torchrun --standalone --nproc-per-node=gpu {__file__}")
    if args.device == "cuda" and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        parser.error("not enough GPUs: each process needs one; or use --device cpu")
    if args.backend == "apex" and (apex is None or args.device == "cpu" or args.compile):
        parser.error("--backend apex needs a GPU, NVIDIA Apex 25.04 (see README), and no --compile")
    if args.opt_level == "O2" and args.clip_grad:
        parser.error("this script cannot clip at O2: that needs apex.amp.master_params")
    if args.backend == "torch" and args.opt_level == "O2":
        parser.error("PyTorch has no O2 (float16 weights with float32 copies); use O1, or --backend apex")
    args.precision = f"{args.opt_level} by {args.backend}"
    args.torch_amp = args.backend == "torch" and args.opt_level == "O1"  # enables autocast and GradScaler
    return args


if __name__ == "__main__":
    main(parse_args())
