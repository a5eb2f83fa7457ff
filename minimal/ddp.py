"""Train ResNet-50 on CIFAR-10 with all GPUs.

torchrun --standalone --nproc-per-node=gpu minimal/ddp.py
"""

import os

import checks  # the file beside this one
import torch
import torch.distributed as dist
from filelock import FileLock  # installed with PyTorch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms


def main():
    # 1. torchrun starts this script once per GPU, and tells each process which one it is.
    rank = int(os.environ["RANK"])  # index of this process among all
    local_rank = int(os.environ["LOCAL_RANK"])  # index on its machine
    world_size = int(os.environ["WORLD_SIZE"])  # number of processes

    # 2. Each process uses its own GPU, and connects to the others.
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    torch.manual_seed(21)
    to_tensor = transforms.ToTensor()
    with FileLock("data.lock"):  # one process downloads while the others wait
        train_set = datasets.CIFAR10("data", train=True, download=True, transform=to_tensor)
    val_set = datasets.CIFAR10("data", train=False, transform=to_tensor)

    # 3. Each process trains on its own share of the images. The sampler also shuffles.
    # Validation uses every world_size-th image, because the sampler would repeat some.
    sampler = DistributedSampler(train_set, seed=21, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=512, sampler=sampler, num_workers=8)
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    val_loader = DataLoader(val_share, batch_size=512, num_workers=8)

    model = models.resnet50(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # both for small images
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # 4. Wrap the model. DDP copies rank 0's weights to all processes, and from now on averages
    # the gradients in backward(). Train with `ddp_model`. It shares its weights with `model`.
    ddp_model = DDP(model)
    torch.manual_seed(21 + rank)  # dropout and random transforms should differ between ranks

    for epoch in range(10):
        sampler.set_epoch(epoch)  # 5. Without this, all epochs have the same order.
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # A safeguard, not a step: it changes nothing, and raises an error if weights differ.
        checks.same_weights(optimizer)

        # 6. Each process validates its share, with `model`: `ddp_model` would wait for those
        # that have fewer batches. BatchNorm's statistics differ by process: take rank 0's.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all processes

        # 7. Only rank 0 prints and saves. Otherwise, all processes would write the same file.
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct.item() / len(val_set):.4f}")
            torch.save(model.state_dict(), "model.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
