"""The speed of training steps alone, on one GPU: with one batch that lies there, and no data loading.

    python results/ceiling.py [flags of dp_train.py]

It prints the images per second of each epoch, which has as many steps as in dp_train.py.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
import dp_train as script

torch.backends.cudnn.benchmark = True
args = script.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
args.batch_size = args.batch_size or 512
steps = (args.synthetic or 50_000) // args.batch_size
net = script.build_network(args).to(device).train()
optimizer = script.build_optimizer(args, net)
model = torch.compile(net, mode="reduce-overhead") if args.compile else net
images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
images = images.to(memory_format=torch.channels_last)
labels = torch.randint(10, (args.batch_size,), device=device)
loss = torch.zeros(())
for epoch in range(1, args.epochs + 1):
    loss.item()  # waits for the GPU
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            outputs = model(images)
        loss = F.cross_entropy(outputs.float(), labels)
        loss.backward()
        optimizer.step()
    loss.item()
    images_per_second = steps * args.batch_size / (time.perf_counter() - start)
    print(f"epoch {epoch} images_per_second {images_per_second:.5g}", flush=True)
