"""Compare the port with compare_old.py, and on several processes: ddp.py with a few changes."""

import os

import checks  # checks.py, beside this file
import torch
import torch.distributed as dist
from filelock import FileLock  # installed with PyTorch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
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
    torch.set_default_dtype(torch.float64)  # because rounding may hide small mistakes
    to_tensor = transforms.ToTensor()
    with FileLock("data.lock"):  # one process downloads while the others wait
        train_set = datasets.CIFAR10("data", train=True, download=True, transform=to_tensor)
    val_set = datasets.CIFAR10("data", train=False, transform=to_tensor)
    train_set = Subset(train_set, range(60))
    val_set = Subset(val_set, range(101))  # which ranks cannot share equally

    # 3. Each rank trains on its own share of the images. The sampler shuffles and drops a few
    # to make shares equal. In validation, none is dropped: rank 1 of 4 has images 1, 5, 9...
    sampler = DistributedSampler(train_set, shuffle=False, drop_last=True)
    batch_size = 12 // world_size
    train_loader = DataLoader(train_set, batch_size, sampler=sampler)
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_share, batch_size=512)

    model = models.resnet50(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # both for small images
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # 4. Wrap the model. DDP copies rank 0's weights to all ranks. Train with `ddp_model`, which
    # averages the gradients in backward(), and shares its weights with `model`.
    ddp_model = DDP(model)  # no device_ids: model and images are on its GPU already
    # Step 6 copies BatchNorm's statistics, so DDP need not copy them in each step. (As an
    # argument of DDP, broadcast_buffers=False is deprecated since PyTorch 2.13.)
    ddp_model.broadcast_buffers = False
    torch.manual_seed(21 + rank)  # dropout and random transforms should differ between ranks

    for epoch in range(2):
        sampler.set_epoch(epoch)  # 5. Shuffle differently in each epoch.
        model.eval()  # no dropout; BatchNorm uses its stored statistics, not those of the batch
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            checks.same_gradient(model)
            if world_size == 1:  # with several, each rank has the loss of its own images
                checks.same_as_before("loss", loss)
            optimizer.step()
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
        checks.same_as_before("correct", correct)

        # 7. Only rank 0 prints and saves. A call that waits for other ranks would hang here.
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct.item() / len(val_set):.4f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
