"""The same training by Lightning's Trainer or by Hugging Face accelerate, as their documentation shows it.

    torchrun --standalone --nproc-per-node=gpu results/peers.py lightning [flags of ddp_launch_train.py]

The model and the optimizer are those of ddp_launch_train.py. torchvision transforms each image on the CPU.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

sys.path.append(str(Path(__file__).resolve().parents[1]))
import ddp_launch_train as script

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def print_speed(args, epoch, steps, start):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if os.environ["RANK"] == "0":
        speed = steps * args.batch_size / (time.perf_counter() - start)
        print(f"epoch {epoch} images_per_second {speed:.5g}", flush=True)


def train_by_accelerate(args, loader, total_steps):
    from accelerate import Accelerator

    options = dict(cpu=DEVICE == "cpu", step_scheduler_with_optimizer=False)
    accelerator = Accelerator(mixed_precision="bf16", **options)
    model = script.build_model(args)
    optimizer = script.build_optimizer(args, model)
    scheduler = script.build_scheduler(args, optimizer, total_steps)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        print_speed(args, epoch, len(loader), start)


def train_by_lightning(args, loader, total_steps):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = script.build_model(args)

        def training_step(self, batch, index):
            images, labels = batch
            return F.cross_entropy(self.model(images.to(memory_format=torch.channels_last)), labels)

        def configure_optimizers(self):
            optimizer = script.build_optimizer(args, self.model)
            scheduler = script.build_scheduler(args, optimizer, total_steps)
            return dict(optimizer=optimizer, lr_scheduler=dict(scheduler=scheduler, interval="step"))

        def on_train_epoch_start(self):
            self.start = time.perf_counter()

        def on_train_epoch_end(self):
            print_speed(args, self.current_epoch + 1, self.trainer.num_training_batches, self.start)

    devices = dict(accelerator=DEVICE, devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(precision="bf16-mixed", max_epochs=args.epochs, **devices, **quiet)
    trainer.fit(Module(), loader)


def main():
    args = script.parse_args(sys.argv[2:])
    torch.backends.cudnn.benchmark = True
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    augment = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*augment, transforms.ToTensor(), normalize])
    processes = int(os.environ["WORLD_SIZE"])
    data = datasets.CIFAR10(args.data_dir, transform=transform)
    loading = dict(num_workers=args.workers, persistent_workers=args.workers > 0, pin_memory=DEVICE == "cuda")
    # Lightning and accelerate give each process its share of this loader.
    loader = DataLoader(data, args.batch_size // processes, shuffle=True, drop_last=True, **loading)
    train = train_by_lightning if sys.argv[1] == "lightning" else train_by_accelerate
    train(args, loader, args.epochs * (len(loader) // processes))


if __name__ == "__main__":
    main()  # a loader in a global variable would delay the end of its workers
