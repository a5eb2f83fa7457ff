"""Measure what one GPU can do at most: training steps on images that already lie on the GPU, with cudnn.benchmark.

    python results/ceiling.py [--precision fp16] [--compile] [--graph] [--batch-size 512]

A step is that of the scripts without data loading, augmentation and DDP. --graph records it once as a CUDA graph,
so that Python has nothing to do. Prints images per second: the median of five times 20 steps, and their range.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--graph", action="store_true")
parser.add_argument("--batch-size", type=int, default=512)
args = parser.parse_args()

torch.backends.cudnn.benchmark = True
torch.cuda.set_stream(torch.cuda.Stream())  # a CUDA graph cannot record the default stream
common.seed_everything(21)
net = common.build_resnet("resnet50", 32).cuda().train()
model = torch.compile(net) if args.compile else net
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.95, weight_decay=5e-4, nesterov=True, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
images = torch.randn(args.batch_size, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
labels = torch.randint(10, (args.batch_size,), device="cuda")


def step():
    with torch.autocast("cuda", dtype):
        outputs = model(images)
    loss = nn.functional.cross_entropy(outputs.float(), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


for _ in range(12):  # compile, and let cuDNN choose its algorithms
    step()
if args.graph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    step = graph.replay
    step()

speeds = []
for _ in range(5):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    speeds.append(20 * args.batch_size / (time.perf_counter() - start))
print(f"ceiling images_per_second {statistics.median(speeds):.0f} from {min(speeds):.0f} to {max(speeds):.0f}")
