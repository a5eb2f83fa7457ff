"""Train ResNet-50 on CIFAR-10 with all GPUs.    torchrun --standalone --nproc-per-node=gpu minimal/ddp.py"""

import os

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

    # 2. Each process uses its own GPU. If all use GPU 0, NCCL raises an error.
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)

    # 3. Connect the processes. From here on, a process that waits for another for ten minutes ends with an error.
    dist.init_process_group("nccl", device_id=device)

    torch.manual_seed(21)
    with FileLock("data.lock"):  # one process downloads, the others wait
        train_set = datasets.CIFAR10("data", train=True, download=True, transform=transforms.ToTensor())
    val_set = datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())

    # 4. Each process loads its own share of the images. Otherwise, each would train on all.
    sampler = DistributedSampler(train_set, seed=21, drop_last=True)  # shuffles; drop_last: no image comes twice
    train_loader = DataLoader(train_set, batch_size=512, sampler=sampler, num_workers=8)  # per process
    val_share = Subset(val_set, range(rank, len(val_set), world_size))  # DistributedSampler could repeat images
    val_loader = DataLoader(val_share, batch_size=512, num_workers=8)  # keeps the last, smaller batch

    model = models.resnet50(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)  # for small images
    model.maxpool = nn.Identity()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # 5. Wrap the model: DDP copies rank 0's weights to all ranks, and averages the gradients in backward().
    # `model` and `ddp_model` share their weights. Train with `ddp_model`. Otherwise, each GPU would train alone.
    ddp_model = DDP(model)
    torch.manual_seed(21 + rank)  # so that dropout and random transforms differ between ranks

    for epoch in range(10):
        sampler.set_epoch(epoch)  # 6. Otherwise, all epochs have the same order.
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(ddp_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        # 7. All ranks must still have rank 0's weights. If not, some gradients were not averaged.
        for weight in [weight.detach() for group in optimizer.param_groups for weight in group["params"]]:
            of_rank_0 = weight.clone(memory_format=torch.contiguous_format)
            dist.broadcast(of_rank_0, src=0)  # overwrites the copy with rank 0's weight
            difference = (weight - of_rank_0).abs().float().norm()
            assert difference <= 1e-5 * of_rank_0.abs().float().norm(), "the weights of the ranks differ"

        # 8. Each rank validates its share, with `model`: `ddp_model` can communicate, and hang if the ranks have
        # different numbers of batches. BatchNorm's running statistics differ between the ranks: take rank 0's.
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(correct)  # the sum over all ranks

        # 9. Only rank 0 prints and saves. Otherwise, all ranks would write the same file.
        if rank == 0:
            print(f"epoch {epoch} accuracy {correct.item() / len(val_set):.4f}")
            torch.save(model.state_dict(), "model.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
