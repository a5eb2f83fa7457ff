"""The speed of bare training steps on one GPU: no data loading, no augmentation, no DDP; one batch of 512 images.

    python results/ceiling.py --precision bf16|fp16 [--compile] [--graph]

--graph records the step as a CUDA graph, so that one call launches all its kernels. Other flags are ignored. It
prints images per second: the median of five times 20 steps, the lowest and the highest.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common

fp16 = "fp16" in sys.argv
torch.backends.cudnn.benchmark = True
torch.cuda.set_stream(torch.cuda.Stream())  # a CUDA graph cannot record the default stream
common.seed_everything(21)
net = common.build_resnet("resnet50", 32).cuda().train()
model = torch.compile(net) if "--compile" in sys.argv else net
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.95, weight_decay=5e-4, nesterov=True, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=fp16)
images = torch.randn(512, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
labels = torch.randint(10, (512,), device="cuda")


def step():
    with torch.autocast("cuda", torch.float16 if fp16 else torch.bfloat16):
        outputs = model(images)
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(outputs.float(), labels)).backward()
    scaler.step(optimizer)
    scaler.update()


for _ in range(12):  # compiles, and cuDNN chooses its algorithms
    step()
if "--graph" in sys.argv:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    step = graph.replay

speeds = []
for _ in range(5):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    speeds.append(20 * 512 / (time.perf_counter() - start))
print(f"ceiling images_per_second {statistics.median(speeds):.0f} from {min(speeds):.0f} to {max(speeds):.0f}")
