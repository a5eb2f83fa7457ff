"""Train ResNet-50 on CIFAR-10 with all GPUs, counting steps instead of epochs.

torchrun --standalone --nproc-per-node=gpu minimal/by_steps.py

After every 1000 steps, it validates, saves run.pt, and keeps copies of the three newest files.
The same command resumes from run.pt. Start each run in a folder of its own. What differs from
ddp.py: a schedule, the mean loss of all ranks, resuming, and the loop.
"""

import glob
import itertools
import os
import shutil

import checks  # checks.py, beside this file
import torch
import torch.distributed as dist
from filelock import FileLock  # installed with PyTorch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms


def main():
    # 1. torchrun starts this script once per GPU and tells each process which one it is.
    rank = int(os.environ["RANK"])  # index of this process among all
    local_rank = int(os.environ["LOCAL_RANK"])  # index on its machine
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes

    # 2. Each process uses its own GPU and connects to the others.
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    torch.manual_seed(21)
    to_tensor = transforms.ToTensor()
    with FileLock("data.lock"):  # one process downloads while the others wait
        train_set = datasets.CIFAR10("data", train=True, download=True, transform=to_tensor)
    val_set = datasets.CIFAR10("data", train=False, transform=to_tensor)

    # 3. Each rank trains on its own share of the images. The sampler shuffles and drops a few
    # to make shares equal. In validation, none is dropped: rank 1 of 4 has images 1, 5, 9...
    sampler = DistributedSampler(train_set, seed=21, drop_last=True)
    batch_size = 512 // world_size  # of each rank; all together use about 512 images per step
    batch_sampler = BatchSampler(sampler, batch_size, drop_last=False)  # lists of indices
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_share, batch_size=512, num_workers=8)

    model = models.resnet50(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # both for small images
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps, every = 20_000, 1000
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )

    # Resume. The schedule exists already, because creating it changes the learning rate.
    settings = dict(images=len(train_set), batch=batch_size * world_size, steps=steps)
    done = 0  # steps that are done
    if os.path.exists("run.pt"):
        state = torch.load("run.pt", map_location="cpu")
        assert state["settings"] == settings, f"run.pt has {state['settings']}, not {settings}"
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        done = state["done"]
    checks.same_on_all_ranks(dict(done=done))  # raises an error if a machine lacks the file

    # 4. Wrap the model. DDP copies rank 0's weights to all ranks. Train with `ddp_model`, which
    # averages the gradients in backward(), and shares its weights with `model`.
    ddp_model = DDP(model)  # no device_ids: model and images are on its GPU already
    # Step 6 copies BatchNorm's statistics, so DDP need not copy them in each step. (As an
    # argument of DDP, broadcast_buffers=False is deprecated since PyTorch 2.13.)
    ddp_model.broadcast_buffers = False

    for start in range(done, steps, every):
        # DataLoader cannot start within an epoch. So collect the next batches of this rank, as
        # lists of indices, and make a loader for them. A new seed, because a resumed run has to
        # draw the same random numbers. Dropout and random transforms should differ by rank.
        torch.manual_seed(21 + rank + world_size * start)
        end, batches = min(start + every, steps), []
        while len(batches) < end - start:
            epoch, step = divmod(start + len(batches), len(batch_sampler))
            sampler.set_epoch(epoch)  # 5. Shuffle differently in each epoch.
            missing = end - start - len(batches)
            batches += itertools.islice(batch_sampler, step, step + missing)
        model.train()
        loss_sum = torch.zeros((), device=device)
        for images, labels in DataLoader(train_set, batch_sampler=batches, num_workers=8):
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loss_sum += loss.detach()
        checks.same_weights(optimizer)  # ends the run if the weights of the ranks differ

        # 6. Each rank validates its share. BatchNorm's statistics differ by rank: use rank 0's.
        # Call `model`, because `ddp_model` may wait for a rank that has no batch left.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all processes
        dist.all_reduce(loss_sum)

        # 7. Only rank 0 prints and saves. A call that waits for other ranks would hang here.
        if rank == 0:
            loss = loss_sum.item() / (end - start) / world_size  # the mean over all batches
            accuracy = correct.item() / len(val_set)
            print(f"step {end} loss {loss:.4f} accuracy {accuracy:.4f}")
            state = dict(model=model, optimizer=optimizer, scheduler=scheduler)
            state = {name: part.state_dict() for name, part in state.items()}
            torch.save(dict(state, settings=settings, done=end), "run.pt.tmp")
            os.replace("run.pt.tmp", "run.pt")  # a run that is killed here keeps the old file
            shutil.copy("run.pt", f"step-{end}.pt")
            for old in sorted(glob.glob("step-*.pt"), key=os.path.getmtime)[:-3]:
                os.remove(old)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
