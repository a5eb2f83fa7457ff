"""Train a ResNet on CIFAR-10 with DistributedDataParallel: one process per GPU, started by torchrun.

    torchrun --standalone --nproc-per-node=gpu ddp_launch_train.py

takes all GPUs of this machine (CUDA_VISIBLE_DEVICES=0,2 in front: those two). `grep -nF '# ['` on this file
prints its technique, step by step.

Every process has the whole network and its own share of each batch; while the gradients are being computed,
they are averaged over all processes.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

import common


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = lambda message: common.fail(f"{message}; --help lists the flags")
    add = parser.add_argument
    add("--data-dir", metavar="DIR", default="data", help="where CIFAR-10 lies or is downloaded to (default: data)")
    add("--synthetic", action="store_true", help="CIFAR-10-shaped images made from the seed, no download")
    add("--limit", metavar="N", type=int, help="only the first N training images and the first N test images")
    add("--arch", default="resnet50", choices=[f"resnet{depth}" for depth in (18, 34, 50, 101, 152)])
    add("--image-size", metavar="PIXELS", type=int, help="default: 32, or 224 with --pretrained")
    add("--pretrained", action="store_true", help="start from torchvision's ImageNet weights")
    add("--freeze-backbone", action="store_true", help="train only the last layer")
    add("--epochs", metavar="N", type=int, default=30)
    add("--batch-size", metavar="N", type=int, default=512, help="images a step over ALL GPUs (default: 512)")
    add("--lr", type=float, help="peak learning rate (default: 0.4 for each 512 images a step, at most 1.6)")
    add("--clip-grad", metavar="NORM", type=float, help="clip the gradients to this norm (default: do not)")
    add("--workers", metavar="N", type=int, default=4, help="data-loading processes per training process (default: 4)")
    add("--precision", choices=["fp32", "tf32", "bf16"], help="default: bf16 where the GPU has it, else fp32")
    add("--compile", action="store_true", help="compile the network with torch.compile")
    add("--eager", action="store_true", help="start every GPU kernel from Python, without a CUDA graph")
    add("--seed", metavar="N", type=int, default=21)
    add("--log-every", metavar="N", type=int, default=20, help="steps between two printed lines (default: 20)")
    add("--checkpoint", metavar="FILE", help="resume from FILE if it is there; write it after every epoch")
    add("--tensorboard", metavar="DIR", help="write loss, learning rate, accuracy and images/s for TensorBoard")
    add("--profile", metavar="FILE.json", help="write a trace of three training steps, to open in ui.perfetto.dev")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if there is a GPU, else cpu")
    add("--sync-bn", action="store_true", help="BatchNorm over the whole batch, not over each process's share")
    add("--timeout", metavar="SECONDS", type=int, default=600, help="until a process that hangs ends the run")
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)  # torch.distributed.launch passes it
    args = parser.parse_args()
    for name, value in vars(args).items():
        if value == "":
            parser.error(f"--{name.replace('_', '-')} is empty; name a file or a folder, or leave it out")
        least = 0 if name in ("lr", "clip_grad", "workers", "seed", "local_rank") else 1
        most = {"image_size": 2048, "workers": 256, "nproc": 256}.get(name, 2**31 - 1)
        if type(value) in (int, float) and not least <= value <= most:
            parser.error(f"--{name.replace('_', '-')} is {value} and must be from {least} to {most}")
    wanted, found = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count()
    if args.device != "cpu" and found < len([name for name in wanted.split(",") if name]):
        parser.error(f"CUDA_VISIBLE_DEVICES={wanted} finds {found} GPUs; see nvidia-smi -L, or use --device cpu")
    args.device = args.device or ("cuda" if found else "cpu")
    if args.device == "cuda" and not found:
        parser.error("--device cuda finds no GPU; see nvidia-smi, or use --device cpu")
    args.image_size = args.image_size or (224 if args.pretrained else 32)
    if args.pretrained and args.image_size <= 64:
        parser.error("--pretrained weights have the ImageNet stem and need --image-size 65 or more")
    if args.sync_bn and args.device == "cpu":
        parser.error("--sync-bn needs GPUs; leave it out on the CPU")
    return args


def save(state, path, temporary):
    """Write a file whole or not at all: whatever happens, the old file stays; on a full disk training goes on."""
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        print(f"{path} is not saved ({reason}) and training goes on; make room or mend the folder", flush=True)
    finally:
        with contextlib.suppress(OSError):
            for left in temporary.parent.glob("[0-9]*.part"):  # of a run that was killed, too
                left.unlink()
            temporary.parent.rmdir()  # which leaves alone what somebody else has put there


@record  # lets torchrun show the traceback of the process that failed
@common.fail_on(torch.OutOfMemoryError, "the GPU is full", "give a smaller --batch-size, or see nvidia-smi")
def train(args):
    # ------------------------------------------------------------------------------------------------- Setup
    # [DDP 1/14] torchrun starts this file once per GPU and tells each process, in its environment, who it is.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, local_rank, world_size, local_world_size = (int(os.environ[name]) for name in names)
    cuda = args.device == "cuda"
    if cuda and local_world_size > (found := torch.cuda.device_count()):
        common.fail(f"{local_world_size} processes and {found} GPUs here; start one process per GPU")
    if args.batch_size % world_size:
        less = max(args.batch_size // world_size, 1) * world_size
        common.fail(f"--batch-size must divide by {world_size} processes; {less} and {less + world_size} are nearest")
    # [DDP 2/14] Each process takes its own GPU before any other CUDA call; else all put a context on GPU 0.
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    own_gpus = [local_rank] if cuda else []
    for gpu in reversed(own_gpus):  # the first comes last: set_stream() makes its GPU the current one
        torch.cuda.set_stream(torch.cuda.Stream(gpu))  # a CUDA graph cannot record the default stream
    torch.set_num_threads(max(1, os.cpu_count() // world_size))
    gpus = len(own_gpus) * world_size
    common.seed_everything(args.seed)
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = args.precision or ("bf16" if bf16 else "fp32")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = True

    # -------------------------------------------------------------------------------------------------- Data
    if args.synthetic:
        train_set, test_set = common.synthetic_cifar10(args.seed, args.limit)
    else:
        train_set, test_set = common.load_cifar10(args.data_dir, args.limit)
    if len(train_set) < args.batch_size:
        common.fail(f"--batch-size {args.batch_size} is more than the {len(train_set)} training images; give less")
    loading = dict(batch_size=args.batch_size // world_size, num_workers=args.workers, pin_memory=cuda)
    if args.workers:  # forked workers share the images' memory and start at once, which spawned ones do not
        loading |= dict(persistent_workers=True, multiprocessing_context="fork")
    checking = loading | (dict(batch_size=625) if args.image_size <= 64 else {})  # equal parts on 1, 2, 4 and 8 GPUs
    # [DDP 3/14] Each process trains on its own share of the images; without the sampler all read the same ones.
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    # [DDP 4/14] It validates its own share too, unpadded: DistributedSampler would count some images twice.
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), **checking)
    transform = common.BatchTransform(args.image_size, args.pretrained).to(device)
    steps = len(train_loader)

    # ----------------------------------------------------------------------------------- Model and optimizer
    net = common.build_resnet(args.arch, args.image_size, args.pretrained)
    # [DDP 5/14] Freeze and convert layers before wrapping: DDP notes only then which gradients it has to average.
    if args.freeze_backbone:
        net.requires_grad_(False)
        net.fc.requires_grad_(True)
    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net.to(device)
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    lr = 0.4 * min(args.batch_size / 512, 4) if args.lr is None else args.lr
    rate = torch.tensor(lr, device=device)  # a number would be part of a CUDA graph for good
    optimizer = torch.optim.SGD(trainable, rate, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
    total, warmup = args.epochs * steps, 0.2 * args.epochs * steps

    def one_cycle(step):  # up to lr over the first fifth of the run, then down to zero, both in a straight line
        return min((step + 1) / (warmup + 1), (total - step) / (total - warmup))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, one_cycle)
    epochs_done, best, changed = 0, 0.0, ""
    kind = dict(arch=args.arch, image_size=args.image_size, batch_size=args.batch_size, lr=lr)
    manner = dict(world_size=world_size, precision=precision)  # these may change from run to run
    manner |= {name: getattr(args, name) for name in ("epochs", "seed", "limit", "synthetic", "clip_grad")}
    path = args.checkpoint and Path(os.path.realpath(args.checkpoint))  # a link stays one
    if path and os.path.exists(path):
        advice = "give its run's flags or another FILE"
        with common.fail_on(Exception, f"cannot resume from {args.checkpoint}", advice):  # broken files raise anything
            if not os.path.isfile(path):
                raise ValueError("it is no file")
            saved = torch.load(path, map_location="cpu", weights_only=True)
            if differs := [f"--{k.replace('_', '-')} {saved.get(k)}" for k in kind if saved.get(k) != kind[k]]:
                raise ValueError(f"it has {' '.join(differs)}")
            if saved["epoch"] > args.epochs or saved["scheduler"]["last_epoch"] != saved["epoch"] * steps:
                raise ValueError(f"it has {saved['epoch']} epochs, {saved['scheduler']['last_epoch']} steps in all")
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"].to(device)
            scheduler.load_state_dict(saved["scheduler"])
            epochs_done, best, metrics = saved["epoch"], saved["best"], saved["metrics"]
            changed = "".join(f"; {k} was {saved.get(k)}, is {v}" for k, v in manner.items() if saved.get(k) != v)
    with common.fail_on(OSError, "the data-loading processes cannot start", "give fewer --workers or see ulimit -n"):
        for loader in train_loader, test_loader:  # fork now: beside busy threads a fork hangs at times
            iter(loader)
    # [DDP 6/14] Join the other processes only now, with all files at hand: no collective waits for a download.
    backend = "nccl" if cuda else "gloo"
    store = dist.HashStore() if world_size == 1 else None  # alone it needs no port; else torchrun's
    if world_size == local_world_size:  # on one machine nothing listens to the network
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")  # or a hang takes NCCL a minute longer to end
    os.environ.setdefault("TORCH_NCCL_DESYNC_DEBUG", "1")  # NCCL then names the rank that hangs
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"  # with 1, torchrun's, a hang beside a CUDA graph did not end
    timeout = datetime.timedelta(seconds=args.timeout)
    advice = "check the addresses and, in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, the network cards"
    with common.fail_on((RuntimeError, ValueError), "the processes cannot meet", advice):
        dist.init_process_group(backend, None, timeout, world_size, rank, store, device_id=device if cuda else None)
    # [DDP 7/14] The wrapper copies rank 0's weights to all and averages the gradients, in place, during backward().
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    model.broadcast_buffers = False  # BatchNorm statistics need not travel every step: see 12
    if args.compile:
        model = torch.compile(model)

    everyone = torch.empty(world_size, 2, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyone, torch.tensor([[os.getpid(), epochs_done]], device=device))
    pids, all_epochs_done = everyone.T.tolist()
    if len(set(all_epochs_done)) > 1:
        common.fail(f"not all processes find the same {args.checkpoint}; put it on a disk that all machines share")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "none"
    device_name = torch.cuda.get_device_name(device) if cuda else "cpu"
    weights, trained = (sum(p.numel() for p in part) for part in (net.parameters(), trainable))
    print(f"technique   DistributedDataParallel ({backend}), launcher {launcher}")
    print(f"devices     {gpus or world_size} x {device_name}, world size {world_size}, process ids {pids}")
    print(f"batch       {args.batch_size} images a step, {args.batch_size // world_size} per process")
    print(f"network     {args.arch}, {precision}, {weights:,} parameters, {trained:,} of them trainable")
    print(f"epochs      {epochs_done} done, {args.epochs - epochs_done} to come of {steps} steps{changed}", flush=True)

    # ------------------------------------------------------------------------------------------------- Train
    if args.tensorboard and rank == 0:
        advice = "install tensorboard or name another folder"
        with common.fail_on((ImportError, OSError), f"no --tensorboard {args.tensorboard}", advice):
            from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only where it is wanted

            writer = SummaryWriter(args.tensorboard, purge_step=epochs_done + 1)
    if args.profile and rank == 0:
        if (args.epochs - epochs_done) * steps < 8:
            common.fail("--profile needs 8 steps or more to come; give more --epochs or a smaller --batch-size")
        if not args.profile.endswith((".json", ".json.gz")):  # so no checkpoint is overwritten by mistake
            common.fail(f"--profile {args.profile} does not end in .json or .json.gz; name a file that does")
        with common.fail_on(OSError, f"no --profile {args.profile}", "name a file that can be written"):
            open(args.profile, "a").close()

    def report(step, now, loss, copied):
        """Print the line of a step: the loss, and the speed since the last line."""
        nonlocal last_step, last_time
        if cuda:
            copied.synchronize()
            now = time.perf_counter()
        speed = (step - last_step) * args.batch_size / (now - last_time)
        line = f"epoch {epoch} step {step}/{steps} loss {loss.item()} images/s {speed:.0f} seconds {now - start:.1f}"
        print(line, flush=True) if no_bar else bar.set_postfix_str(line, refresh=False)
        last_step, last_time = step, now

    # Every batch goes to the same memory: there a CUDA graph looks for it.
    share = args.batch_size // world_size
    inputs, targets = (torch.empty(share, *x.shape, dtype=x.dtype, device=device) for x in train_set[0])
    step_loss = torch.zeros((), device=device)
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    train_sum, val_sum, correct, count = totals.unbind()  # views: adding to one of them adds to totals

    def update():
        """Train one step on `inputs` and `targets`."""
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(transform(inputs, train=True)), targets, label_smoothing=0.1)
        net.zero_grad()
        loss.backward()
        if args.clip_grad:
            nn.utils.clip_grad_norm_(trainable, args.clip_grad)
        optimizer.step()
        train_sum.add_(step_loss.copy_(loss.detach()))

    def start_loading(epoch):
        """Return an iterator over the batches of an epoch; its workers begin with the first ones at once."""
        # [DDP 8/14] Each epoch has its own order of the images; without set_epoch() all have that of the first.
        sampler.set_epoch(epoch)
        return iter(train_loader)

    graph = torch.cuda.CUDAGraph() if cuda and not args.eager else None
    start, done, train_seconds = time.perf_counter(), 0, 0.0
    warm = min(20, (args.epochs - epochs_done) * steps // 2)  # the first steps are slow and do not count as speed
    profiler = None
    if args.profile and rank == 0:
        schedule = torch.profiler.schedule(skip_first=warm, wait=0, warmup=1, active=3, repeat=1)
        profiler = torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(args.profile)
        )
        profiler.start()
    batches = start_loading(epochs_done + 1)
    for epoch in range(epochs_done + 1, args.epochs + 1):
        # [DDP 9/14] Each rank has its own seed; with one for all, every process would crop and flip alike.
        common.seed_everything(args.seed, epoch, rank)
        net.train(not args.freeze_backbone)  # the BatchNorms of a frozen backbone stay in eval mode
        totals.zero_()
        bar = tqdm(batches, total=steps, leave=False, disable=None if rank == 0 else True)
        late, last_step, no_bar = None, 0, bar.disable
        epoch_start = clock = last_time = time.perf_counter()
        for step, (images, labels) in enumerate(bar, 1):
            inputs.copy_(images, non_blocking=True), targets.copy_(labels, non_blocking=True)
            # [DDP 10/14] Python takes longer to start a small step's kernels than the GPU to run them. A CUDA graph
            # records one step, all-reduce included (DDP allows it after eleven), and from then on starts it as a whole.
            if graph and done == 12:  # thread_local: DataLoader's thread that pins batches goes on meanwhile
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                    update()
                update = graph.replay
            update()
            scheduler.step()
            # The GPU never waits for the host: a loss sets out for it here and is printed after the next step.
            if late:
                report(*late)
            late = None
            if step % args.log_every == 0:
                # [DDP 11/14] The mean of all processes. --timeout counts here: within a graph NCCL watches nothing.
                mean = step_loss / world_size
                dist.all_reduce(mean)
                copy = mean.to("cpu", non_blocking=True)
                late = step, time.perf_counter(), copy, torch.cuda.current_stream().record_event() if cuda else None
            if profiler:
                profiler.step()
            done += 1
            if done == warm:
                if cuda:
                    torch.cuda.synchronize()
                train_seconds, clock = 0.0, time.perf_counter()
        if late:
            report(*late)
        # [DDP 12/14] BatchNorm's statistics are each process's own so far; their mean is what counts from here on.
        for buffer in filter(torch.is_floating_point, net.buffers()):
            dist.all_reduce(buffer.div_(world_size))
        if cuda:
            torch.cuda.synchronize()
        train_seconds += time.perf_counter() - clock
        images_per_second = steps * args.batch_size / (time.perf_counter() - epoch_start)
        if epoch < args.epochs:  # during validation, so that the next epoch need not wait for its first images
            batches = start_loading(epoch + 1)

        # ------------------------------------------------------------------------------------------ Validate
        net.eval()
        with torch.no_grad():
            for images, labels in test_loader:
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                    outputs = net(transform(images, train=False)).float()
                val_sum.add_(F.cross_entropy(outputs, labels, reduction="sum"))
                correct.add_((outputs.argmax(1) == labels).sum())
                count.add_(len(labels))
        # [DDP 13/14] One all-reduce an epoch turns each process's own sums into those over all processes.
        dist.all_reduce(totals)
        losses, val_losses, hits, seen = totals.tolist()
        assert seen == len(test_set), "each test image is counted once"
        train_loss, val_loss, val_accuracy = losses / (steps * world_size), val_losses / seen, hits / seen
        metrics = dict(train_loss=train_loss, val_loss=val_loss, val_accuracy=val_accuracy)
        seconds = time.perf_counter() - epoch_start
        print(f"epoch {epoch} {' '.join(f'{k} {v}' for k, v in metrics.items())} seconds {seconds:.2f}", flush=True)
        if not math.isfinite(train_loss + val_loss):
            common.fail(f"the loss of epoch {epoch} is no number and not saved; try a smaller --lr or --clip-grad 1")
        if args.tensorboard and rank == 0:
            scalars = dict(metrics, lr=scheduler.get_last_lr()[0], images_per_second=images_per_second)
            for name, value in scalars.items():
                writer.add_scalar(name, value, epoch)

        # ---------------------------------------------------------------------------------------------- Save
        # [DDP 14/14] Rank 0 alone writes, and net rather than model: no "module." before the names of weights.
        if path and rank == 0:
            temporary = Path(f"{path}.tmp", f"{os.getpid()}.part")  # a second run with this FILE writes another
            if val_accuracy > best:
                best = val_accuracy
                save(net.state_dict(), path.with_suffix(f".best{path.suffix}"), temporary)
            state = dict(kind | manner, epoch=epoch, best=best, metrics=metrics)
            state |= dict(model=net.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict())
            save(state, path, temporary)

    peaks = [torch.cuda.max_memory_allocated(gpu) // 2**20 for gpu in own_gpus]
    peaks = peaks or [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024]
    own_peaks = torch.tensor([peaks + [0]], device=device)
    dist.all_gather_into_tensor(everyone, own_peaks)
    peaks = everyone[:, 0].tolist()
    result = dict(
        script=Path(__file__).name, launcher=launcher, backend=backend, device=args.device, gpus=gpus,
        world_size=world_size, pids=pids, arch=args.arch, image_size=args.image_size, precision=precision,
        batch_size=args.batch_size, epochs=args.epochs, steps=args.epochs * steps,
        images_per_second=(done - warm) * args.batch_size / train_seconds if done > warm else None,
        seconds_per_20_steps=20 * train_seconds / (done - warm) if done > warm else None,
        peak_memory_mib=peaks, **metrics, seconds=time.perf_counter() - start,
    )
    print("RESULT", json.dumps(result), flush=True)
    model = update = graph = None  # before the process group, what was gathered after it, or PyTorch 2.6 may hang
    dist.destroy_process_group()


if __name__ == "__main__":
    stopped = "stopped; with --checkpoint FILE the same command goes on where it was"
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    missing = names - os.environ.keys()
    if {"RANK", "WORLD_SIZE"} <= missing:
        signal.signal(signal.SIGTERM, lambda *_: common.fail(stopped, code=143))
        print("One process, without torchrun; for all GPUs: torchrun --standalone --nproc-per-node=gpu", __file__)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    elif missing:
        common.fail(f"the environment lacks {', '.join(sorted(missing))}; start with torchrun, which sets them all")
    else:  # these processes end with a torchrun that is killed
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)
    common.setup_for_distributed(is_master=os.environ["RANK"] == "0")
    try:
        train(parse_args())
    except KeyboardInterrupt:
        common.fail(stopped, code=130)
    finally:
        for process in torch.multiprocessing.active_children():  # of DataLoader, which else takes 5 s for each
            process.terminate()
