"""The same training by Hugging Face accelerate, with torchvision's transforms per image, as it documents.

    pip install accelerate
    torchrun --standalone --nproc-per-node=gpu results/peers/accelerate_train.py [--batch-size 1024] [--epochs 5]

The network, SGD, its schedule, bf16 and the batch over all GPUs are those of ddp_launch_train.py. It prints, for
each epoch, the images per second of the whole epoch, and without its first 20 steps.
"""

import torch
from accelerate import Accelerator
from peer import Speed, arguments, network_and_optimizer, training_set
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main():
    args = arguments(__doc__)
    torch.backends.cudnn.benchmark = True
    accelerator = Accelerator(
        mixed_precision="bf16", cpu=not torch.cuda.is_available(), step_scheduler_with_optimizer=False
    )
    loader = DataLoader(
        training_set(args),
        args.batch_size // accelerator.num_processes,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=args.workers > 0,
    )
    total_steps = args.epochs * (len(loader) // accelerator.num_processes)
    net, optimizer, scheduler = network_and_optimizer(args, total_steps)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    speed = Speed(args)
    for epoch in range(1, args.epochs + 1):
        net.train()
        speed.start()
        for step, (images, labels) in enumerate(loader, 1):
            loss = F.cross_entropy(net(images.to(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            speed.step(step)
        speed.end(epoch, accelerator.is_main_process)
    accelerator.end_training()


if __name__ == "__main__":
    main()  # a loader in a global variable would hold up the end: 5 s for each data-loading process
