"""The same training by plain DDP, with torchvision's transforms per image on the CPU, as it documents.

    torchrun --standalone --nproc-per-node=gpu results/peers/torchvision_train.py [--batch-size 1024] [--epochs 5]

The network, SGD, its schedule, bf16 and the batch over all GPUs are those of ddp_launch_train.py. It prints, for
each epoch, the images per second of the whole epoch, and without its first 20 steps.
"""

import os

import torch
import torch.distributed as dist
from peer import Speed, arguments, network_and_optimizer, training_set
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    args = arguments(__doc__)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    data_set = training_set(args)
    sampler = DistributedSampler(data_set, drop_last=True)
    loader = DataLoader(
        data_set,
        args.batch_size // dist.get_world_size(),
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=cuda,
        persistent_workers=args.workers > 0,
    )
    net, optimizer, scheduler = network_and_optimizer(args, args.epochs * len(loader), device)
    model = DistributedDataParallel(net)
    speed = Speed(args)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        speed.start()
        for step, (images, labels) in enumerate(loader, 1):
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            speed.step(step)
        speed.end(epoch, dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()  # a loader in a global variable would hold up the end: 5 s for each data-loading process
