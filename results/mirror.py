"""Print the test accuracy of a checkpoint, without and with each image's mirror image.

    python results/mirror.py run.pt

With it, the class is that of the larger sum of both probabilities. Needs a checkpoint of ddp_launch_train.py.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import ddp_launch_train

device = "cuda" if torch.cuda.is_available() else "cpu"
saved = torch.load(sys.argv[1], map_location="cpu")
args = argparse.Namespace(**saved["flags"])
net = ddp_launch_train.build_network(args).to(device).eval()
net.load_state_dict(saved["net"])
images, labels = ddp_launch_train.load_data(args)[1].tensors
right = torch.zeros(2)
with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=args.precision == "bf16"):
    for part, answers in zip(images.split(500), labels.split(500), strict=True):
        inputs = common.prepare(part.to(device), args.image_size, args.pretrained)
        plain = net(inputs).softmax(1)
        for i, scores in enumerate((plain, plain + net(inputs.flip(3)).softmax(1))):
            right[i] += (scores.argmax(1).cpu() == answers).sum()
print("test accuracy {:.4f}, with mirror images {:.4f}".format(*(right / len(labels))))
