"""Train a ResNet on CIFAR-10 with nn.DataParallel: one process, several GPUs; on one GPU the plain baseline.

    python dp_train.py

takes all GPUs of this machine (CUDA_VISIBLE_DEVICES=0,2 in front: those two). `grep -nF '# ['` on this file
prints its technique, step by step.

The one process cuts each batch into a piece per GPU, copies the network to all of them in every step, and
collects the outputs on the first.
"""

import argparse
import contextlib
import json
import math
import os
import resource
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
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


class DataParallel(nn.DataParallel):
    """nn.DataParallel without its threads."""

    def parallel_apply(self, copies, inputs, kwargs):
        # [DP 1/7] The original starts a thread per GPU in every step, and cuDNN remembers by thread which algorithm was
        # fastest: with cudnn.benchmark, every step tries every algorithm of every convolution again. autocast's type
        # is lost there as well: bf16 becomes float16. One thread for all has neither trouble.
        outputs = []
        parts = zip(self.device_ids, copies, inputs, kwargs, strict=False)  # a small batch may need fewer GPUs
        for gpu, copy, arguments, keywords in parts:
            with torch.cuda.device(gpu):
                outputs.append(copy(*arguments, **keywords))
        return outputs


@common.fail_on(torch.OutOfMemoryError, "the GPU is full", "give a smaller --batch-size, or see nvidia-smi")
def train(args):
    # ------------------------------------------------------------------------------------------------- Setup
    # [DP 2/7] One process, so rank 0 of 1, has all the GPUs; batches, outputs and optimizer are on the first.
    rank, local_rank, world_size = 0, 0, 1
    cuda = args.device == "cuda"
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    own_gpus = list(range(torch.cuda.device_count())) if cuda else []
    for gpu in reversed(own_gpus):  # the first comes last: set_stream() makes its GPU the current one
        torch.cuda.set_stream(torch.cuda.Stream(gpu))  # a CUDA graph cannot record the default stream
    # [DP 3/7] backward() runs in this thread too: the streams that were set above are those of this thread alone.
    torch.autograd.set_multithreading_enabled(False)
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
    order = torch.Generator()
    train_loader = DataLoader(train_set, shuffle=True, generator=order, drop_last=True, **loading)
    test_loader = DataLoader(test_set, **checking)
    transform = common.BatchTransform(args.image_size, args.pretrained).to(device)
    steps = len(train_loader)

    # ----------------------------------------------------------------------------------- Model and optimizer
    net = common.build_resnet(args.arch, args.image_size, args.pretrained)
    if args.freeze_backbone:
        net.requires_grad_(False)
        net.fc.requires_grad_(True)
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
    # [DP 4/7] The wrapper copies net to every GPU in each forward pass and adds up their gradients in backward().
    # BatchNorm's statistics are those of the first GPU's piece, and validation runs on that GPU alone.
    model = DataParallel(net) if gpus > 1 else net
    if args.compile and gpus > 1:
        print("--compile is left out: torch.compile does nothing for nn.DataParallel; ddp_launch_train.py compiles")
    elif args.compile:
        model = torch.compile(model)

    pids, backend, launcher = [os.getpid()], "none", "none"
    device_name = torch.cuda.get_device_name(device) if cuda else "cpu"
    weights, trained = (sum(p.numel() for p in part) for part in (net.parameters(), trainable))
    print("technique   DataParallel")
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
        # [DP 5/7] The other GPUs' streams branch off from the first's here and join it again after backward(); a CUDA
        # graph that is recorded on the first would not hold their work otherwise.
        for gpu in own_gpus[1:]:
            torch.cuda.current_stream(gpu).wait_stream(torch.cuda.current_stream())
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(transform(inputs, train=True)), targets, label_smoothing=0.1)
        net.zero_grad()
        loss.backward()
        for gpu in own_gpus[1:]:
            torch.cuda.current_stream().wait_stream(torch.cuda.current_stream(gpu))
        if args.clip_grad:
            nn.utils.clip_grad_norm_(trainable, args.clip_grad)
        optimizer.step()
        train_sum.add_(step_loss.copy_(loss.detach()))

    def start_loading(epoch):
        """Return an iterator over the batches of an epoch; its workers begin with the first ones at once."""
        order.manual_seed(args.seed + epoch)
        return iter(train_loader)

    graph = torch.cuda.CUDAGraph() if cuda and not args.eager else None
    pools = {}
    for gpu in own_gpus[1:]:
        with torch.cuda.device(gpu):
            pools[gpu] = torch.cuda.MemPool()
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
        common.seed_everything(args.seed, epoch, rank)
        net.train(not args.freeze_backbone)  # the BatchNorms of a frozen backbone stay in eval mode
        totals.zero_()
        bar = tqdm(batches, total=steps, leave=False, disable=None if rank == 0 else True)
        late, last_step, no_bar = None, 0, bar.disable
        epoch_start = clock = last_time = time.perf_counter()
        for step, (images, labels) in enumerate(bar, 1):
            inputs.copy_(images, non_blocking=True), targets.copy_(labels, non_blocking=True)
            # [DP 6/7] Python takes longer to start a step's kernels than the GPU to run them, most of all on several. A
            # CUDA graph records one step of all GPUs, and from then on starts it as a whole, in memory of its own.
            if graph and done == 12:  # thread_local: DataLoader's thread that pins batches goes on meanwhile
                with contextlib.ExitStack() as recording:
                    stream = torch.cuda.current_stream()
                    recording.enter_context(torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"))
                    for gpu, pool in pools.items():  # the first GPU's memory is the graph's own affair
                        recording.enter_context(torch.cuda.use_mem_pool(pool, gpu))
                    update()
                update = graph.replay
            update()
            scheduler.step()
            # The GPU never waits for the host: a loss sets out for it here and is printed after the next step.
            if late:
                report(*late)
            late = None
            if step % args.log_every == 0:
                copy = step_loss.to("cpu", non_blocking=True, copy=True)
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
        # [DP 7/7] net is written rather than model: no "module." before the names of the weights.
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
    result = dict(
        script=Path(__file__).name, launcher=launcher, backend=backend, device=args.device, gpus=gpus,
        world_size=world_size, pids=pids, arch=args.arch, image_size=args.image_size, precision=precision,
        batch_size=args.batch_size, epochs=args.epochs, steps=args.epochs * steps,
        images_per_second=(done - warm) * args.batch_size / train_seconds if done > warm else None,
        seconds_per_20_steps=20 * train_seconds / (done - warm) if done > warm else None,
        peak_memory_mib=peaks, **metrics, seconds=time.perf_counter() - start,
    )
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    stopped = "stopped; with --checkpoint FILE the same command goes on where it was"
    signal.signal(signal.SIGTERM, lambda *_: common.fail(stopped, code=143))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        common.fail(f"one process takes all GPUs, and torchrun starts several; start it with: python {__file__}")
    try:
        train(parse_args())
    except KeyboardInterrupt:
        common.fail(stopped, code=130)
    finally:
        for process in torch.multiprocessing.active_children():  # of DataLoader, which else takes 5 s for each
            process.terminate()
