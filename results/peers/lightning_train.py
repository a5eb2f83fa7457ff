"""The same training by Lightning's Trainer, with torchvision's transforms per image, as it documents.

    pip install lightning
    python results/peers/lightning_train.py [--batch-size 1024] [--epochs 5] [--workers 14]

The network, SGD, its schedule, bf16 and the batch over all GPUs are those of ddp_launch_train.py. It prints, for
each epoch, the images per second of the whole epoch, and without its first 20 steps.
"""

import lightning
import torch
from peer import Speed, arguments, network_and_optimizer, training_set
from torch.nn import functional as F
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, args, total_steps):
        super().__init__()
        self.args, self.total_steps = args, total_steps
        self.net, self.optimizer, self.scheduler = network_and_optimizer(args, total_steps)

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.net(images.to(memory_format=torch.channels_last)), labels)

    def configure_optimizers(self):
        return dict(optimizer=self.optimizer, lr_scheduler=dict(scheduler=self.scheduler, interval="step"))


class Clock(lightning.Callback):
    def __init__(self, args):
        self.speed = Speed(args)

    def on_train_epoch_start(self, trainer, module):
        self.speed.start()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.speed.step(index + 1)

    def on_train_epoch_end(self, trainer, module):
        self.speed.end(trainer.current_epoch + 1, trainer.is_global_zero)


def main():
    args = arguments(__doc__)
    torch.backends.cudnn.benchmark = True
    gpus = torch.cuda.device_count()
    processes = gpus or 2
    loader = DataLoader(
        training_set(args),
        args.batch_size // processes,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        pin_memory=gpus > 0,
        persistent_workers=args.workers > 0,
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if gpus else "cpu",
        devices=processes,
        strategy="ddp",
        precision="bf16-mixed",
        max_epochs=args.epochs,
        benchmark=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Clock(args)],
    )
    trainer.fit(Module(args, args.epochs * (len(loader) // processes)), loader)


if __name__ == "__main__":
    main()  # a loader in a global variable would hold up the end: 5 s for each data-loading process
